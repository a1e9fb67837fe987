// SPDX-License-Identifier: Apache-2.0
// What the host hands to the decode kernels, and the instances that there are (instances/).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "tardis/attention.h"

namespace tardis::attention {

// Tensor maps of one pool. Dimensions: 64 columns (fp8: all of them), slots, blocks of columns, heads.
struct PoolMaps {
  CUtensorMap keys, values;
};

struct DecodeParams {
  PoolMaps pools[TARDIS_ATTENTION_POOLS];
  const void* queries;
  void* output;
  float* lse;
  const std::int32_t* pages;
  const std::int32_t* lengths;
  float* partial_output;  // [batch][splits][query row][head_dim] where there are several splits
  float* partial_lse;     // [batch][splits][query row]
  std::uint64_t query_row_bytes, output_row_bytes, page_row;
  float logit_scale;  // of the products as they come out of shared memory, without the base of the exponential
  float soft_cap;     // 0: none
  float value_scale;
  std::int32_t window_left;
  std::uint32_t query_tokens, query_heads, kv_heads;
  std::uint32_t group;  // query heads of a KV head
  std::uint32_t splits, max_tokens;
  std::uint32_t page_shift;  // log2 of the tokens of a page
  std::uint32_t box_shift;   // log2 of the tokens of a box, at most 6 and at most page_shift
};

struct Instance {
  const char* name;  // "bf16:128"
  std::uint32_t type, head_dim;
  const void* kernel;
  std::uint32_t shared_bytes, threads;
  std::uint32_t enough_ctas, ctas_per_sm;  // of an SM: to read as fast as HBM gives; at most
};

// Those that were built, and their number.
const Instance* instances(std::size_t* count);

// Joins the partial results of the splits; launched behind the decode kernel, which lets it start early.
struct CombineParams {
  const float* partial_output;
  const float* partial_lse;
  void* output;
  float* lse;
  std::uint64_t output_row_bytes;
  std::uint32_t query_tokens, query_heads, head_dim, splits, batch;
  bool fp16;
};
cudaError_t launch_combine(const CombineParams& params, cudaStream_t stream);
cudaError_t load_combine();

cudaError_t load_store();

}  // namespace tardis::attention
