// SPDX-License-Identifier: Apache-2.0
#include "store/stripes.h"

#include <algorithm>
#include <bit>

namespace tardis {
namespace {

// Less than this is not worth a request of its own.
constexpr std::uint64_t kLeastShare = 64 * 1024;

// The most slots for which fits(geometry) holds.
template <class Fits>
SegmentGeometry largest(std::uint64_t segment_bytes, SlotClass slot_class, const Fits& fits) {
  const auto with = [&](std::uint32_t slots) {
    return SegmentGeometry::with(slots, slot_class.slot_bytes, slot_class.digests_per_slot);
  };
  std::uint32_t low = 0;
  std::uint32_t high = SegmentGeometry::of(segment_bytes, slot_class.slot_bytes, slot_class.digests_per_slot).slots;
  while (low < high) {
    const std::uint32_t middle = low + (high - low + 1) / 2;
    if (fits(with(middle))) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return with(low);
}

}  // namespace

Stripes Stripes::of(const SegmentSuperblock& s) {
  if (s.stripes == 0) return {};
  return {s.stripes, s.stripe_bytes, s.segment_bytes, s.stripe_nonce, s.stripe_paths};
}

bool Stripes::sane() const {
  return files >= 2 && files <= kMaxPaths && std::popcount(mask()) == static_cast<int>(files) &&
         member_bytes > StripeMap::kMemberStart && member_bytes % StripeMap::kBlock == 0 &&
         member_bytes < segment_bytes / (files - 1);
}

std::uint32_t Stripes::mask() const {
  std::uint32_t result = 0;
  for (std::uint32_t i = 0; i < std::min(files, kMaxPaths); ++i) {
    if (paths[i] < kMaxPaths) result |= 1u << paths[i];
  }
  return result;
}

Stripes Stripes::plan(std::uint64_t segment_bytes, SlotClass slot_class, std::uint64_t unit,
                      std::span<const std::uint32_t> paths) {
  Stripes result;
  result.segment_bytes = segment_bytes;
  const auto files = static_cast<std::uint32_t>(paths.size());
  // The second file has as much payload as any but the first.
  const auto shares = [&](const SegmentGeometry& g) {
    const StripeMap map{g.payload_offset, unit, files};
    const std::uint64_t payload = g.slots * g.slot_bytes;
    return std::pair(g.payload_offset + map.share(0, payload), StripeMap::kMemberStart + map.share(1, payload));
  };
  const SegmentGeometry g = largest(segment_bytes, slot_class, [&](const SegmentGeometry& one) {
    const auto [base, member] = shares(one);
    return base + (files - 1) * member <= segment_bytes;
  });
  if (g.slots == 0) return result;
  // What is left over is dealt to all, for classes of which more slots may fit.
  const auto [base, member] = shares(g);
  const std::uint64_t spare = (segment_bytes - base - (files - 1) * member) / files;
  result.files = files;
  result.member_bytes = member + spare / StripeMap::kBlock * StripeMap::kBlock;
  std::copy(paths.begin(), paths.end(), result.paths.begin());
  return result;
}

SegmentGeometry Stripes::geometry(SlotClass slot_class, std::uint64_t unit) const {
  return largest(segment_bytes, slot_class, [&](const SegmentGeometry& g) {
    const StripeMap map{g.payload_offset, unit, files};
    const std::uint64_t payload = g.slots * g.slot_bytes;
    return g.payload_offset + map.share(0, payload) <= bytes_of(0) &&
           StripeMap::kMemberStart + map.share(1, payload) <= member_bytes;
  });
}

std::uint64_t stripe_unit(const ObjectGeometry& object, std::uint32_t files) {
  const std::uint64_t slot = object.slot_class().slot_bytes;
  if (object.parts >= files) return std::min(round_up(object.part_stride, StripeMap::kBlock), slot);
  if (slot < files * kLeastShare) return slot;  // whole on one drive, its neighbours on the others
  return std::min(round_up((slot + files - 1) / files, kChunkBytes), slot);
}

StripeHeader stripe_header(const Stripes& stripes, std::uint32_t index, const Uuid& store, SegmentName name) {
  StripeHeader h{};
  h.magic = StripeHeader::kMagic;
  h.format_version = kFormatVersion;
  h.index = index;
  h.store_uuid = store;
  h.path = name.path;
  h.segment = name.number;
  h.nonce = stripes.nonce;
  seal(h);
  return h;
}

bool same_stripe(const StripeHeader& found, const StripeHeader& expected) {
  return sealed(found) && found.index == expected.index && found.store_uuid == expected.store_uuid &&
         found.path == expected.path && found.segment == expected.segment && found.nonce == expected.nonce;
}

}  // namespace tardis
