// SPDX-License-Identifier: Apache-2.0
// Joins the partial outputs of the splits of a context, each weighted by its share of the sum of exponentials.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "attention/decode.h"
#include "gio/programmatic.cuh"

namespace tardis::attention {
namespace {

constexpr std::uint32_t kCombineThreads = 256;
constexpr std::uint32_t kCombineWarps = kCombineThreads / 32;
static_assert(kCombineThreads == TARDIS_ATTENTION_MOST_SPLITS, "a thread for each split");

__device__ __forceinline__ void add_weighted(float4& sum, const float4& value, float weight) {
  sum.x = fmaf(weight, value.x, sum.x);
  sum.y = fmaf(weight, value.y, sum.y);
  sum.z = fmaf(weight, value.z, sum.z);
  sum.w = fmaf(weight, value.w, sum.w);
}

template <class Element>
__device__ __forceinline__ void store(unsigned char* row, std::uint32_t column, const float4& value) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    auto* const out = reinterpret_cast<__nv_bfloat162*>(row + column * 2);
    out[0] = __floats2bfloat162_rn(value.x, value.y);
    out[1] = __floats2bfloat162_rn(value.z, value.w);
  } else {
    auto* const out = reinterpret_cast<__half2*>(row + column * 2);
    out[0] = __floats2half2_rn(value.x, value.y);
    out[1] = __floats2half2_rn(value.z, value.w);
  }
}

struct Highest {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// Of all threads, in all of them. `parts` is used by one call alone.
template <class Join>
__device__ __forceinline__ float joined(float value, float* parts) {
  const Join join;
#pragma unroll
  for (int step = 16; step != 0; step /= 2) value = join(value, __shfl_xor_sync(~0U, value, step));
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  float all = parts[0];
#pragma unroll
  for (std::uint32_t i = 1; i < kCombineWarps; ++i) all = join(all, parts[i]);
  return all;
}

// A CTA for each query row. Grid: query rows of a request, requests.
template <class Element>
__global__ void __launch_bounds__(kCombineThreads) combine_splits(const __grid_constant__ CombineParams params) {
  __shared__ float shares[TARDIS_ATTENTION_MOST_SPLITS], parts[2][kCombineWarps];
  __shared__ float4 sums[kCombineThreads];
  const std::uint32_t row = blockIdx.x, request = blockIdx.y, rows = gridDim.x, split = threadIdx.x;
  const std::uint64_t first = std::uint64_t{request} * params.splits * rows + row;  // split s: s * rows behind it
  gio::wait_for_kernel_before();
  const float lse = split < params.splits ? params.partial_lse[first + std::uint64_t{split} * rows] : -INFINITY;
  const float highest = joined<Highest>(lse, parts[0]);
  const float base = highest == -INFINITY ? 0 : highest;
  const float weight = __expf(lse - base), total = joined<Sum>(weight, parts[1]);
  shares[split] = total == 0 ? 0 : weight / total;  // 0: perhaps nothing was written there, and nothing is read
  __syncthreads();

  // Threads that have the same columns share the splits.
  const std::uint32_t columns = params.head_dim / 4, ways = kCombineThreads / columns;
  const std::uint32_t column = threadIdx.x % columns, way = threadIdx.x / columns;
  float4 sum = {0, 0, 0, 0};
#pragma unroll 4
  for (std::uint32_t i = way; i < params.splits; i += ways) {
    const float share = shares[i];
    if (share == 0) continue;
    const auto* const partial =
        reinterpret_cast<const float4*>(params.partial_output + (first + std::uint64_t{i} * rows) * params.head_dim);
    add_weighted(sum, partial[column], share);
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (way != 0) return;
  for (std::uint32_t i = 1; i < ways; ++i) add_weighted(sum, sums[i * columns + column], 1);
  const std::uint32_t token = row / params.query_heads, head = row % params.query_heads;
  auto* const out = static_cast<unsigned char*>(params.output) +
                    (std::uint64_t{request} * params.query_tokens + token) * params.output_row_bytes +
                    std::uint64_t{head} * params.head_dim * 2;
  store<Element>(out, column * 4, sum);
  if (params.lse != nullptr && column == 0) {
    params.lse[std::uint64_t{request} * rows + row] = total == 0 ? -INFINITY : highest + __logf(total);
  }
}

}  // namespace

cudaError_t launch_combine(const CombineParams& params, cudaStream_t stream) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(params.query_tokens * params.query_heads, params.batch);
  config.blockDim = dim3(kCombineThreads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, params.fp16 ? combine_splits<__half> : combine_splits<__nv_bfloat16>, params);
}

cudaError_t load_combine() {
  cudaFuncAttributes attributes;
  const cudaError_t result = cudaFuncGetAttributes(&attributes, combine_splits<__half>);
  return result != cudaSuccess ? result : cudaFuncGetAttributes(&attributes, combine_splits<__nv_bfloat16>);
}

}  // namespace tardis::attention
