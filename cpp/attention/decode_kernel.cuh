// SPDX-License-Identifier: Apache-2.0
// Decode attention: a CTA goes over the tiles of one split of one request's context for one KV head. One warp loads
// (Producer), one warp group computes (Consumer).
#pragma once

#include <cstdint>

#include "attention/decode.h"
#include "attention/decode_consumer.cuh"
#include "attention/decode_producer.cuh"
#include "gio/programmatic.cuh"

namespace tardis::attention {

// Grid: KV heads, splits, requests.
template <class Shape, class Element>
__global__ void __launch_bounds__(kThreads, Shape::kCtasPerSm)
    decode_attention(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const std::uint32_t head = blockIdx.x, split = blockIdx.y, request = blockIdx.z;
  const StageRing<Shape> ring(shared);
  if (threadIdx.x == 0) {
    if (shared_address(shared) % kSwizzleBytes != 0) __trap();  // both sides' swizzle goes by addresses
    ring.init();
  }
  const auto given = static_cast<std::uint32_t>(max(__ldg(params.lengths + request), 0));
  const std::uint32_t length = min(given, params.max_tokens);
  const TokenRange tokens = seen_by_all(length, params.query_tokens, params.window_left);
  const TokenRange tiles = tiles_of_split(tokens, split, params.splits);
  __syncthreads();
  gio::let_next_kernel_start();
  if (threadIdx.x >= kConsumerThreads) {
    Producer<Shape>(params, ring, request, head, tokens).run(tiles);
  } else {
    Consumer<Shape, Element> consumer(params, shared, request, head, split, length);
    if (tiles.begin < tiles.end) {
      consumer.load_queries();
      consumer.run(tiles);
    }
    consumer.write();
  }
}

}  // namespace tardis::attention
