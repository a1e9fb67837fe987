// SPDX-License-Identifier: Apache-2.0
// One warp a chunk. Bound by loads; a few blocks are in flight per warp, so that mapped host memory (microseconds away)
// is read at link speed by few CTAs.
#include "gpu/xxh3_digest.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "gpu/xxh3.h"

namespace tardis {
namespace {

namespace x = xxh3;

constexpr int kWarpsPerCta = 8;
constexpr int kMaxCtas = 32;        // the rest is a stride: verifying must leave most of the SMs to compute
constexpr int kBlocksInFlight = 4;  // per warp: 4 KiB
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

enum class Alignment { kVector, kAny };

// 16 bytes, read once: past L1, which does not see what DMA wrote since.
template <Alignment alignment>
__device__ __forceinline__ x::Words load(const unsigned char* p) {
  if constexpr (alignment == Alignment::kVector) {
    const ulonglong2 value = __ldcg(reinterpret_cast<const ulonglong2*>(p));
    return {value.x, value.y};
  } else {
    return x::read_words(p);
  }
}

__device__ __forceinline__ std::uint64_t add_over_stripes(std::uint64_t value) {
#pragma unroll
  for (int distance = 4; distance < x::kLanes; distance *= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

// Adds the lanes' shares of one block to the sums, which every lane of the same pair then holds.
__device__ __forceinline__ void add_share(x::Words& sums, const x::Words& share) {
  sums.first += add_over_stripes(share.first);
  sums.second += add_over_stripes(share.second);
}

// All 32 lanes must call it, with the same arguments.
template <Alignment alignment>
__device__ std::uint64_t digest_long(const unsigned char* input, std::size_t bytes) {
  const int lane = static_cast<int>(threadIdx.x) % x::kLanes;
  const x::Words keys[2] = {x::stripe_key(lane, 0), x::stripe_key(lane, 1)};
  const x::Words scramble_key = x::scramble_key(lane);
  const x::LongShape shape = x::long_shape(bytes);
  x::Words sums = x::initial_sums(lane);

  std::size_t block = 0;
  for (; block + kBlocksInFlight <= shape.full_blocks; block += kBlocksInFlight) {
    x::Words loaded[kBlocksInFlight][2];
#pragma unroll
    for (int i = 0; i < kBlocksInFlight; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        loaded[i][half] = load<alignment>(input + (block + i) * x::kBlockBytes + x::lane_offset(lane, half));
      }
    }
#pragma unroll
    for (int i = 0; i < kBlocksInFlight; ++i) {
      x::Words share;
      x::accumulate(share, loaded[i][0], keys[0]);
      x::accumulate(share, loaded[i][1], keys[1]);
      add_share(sums, share);
      x::scramble(sums, scramble_key);
    }
  }
  for (; block < shape.full_blocks; ++block) {
    x::Words share;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      x::accumulate(share, load<alignment>(input + block * x::kBlockBytes + x::lane_offset(lane, half)), keys[half]);
    }
    add_share(sums, share);
    x::scramble(sums, scramble_key);
  }

  x::Words share;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (x::lane_stripe(lane, half) < shape.tail_stripes) {
      x::accumulate(share, load<alignment>(input + block * x::kBlockBytes + x::lane_offset(lane, half)), keys[half]);
    }
  }
  if (lane < 4) {
    // The last 64 bytes start anywhere: no vector load.
    const unsigned char* last = input + bytes - x::kStripeBytes + x::lane_offset(lane, 0);
    const x::Words words = bytes % 16 == 0 ? load<alignment>(last) : x::read_words(last);
    x::accumulate(share, words, x::last_stripe_key(lane));
  }
  add_share(sums, share);

  std::uint64_t merged = x::merge_pair(lane, sums);
  merged += __shfl_xor_sync(kAllLanes, merged, 1);
  merged += __shfl_xor_sync(kAllLanes, merged, 2);
  return x::finish(merged, bytes);
}

__global__ void __launch_bounds__(kWarpsPerCta* x::kLanes)
    chunk_digests(const void* const* pieces, const std::uint64_t* piece_bytes, std::uint64_t* digests,
                  std::uint32_t chunks) {
  const std::uint32_t warps = gridDim.x * kWarpsPerCta;
  const std::uint32_t first = blockIdx.x * kWarpsPerCta + threadIdx.x / x::kLanes;
  const bool writer = threadIdx.x % x::kLanes == 0;
  for (std::uint64_t chunk = first; chunk < chunks; chunk += warps) {
    const auto* input = static_cast<const unsigned char*>(pieces[chunk]);
    const auto bytes = static_cast<std::size_t>(piece_bytes[chunk]);
    std::uint64_t digest = 0;
    if (bytes <= x::kShortBytes) {
      if (writer) digest = x::digest_short(input, bytes);
    } else if (reinterpret_cast<std::uintptr_t>(input) % 16 == 0) {
      digest = digest_long<Alignment::kVector>(input, bytes);
    } else {
      digest = digest_long<Alignment::kAny>(input, bytes);
    }
    if (writer) digests[chunk] = digest;
  }
}

}  // namespace
}  // namespace tardis

extern "C" int tardis_gpu_chunk_digests(const void* const* pieces_dev, const uint64_t* piece_bytes_dev,
                                        uint64_t* digests_dev, uint32_t chunks, void* cuda_stream) {
  using namespace tardis;
  if (chunks == 0) return cudaSuccess;
  if (pieces_dev == nullptr || piece_bytes_dev == nullptr || digests_dev == nullptr) return cudaErrorInvalidValue;
  const unsigned wanted = (chunks + kWarpsPerCta - 1) / kWarpsPerCta;
  const dim3 grid(std::min<unsigned>(wanted, kMaxCtas));
  chunk_digests<<<grid, kWarpsPerCta * x::kLanes, 0, static_cast<cudaStream_t>(cuda_stream)>>>(
      pieces_dev, piece_bytes_dev, digests_dev, chunks);
  return cudaGetLastError();
}
