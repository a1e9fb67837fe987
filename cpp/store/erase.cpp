// SPDX-License-Identifier: Apache-2.0
// Explicit deletion: headers are overwritten and flushed before it returns, so that no rebuild brings anything back.
#include <algorithm>
#include <set>

#include "store/counters.h"
#include "store/store.h"

namespace tardis {

bool Store::Selection::has(const Fingerprint& fingerprint, const Hash256& hash) const {
  if (space && *space != fingerprint) return false;
  const std::uint32_t whole = key_nibbles / 2;
  if (!std::equal(key.begin(), key.begin() + whole, hash.begin())) return false;
  return key_nibbles % 2 == 0 || (key[whole] ^ hash[whole]) < 16;
}

// False: this segment had nothing of it on disk.
Result<bool> Store::erase_in(Segment& segment, const Selection& selection, std::uint64_t& pages) {
  index_.for_each_in(segment.id(), [&](const IndexEntry& entry) {
    if (selection.has(table_.name_space(entry.space).fingerprint, entry.key) && index_.unpublish(entry)) ++pages;
  });
  const std::lock_guard io(segment.io_mutex());
  auto table = segment.table();
  if (!table) return table.error();
  const bool everything = !selection.space && selection.key_nibbles == 0;
  // Evicted objects left headers that a rebuild would believe, so every header counts, not only published ones.
  std::set<std::uint64_t> blocks;
  std::vector<std::uint32_t> erased;
  for (std::uint32_t slot = 0; slot < segment.geometry().slots; ++slot) {
    SlotHeader& header = (*table)->header(slot);
    if (all_zero(&header, sizeof header)) continue;
    if (!everything && (!sealed(header) || !selection.has(header.fingerprint, header.key))) continue;
    (*table)->blocks_of(slot, blocks);
    erased.push_back(slot);
  }
  if (blocks.empty()) {
    // A header that was overwritten, or erased by a process that died, may still be on the medium.
    if (!segment.dirty()) return false;
    if (Status status = segment.flush_tables(); !status) return status.error();
    return false;
  }
  if (Status status = segment.make_dirty(); !status) return status.error();
  for (const std::uint32_t slot : erased) (*table)->header(slot) = {};
  const Status written = segment.write_table(blocks);
  const Status flushed = segment.flush_tables();
  const std::lock_guard lock(mutex_);
  if (!flushed) flush_failed(segment, flushed.error());
  if (!written || !flushed) {
    segment.live().doubtful.store(1);
    return written ? flushed.error() : written.error();
  }
  for (const std::uint32_t slot : erased) {
    index_.end_quarantine(index_.global({segment.id(), slot}));
  }
  return true;
}

Result<std::uint64_t> Store::remove(const Selection& selection) {
  const Call call(*this);
  if (!call) return Call::closed();
  std::unique_lock turn(clear_turn_);
  const std::unique_lock gate(clear_gate_);  // a page being stored must not appear after the headers were invalidated
  turn.unlock();
  std::uint64_t pages = 0;
  std::vector<std::uint32_t> unreadable;
  // A segment that fails does not keep the others from being emptied.
  Status result;
  for_each_segment([&](std::uint32_t id, SegmentState state) {
    // What is being created holds nothing, and may go again: its file must not be opened. Of what is being re-classed
    // nothing can be said before that has ended, or was taken over.
    if (state == SegmentState::kCreating) return;
    Status status;
    // That of the headers, unless it is another that keeps the segment from being opened.
    std::uint32_t path = live(id).path.load();
    if (state != SegmentState::kUnreadable) {
      std::optional<Error> why;
      Segment* own = segment(id, &why, &path);
      status = own == nullptr ? Status(*why) : claim_waiting(*own);
      if (status) {
        if (state_of(id) == SegmentState::kReady) {
          auto erased = erase_in(*own, selection, pages);
          if (!erased) status = erased.error();
        }
        release(*own);
      }
    }
    // Where nothing can be deleted nothing may be found any more, now or later.
    if (!status && path != 0 && is_path_fault(status.error().os_error)) take_out(path, status.error().message);
    if (path_out(id) < kMaxPaths) return;
    if (live(id).state.load() == SegmentState::kUnreadable) unreadable.push_back(id);
    if (!status) result = status;
  });
  if (Status status = forbid_return(); !status) result = status;
  limit_cached_tables();
  counters_->cleared_pages += pages;
  if (!result) return result.error();
  if (!unreadable.empty()) {
    return Error{Code::kCorrupt, std::to_string(pages) + " pages deleted, but what is in " +
                                     segment_path(unreadable.front()) +
                                     " cannot be read and may hold more; delete that file while the store is closed"};
  }
  return pages;
}

}  // namespace tardis
