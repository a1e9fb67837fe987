// SPDX-License-Identifier: Apache-2.0
// The ring of stages between the producer warp, whose tensor copies fill them, and the consumer warps: K of a tile,
// V of it, K of the next, and so on.
#pragma once

#include <cstdint>

#include "attention/decode_shape.h"
#include "attention/tensor_copy.cuh"

namespace tardis::attention {

template <class Shape>
class StageRing {
 public:
  __device__ __forceinline__ explicit StageRing(unsigned char* shared)
      : stages_(shared + Shape::kStagesAt), barriers_(reinterpret_cast<std::uint64_t*>(shared + Shape::kBarriersAt)) {}

  // One thread; a __syncthreads() must follow.
  __device__ __forceinline__ void init() const {
    for (std::uint32_t i = 0; i < Shape::kStages; ++i) {
      barrier_init(filled(i), 1);                // the producer's arrival, and the bytes that it expects
      barrier_init(emptied(i), kConsumerWarps);  // one lane of each
    }
    fence_barrier_init();
  }

  __device__ __forceinline__ unsigned char* data(std::uint32_t stage) const {
    return stages_ + stage * Shape::kStageBytes;
  }
  __device__ __forceinline__ std::uint64_t* filled(std::uint32_t stage) const { return barriers_ + stage; }
  __device__ __forceinline__ std::uint64_t* emptied(std::uint32_t stage) const {
    return barriers_ + Shape::kStages + stage;
  }

 private:
  unsigned char* stages_;
  std::uint64_t* barriers_;
};

// A place in the ring and how often it came by, as the parity that barriers are waited for with.
template <class Shape>
struct StagePlace {
  std::uint32_t stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == Shape::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace tardis::attention
