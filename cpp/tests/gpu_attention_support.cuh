// SPDX-License-Identifier: Apache-2.0
// For programs that check and time decode attention: pools in pinned memory and HBM with page tables over them, and
// plain kernels that compute the same token by token.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "gpu_support.h"
#include "tardis/attention.h"

namespace tardis::attention::testing {

using namespace tardis::gpu_test;

inline std::uint32_t stored_bytes(std::uint32_t type) { return type == TARDIS_ATTENTION_FP8_E4M3 ? 1 : 2; }
inline const char* type_text(std::uint32_t type) {
  return type == TARDIS_ATTENTION_BF16 ? "bf16" : type == TARDIS_ATTENTION_FP16 ? "fp16" : "fp8";
}
// Of queries and output.
inline bool is_half(std::uint32_t type) { return type == TARDIS_ATTENTION_FP16; }

template <class To, class From>
To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline std::uint16_t encoded16(float value, bool half) {
  return half ? bits_of<std::uint16_t>(__float2half_rn(value)) : bits_of<std::uint16_t>(__float2bfloat16_rn(value));
}
inline float decoded16(std::uint16_t bits, bool half) {
  return half ? __half2float(bits_of<__half>(bits)) : __bfloat162float(bits_of<__nv_bfloat16>(bits));
}

enum class Mix { kHost, kDevice, kBoth };

inline const char* text_of(Mix mix) {
  return mix == Mix::kHost ? "host" : mix == Mix::kDevice ? "HBM" : "host and HBM";
}

struct Shape {
  std::uint32_t type = TARDIS_ATTENTION_BF16, head_dim = 128, query_heads = 32, kv_heads = 8, page_tokens = 64;
  std::uint32_t row() const { return query_heads * head_dim; }
};

// K and V of one layer in one kind of memory, everything NaN at first.
class Pool {
 public:
  Pool(Where where, const Shape& shape, std::uint64_t pages, std::uint32_t pad_heads)
      : shape_(shape),
        slots_(pages * shape.page_tokens),
        slot_bytes_(std::uint64_t{shape.kv_heads + pad_heads} * shape.head_dim * stored_bytes(shape.type)),
        keys_(where, slots_ * slot_bytes_),
        values_(where, slots_ * slot_bytes_) {
    keys_.fill(0xFF);  // a NaN in all three types
    values_.fill(0xFF);
  }
  tardis_attention_pool parameters() const {
    const std::uint64_t head = std::uint64_t{shape_.head_dim} * stored_bytes(shape_.type);
    return {keys_.address(), values_.address(), slots_, slot_bytes_, head, slot_bytes_, head};
  }
  Memory& side(bool values) { return values ? values_ : keys_; }
  std::uint64_t slot_bytes() const { return slot_bytes_; }

 private:
  const Shape shape_;
  const std::uint64_t slots_, slot_bytes_;
  Memory keys_, values_;
};

// --- the same by plain kernels
// -------------------------------------------------------------------------------------------

__device__ inline double element(const void* at, std::uint64_t byte, std::uint32_t type) {
  const auto* p = static_cast<const unsigned char*>(at) + byte;
  if (type == TARDIS_ATTENTION_BF16) return __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(p));
  if (type == TARDIS_ATTENTION_FP16) return __half2float(*reinterpret_cast<const __half*>(p));
  return static_cast<float>(*reinterpret_cast<const __nv_fp8_e4m3*>(p));
}

template <class Real>
__device__ Real joined(Real value, bool highest) {
  __shared__ Real parts[256];
  parts[threadIdx.x] = value;
  __syncthreads();
  Real all = parts[0];
  for (unsigned i = 1; i < blockDim.x; ++i) all = highest ? (parts[i] > all ? parts[i] : all) : all + parts[i];
  __syncthreads();
  return all;
}

// Real double: the reference. Real float: two passes with the weights rounded to the type of the queries, as kernels on
// matrix instructions do it. Grid: query rows of a request, requests; 256 threads. scratch: [request][row][max_tokens].
template <class Real>
__global__ void plain_attention(tardis_attention_decode d, Real* out, Real* lse, Real* scratch) {
  constexpr bool kRounds = sizeof(Real) == 4;
  const std::uint32_t rows = d.query_tokens * d.query_heads, row = blockIdx.x, request = blockIdx.y;
  const std::uint32_t token = row / d.query_heads, head = row % d.query_heads, group = d.query_heads / d.kv_heads;
  const std::uint32_t kv_head = head / group, query_type = d.type == TARDIS_ATTENTION_FP8_E4M3 ? 0 : d.type;
  const int end = d.lengths[request] - static_cast<int>(d.query_tokens - 1 - token);
  const int begin = d.window_left < 0 ? 0 : max(end - 1 - d.window_left, 0);
  const std::uint32_t size = d.type == TARDIS_ATTENTION_FP8_E4M3 ? 1 : 2;
  const std::uint64_t at = std::uint64_t{request} * rows + row;
  Real* const weights = scratch + at * d.max_tokens;
  const auto* const query = static_cast<const unsigned char*>(d.queries) +
                            (std::uint64_t{request} * d.query_tokens + token) * d.query_row_bytes;
  const auto stored = [&](int t, bool values, std::uint32_t column) {
    const std::int32_t page = d.pages[request * d.page_row + t / d.page_tokens];
    const tardis_attention_pool& pool = d.pools[(page & TARDIS_ATTENTION_SECOND_POOL) != 0];
    const std::uint64_t slot = std::uint64_t(page & ~TARDIS_ATTENTION_SECOND_POOL) * d.page_tokens + t % d.page_tokens;
    const std::uint64_t byte = slot * (values ? pool.value_slot_bytes : pool.key_slot_bytes) +
                               kv_head * (values ? pool.value_head_bytes : pool.key_head_bytes) + column * size;
    return Real(element(reinterpret_cast<const void*>(values ? pool.values : pool.keys), byte, d.type));
  };
  Real highest = -INFINITY;
  for (int t = begin + static_cast<int>(threadIdx.x); t < end; t += blockDim.x) {
    Real product = 0;
    for (std::uint32_t i = 0; i < d.head_dim; ++i) {
      product += Real(element(query, (head * d.head_dim + i) * 2, query_type)) * stored(t, false, i);
    }
    product *= Real(d.scale) * Real(d.key_scale);
    if (d.soft_cap != 0) product = Real(d.soft_cap) * tanh(product / Real(d.soft_cap));
    weights[t] = product;
    highest = product > highest ? product : highest;
  }
  highest = joined(highest, true);
  Real sum = 0;
  for (int t = begin + static_cast<int>(threadIdx.x); t < end; t += blockDim.x) {
    Real weight = exp(weights[t] - highest);
    sum += weight;
    if (kRounds) {
      weight = query_type == TARDIS_ATTENTION_FP16 ? Real(__half2float(__float2half_rn(weight)))
                                                   : Real(__bfloat162float(__float2bfloat16_rn(weight)));
    }
    weights[t] = weight;
  }
  sum = joined(sum, false);
  if (threadIdx.x < d.head_dim) {
    Real total = 0;
    for (int t = begin; t < end; ++t) total += weights[t] * stored(t, true, threadIdx.x);
    total = sum == 0 ? Real(0) : total / sum * Real(d.value_scale);
    if (kRounds) {
      total = query_type == TARDIS_ATTENTION_FP16 ? Real(__half2float(__float2half_rn(total)))
                                                  : Real(__bfloat162float(__float2bfloat16_rn(total)));
    }
    out[at * d.head_dim + threadIdx.x] = total;
  }
  if (threadIdx.x == 0) lse[at] = sum == 0 ? Real(-INFINITY) : highest + log(sum);
}

// A quick source of numbers that look normal enough.
class Normal {
 public:
  explicit Normal(std::uint64_t seed) : state_(seed | 1) {}
  float operator()() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    const std::uint64_t s = state_;
    const int sum = static_cast<int>(s & 0xFFFF) + static_cast<int>(s >> 16 & 0xFFFF) +
                    static_cast<int>(s >> 32 & 0xFFFF) + static_cast<int>(s >> 48 & 0xFFFF);
    return static_cast<float>(sum - 131070) * (1.0F / 37837.0F);  // variance of four uniforms
  }

 private:
  std::uint64_t state_;
};

// Enqueues, or ends the program with the library's sentence.
inline void decode(const tardis_attention_decode& parameters, cudaStream_t stream) {
  char error[512] = "";
  const int result = tardis_gpu_attention_decode(&parameters, stream, error, sizeof error);
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "tardis_gpu_attention_decode: %d: %s\n", result, error);
  std::exit(1);
}

inline std::uint64_t workspace_bytes(const tardis_attention_decode& parameters) {
  char error[512] = "";
  std::uint64_t bytes = 0;
  const int result = tardis_gpu_attention_workspace(&parameters, &bytes, error, sizeof error);
  if (result == cudaSuccess) return bytes;
  std::fprintf(stderr, "tardis_gpu_attention_workspace: %d: %s\n", result, error);
  std::exit(1);
}

}  // namespace tardis::attention::testing
