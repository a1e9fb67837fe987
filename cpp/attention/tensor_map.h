// SPDX-License-Identifier: Apache-2.0
// Tensor maps of KV pools, encoded by the driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "attention/tile.h"

namespace tardis::attention {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

struct TensorMapEncoder {
  EncodeTiled call = nullptr;
  cudaError_t error = cudaErrorNotSupported;
};

// Looked up once, through the runtime: the library must load where no libcuda is.
inline const TensorMapEncoder& tensor_map_encoder() {
  static const TensorMapEncoder found = [] {
    constexpr unsigned kVersion = 12000;
    TensorMapEncoder encoder;
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    encoder.error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, kVersion, cudaEnableDefault, &result);
    if (encoder.error == cudaSuccess && result != cudaDriverEntryPointSuccess) encoder.error = cudaErrorNotSupported;
    encoder.call = reinterpret_cast<EncodeTiled>(entry);
    return encoder;
  }();
  return found;
}

// K or V of a pool: [slots][heads][head_dim].
struct PoolTensor {
  std::uint64_t address, slots, slot_bytes, head_bytes;
  std::uint32_t heads, head_dim, element_bytes;  // 1: rows as they are; 2: blocks of 64 columns, 128-byte swizzle
};

enum class MapPromotion : std::uint32_t { kNone, k128, k256 };  // of what the copy asks L2 for

// Boxes are box_tokens slots of one head: all columns of one byte, or a block of two.
inline CUresult encode_pool_map(CUtensorMap* map, const PoolTensor& tensor, std::uint32_t box_tokens,
                                MapPromotion promotion) {
  const bool wide = tensor.element_bytes == 2;
  const std::uint32_t columns = wide ? kBlockColumns : tensor.head_dim;
  const cuuint64_t sizes[4] = {columns, tensor.slots, tensor.head_dim / columns, tensor.heads};
  const cuuint64_t strides[3] = {tensor.slot_bytes, kRowBytes, tensor.head_bytes};
  const cuuint32_t box[4] = {columns, box_tokens, 1, 1}, steps[4] = {1, 1, 1, 1};
  constexpr CUtensorMapL2promotion kPromotions[] = {CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  return tensor_map_encoder().call(map, wide ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, 4,
                                   reinterpret_cast<void*>(tensor.address), sizes, strides, box, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE,
                                   wide ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                                   kPromotions[static_cast<int>(promotion)], CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace tardis::attention
