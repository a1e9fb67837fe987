// SPDX-License-Identifier: Apache-2.0
// For who keeps a copy of the running index: what of it changed since it was looked at last, whichever process changed
// it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "store/index.h"

namespace tardis {

// Chunk digests of an object, and what proves them.
struct DigestSource {
  std::uint64_t address = 0;  // SegmentAddresses
  std::uint64_t root = 0;
};

// An object that can be found, and where its bytes are.
struct LiveObject {
  IndexEntry entry;
  std::uint64_t address = 0;  // of its first byte
  DigestSource digests;
};

struct SlotChange {
  GlobalSlot slot = 0;
  bool gone = false;              // what was told of this slot before cannot be found any more
  std::optional<LiveObject> now;  // and this can
};

// The generations that were told of, by segment and slot. Nothing yet: a first look tells of every object.
class SeenSlots {
 public:
  std::uint64_t objects() const { return objects_; }

 private:
  friend class Store;
  std::vector<std::vector<std::uint64_t>> generations_;  // of live objects; 0: none
  std::uint64_t objects_ = 0;
};

}  // namespace tardis
