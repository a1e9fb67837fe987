// SPDX-License-Identifier: Apache-2.0
// Moves from HBM to pinned memory that swap_begin has begun, as pages and objects for the movers. One thread block.
#include "gstore/block_row.h"
#include "gstore/restore_ranks.cuh"
#include "gstore/restore_work.h"

namespace tardis::gstore {
namespace {

__global__ void __launch_bounds__(kRankThreads)
    restore_moves(const __grid_constant__ tardis_gpu_restore restore, const __grid_constant__ RestoreWork work,
                  const std::uint32_t* count_memory) {
  __shared__ Ranks<1> ranks;
  const std::uint32_t count = batch_count(count_memory, restore.shape.max_pages);
  const std::uint64_t drams = tier_begin(restore.places.blocks, TARDIS_GPU_DRAM);
  ranks.start();
  for (std::uint32_t first = 0; first < count; first += kRankThreads) {
    const std::uint32_t i = first + threadIdx.x;
    const bool moves = i < count && work.dram_to[i] != kNone;
    const std::uint32_t position = ranks.place(moves ? 0 : 1);
    if (!moves) continue;
    work.dram_pages[position] = static_cast<std::uint32_t>(work.dram_from[i]);
    work.dram_objects[position] = restore.places.dram + (work.dram_to[i] - drams) * restore.places.dram_stride;
  }
  if (threadIdx.x == 0) work.counts->moves = ranks.totals[0];
}

}  // namespace

int launch_restore_moves(const tardis_gpu_restore& restore, const RestoreWork& work, const std::uint32_t* count,
                         cudaStream_t stream) {
  restore_moves<<<1, kRankThreads, 0, stream>>>(restore, work, count);
  return cudaGetLastError();
}

int load_restore_moves() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, restore_moves);
}

}  // namespace tardis::gstore
