// SPDX-License-Identifier: Apache-2.0
// Sink of digest_chunks() for rings: what is read is compared with the digests that its context names, the digests of
// what is written go there.
#pragma once

#include <cstdint>

#include "gio/bulk_mover.cuh"
#include "gio/mover.cuh"
#include "gio/mover_control.cuh"

namespace tardis::gio {

class RingDigests {
 public:
  __device__ __forceinline__ explicit RingDigests(const MovedRing* rings) : rings_(rings) {}

  // The slot is looked at only if it waits for this: another's, it might be another command's by now.
  __device__ __forceinline__ bool wants(const Stage& stage) {
    const bool wanted = stage.part_chunks != 0;
    // On its way while the digest is made.
    if (wanted && threadIdx.x % kWarpLanes == 0 && slot_of(stage).op == IoOp::kRead) expected_ = *word_of(stage);
    return wanted;
  }
  __device__ __forceinline__ void digested(const Stage& stage, std::uint64_t digest) {
    if (threadIdx.x % kWarpLanes != 0) return;
    RingSlot& slot = slot_of(stage);
    if (slot.op == IoOp::kWrite) {
      *word_of(stage) = digest;
    } else if (digest != expected_) {
      slot.damaged = 1;
    }
    share_moved(slot);
  }

 private:
  __device__ __forceinline__ RingSlot& slot_of(const Stage& stage) const { return moved_slot(rings_, stage.part); }
  // Volatile: past L1, which does not see what DMA or other SMs wrote since.
  __device__ __forceinline__ volatile std::uint64_t* word_of(const Stage& stage) const {
    return reinterpret_cast<volatile std::uint64_t*>(slot_of(stage).digests) + stage.chunk;
  }

  const MovedRing* const rings_;
  std::uint64_t expected_ = 0;
};

}  // namespace tardis::gio
