// SPDX-License-Identifier: Apache-2.0
// Headers that fail their checks, in a store in use: no recovery would believe them, and each would cost its slot.
#include <set>

#include "store/counters.h"
#include "store/scan.h"
#include "store/store.h"

namespace tardis {

// How many slots became free. The caller holds the segment.
Result<std::uint64_t> Store::repair_headers_of(Segment& segment) {
  const std::lock_guard io(segment.io_mutex());
  segment.drop_table();  // what is on the medium counts, not what was written to it once
  auto table = segment.table();
  if (!table) return table.error();
  const std::uint64_t bytes = folder_.superblock().segment_bytes;
  const SegmentFacts facts{segment.number(), segment.epoch(), segment.geometry(), bytes,
                           folder_.superblock().block_bytes};
  std::set<std::uint64_t> blocks;
  std::uint64_t repaired = 0;
  for (std::uint32_t slot = 0; slot < facts.geometry.slots; ++slot) {
    SlotHeader& header = (*table)->header(slot);
    if (judge(header, slot, facts) != Belief::kBad) continue;
    const GlobalSlot global = index_.global({segment.id(), slot});
    if (index_.stamp(global).state() == SlotState::kWriting) continue;  // about to get a header of its own
    if (const auto entry = index_.read(global)) index_.unpublish(*entry);
    index_.end_quarantine(global);
    header = {};
    (*table)->blocks_of(slot, blocks);
    ++repaired;
  }
  if (blocks.empty()) return repaired;
  Status status = segment.make_dirty();
  if (status) status = segment.write_table(blocks);
  if (status) status = segment.flush();
  if (!status) return status.error();
  return repaired;
}

Result<std::uint64_t> Store::repair_headers() {
  const Call call(*this);
  if (!call) return Call::closed();
  std::uint64_t repaired = 0;
  Status result;
  for_each_segment([&](std::uint32_t id, SegmentState state) {
    if (state != SegmentState::kReady) return;
    std::optional<Error> why;
    Segment* own = segment(id, &why);
    Status status = own == nullptr ? Status(*why) : claim_waiting(*own);
    if (status) {
      if (state_of(id) == SegmentState::kReady) {
        auto here = repair_headers_of(*own);
        if (here) repaired += *here;
        if (!here) status = here.error();
      }
      release(*own);
    }
    if (!status) result = status;
  });
  limit_cached_tables();
  if (!result) return result.error();
  return repaired;
}

}  // namespace tardis
