// SPDX-License-Identifier: Apache-2.0
// What a mirror of a store tells the device (C++17).
#pragma once

#include <cstdint>
#include <vector>

#include "gstore/index.h"

namespace tardis::gstore {

// In this order; each step for all elements before the next.
struct MirrorBatch {
  std::vector<tardis_gpu_index_entry> erases;  // tardis_gpu_index_apply
  std::vector<std::uint64_t> leaves;           // tardis_gpu_blocks_free; then Mirror::left()
  // tardis_gpu_blocks_attach; then Mirror::attached(), which adds those that could not be to the adopts.
  std::vector<std::uint64_t> attach_handles;
  std::vector<std::uint32_t> attach_blocks;
  std::vector<std::uint32_t> adopts;         // tardis_gpu_blocks_adopt; then Mirror::adopted()
  std::vector<tardis_gpu_index_entry> puts;  // tardis_gpu_index_apply: made by adopted()
  bool empty() const { return erases.empty() && leaves.empty() && attach_blocks.empty() && adopts.empty(); }
};

}  // namespace tardis::gstore
