// SPDX-License-Identifier: Apache-2.0
// fp8 to bf16 within shared memory, and rows of zeros where there is no token: by all consumer threads.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "attention/decode_shape.h"

namespace tardis::attention {

// Two e4m3 as two bf16; all of their values are exact in bf16, and in the fp16 in between.
__device__ __forceinline__ std::uint32_t bf16_pair(std::uint16_t pair) {
  const __half2_raw half = __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3);
  const float2 value = __half22float2(half);
  const __nv_bfloat162 wide = __float22bfloat162_rn(value);
  return reinterpret_cast<const std::uint32_t&>(wide);
}

// From rows of head_dim bytes to blocks as tensor copies of 16-bit elements leave them. Rows outside of [begin, end)
// become zeros: what is there may be no number, and 0 * NaN is not 0.
template <class Shape>
__device__ __forceinline__ void convert_tile(unsigned char* to, const unsigned char* from, std::uint32_t begin,
                                             std::uint32_t end) {
  constexpr std::uint32_t kRowPieces = Shape::kHeadDim / kPieceBytes;  // each becomes two
#pragma unroll 2
  for (std::uint32_t i = threadIdx.x; i < kTileRows * kRowPieces; i += kConsumerThreads) {
    const std::uint32_t row = i / kRowPieces, piece = i % kRowPieces;
    uint4 stored = reinterpret_cast<const uint4*>(from)[i];
    if (row < begin || row >= end) stored = {0, 0, 0, 0};
    const auto low = [](std::uint32_t word) { return bf16_pair(static_cast<std::uint16_t>(word)); };
    const auto high = [](std::uint32_t word) { return bf16_pair(static_cast<std::uint16_t>(word >> 16)); };
    unsigned char* const block = to + piece / 4 * kBlockBytes;
    const std::uint32_t first = piece % 4 * 2;
    *reinterpret_cast<uint4*>(block + piece_offset(row, first)) = {low(stored.x), high(stored.x), low(stored.y),
                                                                   high(stored.y)};
    *reinterpret_cast<uint4*>(block + piece_offset(row, first + 1)) = {low(stored.z), high(stored.z), low(stored.w),
                                                                       high(stored.w)};
  }
}

// The same for a tile of 16-bit elements, in place.
template <class Shape>
__device__ __forceinline__ void clear_rows(unsigned char* tile, std::uint32_t begin, std::uint32_t end) {
  constexpr std::uint32_t kRowPieces = Shape::kHeadDim * 2 / kPieceBytes;
  for (std::uint32_t i = threadIdx.x; i < kTileRows * kRowPieces; i += kConsumerThreads) {
    const std::uint32_t row = i / kRowPieces, piece = i % kRowPieces;
    if (row >= begin && row < end) continue;
    *reinterpret_cast<uint4*>(tile + piece / 8 * kBlockBytes + piece_offset(row, piece % 8)) = {0, 0, 0, 0};
  }
}

}  // namespace tardis::attention
