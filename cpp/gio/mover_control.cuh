// SPDX-License-Identifier: Apache-2.0
// What the warps of rings and those that move bytes for them tell each other, in shared memory.
#pragma once

#include <cstdint>

#include "gio/bulk_copy.cuh"
#include "gio/granted_queue.h"
#include "gio/pieces.h"
#include "gio/ring.h"

namespace tardis::gio {

struct MoverControl {
  std::uint32_t posted;  // jobs, by the ring's warp
  std::uint32_t stop;    // no more will come
};

// A ring of the CTA, as movers see it.
struct MovedRing {
  MoverControl* control;
  const GrantedQueue* queue;
  RingWork work;
};

// As movers name a command: its ring in the CTA, and its slot.
__device__ __forceinline__ std::uint32_t name_of(std::uint32_t ring, std::uint32_t slot) { return ring << 16 | slot; }
__device__ __forceinline__ RingSlot& moved_slot(const MovedRing* rings, std::uint32_t name) {
  return rings[name >> 16].work.slots[name & 0xffff];
}

// Words in shared memory, between warps of the CTA. Addressed as such: an acquire of a word that might be in global
// memory empties L1.
__device__ __forceinline__ std::uint32_t load_acquire_cta(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(value) : "r"(shared_address(word)) : "memory");
  return value;
}
__device__ __forceinline__ void store_release_cta(std::uint32_t* word, std::uint32_t value) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(shared_address(word)), "r"(value) : "memory");
}
// Forbids that the ring counts a job as done before its bytes, what was read for them, and its digests are: the ring's
// own fences, before a doorbell and before the flag, carry that on to everybody else.
__device__ __forceinline__ void share_moved(RingSlot& slot) {
  asm volatile("red.release.cta.shared::cta.add.u32 [%0], -1;" ::"r"(shared_address(&slot.movers_left)) : "memory");
}

// The ring's side: a job is done when all of its chunks have landed, and been digested where its context names digests.
class JobMover {
 public:
  __device__ __forceinline__ JobMover(MoverControl& control, const RingWork& work)
      : control_(control), slots_(work.slots) {}

  __device__ __forceinline__ std::uint32_t shares(std::uint32_t bytes, bool digested) const {
    static_assert(kChunkBytes == kDigestedBytes, "what is moved at once is digested at once");
    return (bytes + kChunkBytes - 1) / kChunkBytes << (digested ? 1 : 0);
  }
  __device__ __forceinline__ void publish(std::uint32_t jobs) {
    posted_ += jobs;
    __syncwarp();
    // Release: forbids that a mover sees the number before the jobs and their slots.
    if (threadIdx.x % 32 == 0) store_release_cta(&control_.posted, posted_);
  }
  __device__ __forceinline__ bool finished(std::uint32_t slot) const {
    return load_acquire_cta(&slots_[slot].movers_left) == 0;
  }
  __device__ __forceinline__ void stop() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) store_release_cta(&control_.stop, 1);
  }

 private:
  MoverControl& control_;
  RingSlot* const slots_;
  std::uint32_t posted_ = 0;
};

// By a loading warp: take(ring, first, jobs) for every job that is posted, up to 32 at a time, until there will be
// none.
template <class Take>
__device__ __forceinline__ void for_posted_jobs(const MovedRing* rings, std::uint32_t count, Take&& take) {
  constexpr unsigned kAll = 0xffffffff;
  constexpr std::uint32_t kMostJobs = 32;
  const std::uint32_t lane = threadIdx.x % 32;
  std::uint32_t taken = 0;  // of the ring with this lane's number
  while (true) {
    bool stopped = true;
    std::uint32_t posted = taken;
    if (lane < count) {
      stopped = load_acquire_cta(&rings[lane].control->stop) != 0;  // before what it posted last
      posted = load_acquire_cta(&rings[lane].control->posted);
    }
    std::uint32_t news = __ballot_sync(kAll, posted != taken);
    if (news == 0) {
      if (__all_sync(kAll, stopped)) return;
      continue;
    }
    // Forbids that bulk copies of any lane overtake what the rings acquired with completions, or were asked to gather.
    fence_proxy_async();
    for (; news != 0; news &= news - 1) {
      const int ring = __ffs(static_cast<int>(news)) - 1;
      const std::uint32_t end = __shfl_sync(kAll, posted, ring);
      for (std::uint32_t job = __shfl_sync(kAll, taken, ring); job != end;) {
        const std::uint32_t jobs = min(end - job, kMostJobs);
        take(static_cast<std::uint32_t>(ring), job, jobs);
        job += jobs;
      }
    }
    taken = posted;
  }
}

}  // namespace tardis::gio
