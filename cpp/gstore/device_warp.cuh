// SPDX-License-Identifier: Apache-2.0
// A warp as IndexWriter wants it, and the end of a batch.
#pragma once

#include "gstore/index_layout.h"

namespace tardis::gstore {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kWarpsPerCta = 8;
constexpr int kThreads = kWarpsPerCta * kLanes;

struct DeviceWarp {
  using Words = std::uint64_t;  // each lane has its own

  const int self = static_cast<int>(threadIdx.x) % kLanes;

  __device__ __forceinline__ Words words(const std::uint64_t* from, int n) const {
    return self < n ? load(from + self) : 0;
  }
  __device__ __forceinline__ std::uint64_t at(Words words, int lane) const {
    return __shfl_sync(kAllLanes, words, lane);
  }
  __device__ __forceinline__ std::uint64_t own(Words words, int) const { return words; }
  template <class F>
  __device__ __forceinline__ std::uint32_t ballot(F f) const {
    return __ballot_sync(kAllLanes, f(self));
  }
  template <class F>
  __device__ __forceinline__ void first_lanes(int n, F f) const {
    if (self < n) f(self);
  }
  template <class F>
  __device__ __forceinline__ std::uint64_t leader(F f) const {
    std::uint64_t value = 0;
    if (self == 0) value = f();
    return __shfl_sync(kAllLanes, value, 0);
  }
  __device__ __forceinline__ void ordered() const {
    __syncwarp();
    fence();  // of all lanes' work before the first __syncwarp, for all lanes' work after the second
    __syncwarp();
  }
};

// What the warps of a thread block count, and how the last block of a batch tells of it.
struct BatchTotals {
  std::uint32_t by_status[TARDIS_GPU_INDEX_STATUSES];
  std::uint32_t run;
};

__device__ __forceinline__ void begin_batch(BatchTotals& totals) {
  if (threadIdx.x < TARDIS_GPU_INDEX_STATUSES) totals.by_status[threadIdx.x] = 0;
  if (threadIdx.x == 0) totals.run = ~0u;
  __syncthreads();
}

// `run` of a ticket is kept as its complement, so that a ticket starts as zeros.
__device__ __forceinline__ void end_batch(const BatchTotals& totals, std::uint32_t count, tardis_gpu_ticket* ticket,
                                          tardis_gpu_report* report) {
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int i = 0; i < TARDIS_GPU_INDEX_STATUSES; ++i) {
    if (totals.by_status[i] != 0) atomicAdd(&ticket->totals[i], totals.by_status[i]);
  }
  if (totals.run != ~0u) atomicMax(&ticket->run, ~totals.run);
  fence();  // forbids that this block is counted as finished before what it wrote is there for the last one
  if (atomicAdd(&ticket->finished, 1) + 1 != gridDim.x) return;
  acquire_fence();  // forbids that totals are read before the other blocks are known to have finished
  volatile tardis_gpu_ticket* last = ticket;
  std::uint32_t by_status[TARDIS_GPU_INDEX_STATUSES];
#pragma unroll
  for (int i = 0; i < TARDIS_GPU_INDEX_STATUSES; ++i) by_status[i] = last->totals[i];
  const std::uint32_t first_missing = ~last->run;
  const std::uint64_t epoch = last->epoch + 1;
#pragma unroll
  for (int i = 0; i < TARDIS_GPU_INDEX_STATUSES; ++i) last->totals[i] = 0;
  last->run = 0;
  last->finished = 0;
  last->epoch = epoch;
  if (report == nullptr) return;
#pragma unroll
  for (int i = 0; i < TARDIS_GPU_INDEX_STATUSES; ++i) report->totals[i] = by_status[i];
  report->count = count;
  report->run = first_missing < count ? first_missing : count;
  // Release, of the other blocks' work too, as it is known here to be done: forbids that the epoch is seen before any
  // of it and before the rest of the report, in host memory as well.
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(&report->epoch), "l"(epoch) : "memory");
}

__device__ __forceinline__ std::uint32_t batch_count(const std::uint32_t* count, std::uint32_t max_count) {
  // Volatile: a host that replays a graph has changed it since.
  const std::uint32_t now = *static_cast<const volatile std::uint32_t*>(count);
  return now < max_count ? now : max_count;
}

}  // namespace tardis::gstore
