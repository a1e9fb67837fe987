// SPDX-License-Identifier: Apache-2.0
// Segments whose payload is dealt to files on several paths, so that the layers of one object come from all of them.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "block/stripe_map.h"
#include "store/format.h"

namespace tardis {

// The files of one segment. Fixed for its life: a re-class changes the unit alone.
struct Stripes {
  std::uint32_t files = 0;          // 0: not striped
  std::uint64_t member_bytes = 0;   // length of each but the first
  std::uint64_t segment_bytes = 0;  // of all together
  std::uint64_t nonce = 0;
  std::array<std::uint8_t, kMaxPaths> paths{};  // the first: the segment's own

  static Stripes of(const SegmentSuperblock& superblock);
  // For a new segment on these paths. files == 0: no object of this class would fit.
  static Stripes plan(std::uint64_t segment_bytes, SlotClass slot_class, std::uint64_t unit,
                      std::span<const std::uint32_t> paths);
  explicit operator bool() const { return files > 0; }
  bool sane() const;  // and every path named once
  std::uint64_t bytes_of(std::uint32_t file) const {
    return file == 0 ? segment_bytes - (files - 1) * member_bytes : member_bytes;
  }
  std::uint32_t mask() const;
  // As many slots as the files have room for.
  SegmentGeometry geometry(SlotClass slot_class, std::uint64_t unit) const;
};
static_assert(StripeMap::kBlock == kTableBlockBytes && StripeMap::kMemberStart == kTableBlockBytes);

// How much of an object lies on one drive in a row: a layer, or where there are too few, the drive's share of all.
std::uint64_t stripe_unit(const ObjectGeometry& object, std::uint32_t files);

// Whether a member's first block says that it belongs to this segment.
StripeHeader stripe_header(const Stripes& stripes, std::uint32_t index, const Uuid& store, SegmentName name);
bool same_stripe(const StripeHeader& found, const StripeHeader& expected);

}  // namespace tardis
