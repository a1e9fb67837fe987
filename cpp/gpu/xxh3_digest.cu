// SPDX-License-Identifier: Apache-2.0
// One warp a chunk. Bound by loads; a few blocks are in flight per warp, so that mapped host memory (microseconds away)
// is read at link speed by few CTAs.
#include "gpu/xxh3_digest.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "gpu/xxh3_warp.cuh"

namespace tardis {
namespace {

namespace x = xxh3;

constexpr int kWarpsPerCta = 8;
constexpr int kMaxCtas = 32;        // the rest is a stride: verifying must leave most of the SMs to compute
constexpr int kBlocksInFlight = 4;  // per warp: 4 KiB

// 16 bytes, read once: past L1, which does not see what DMA wrote since.
struct VectorLoad {
  static __device__ __forceinline__ x::Words at(const unsigned char* p) {
    const ulonglong2 value = __ldcg(reinterpret_cast<const ulonglong2*>(p));
    return {value.x, value.y};
  }
  static __device__ __forceinline__ x::Words anywhere(const unsigned char* p) { return x::read_words(p); }
};

struct AnyLoad {
  static __device__ __forceinline__ x::Words at(const unsigned char* p) { return x::read_words(p); }
  static __device__ __forceinline__ x::Words anywhere(const unsigned char* p) { return x::read_words(p); }
};

__global__ void __launch_bounds__(kWarpsPerCta* x::kLanes)
    chunk_digests(const void* const* pieces, const std::uint64_t* piece_bytes, std::uint64_t* digests,
                  std::uint32_t chunks) {
  const std::uint32_t warps = gridDim.x * kWarpsPerCta;
  const std::uint32_t first = blockIdx.x * kWarpsPerCta + threadIdx.x / x::kLanes;
  const int lane = static_cast<int>(threadIdx.x) % x::kLanes;
  const bool writer = lane == 0;
  const x::LaneKeys keys = x::LaneKeys::of(lane);
  for (std::uint64_t chunk = first; chunk < chunks; chunk += warps) {
    const auto* input = static_cast<const unsigned char*>(pieces[chunk]);
    const auto bytes = static_cast<std::size_t>(piece_bytes[chunk]);
    std::uint64_t digest = 0;
    if (bytes <= x::kShortBytes) {
      if (writer) digest = x::digest_short(input, bytes);
    } else if (reinterpret_cast<std::uintptr_t>(input) % 16 == 0) {
      digest = x::digest_long<VectorLoad, kBlocksInFlight>(input, bytes, lane, keys);
    } else {
      digest = x::digest_long<AnyLoad, kBlocksInFlight>(input, bytes, lane, keys);
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
