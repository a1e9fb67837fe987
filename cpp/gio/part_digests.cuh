// SPDX-License-Identifier: Apache-2.0
// From digests of chunks to those of parts, and to the word that says whether they are the expected ones.
#pragma once

#include <cstdint>

#include "gio/mover.cuh"
#include "gio/mover.h"

namespace tardis::gio {

// Sink of digest_chunks(). The warp that brings the last chunk of a part, in whichever CTA, finishes the part.
template <class Ring>
struct PartDigests {
  Ring& ring;
  const tardis_gpu_digest_args& out;
  const xxh3::BlockKeys& keys;

  __device__ void digested(const Stage& stage, std::uint64_t digest, int warp) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    if (stage.part_chunks > out.chunks_per_part) {
      if (stage.chunk == 0 && lane == 0) settle(stage.part, TARDIS_GPU_PART_TOO_LONG);
      return;
    }
    std::uint64_t* const digests = out.chunk_digests + std::uint64_t{stage.part} * out.chunks_per_part;
    bool last = true;
    if (lane == 0) {
      digests[stage.chunk] = digest;
      if (stage.part_chunks > 1) {
        __threadfence();  // forbids that the arrival is seen before the digest
        last = atomicAdd(&out.arrived[stage.part], 1) == stage.part_chunks - 1;
        if (last) out.arrived[stage.part] = 0;
        __threadfence();  // forbids that the digests are read before the arrivals were
      }
    }
    last = __shfl_sync(xxh3::kAllLanes, last, 0);
    if (!last) return;
    __syncwarp();
    finish_part(stage, digests, digest, warp, lane);
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

  __device__ void finish_part(const Stage& stage, const std::uint64_t* digests, std::uint64_t own, int warp, int lane) {
    const std::uint32_t count = stage.part_chunks;
    const std::uint64_t expected_part = out.expected_parts != nullptr ? load(out.expected_parts + stage.part) : 0;
    bool equal = true;
    if (out.expected_chunks != nullptr) {
      const std::uint64_t* const expected = out.expected_chunks + std::uint64_t{stage.part} * out.chunks_per_part;
      for (std::uint32_t i = lane; i < count; i += kWarpLanes)
        equal = equal && (count == 1 ? own : load(digests + i)) == load(expected + i);
    }
    if (out.expected_parts != nullptr || out.part_digests != nullptr) {
      const std::uint64_t digest = digest_of(digests, own, count, warp, lane);
      if (lane == 0) {
        if (out.part_digests != nullptr) out.part_digests[stage.part] = digest;
        if (out.expected_parts != nullptr) equal = equal && digest == expected_part;
      }
    }
    equal = __all_sync(xxh3::kAllLanes, equal);
    if (lane == 0) settle(stage.part, equal ? TARDIS_GPU_PART_GOOD : TARDIS_GPU_PART_MISMATCH);
  }

  __device__ std::uint64_t digest_of(const std::uint64_t* digests, std::uint64_t own, std::uint32_t count, int warp,
                                     int lane) {
    const std::size_t bytes = count * sizeof(std::uint64_t);
    if (bytes > xxh3::kShortBytes) {
      return xxh3::digest_by_blocks<DigestLoad>(reinterpret_cast<const unsigned char*>(digests), bytes, lane, keys);
    }
    static_assert(xxh3::kShortBytes / sizeof(std::uint64_t) <= Ring::kScratchWords);
    std::uint64_t* const scratch = ring.scratch[warp];
    if (static_cast<std::uint32_t>(lane) < count) scratch[lane] = count == 1 ? own : load(digests + lane);
    __syncwarp();
    std::uint64_t digest = 0;
    if (lane == 0) digest = xxh3::digest_short(reinterpret_cast<const unsigned char*>(scratch), bytes);
    __syncwarp();  // forbids that the next part's digests overwrite these
    return digest;
  }

  static __device__ std::uint64_t load(const std::uint64_t* word) {
    return __ldcg(reinterpret_cast<const unsigned long long*>(word));
  }

  __device__ void settle(std::uint32_t part, tardis_gpu_part_status status) {
    out.status[part] = status;
    if (status != TARDIS_GPU_PART_GOOD) atomicAdd(out.errors, 1u);
  }
};

}  // namespace tardis::gio
