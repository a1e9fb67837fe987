// SPDX-License-Identifier: Apache-2.0
// The consumer warp group of a decode kernel: keeps the queries of one KV head in shared memory and the output in
// registers, and goes over the tiles once: products with K, softmax as it goes, products with V.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/convert.cuh"
#include "attention/decode.h"
#include "attention/stage_ring.cuh"
#include "attention/wgmma.cuh"

namespace tardis::attention {

enum NamedBarrier : int { kConsumersMeet = 1 };  // 0 is __syncthreads()

__device__ __forceinline__ void consumers_meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(int{kConsumersMeet}), "n"(int{kConsumerThreads}) : "memory");
}

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <class Element>
__device__ __forceinline__ std::uint32_t pair_of(float low, float high) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
}

template <class Shape, class Element>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const DecodeParams& params, unsigned char* shared, std::uint32_t request,
                                      std::uint32_t head, std::uint32_t split, std::uint32_t length)
      : params_(params),
        shared_(shared),
        ring_(shared),
        request_(request),
        head_(head),
        split_(split),
        length_(length),
        rows_(params.query_tokens * params.group) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_[half] = query_row_of(warp() * 16 + lane() / 4 + 8 * half);
      seen_[half] = row_[half] < rows_
                        ? seen_by(length, params.query_tokens, row_[half] / params.group, params.window_left)
                        : TokenRange{0, 0};
    }
  }

  // Rows of the tile without a query are zeros.
  __device__ __forceinline__ void load_queries() {
    constexpr std::uint32_t kRowPieces = Shape::kHeadDim * 2 / kPieceBytes;
    for (std::uint32_t i = threadIdx.x; i < kTileRows * kRowPieces; i += kConsumerThreads) {
      const std::uint32_t tile_row = i / kRowPieces, piece = i % kRowPieces, row = query_row_of(tile_row);
      uint4 value = {0, 0, 0, 0};
      if (row < rows_) {
        const auto* from =
            static_cast<const unsigned char*>(params_.queries) +
            (std::uint64_t{request_} * params_.query_tokens + row / params_.group) * params_.query_row_bytes +
            head_of(row) * (Shape::kHeadDim * 2);
        value = __ldg(reinterpret_cast<const uint4*>(from) + piece);
      }
      *reinterpret_cast<uint4*>(shared_ + piece / 8 * kBlockBytes + piece_offset(tile_row, piece % 8)) = value;
    }
    fence_proxy_async();  // forbids that matrix instructions read the queries before these stores
    consumers_meet();
  }

  __device__ __forceinline__ void run(const TokenRange& tiles) {
    const TokenRange any = seen_by_all(length_, params_.query_tokens, params_.window_left);
    const TokenRange first = seen_by(length_, params_.query_tokens, 0, params_.window_left);
    const TokenRange last = seen_by(length_, params_.query_tokens, params_.query_tokens - 1, params_.window_left);
    StagePlace<Shape> place;
    for (std::uint32_t tile = tiles.begin; tile < tiles.end; ++tile) {
      const std::uint32_t begin = tile * kTileRows;
      // Where all queries see all tokens nothing need be masked.
      const bool edge = begin < last.begin || begin + kTileRows > first.end;
      const std::uint32_t valid_begin = any.begin > begin ? any.begin - begin : 0;
      const std::uint32_t valid_end = any.end - begin < kTileRows ? any.end - begin : kTileRows;

      float logits[kSums] = {};
      const unsigned char* const keys = take(place, valid_begin, valid_end, false);
      multiply_keys(logits, keys);
      give_back(place);

      if (params_.soft_cap != 0) cap(logits);
      if (edge) mask(logits, begin);
      std::uint32_t weights[4][4];
      soften(logits, weights);

      const unsigned char* const values = take(place, valid_begin, valid_end, edge);
      multiply_values(weights, values);
      give_back(place);
    }
  }

  __device__ __forceinline__ void write() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sum_[half];
      sum += __shfl_xor_sync(~0U, sum, 1);
      sum += __shfl_xor_sync(~0U, sum, 2);
      if (row_[half] >= rows_) continue;
      const float factor = sum > 0 ? params_.value_scale / sum : (sum == 0 ? 0 : sum);  // NaN stays NaN
      const float lse = sum == 0 ? -INFINITY : (highest_[half] * exponent() + __log2f(sum)) * kLn2;
      write_row(half, factor, lse);
    }
  }

 private:
  static __device__ __forceinline__ std::uint32_t lane() { return threadIdx.x % kWarpThreads; }
  static __device__ __forceinline__ std::uint32_t warp() { return threadIdx.x / kWarpThreads; }
  __device__ __forceinline__ std::uint32_t head_of(std::uint32_t row) const {
    return head_ * params_.group + row % params_.group;
  }

  // Of the base 2: what a logit as it is in the registers is multiplied with.
  __device__ __forceinline__ float exponent() const {
    return params_.soft_cap != 0 ? kLog2E : params_.logit_scale * kLog2E;
  }

  // A tile as matrix instructions can read it.
  __device__ __forceinline__ const unsigned char* take(const StagePlace<Shape>& place, std::uint32_t begin,
                                                       std::uint32_t end, bool clear) {
    wait_for(ring_.filled(place.stage), place.parity);
    __syncwarp();  // matrix instructions want all lanes together, and some may have waited longer
    unsigned char* const data = ring_.data(place.stage);
    if constexpr (Shape::kConverted) {
      unsigned char* const converted = shared_ + Shape::kConvertedAt;
      consumers_meet();  // forbids that it is overwritten while another warp's instructions read it
      convert_tile<Shape>(converted, data, begin, end);
      fence_proxy_async();  // forbids that matrix instructions read it before these stores
      consumers_meet();
      return converted;
    } else {
      if (clear) {
        clear_rows<Shape>(data, begin, end);
        fence_proxy_async();  // forbids that matrix instructions read it before these stores, and that they overtake
                              // the next tensor copy into this stage
        consumers_meet();
      }
      return data;
    }
  }

  __device__ __forceinline__ void give_back(StagePlace<Shape>& place) {
    if (lane() == 0) barrier_arrive(ring_.emptied(place.stage));
    place.advance();
  }

  __device__ __forceinline__ void multiply_keys(float (&logits)[kSums], const unsigned char* keys) {
    const std::uint32_t query_address = shared_address(shared_), key_address = shared_address(keys);
    pin_sums(logits);
    matrix_begin();
#pragma unroll
    for (std::uint32_t step = 0; step < Shape::kHeadDim / kStepColumns; ++step) {
      multiply_rows<Element>(logits, block_descriptor(query_address + column_step_bytes(step)),
                             block_descriptor(key_address + column_step_bytes(step)), step != 0);
    }
    matrix_commit();
    matrix_wait();
    pin_sums(logits);
    __syncwarp();
  }

  __device__ __forceinline__ void multiply_values(const std::uint32_t (&weights)[4][4], const unsigned char* values) {
    const std::uint32_t address = shared_address(values);
#pragma unroll
    for (std::uint32_t block = 0; block < Shape::kBlocks; ++block) pin_sums(output_[block]);
    matrix_begin();
#pragma unroll
    for (std::uint32_t step = 0; step < kTileRows / kStepColumns; ++step) {
#pragma unroll
      for (std::uint32_t block = 0; block < Shape::kBlocks; ++block) {
        multiply_add<Element>(output_[block], weights[step], block_descriptor(address + row_step_bytes(step, block)));
      }
    }
    matrix_commit();
    matrix_wait();
#pragma unroll
    for (std::uint32_t block = 0; block < Shape::kBlocks; ++block) pin_sums(output_[block]);
    __syncwarp();
  }

  __device__ __forceinline__ void cap(float (&logits)[kSums]) const {
    const float inner = 2 * kLog2E * params_.logit_scale / params_.soft_cap;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      logits[i] = params_.soft_cap * (1 - __fdividef(2, 1 + power_of_two(logits[i] * inner)));
    }
  }

  __device__ __forceinline__ void mask(float (&logits)[kSums], std::uint32_t begin) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const TokenRange& seen = seen_[i / 2 % 2];
      const std::uint32_t token = begin + 8 * (i / 4) + 2 * (lane() % 4) + i % 2;
      if (token < seen.begin || token >= seen.end) logits[i] = -INFINITY;
    }
  }

  // Turns logits into weights as the left side of the second product, and keeps sums, highest and output in step.
  __device__ __forceinline__ void soften(float (&logits)[kSums], std::uint32_t (&weights)[4][4]) {
    const float factor = exponent();
    float base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = highest_[half];
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        highest = fmaxf(highest, fmaxf(logits[i + 2 * half], logits[i + 2 * half + 1]));
      }
      highest = fmaxf(highest, __shfl_xor_sync(~0U, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(~0U, highest, 2));
      base[half] = highest == -INFINITY ? 0 : highest * factor;
      const float fade = power_of_two(highest_[half] * factor - base[half]);
      highest_[half] = highest;
      sum_[half] *= fade;
#pragma unroll
      for (std::uint32_t block = 0; block < Shape::kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < kSums; i += 4) {
          output_[block][i + 2 * half] *= fade;
          output_[block][i + 2 * half + 1] *= fade;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      logits[i] = power_of_two(fmaf(logits[i], factor, -base[i / 2 % 2]));
      sum_[i / 2 % 2] += logits[i];
    }
#pragma unroll
    for (int i = 0; i < kSums; i += 2) weights[i / 8][i % 8 / 2] = pair_of<Element>(logits[i], logits[i + 1]);
  }

  __device__ __forceinline__ void write_row(int half, float factor, float lse) {
    const std::uint32_t row = row_[half], token = row / params_.group, head = head_of(row);
    const std::uint32_t out_row = token * params_.query_heads + head;  // of this request
    const std::uint32_t request_rows = params_.query_tokens * params_.query_heads;
    if (params_.splits == 1) {
      auto* const out = static_cast<unsigned char*>(params_.output) +
                        (std::uint64_t{request_} * params_.query_tokens + token) * params_.output_row_bytes +
                        std::uint64_t{head} * (Shape::kHeadDim * 2);
      for_pairs(half, factor, [&](std::uint32_t column, float low, float high) {
        reinterpret_cast<std::uint32_t*>(out)[column / 2] = pair_of<Element>(low, high);
      });
      if (params_.lse != nullptr && lane() % 4 == 0) {
        params_.lse[std::uint64_t{request_} * request_rows + out_row] = lse;
      }
      return;
    }
    const std::uint64_t at = (std::uint64_t{request_} * params_.splits + split_) * request_rows + out_row;
    if (lane() % 4 == 0) params_.partial_lse[at] = lse;
    if (lse == -INFINITY) return;  // then nobody reads the rest
    for_pairs(half, factor, [&](std::uint32_t column, float low, float high) {
      reinterpret_cast<float2*>(params_.partial_output + at * Shape::kHeadDim)[column / 2] = {low, high};
    });
  }

  template <class Write>
  __device__ __forceinline__ void for_pairs(int half, float factor, Write&& write) {
#pragma unroll
    for (std::uint32_t block = 0; block < Shape::kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        write(block * kBlockColumns + 2 * i + 2 * (lane() % 4), output_[block][i + 2 * half] * factor,
              output_[block][i + 2 * half + 1] * factor);
      }
    }
  }

  const DecodeParams& params_;
  unsigned char* const shared_;
  const StageRing<Shape> ring_;
  const std::uint32_t request_, head_, split_, length_;
  const std::uint32_t rows_;  // of the tile that are queries
  std::uint32_t row_[2];      // this thread's
  TokenRange seen_[2];
  float highest_[2] = {-INFINITY, -INFINITY};  // logit so far
  float sum_[2] = {0, 0};                      // of this thread's columns
  float output_[Shape::kBlocks][kSums] = {};
};

}  // namespace tardis::attention
