// SPDX-License-Identifier: Apache-2.0
// Rows that are to leave memory: those that have a file block can go there, the others have nowhere to go. One thread
// block.
#include "gstore/block_row.h"
#include "gstore/restore_ranks.cuh"
#include "gstore/restore_work.h"

namespace tardis::gstore {
namespace {

__global__ void __launch_bounds__(kRankThreads)
    restore_leave(const __grid_constant__ tardis_gpu_restore restore, const __grid_constant__ RestoreWork work) {
  __shared__ Ranks<2> ranks;
  const std::uint32_t count = batch_count(&work.counts->found, restore.shape.max_pages);
  ranks.start();
  for (std::uint32_t first = 0; first < count; first += kRankThreads) {
    const std::uint32_t i = first + threadIdx.x;
    std::uint64_t handle = kNone;
    int list = 2;
    if (i < count) {
      handle = work.taken[i];
      const volatile std::uint64_t* const home = restore.places.blocks.home + number_of(handle);
      list = *home != kNone ? 0 : 1;
    }
    const std::uint32_t position = ranks.place(list);
    if (list == 0) work.undo[position] = handle;
    if (list == 1) {
      work.drop[position] = handle;
      tardis_gpu_index_entry entry = restore.places.names[number_of(handle)];
      // Of a row that was never committed the name is an earlier one's, or none: whatever it is, only what leads to
      // this row may go, and nothing may come.
      entry.location = handle;
      entry.op = TARDIS_GPU_INDEX_FORGET;
      work.entries[position] = entry;
    }
  }
  if (threadIdx.x == 0) {
    work.counts->homes = ranks.totals[0];
    work.counts->lost = ranks.totals[1];
  }
}

}  // namespace

int launch_restore_leave(const tardis_gpu_restore& restore, const RestoreWork& work, cudaStream_t stream) {
  restore_leave<<<1, kRankThreads, 0, stream>>>(restore, work);
  return cudaGetLastError();
}

int load_restore_leave() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, restore_leave);
}

}  // namespace tardis::gstore
