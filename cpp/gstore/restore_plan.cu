// SPDX-License-Identifier: Apache-2.0
// From the lists of classify and what was taken for them to one result for each key, and to what is moved, in the order
// of the keys. One thread block.
#include "gstore/block_row.h"
#include "gstore/restore_ranks.cuh"
#include "gstore/restore_work.h"

namespace tardis::gstore {
namespace {

enum PlanList { kFiles, kDrams, kNews, kUndo, kLists };
constexpr std::uint32_t kPlaceBits = 24;

__global__ void __launch_bounds__(kRankThreads)
    restore_plan(const __grid_constant__ tardis_gpu_restore restore, const __grid_constant__ RestoreWork work,
                 const std::uint32_t* count_memory, tardis_gpu_restore_result* results) {
  __shared__ Ranks<kLists> ranks;
  const std::uint32_t most = restore.shape.max_pages;
  const std::uint32_t count = batch_count(count_memory, most);
  const std::uint64_t drams = tier_begin(restore.places.blocks, TARDIS_GPU_DRAM);
  const std::uint64_t files = tier_begin(restore.places.blocks, TARDIS_GPU_FILE);
#pragma unroll
  for (std::uint32_t source = 0; source < TARDIS_GPU_SOURCES; ++source) {
    const std::uint32_t n = work.counts->sources[source];
    for (std::uint32_t k = threadIdx.x; k < n; k += kRankThreads) {
      work.places[work.lists[source * most + k]] = source << kPlaceBits | k;
    }
  }
  const std::uint32_t layers = restore.shape.layers;
  for (std::uint32_t layer = threadIdx.x; layer < layers; layer += kRankThreads) {
    work.pools[layer] = restore.places.key_layers[layer];
    if (restore.shape.sides == 2) work.pools[layers + layer] = restore.places.value_layers[layer];
  }
  ranks.start();  // its barrier also forbids that places are read before all are written
  for (std::uint32_t first = 0; first < count; first += kRankThreads) {
    const std::uint32_t i = first + threadIdx.x;
    int list = kLists;
    tardis_gpu_restore_result result{kNone, kNone, TARDIS_GPU_SOURCE_MISS, TARDIS_GPU_RESTORE_LATER};
    std::uint64_t from = 0;
    if (i < count) {
      const std::uint32_t place = work.places[i], at = place & ((1u << kPlaceBits) - 1);
      result.source = place >> kPlaceBits;
      std::uint8_t status = TARDIS_GPU_BLOCKS_OK;
      if (result.source == TARDIS_GPU_SOURCE_HBM) {
        result.page = work.ids[i];
        result.handle = work.taken[TARDIS_GPU_SOURCE_HBM * most + at];
        result.outcome = TARDIS_GPU_RESTORE_HIT;
      } else if (result.source == TARDIS_GPU_SOURCE_DRAM) {
        result.handle = work.taken[TARDIS_GPU_SOURCE_DRAM * most + at];
        status = work.dram_statuses[at];
        result.page = work.dram_to[at];
        from = work.dram_from[at];
        list = kDrams;
      } else if (result.source == TARDIS_GPU_SOURCE_FILE) {
        result.handle = work.taken[TARDIS_GPU_SOURCE_FILE * most + at];
        status = work.file_statuses[at];
        result.page = work.file_to[at];
        from = work.file_from[at];
        list = kFiles;
      } else if (result.source == TARDIS_GPU_SOURCE_MISS) {
        result.handle = work.new_handles[at];
        status = work.new_statuses[at];
        result.page = work.new_ids[at];
        result.outcome = TARDIS_GPU_RESTORE_NEW;
        list = kNews;
      }
      if (list == kDrams || list == kFiles) result.outcome = TARDIS_GPU_RESTORE_LANDED;
      if (status != TARDIS_GPU_BLOCKS_OK) {
        const bool full = status == TARDIS_GPU_BLOCKS_NO_BLOCK || status == TARDIS_GPU_BLOCKS_NO_ROW;
        result.outcome = full ? TARDIS_GPU_RESTORE_NO_ROOM : TARDIS_GPU_RESTORE_LATER;
        result.page = kNone;
        list = list == kNews ? kLists : kUndo;  // classify took a reference
      }
    }
    const std::uint32_t position = ranks.place(list);
    if (list == kDrams) {
      work.dram_pages[position] = static_cast<std::uint32_t>(result.page);
      work.dram_objects[position] = restore.places.dram + (from - drams) * restore.places.dram_stride;
      work.dram_keys[position] = i;
    } else if (list == kFiles) {
      work.file_pages[position] = static_cast<std::uint32_t>(result.page);
      work.file_blocks[position] = static_cast<std::uint32_t>(from - files);
      work.file_firsts[position] = restore.places.page_blocks[from - files];
      work.file_keys[position] = i;
    } else if (list == kNews) {
      work.new_pages[position] = static_cast<std::uint32_t>(result.page);
      work.new_keys[position] = i;
    } else if (list == kUndo) {
      work.undo[position] = result.handle;
      result.handle = kNone;
    }
    if (i < count) results[i] = result;
  }
  if (threadIdx.x == 0) {
    work.counts->files = ranks.totals[kFiles];
    work.counts->drams = ranks.totals[kDrams];
    work.counts->news = ranks.totals[kNews];
    work.counts->undo = ranks.totals[kUndo];
    work.counts->drop = 0;
  }
}

}  // namespace

int launch_restore_plan(const tardis_gpu_restore& restore, const RestoreWork& work, const std::uint32_t* count,
                        tardis_gpu_restore_result* results, cudaStream_t stream) {
  restore_plan<<<1, kRankThreads, 0, stream>>>(restore, work, count, results);
  return cudaGetLastError();
}

int load_restore_plan() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, restore_plan);
}

}  // namespace tardis::gstore
