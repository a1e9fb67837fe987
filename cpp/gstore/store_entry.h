// SPDX-License-Identifier: Apache-2.0
// What the store's index tells the GPU's of an object. Host only.
#pragma once

#include <cstring>

#include "gstore/index_layout.h"
#include "store/index.h"

namespace tardis::gstore {

static_assert(kMaxNamespaces <= 0x10000, "a change has 16 bits for the namespace");

// The place of an object is its slot. Whoever keeps a block table puts a handle there instead.
inline tardis_gpu_index_entry change_of(const IndexEntry& entry, tardis_gpu_index_op op) {
  tardis_gpu_index_entry change = {};
  static_assert(sizeof change.key == sizeof entry.key);
  std::memcpy(change.key, entry.key.data(), sizeof change.key);
  change.location = entry.slot;
  change.generation = entry.stamp.generation();
  change.root = entry.root;
  change.payload_bytes = entry.payload_bytes;
  change.space = static_cast<std::uint16_t>(entry.space);
  change.op = static_cast<std::uint8_t>(op);
  return change;
}

}  // namespace tardis::gstore
