// SPDX-License-Identifier: Apache-2.0
// Which pages are good: from files those of which every command of every layer is, from pinned memory all of them if
// every layer has ended. The others lose their page and their reference, and if their bytes are not the stored ones,
// also their place in the index. Counts all outcomes.
#include "gstore/block_row.h"
#include "gstore/device_warp.cuh"
#include "gstore/restore_work.h"

namespace tardis::gstore {
namespace {

__global__ void __launch_bounds__(kThreads)
    restore_judge(const __grid_constant__ tardis_gpu_restore restore, const __grid_constant__ RestoreWork work,
                  const std::uint32_t commands, const std::uint64_t* keys, const std::uint32_t* count_memory,
                  tardis_gpu_restore_result* results) {
  __shared__ std::uint32_t outcomes[TARDIS_GPU_RESTORE_OUTCOMES];
  if (threadIdx.x < TARDIS_GPU_RESTORE_OUTCOMES) outcomes[threadIdx.x] = 0;
  // A layer's flag is raised behind its movers. One that stayed down was not enqueued, and its pages are as they were.
  int mine = 1;
  for (std::uint32_t layer = threadIdx.x; layer < restore.shape.layers; layer += kThreads) {
    mine &= work.flags[layer] != gio::kIoPending;
  }
  const bool landed = __syncthreads_and(mine) != 0;
  const std::uint32_t count = batch_count(count_memory, restore.shape.max_pages);
  const std::uint32_t files = work.counts->files, self = blockIdx.x * kThreads + threadIdx.x;
  for (std::uint32_t k = self; k < files; k += gridDim.x * kThreads) {
    bool good = true, damaged = false;
    for (std::uint32_t layer = 0; layer < restore.shape.layers; ++layer) {
      const std::uint32_t* const statuses = work.statuses + std::uint64_t{layer} * gio::kMostContexts + k * commands;
      for (std::uint32_t command = 0; command < commands; ++command) {
        const gio::IoEnd end = gio::IoStatus{statuses[command]}.end();
        good &= end == gio::IoEnd::kDone;
        damaged |= end == gio::IoEnd::kDamaged;
      }
    }
    const std::uint32_t i = work.file_keys[k];
    work.file_good[work.places[i] & 0xFFFFFFu] = good;
    if (good) continue;
    tardis_gpu_restore_result& result = results[i];
    work.undo[atomicAdd(&work.counts->undo, 1u)] = result.handle;
    if (damaged) {
      const std::uint32_t at = atomicAdd(&work.counts->drop, 1u);
      work.drop[at] = result.handle;
      tardis_gpu_index_entry entry{};
#pragma unroll
      for (int word = 0; word < 4; ++word) entry.key[word] = keys[4 * std::uint64_t{i} + word];
      entry.location = result.handle;
      entry.space = static_cast<std::uint16_t>(restore.places.space);
      entry.op = TARDIS_GPU_INDEX_FORGET;
      work.entries[at] = entry;
    }
    result.page = kNone;
    result.handle = kNone;
    result.outcome = damaged ? TARDIS_GPU_RESTORE_DAMAGED : TARDIS_GPU_RESTORE_FAILED;
    atomicAdd(outcomes + result.outcome, 1u);
  }
  for (std::uint32_t k = self; k < work.counts->drams; k += gridDim.x * kThreads) {
    const std::uint32_t i = work.dram_keys[k];
    work.dram_good[work.places[i] & 0xFFFFFFu] = landed;
    const std::uint32_t outcome = landed ? TARDIS_GPU_RESTORE_LANDED : TARDIS_GPU_RESTORE_FAILED;
    atomicAdd(outcomes + outcome, 1u);
    if (landed) continue;
    tardis_gpu_restore_result& result = results[i];
    work.undo[atomicAdd(&work.counts->undo, 1u)] = result.handle;
    result.page = kNone;
    result.handle = kNone;
    result.outcome = outcome;
  }
  // Of keys that this kernel does not change: the outcome of a page that was moved may be another thread's just now.
  for (std::uint32_t i = self; i < count; i += gridDim.x * kThreads) {
    const std::uint32_t place = work.places[i], source = place >> 24, at = place & 0xFFFFFFu;
    const bool moved = (source == TARDIS_GPU_SOURCE_FILE && work.file_statuses[at] == TARDIS_GPU_BLOCKS_OK) ||
                       (source == TARDIS_GPU_SOURCE_DRAM && work.dram_statuses[at] == TARDIS_GPU_BLOCKS_OK);
    if (!moved) atomicAdd(outcomes + results[i].outcome, 1u);
  }
  for (std::uint32_t k = self; k < files; k += gridDim.x * kThreads) {
    if (work.file_good[work.places[work.file_keys[k]] & 0xFFFFFFu] != 0) {
      atomicAdd(outcomes + TARDIS_GPU_RESTORE_LANDED, 1u);
    }
  }
  __syncthreads();
  if (threadIdx.x < TARDIS_GPU_RESTORE_OUTCOMES && outcomes[threadIdx.x] != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(work.totals->outcomes + threadIdx.x),
              static_cast<unsigned long long>(outcomes[threadIdx.x]));
  }
}

constexpr unsigned kCtas = 8;

}  // namespace

int launch_restore_judge(const tardis_gpu_restore& restore, const RestoreWork& work, const void* keys,
                         const std::uint32_t* count, tardis_gpu_restore_result* results, cudaStream_t stream) {
  restore_judge<<<kCtas, kThreads, 0, stream>>>(restore, work, commands_per_page(restore.shape),
                                                static_cast<const std::uint64_t*>(keys), count, results);
  return cudaGetLastError();
}

int load_restore_judge() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, restore_judge);
}

}  // namespace tardis::gstore
