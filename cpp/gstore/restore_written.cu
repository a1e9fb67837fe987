// SPDX-License-Identifier: Apache-2.0
// New pages that were written have a file block from now on, and its digests are those that the ring made. Blocks of
// the others are free again, unless a drive may yet write there. A thread block a page.
#include "gstore/block_table.cuh"
#include "gstore/restore_work.h"

namespace tardis::gstore {
namespace {

constexpr unsigned kMaxCtas = 64;

__global__ void __launch_bounds__(kThreads)
    restore_written(const __grid_constant__ tardis_gpu_restore restore, const __grid_constant__ RestoreWork work,
                    const std::uint32_t commands) {
  const tardis_gpu_blocks& blocks = restore.places.blocks;
  const std::uint32_t writes = work.counts->writes, layers = restore.shape.layers;
  const std::uint64_t digests = std::uint64_t{layers} * restore.shape.layer_digests;
  for (std::uint32_t k = blockIdx.x; k < writes; k += gridDim.x) {
    int mine = 1, late = 0;
    for (std::uint32_t at = threadIdx.x; at < layers * commands; at += kThreads) {
      const std::uint64_t status = std::uint64_t{at / commands} * gio::kMostContexts + k * commands + at % commands;
      const gio::IoEnd end = gio::IoStatus{work.write_statuses[status]}.end();
      mine &= end == gio::IoEnd::kDone;
      late |= end == gio::IoEnd::kTimedOut;
    }
    const bool good = __syncthreads_and(mine) != 0, any_late = __syncthreads_or(late) != 0;
    if (good) {
      for (std::uint64_t at = threadIdx.x; at < digests; at += kThreads) {
        restore.places.digests[work.write_blocks[k] * digests + at] = work.write_digests[k * digests + at];
      }
    }
    __syncthreads();
    if (threadIdx.x != 0) continue;
    const std::uint64_t handle = work.write_handles[k];
    const std::uint64_t home = tier_begin(blocks, TARDIS_GPU_FILE) + work.write_blocks[k];
    Row row{};
    // As if it moved, so that its home is this thread's.
    const bool taken = good && update_row(blocks, handle, row, [&](Row& change) {
                                 return begin_move(change, handle, kMostRefs, 0, 0);
                               }) == BlockStatus::kOk;
    volatile std::uint64_t* const at = blocks.home + number_of(handle);
    // Elsewhere by now: what was written may be what came into its page after it.
    const bool kept = taken && *at == kNone && block_of(row) == work.write_pages[k];
    fence();  // forbids that the row can be found to have this file block before its digests are there
    if (kept) *at = home;
    if (taken) update_row(blocks, handle, row, [&](Row& change) { return end_move(change, handle, kNoBlock); });
    if (!kept && !any_late) give_block(blocks, home);
    if (any_late) atomicAdd(reinterpret_cast<unsigned long long*>(&work.totals->late), 1ull);
    if (kept) atomicAdd(reinterpret_cast<unsigned long long*>(&work.totals->written), 1ull);
  }
}

}  // namespace

int launch_restore_written(const tardis_gpu_restore& restore, const RestoreWork& work, cudaStream_t stream) {
  restore_written<<<kMaxCtas, kThreads, 0, stream>>>(restore, work, commands_per_page(restore.shape));
  return cudaGetLastError();
}

int load_restore_written() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, restore_written);
}

}  // namespace tardis::gstore
