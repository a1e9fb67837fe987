// SPDX-License-Identifier: Apache-2.0
// Rebuilds the index from header tables alone.
#include <algorithm>
#include <map>
#include <set>

#include "store/counters.h"
#include "store/digest.h"
#include "store/scan.h"
#include "store/store.h"

namespace tardis {
namespace {

Status erase_headers(Segment& segment, const std::vector<std::uint32_t>& slots) {
  if (slots.empty()) return {};
  auto table = segment.table();
  if (!table) return table.error();
  std::set<std::uint64_t> blocks;
  for (const std::uint32_t slot : slots) {
    (*table)->header(slot) = {};
    (*table)->blocks_of(slot, blocks);
  }
  const Status status = segment.write_table(blocks);
  segment.drop_table();
  return status;
}

}  // namespace

struct Store::Found {
  Claim claim;
  SlotRef where;
  bool dirty;     // its segment was being written when the store was last in use
  bool rejected;  // not believed: its payload or its digest table entry is of another object
};

Status Store::recover() {
  std::vector<Found> found;
  if (Status status = scan_segments(found); !status) return status;
  verify_unproven(found);
  publish_newest(found);
  return settle_segments(found);
}

Status Store::scan_segments(std::vector<Found>& found) {
  auto files = folder_.segment_files();
  if (!files) return files.error();
  while (files->size() > max_segments()) {
    const auto last = std::prev(files->end());
    notes_.push_back("capacity is smaller than before: removed " + last->second);
    if (Status status = folder_.remove_segment(last->first); !status) return status;
    files->erase(last);
  }
  const StoreSuperblock& superblock = folder_.superblock();
  for (const auto& [id, path] : *files) {
    auto loaded = Segment::load(*device_, path, id, superblock.uuid, superblock.segment_bytes);
    if (!loaded && loaded.error().code == Code::kNotFound) {
      if (Status status = folder_.remove_segment(id); !status) return status;
      continue;
    }
    auto table = loaded ? (*loaded)->table() : Result<SegmentTable*>(loaded.error());
    if (!table) {
      unreadable_[id] = table.error().message;
      notes_.push_back("segment left alone: " + table.error().message);
      continue;
    }
    Segment& segment = **loaded;
    adopt_segment(std::move(*loaded));
    if (segment.truncated()) {
      notes_.push_back(path + ": " + std::to_string(segment.file_bytes()) + " bytes instead of " +
                       std::to_string(superblock.segment_bytes) + "; pages beyond its end are lost");
    }
    // In a dirty or truncated segment a broken header is what a crash leaves: an ordinary free slot.
    const bool whole = !segment.dirty() && !segment.suspect() && !segment.truncated();
    const SegmentFacts facts{id, segment.epoch(), segment.geometry(), segment.file_bytes(), superblock.block_bytes};
    for (std::uint32_t slot = 0; slot < facts.geometry.slots; ++slot) {
      const SlotHeader& header = (*table)->header(slot);
      const Belief belief = judge(header, slot, facts);
      if (belief == Belief::kBad) counters_->recovered_rejected += 1;
      if (belief == Belief::kQuarantined || (belief == Belief::kBad && whole)) {
        set_state({id, slot}, SlotState::kQuarantined);
      }
      if (belief != Belief::kObject) continue;
      const bool torn =
          segment.dirty() && digest_root(ObjectGeometry::of(header), (*table)->digests(slot)) != header.root_digest;
      found.push_back({{segment.file(), facts.geometry.slot_offset(slot), header}, {id, slot}, segment.dirty(), torn});
    }
    segment.drop_table();
  }
  return {};
}

// Pages of groups that no header proves durable are believed only after their payload was read.
void Store::verify_unproven(std::vector<Found>& found) {
  for (const Found& one : found) durable_group_ = std::max(durable_group_, one.claim.header.last_durable_group);
  std::vector<Claim> claims;
  std::vector<Found*> claimed;
  for (Found& one : found) {
    if (one.rejected || !one.dirty || one.claim.header.flush_group <= durable_group_) continue;
    claims.push_back(one.claim);
    claimed.push_back(&one);
  }
  verify_claims(*device_, claims, {});
  for (std::size_t k = 0; k < claims.size(); ++k) {
    claimed[k]->claim.verified = claims[k].verified;
    claimed[k]->rejected = !claims[k].verified;
    if (claims[k].verified) counters_->recovered_verified += 1;
  }
}

// The newest generation of a key wins; insertion goes from old to new, which is also the order of recency.
void Store::publish_newest(const std::vector<Found>& found) {
  std::vector<const Found*> order;
  for (const Found& one : found) {
    next_generation_ = std::max(next_generation_, one.claim.header.generation + 1);
    if (one.rejected) {
      counters_->recovered_rejected += 1;
    } else {
      order.push_back(&one);
    }
  }
  const auto generation = [](const Found* one) { return one->claim.header.generation; };
  std::sort(order.begin(), order.end(), [&](auto* a, auto* b) { return generation(a) < generation(b); });
  for (const Found* one : order) {
    const SlotHeader& header = one->claim.header;
    const ObjectKey key{intern(header.fingerprint), header.key};
    if (IndexEntry* older = index_.find(key)) unpublish(*older);
    const Segment& owner = segment(one->where.segment);
    IndexEntry& entry = index_.insert({.key = key,
                                       .where = one->where,
                                       .slot_class = owner.slot_class(),
                                       .parent = header.parent,
                                       .generation = header.generation,
                                       .root = header.root_digest,
                                       .payload_bytes = header.payload_bytes,
                                       .suspect = (owner.dirty() || owner.suspect()) && !one->claim.verified});
    slot(one->where).entry = &entry;
    set_state(one->where, SlotState::kLive);
    payload_bytes_ += header.payload_bytes;
  }
  counters_->recovered_pages += index_.size();
}

Status Store::settle_segments(const std::vector<Found>& found) {
  std::map<std::uint32_t, std::vector<std::uint32_t>> rejected;  // slots by segment
  for (const Found& one : found) {
    durable_group_ = std::max(durable_group_, one.claim.header.flush_group);
    if (one.rejected) rejected[one.where.segment].push_back(one.where.slot);
  }
  for (const auto& [id, segment] : segments_) {
    const std::lock_guard io(segment->io_mutex());
    if (segment->truncated()) {
      if (Status status = segment->restore_length(); !status) return status;
    }
    if (!segment->dirty()) continue;
    notes_.push_back(segment->path() + ": was not closed; recovered");
    // Headers that were not believed go: later groups will be durable, and would vouch for these by their number.
    Status status = erase_headers(*segment, rejected[id]);
    // What was just read may still be in the operating system's cache only.
    if (status) status = segment->flush();
    if (status) status = segment->set_flags(kSegmentDirty | kSegmentSuspect);
    if (!status) return status;
  }
  group_->id = durable_group_ + 1;
  finished_group_ = durable_group_;
  return {};
}

}  // namespace tardis
