// SPDX-License-Identifier: Apache-2.0
// The table of the instances that were built. attention_shapes.inc, made by CMake, has a line SHAPE(type, head_dim) for
// each.
#include "attention/decode.h"

namespace tardis::attention {

#define SHAPE(type, head_dim) Instance decode_##type##_##head_dim();
#include "attention_shapes.inc"
#undef SHAPE

const Instance* instances(std::size_t* count) {
  static const Instance built[] = {
#define SHAPE(type, head_dim) decode_##type##_##head_dim(),
#include "attention_shapes.inc"
#undef SHAPE
  };
  *count = sizeof built / sizeof *built;
  return built;
}

}  // namespace tardis::attention

const char* tardis_gpu_attention_shapes() {
  static const char* const text =
#define SHAPE(type, head_dim) " " #type ":" #head_dim
#include "attention_shapes.inc"
#undef SHAPE
      ;
  return text + 1;
}
