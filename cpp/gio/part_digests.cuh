// SPDX-License-Identifier: Apache-2.0
// From digests of chunks to those of parts, and to the word that says whether they are the expected ones.
#pragma once

#include <cstdint>

#include "gio/mover.cuh"
#include "gio/mover.h"

namespace tardis::gio {

// Sink of digest_chunks(), one a warp. Whoever brings the last chunk of a part, in whichever CTA, finishes the part.
// Digests gather in the lanes, one each, and are handed in together: it takes microseconds until the others' are seen,
// and longer while the link is busy.
template <class Ring>
class PartDigests {
 public:
  __device__ PartDigests(Ring& ring, const tardis_gpu_digest_args& out, const xxh3::BlockKeys& keys)
      : ring_(ring), out_(out), keys_(keys), lane_(static_cast<int>(threadIdx.x) % kWarpLanes) {}

  __device__ __forceinline__ void digested(const Stage& stage, std::uint64_t digest, int warp) {
    if (lane_ == gathered_) {
      digest_ = digest;
      part_ = stage.part;
      chunk_ = stage.chunk;
      part_chunks_ = stage.part_chunks;
    }
    if (++gathered_ == kWarpLanes) hand_in(warp);
  }

  // Nothing else to do just now, or ever.
  __device__ __forceinline__ void idle(int warp) {
    if (gathered_ != 0) hand_in(warp);
  }

 private:
  // Not through L1: it may hold a line of which another SM has written a part since.
  struct DigestLoad {
    static __device__ __forceinline__ xxh3::Words at(const unsigned char* p) {
      const auto* words = reinterpret_cast<const unsigned long long*>(p);
      return {__ldcg(words), __ldcg(words + 1)};
    }
    static __device__ __forceinline__ xxh3::Words anywhere(const unsigned char* p) { return at(p); }
  };

  __device__ void hand_in(int warp) {
    bool mine = lane_ < gathered_;
    gathered_ = 0;
    if (mine && part_chunks_ > out_.chunks_per_part) {
      if (chunk_ == 0) settle(part_, TARDIS_GPU_PART_TOO_LONG);
      mine = false;
    }
    if (mine) out_.chunk_digests[std::uint64_t{part_} * out_.chunks_per_part + chunk_] = digest_;
    const bool one_of_several = mine && part_chunks_ > 1;
    bool last = false;
    if (__any_sync(xxh3::kAllLanes, one_of_several)) {
      fence_device();  // forbids that an arrival is seen before its digest
      if (one_of_several) {
        last = atomicAdd(&out_.arrived[part_], 1u) == part_chunks_ - 1;
        if (last) out_.arrived[part_] = 0;
      }
      fence_device();  // forbids that digests are read before their arrivals were
    }
    if (mine && !one_of_several) finish_part_of_one(warp);
    __syncwarp();
    for (unsigned ready = __ballot_sync(xxh3::kAllLanes, last); ready != 0; ready &= ready - 1) {
      const int lane = __ffs(static_cast<int>(ready)) - 1;
      finish_part(__shfl_sync(xxh3::kAllLanes, part_, lane), __shfl_sync(xxh3::kAllLanes, part_chunks_, lane), warp);
    }
  }

  // One lane, of a part of one chunk.
  __device__ __forceinline__ void finish_part_of_one(int warp) {
    bool equal = out_.expected_chunks == nullptr ||
                 load(out_.expected_chunks + std::uint64_t{part_} * out_.chunks_per_part) == digest_;
    if (out_.expected_parts != nullptr || out_.part_digests != nullptr) {
      std::uint64_t* const scratch = &ring_.scratch[warp][lane_];
      *scratch = digest_;
      const std::uint64_t digest =
          xxh3::digest_up_to_16(reinterpret_cast<const unsigned char*>(scratch), sizeof digest_);
      if (out_.part_digests != nullptr) out_.part_digests[part_] = digest;
      if (out_.expected_parts != nullptr) equal = equal && digest == load(out_.expected_parts + part_);
    }
    settle(part_, equal ? TARDIS_GPU_PART_GOOD : TARDIS_GPU_PART_MISMATCH);
  }

  // All lanes, of a part of `count` chunks.
  __device__ __forceinline__ void finish_part(std::uint32_t part, std::uint32_t count, int warp) {
    const std::uint64_t first = std::uint64_t{part} * out_.chunks_per_part;
    const std::uint64_t* const digests = out_.chunk_digests + first;
    const std::uint64_t expected_part = out_.expected_parts != nullptr ? load(out_.expected_parts + part) : 0;
    bool equal = true;
    if (out_.expected_chunks != nullptr) {
      for (std::uint32_t i = lane_; i < count; i += kWarpLanes) {
        equal = equal && load(digests + i) == load(out_.expected_chunks + first + i);
      }
    }
    if (out_.expected_parts != nullptr || out_.part_digests != nullptr) {
      const std::uint64_t digest = digest_of(digests, count, warp);
      if (lane_ == 0) {
        if (out_.part_digests != nullptr) out_.part_digests[part] = digest;
        if (out_.expected_parts != nullptr) equal = equal && digest == expected_part;
      }
    }
    equal = __all_sync(xxh3::kAllLanes, equal);
    if (lane_ == 0) settle(part, equal ? TARDIS_GPU_PART_GOOD : TARDIS_GPU_PART_MISMATCH);
  }

  __device__ __forceinline__ std::uint64_t digest_of(const std::uint64_t* digests, std::uint32_t count, int warp) {
    const std::size_t bytes = count * sizeof(std::uint64_t);
    if (bytes > xxh3::kShortBytes) {
      return xxh3::digest_by_blocks<DigestLoad>(reinterpret_cast<const unsigned char*>(digests), bytes, lane_, keys_);
    }
    static_assert(xxh3::kShortBytes / sizeof(std::uint64_t) <= Ring::kScratchWords);
    std::uint64_t* const scratch = ring_.scratch[warp];
    if (static_cast<std::uint32_t>(lane_) < count) scratch[lane_] = load(digests + lane_);
    __syncwarp();
    std::uint64_t digest = 0;
    if (lane_ == 0) digest = xxh3::digest_short(reinterpret_cast<const unsigned char*>(scratch), bytes);
    __syncwarp();  // forbids that the next part's digests overwrite these
    return digest;
  }

  // Lighter than __threadfence(), which orders more than this needs.
  static __device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

  static __device__ std::uint64_t load(const std::uint64_t* word) {
    return __ldcg(reinterpret_cast<const unsigned long long*>(word));
  }

  __device__ void settle(std::uint32_t part, tardis_gpu_part_status status) {
    out_.status[part] = status;
    if (status != TARDIS_GPU_PART_GOOD) atomicAdd(out_.errors, 1u);
  }

  Ring& ring_;
  const tardis_gpu_digest_args& out_;
  const xxh3::BlockKeys& keys_;
  const int lane_;
  int gathered_ = 0;  // the lanes below it hold a chunk each
  std::uint64_t digest_ = 0;
  std::uint32_t part_ = 0, chunk_ = 0, part_chunks_ = 0;
};

}  // namespace tardis::gio
