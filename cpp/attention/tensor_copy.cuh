// SPDX-License-Identifier: Apache-2.0
// Loads of boxes by tensor maps, and a wait for barriers that may stand beside matrix instructions.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "gio/bulk_copy.cuh"

namespace tardis::attention {

using gio::barrier_arrive;
using gio::barrier_arrive_expecting;
using gio::barrier_init;
using gio::fence_barrier_init;
using gio::fence_proxy_async;
using gio::shared_address;

// As gio::barrier_wait, without a function call: the compiler runs matrix instructions one by one in a kernel that has
// one.
__device__ __forceinline__ void wait_for(std::uint64_t* barrier, std::uint32_t parity) {
  if (gio::barrier_try_wait(barrier, parity)) return;
  const std::uint64_t start = gio::nanoseconds();
  while (!gio::barrier_try_wait(barrier, parity)) {
    if (gio::nanoseconds() - start > gio::kBarrierDeadline) __trap();
  }
}

// Loads the box at (slot, block, head) of a pool; what lies outside of the pool is zeros. The map is a kernel
// parameter.
__device__ __forceinline__ void load_box(void* shared, const CUtensorMap* map, std::int32_t slot, std::int32_t block,
                                         std::int32_t head, std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared_address(shared)),
      "l"(map), "r"(0), "r"(slot), "r"(block), "r"(head), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace tardis::attention
