// SPDX-License-Identifier: Apache-2.0
// Rebuilds the index from header tables alone.
#include <algorithm>
#include <map>
#include <set>
#include <unordered_set>

#include "store/counters.h"
#include "store/digest.h"
#include "store/scan.h"
#include "store/store.h"

namespace tardis {
namespace {

struct Found {
  Claim claim;
  SlotRef where;
  bool dirty;  // its segment was being written when the store was last in use
  bool torn;   // ... and its digest table entry is of another object
};

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

Status Store::recover() {
  auto files = folder_.segment_files();
  if (!files) return files.error();
  while (files->size() > max_segments()) {
    const auto last = std::prev(files->end());
    notes_.push_back("capacity is smaller than before: removed " + last->second);
    if (Status status = folder_.remove_segment(last->first); !status) return status;
    files->erase(last);
  }
  const StoreSuperblock& superblock = folder_.superblock();
  std::vector<Found> found;
  std::uint64_t durable = 0, last_group = 0;
  for (const auto& [id, path] : *files) {
    auto loaded = Segment::load(*device_, path, id, superblock.uuid, superblock.segment_bytes);
    if (!loaded && loaded.error().code == Code::kNotFound) {
      if (Status status = folder_.remove_segment(id); !status) return status;
      continue;
    }
    if (!loaded) {
      unreadable_[id] = loaded.error().message;
      notes_.push_back("segment left alone: " + loaded.error().message);
      continue;
    }
    Segment& segment = **loaded;
    auto table = segment.table();
    if (!table) {
      unreadable_[id] = table.error().message;
      notes_.push_back("segment left alone: " + table.error().message);
      continue;
    }
    adopt_segment(std::move(*loaded));
    const SegmentFacts facts{id, segment.epoch(), segment.geometry(), segment.file_bytes(), superblock.block_bytes};
    if (segment.truncated()) {
      notes_.push_back(path + ": " + std::to_string(facts.file_bytes) + " bytes instead of " +
                       std::to_string(superblock.segment_bytes) + "; pages beyond its end are lost");
    }
    for (std::uint32_t slot = 0; slot < facts.geometry.slots; ++slot) {
      const SlotHeader& header = (*table)->header(slot);
      const Belief belief = judge(header, slot, facts);
      if (belief == Belief::kQuarantined) {
        set_state({id, slot}, SlotState::kQuarantined);
      } else if (belief == Belief::kBad) {
        counters_->recovered_rejected += 1;
        // In a dirty or truncated segment a broken header is what a crash leaves: an ordinary free slot.
        if (!segment.dirty() && !segment.suspect() && !segment.truncated())
          set_state({id, slot}, SlotState::kQuarantined);
      } else if (belief == Belief::kObject) {
        const bool torn =
            segment.dirty() && digest_root(ObjectGeometry::of(header), (*table)->digests(slot)) != header.root_digest;
        found.push_back(
            {{segment.file(), facts.geometry.slot_offset(slot), header}, {id, slot}, segment.dirty(), torn});
        durable = std::max(durable, header.last_durable_group);
        last_group = std::max(last_group, header.flush_group);
      }
    }
    segment.drop_table();
  }

  // Pages of groups that no header proves durable are believed only after their payload was read.
  std::vector<Claim> claims;
  std::vector<std::size_t> claimed;
  std::unordered_set<std::size_t> rejected;
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (found[i].torn) rejected.insert(i);
    if (found[i].torn || !found[i].dirty || found[i].claim.header.flush_group <= durable) continue;
    claims.push_back(found[i].claim);
    claimed.push_back(i);
  }
  verify_claims(*device_, claims, {});
  for (std::size_t k = 0; k < claims.size(); ++k) {
    found[claimed[k]].claim.verified = claims[k].verified;
    if (claims[k].verified) {
      counters_->recovered_verified += 1;
    } else {
      rejected.insert(claimed[k]);
    }
  }
  counters_->recovered_rejected += rejected.size();
  std::map<std::uint32_t, std::vector<std::uint32_t>> rejected_slots;  // by segment
  for (const std::size_t i : rejected) rejected_slots[found[i].where.segment].push_back(found[i].where.slot);

  // The newest generation of a key wins; insertion goes from old to new, which is also the order of recency.
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < found.size(); ++i) {
    next_generation_ = std::max(next_generation_, found[i].claim.header.generation + 1);
    if (!rejected.contains(i)) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return found[a].claim.header.generation > found[b].claim.header.generation;
  });
  std::vector<std::size_t> kept;
  {
    struct Identity {
      std::size_t operator()(const ObjectKey& key) const { return short_key(key.hash) ^ key.space; }
    };
    std::unordered_set<ObjectKey, Identity> seen;
    for (const std::size_t i : order) {
      if (seen.insert({intern(found[i].claim.header.fingerprint), found[i].claim.header.key}).second) kept.push_back(i);
    }
  }
  std::reverse(kept.begin(), kept.end());
  for (const std::size_t i : kept) {
    const SlotHeader& header = found[i].claim.header;
    Segment& owner = segment(found[i].where.segment);
    IndexEntry& entry = index_.insert({.key = {intern(header.fingerprint), header.key},
                                       .where = found[i].where,
                                       .slot_class = owner.slot_class(),
                                       .parent = header.parent,
                                       .generation = header.generation,
                                       .root = header.root_digest,
                                       .payload_bytes = header.payload_bytes,
                                       .suspect = (owner.dirty() || owner.suspect()) && !found[i].claim.verified});
    slot(found[i].where).entry = &entry;
    set_state(found[i].where, SlotState::kLive);
    payload_bytes_ += header.payload_bytes;
  }
  counters_->recovered_pages += kept.size();

  durable_group_ = std::max(durable, last_group);
  for (const auto& [id, segment] : segments_) {
    const std::lock_guard io(segment->io_mutex());
    if (segment->truncated()) {
      if (Status status = segment->restore_length(); !status) return status;
    }
    if (!segment->dirty()) continue;
    notes_.push_back(segment->path() + ": was not closed; recovered");
    // Headers that were not believed go: later groups will be durable, and would vouch for these by their number.
    Status status = erase_headers(*segment, rejected_slots[id]);
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
