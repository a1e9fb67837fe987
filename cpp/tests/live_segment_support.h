// SPDX-License-Identifier: Apache-2.0
// A live table with segments of free slots, and no files below them: for tests and benchmarks of the index alone.
#pragma once

#include <algorithm>

#include "store/live_table.h"

namespace tardis::testing {

// As a segment that was just made, of `segment_bytes`.
inline Status add_live_segment(LiveTable& table, std::uint32_t id, SlotClass slot_class, std::uint64_t segment_bytes) {
  const std::uint32_t slots =
      SegmentGeometry::of(segment_bytes, slot_class.slot_bytes, slot_class.digests_per_slot).slots;
  if (Status status = table.reserve_segment(id); !status) return status;
  if (Status status = table.reserve_records(id, slots); !status) return status;
  LiveSegment& s = table.segment(id);
  s.slot_bytes.store(slot_class.slot_bytes);
  s.digests_per_slot.store(slot_class.digests_per_slot);
  s.slots.store(slots);
  s.counts[0].store(slots);
  s.state.store(SegmentState::kReady);
  table.header().segments_end.store(std::max(id + 1, table.header().segments_end.load()));
  return {};
}

}  // namespace tardis::testing
