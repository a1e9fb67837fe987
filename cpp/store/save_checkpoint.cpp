// SPDX-License-Identifier: Apache-2.0
// Writes the index beside the data, at the end and from time to time, so that opening need not read every header table.
#include <algorithm>

#include "store/counters.h"
#include "store/store.h"

namespace tardis {

// Under the setup lock.
Status Store::save_checkpoint(std::vector<Snapshot>& saved) {
  const LiveHeader& h = table_.header();
  const StoreSuperblock& s = folder_.superblock();
  std::uint64_t segments = 0, entries = 0;
  for_each_segment([&](std::uint32_t id, SegmentState) {
    ++segments;
    entries += live(id).counts[static_cast<std::size_t>(SlotState::kLive)].load();
  });
  // The old one goes only when the new one is in its place.
  const std::uint64_t both =
      2 * (entries * sizeof(CheckpointEntry) + segments * sizeof(CheckpointSegment)) + kMetadataBytes / 2;
  if (segments * s.segment_bytes + both > s.capacity_bytes) {
    return Error{Code::kNoSpace, "it does not fit in the capacity beside the segments"};
  }
  CheckpointHeader header{};
  header.store_uuid = s.uuid;
  header.durable_group = durable_group();
  header.next_generation = h.next_generation.load();
  header.next_group = h.next_group.load();
  header.clock = h.clock.load();
  std::vector<Fingerprint> namespaces;
  const std::uint32_t known = h.namespaces_end.load();
  for (NamespaceId id = 0; id < known; ++id) namespaces.push_back(table_.name_space(id).fingerprint);
  std::uint32_t id = 0;
  return write_checkpoint(folder_.path(), namespaces, header, [&](CheckpointSegment& segment, auto& list) {
    while (id < h.segments_end.load() && state_of(id) != SegmentState::kReady) ++id;
    if (id >= h.segments_end.load()) return false;
    segment.segment = name_of(id).word();
    segment.epoch = live(id).epoch.load();
    segment.write_sequence = live(id).write_sequence.load();
    // In this order: who takes the segment after it was seen idle changes its tables before it publishes anything.
    const bool idle = live(id).owner.load() == 0;
    saved.push_back({id, live(id).table_version.load(), idle});
    const std::uint32_t slots = live(id).slots.load();
    for (std::uint32_t slot = 0; slot < slots; ++slot) {
      auto entry = index_.save(index_.global({id, slot}));
      if (!entry || entry->space >= known) continue;
      entry->slot = slot;
      list.push_back(*entry);
    }
    ++id;
    return true;
  });
}

// A segment that nobody writes becomes clean if the checkpoint still tells of all that is in its tables.
Result<bool> Store::clean_segment(const Snapshot& saved) {
  LiveSegment& s = live(saved.id);
  if (!saved.idle || state_of(saved.id) != SegmentState::kReady || (s.flags.load() & kSegmentDirty) == 0 ||
      s.doubtful.load() != 0) {
    return false;
  }
  Segment* own = segment(saved.id);
  if (own == nullptr || !claim_alone(*own)) return false;
  Result<bool> result = false;
  if (s.state.load() == SegmentState::kReady && s.table_version.load() == saved.table_version) {
    const std::lock_guard io(own->io_mutex());
    Status status = own->flush();  // what it holds, before it says that it is whole
    if (status) status = own->set_flags(s.flags.load() & ~std::uint32_t{kSegmentDirty});
    result = status ? Result<bool>(true) : Result<bool>(status.error());
  }
  release(*own);
  return result;
}

Result<std::uint64_t> Store::checkpoint() {
  const Call call(*this);
  if (!call) return Call::closed();
  return checkpoint_now();
}

Result<std::uint64_t> Store::checkpoint_now() {
  const std::lock_guard describe(describe_mutex_);  // the setup lock is the process's
  if (Status status = folder_.lock_setup(); !status) return status.error();
  std::vector<Snapshot> saved;
  std::uint64_t cleaned = 0;
  Status status = save_checkpoint(saved);
  for (const Snapshot& snapshot : saved) {
    if (!status) break;
    const auto clean = clean_segment(snapshot);
    if (!clean) status = clean.error();
    cleaned += clean && *clean;
  }
  folder_.unlock_setup();
  counters_->checkpoints += status ? 1 : 0;
  if (!status) return status.error();
  return cleaned;
}

}  // namespace tardis
