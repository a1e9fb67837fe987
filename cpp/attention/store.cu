// SPDX-License-Identifier: Apache-2.0
// New rows of K and V into the slots of a layer's pools, in host memory or HBM.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "attention/decode.h"
#include "attention/decode_check.h"

namespace tardis::attention {
namespace {

constexpr std::uint32_t kStoreThreads = 256;

struct StoreParams {
  tardis_attention_store store;
  std::uint32_t page_shift, row_pieces, head_pieces;  // 16-byte pieces of what is stored
};

// Where a token's row goes; null: nowhere.
__device__ __forceinline__ unsigned char* row_of(const StoreParams& params, std::uint32_t token, bool values,
                                                 std::uint64_t* head_bytes) {
  const tardis_attention_store& store = params.store;
  const std::int64_t slot = __ldg(store.slots + token);
  const auto page = static_cast<std::uint64_t>(slot) >> params.page_shift;
  if (slot < 0 || (store.entries != nullptr && page >= store.entry_count)) return nullptr;
  const auto entry = store.entries != nullptr ? static_cast<std::uint32_t>(__ldg(store.entries + page))
                                              : static_cast<std::uint64_t>(page);
  const tardis_attention_pool& pool = store.pools[(entry & TARDIS_ATTENTION_SECOND_POOL) != 0 ? 1 : 0];
  const std::uint64_t first = (entry & ~std::uint64_t{TARDIS_ATTENTION_SECOND_POOL}) << params.page_shift;
  const std::uint64_t at = first + (static_cast<std::uint64_t>(slot) & ((1U << params.page_shift) - 1));
  if (at >= pool.slots || pool.keys == 0) return nullptr;
  *head_bytes = values ? pool.value_head_bytes : pool.key_head_bytes;
  return reinterpret_cast<unsigned char*>((values ? pool.values : pool.keys) +
                                          at * (values ? pool.value_slot_bytes : pool.key_slot_bytes));
}

__device__ __forceinline__ std::uint32_t quantized(const uint2& four, float factor) {
  const auto& pairs = reinterpret_cast<const __nv_bfloat162(&)[2]>(four);
  std::uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float2 value = __bfloat1622float2(pairs[i]);
    value.x *= factor;
    value.y *= factor;
    word |= std::uint32_t{__nv_cvt_float2_to_fp8x2(value, __NV_SATFINITE, __NV_E4M3)} << 16 * i;
  }
  return word;
}

// A thread for each 16 bytes that are stored. Grid: pieces of a row, tokens (as many as fit), K and V.
template <bool kQuantizes>
__global__ void __launch_bounds__(kStoreThreads) store_rows(const __grid_constant__ StoreParams params) {
  const tardis_attention_store& store = params.store;
  const std::uint32_t piece = blockIdx.x * kStoreThreads + threadIdx.x;
  const bool values = blockIdx.z != 0;
  if (piece >= params.row_pieces) return;
  for (std::uint32_t token = blockIdx.y; token < store.tokens; token += gridDim.y) {
    std::uint64_t head_bytes = 0;
    unsigned char* const row = row_of(params, token, values, &head_bytes);
    if (row == nullptr) continue;
    const auto* const from = static_cast<const unsigned char*>(values ? store.values : store.keys) +
                             token * (values ? store.value_row_bytes : store.key_row_bytes);
    auto* const to =
        reinterpret_cast<uint4*>(row + piece / params.head_pieces * head_bytes) + piece % params.head_pieces;
    if constexpr (kQuantizes) {
      const float factor = 1 / (values ? store.value_scale : store.key_scale);
      const uint4 first = reinterpret_cast<const uint4*>(from)[2 * piece];
      const uint4 second = reinterpret_cast<const uint4*>(from)[2 * piece + 1];
      *to = {quantized({first.x, first.y}, factor), quantized({first.z, first.w}, factor),
             quantized({second.x, second.y}, factor), quantized({second.z, second.w}, factor)};
    } else {
      *to = reinterpret_cast<const uint4*>(from)[piece];
    }
  }
}

}  // namespace

cudaError_t load_store() {
  cudaFuncAttributes attributes;
  const cudaError_t result = cudaFuncGetAttributes(&attributes, store_rows<false>);
  return result != cudaSuccess ? result : cudaFuncGetAttributes(&attributes, store_rows<true>);
}

}  // namespace tardis::attention

int tardis_gpu_attention_store(const tardis_attention_store* store, void* stream, char* error,
                               std::size_t error_bytes) {
  using namespace tardis::attention;
  Complaint complaint(error, error_bytes);
  if (store == nullptr) {
    complaint.say("store: expected parameters, found a null pointer");
    return cudaErrorInvalidValue;
  }
  if (!is_valid_call(*store, complaint)) return cudaErrorInvalidValue;
  if (store->tokens == 0) return cudaSuccess;
  const bool quantizes = store->type == TARDIS_ATTENTION_FP8_E4M3;
  StoreParams params{};
  params.store = *store;
  params.page_shift = static_cast<std::uint32_t>(__builtin_ctz(store->page_tokens));
  params.head_pieces = store->head_dim * (quantizes ? 1 : 2) / kPieceBytes;
  params.row_pieces = params.head_pieces * store->kv_heads;
  const dim3 grid((params.row_pieces + kStoreThreads - 1) / kStoreThreads, std::min(store->tokens, 65535U), 2);
  void* arguments[] = {&params};
  const void* const kernel =
      quantizes ? reinterpret_cast<const void*>(&store_rows<true>) : reinterpret_cast<const void*>(&store_rows<false>);
  const cudaError_t result =
      cudaLaunchKernel(kernel, grid, dim3(kStoreThreads), arguments, 0, static_cast<cudaStream_t>(stream));
  if (result != cudaSuccess) complaint.say("launch of the store: %s", cudaGetErrorString(result));
  return result;
}

std::uint32_t tardis_gpu_attention_store_bytes() { return sizeof(tardis_attention_store); }
