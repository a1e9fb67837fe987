// SPDX-License-Identifier: Apache-2.0
// XXH3-64 of digests as 8-byte integers, by a warp: what parts and roots are made of (docs/on-disk-format.md).
#pragma once

#include <cstdint>

#include "gpu/xxh3_warp.cuh"

namespace tardis::gio {

constexpr std::uint32_t kShortDigests = xxh3::kShortBytes / sizeof(std::uint64_t);  // more take the long form

// Past L1: other SMs wrote them. 8-byte aligned.
__device__ __forceinline__ std::uint64_t load_digest(const std::uint64_t* word) {
  return __ldcg(reinterpret_cast<const unsigned long long*>(word));
}

struct DigestLoad {
  static __device__ __forceinline__ xxh3::Words at(const unsigned char* p) {
    const auto* words = reinterpret_cast<const std::uint64_t*>(p);
    return {load_digest(words), load_digest(words + 1)};
  }
  static __device__ __forceinline__ xxh3::Words anywhere(const unsigned char* p) { return at(p); }
};

// Of more than kShortDigests. All lanes.
__device__ __forceinline__ std::uint64_t digest_of_many(const std::uint64_t* digests, std::uint32_t count, int lane,
                                                        const xxh3::BlockKeys& keys) {
  return xxh3::digest_by_blocks<DigestLoad>(reinterpret_cast<const unsigned char*>(digests),
                                            std::size_t{count} * sizeof(std::uint64_t), lane, keys);
}

// Of 1 to kShortDigests of them, of which lane i brings number i; `scratch` is kShortDigests words in shared memory.
// All lanes, and all of them get it.
__device__ __forceinline__ std::uint64_t digest_of_few(std::uint64_t mine, std::uint32_t count, int lane,
                                                       std::uint64_t* scratch) {
  if (static_cast<std::uint32_t>(lane) < count) scratch[lane] = mine;
  __syncwarp();  // forbids that lane 0 reads a word before its lane has written it
  std::uint64_t digest = 0;
  if (lane == 0) {
    digest = xxh3::digest_short(reinterpret_cast<const unsigned char*>(scratch), count * sizeof(std::uint64_t));
  }
  return __shfl_sync(xxh3::kAllLanes, digest, 0);  // and the next use of scratch comes after it
}

}  // namespace tardis::gio
