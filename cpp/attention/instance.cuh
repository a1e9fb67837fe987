// SPDX-License-Identifier: Apache-2.0
// What a file of instances/ consists of: one kernel, compiled by itself.
#pragma once

#include "attention/decode_kernel.cuh"

namespace tardis::attention {

template <std::uint32_t kType, std::uint32_t kHeadDim>
struct InstanceOf {
  using Shape = DecodeShape<kType == TARDIS_ATTENTION_FP8_E4M3 ? 1 : 2, kHeadDim>;
  using Element = std::conditional_t<kType == TARDIS_ATTENTION_FP16, __half, __nv_bfloat16>;

  static Instance make(const char* name) {
    return {name,
            kType,
            kHeadDim,
            reinterpret_cast<const void*>(&decode_attention<Shape, Element>),
            Shape::kSharedBytes,
            kThreads,
            Shape::kEnoughCtas,
            Shape::kCtasPerSm};
  }
};

}  // namespace tardis::attention
