// SPDX-License-Identifier: Apache-2.0
// Positions in lists that one thread block fills in the order of its elements.
#pragma once

#include "gstore/device_warp.cuh"

namespace tardis::gstore {

constexpr unsigned kRankThreads = 1024;  // the whole thread block, and the only one

template <int kLists>
struct Ranks {
  std::uint32_t totals[kLists];  // of the elements before
  std::uint32_t warps[kLists][kRankThreads / kLanes];

  __device__ void start() {
    if (threadIdx.x < kLists) totals[threadIdx.x] = 0;
    __syncthreads();
  }
  // All threads, each for its element; `list`: which one it belongs to, kLists: none. Its position in that list.
  __device__ std::uint32_t place(int list) {
    const unsigned warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    std::uint32_t before = 0;
#pragma unroll
    for (int l = 0; l < kLists; ++l) {
      const std::uint32_t members = __ballot_sync(kAllLanes, list == l);
      if (lane == 0) warps[l][warp] = static_cast<std::uint32_t>(__popc(members));
      if (list == l) before = static_cast<std::uint32_t>(__popc(members & ((1u << lane) - 1)));
    }
    __syncthreads();
    std::uint32_t position = 0;
    if (list < kLists) {
      position = totals[list] + before;
      for (unsigned w = 0; w < warp; ++w) position += warps[list][w];
    }
    __syncthreads();  // forbids that totals grow, or the next elements' warps are noted, before all have their position
    if (threadIdx.x < kLists) {
      for (unsigned w = 0; w < kRankThreads / kLanes; ++w) totals[threadIdx.x] += warps[threadIdx.x][w];
    }
    __syncthreads();
    return position;
  }
};

}  // namespace tardis::gstore
