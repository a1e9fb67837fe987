// SPDX-License-Identifier: Apache-2.0
// File blocks for new pages that a ring is to write: reserved, and nobody's until they are written. One thread block.
#include "gstore/block_table.cuh"
#include "gstore/restore_ranks.cuh"
#include "gstore/restore_work.h"

namespace tardis::gstore {
namespace {

__global__ void __launch_bounds__(kRankThreads)
    restore_homes(const __grid_constant__ tardis_gpu_restore restore, const __grid_constant__ RestoreWork work) {
  __shared__ Ranks<1> ranks;
  __shared__ std::uint32_t found[kRankThreads / kLanes][kLanes];
  const std::uint32_t news = work.counts->news;
  ranks.start();
  for (std::uint32_t first = 0; first < news; first += kRankThreads) {
    const std::uint32_t k = first + threadIdx.x;
    const std::uint32_t block =
        take_numbers(pool_of(restore.places.blocks, TARDIS_GPU_FILE), k < news, found[threadIdx.x / kLanes]);
    const bool has = k < news && block != ~0u;
    const std::uint32_t position = ranks.place(has ? 0 : 1);
    if (!has) continue;
    work.write_pages[position] = work.new_pages[k];
    work.write_blocks[position] = block;
    work.write_firsts[position] = restore.places.page_blocks[block];
    work.write_handles[position] = work.new_handles[work.places[work.new_keys[k]] & 0xFFFFFFu];
  }
  if (threadIdx.x == 0) work.counts->writes = ranks.totals[0];
}

}  // namespace

int launch_restore_homes(const tardis_gpu_restore& restore, const RestoreWork& work, cudaStream_t stream) {
  restore_homes<<<1, kRankThreads, 0, stream>>>(restore, work);
  return cudaGetLastError();
}

int load_restore_homes() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, restore_homes);
}

}  // namespace tardis::gstore
