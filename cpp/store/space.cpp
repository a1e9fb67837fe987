// SPDX-License-Identifier: Apache-2.0
// Where objects go: free slots, then new segments up to the capacity, then eviction.
#include <algorithm>
#include <limits>

#include "store/counters.h"
#include "store/store.h"

namespace tardis {

void Store::set_state(SlotRef where, SlotState next) {
  Segment& owner = segment(where.segment);
  Segment::Slot& s = owner.slots[where.slot];
  if (s.state == SlotState::kFree) --owner.free_slots;
  if (next == SlotState::kFree) ++owner.free_slots;
  --slot_counts_[static_cast<std::size_t>(s.state)];
  ++slot_counts_[static_cast<std::size_t>(next)];
  s.state = next;
}

void Store::adopt_segment(std::unique_ptr<Segment> segment) {
  slot_counts_[static_cast<std::size_t>(SlotState::kFree)] += segment->slots.size();
  segments_[segment->id()] = std::move(segment);
}

void Store::release_slot(SlotRef where) {
  slot(where).entry = nullptr;
  set_state(where, slot(where).leases == 0 ? SlotState::kFree : SlotState::kDying);
}

void Store::end_lease(SlotRef where) {
  Segment::Slot& s = slot(where);
  if (--s.leases == 0 && s.state == SlotState::kDying) set_state(where, SlotState::kFree);
}

SlotRef Store::forget(IndexEntry& entry) {
  const SlotRef where = entry.where;
  payload_bytes_ -= entry.payload_bytes;
  index_.erase(entry);
  slot(where).entry = nullptr;
  return where;
}

void Store::unpublish(IndexEntry& entry) { release_slot(forget(entry)); }

void Store::quarantine(IndexEntry& entry) { set_state(forget(entry), SlotState::kQuarantined); }

void Store::take_free(SlotClass slot_class, std::size_t need, std::vector<SlotRef>& out) {
  for (auto& [id, segment] : segments_) {
    if (segment->reclassing || segment->free_slots == 0 || segment->slot_class() != slot_class) continue;
    const auto count = static_cast<std::uint32_t>(segment->slots.size());
    // From where the last search ended, so that a batch gets consecutive slots.
    for (std::uint32_t step = 0; step < count && segment->free_slots > 0 && out.size() < need; ++step) {
      const std::uint32_t at = (segment->next_slot + step) % count;
      if (segment->slots[at].state != SlotState::kFree) continue;
      set_state({id, at}, SlotState::kWriting);
      out.push_back({id, at});
    }
    if (!out.empty() && out.back().segment == id) segment->next_slot = (out.back().slot + 1) % count;
    if (out.size() == need) return;
  }
}

std::vector<SlotRef> Store::reserve(SlotClass slot_class, std::size_t need, std::optional<Error>& failure) {
  std::vector<SlotRef> out;
  out.reserve(need);
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      take_free(slot_class, need, out);
    }
    if (out.size() == need) return out;
    const Result<bool> grown = grow(slot_class);
    if (!grown) failure = grown.error();
    if (grown && *grown) continue;
    const Result<bool> converted = convert_segment(slot_class);
    if (!converted) failure = converted.error();
    if (converted && *converted) continue;
    const std::lock_guard lock(mutex_);
    if (evict(slot_class, need - out.size()) == 0) return out;
  }
}

Result<bool> Store::grow(SlotClass slot_class) {
  const std::lock_guard grow(grow_mutex_);
  std::uint32_t id = 0;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [known, segment] : segments_) {
      if (!segment->reclassing && segment->slot_class() == slot_class && segment->free_slots > 0) return true;
    }
    if (segments_.size() + unreadable_.size() >= max_segments()) return false;
    while (segments_.contains(id) || unreadable_.contains(id)) ++id;
  }
  auto free = folder_.free_bytes();
  if (!free) return free.error();
  const std::uint64_t bytes = folder_.superblock().segment_bytes;
  if (*free < bytes || *free - bytes < options_.free_space_floor) {
    return Error{Code::kNoSpace, folder_.path() + ": " + human_bytes(*free) + " free; another segment of " +
                                     human_bytes(bytes) + " would not leave free_space_floor (" +
                                     human_bytes(options_.free_space_floor) +
                                     "); free space there or lower free_space_floor"};
  }
  auto segment = Segment::create(*device_, folder_.segment_path(id), id, folder_.superblock().uuid, bytes, slot_class);
  if (!segment) {
    (void)folder_.remove_segment(id);
    return segment.error();
  }
  if (Status status = folder_.sync_segments_folder(); !status) return status.error();
  const std::lock_guard lock(mutex_);
  adopt_segment(std::move(*segment));
  return true;
}

std::size_t Store::evict(SlotClass slot_class, std::size_t need) {
  std::size_t freed = 0;
  const auto unleased = [&](const IndexEntry& entry) { return slot(entry.where).leases == 0; };
  while (freed < need) {
    IndexEntry* entry = index_.coldest(slot_class, unleased);
    if (entry == nullptr) break;
    counters_->evicted_pages += 1;
    counters_->evicted_bytes += entry->payload_bytes;
    unpublish(*entry);
    ++freed;
  }
  return freed;
}

// A segment of another class to turn into this one: when this class has too little to evict from, or when the other
// class holds the coldest object of the store. Null if there is none that can be drained now.
Segment* Store::choose_victim(SlotClass slot_class) {
  std::uint64_t own_coldest = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t other_coldest = std::numeric_limits<std::uint64_t>::max();
  for (const auto& [other, score] : index_.coldest_by_class()) {
    std::uint64_t& coldest = other == slot_class ? own_coldest : other_coldest;
    coldest = std::min(coldest, score);
  }
  Segment* victim = nullptr;
  std::uint64_t victim_score = std::numeric_limits<std::uint64_t>::max();
  for (auto& [id, segment] : segments_) {
    if (segment->reclassing || segment->slot_class() == slot_class) continue;
    if (segment->free_slots == segment->slots.size()) return segment.get();
    if (other_coldest >= own_coldest) continue;
    std::uint64_t hottest = 0;
    bool idle = true;
    for (const Segment::Slot& s : segment->slots) {
      idle = idle && s.leases == 0 && (s.state == SlotState::kFree || s.state == SlotState::kLive);
      if (s.entry != nullptr) hottest = std::max(hottest, s.entry->score);
    }
    if (!idle || hottest >= victim_score) continue;
    victim = segment.get();
    victim_score = hottest;
  }
  return victim;
}

Result<bool> Store::convert_segment(SlotClass slot_class) {
  const std::lock_guard grow(grow_mutex_);
  Segment* victim = nullptr;
  {
    const std::lock_guard lock(mutex_);
    victim = choose_victim(slot_class);
    if (victim == nullptr) return false;
    std::vector<IndexEntry*> doomed;
    for (const Segment::Slot& s : victim->slots) {
      if (s.entry != nullptr) doomed.push_back(s.entry);
    }
    // An extension without its prefix can never be reached: it goes too, unless somebody reads it just now.
    for (IndexEntry* entry : index_.descendants(doomed)) {
      if (slot(entry->where).leases == 0) doomed.push_back(entry);
    }
    for (IndexEntry* entry : doomed) {
      counters_->evicted_pages += 1;
      counters_->evicted_bytes += entry->payload_bytes;
      unpublish(*entry);
    }
    victim->reclassing = true;
    slot_counts_[static_cast<std::size_t>(SlotState::kFree)] -= victim->slots.size();
  }
  Status status;
  {
    const std::lock_guard io(victim->io_mutex());
    status = victim->reclass(slot_class);
  }
  const std::lock_guard lock(mutex_);
  auto owner = segments_.extract(victim->id());
  if (!status) {
    unreadable_[owner.key()] = status.error().message;
    retired_.push_back(std::move(owner.mapped()));  // an open flush group may still name it
    return status.error();
  }
  victim->adopt_class();
  victim->reclassing = false;
  adopt_segment(std::move(owner.mapped()));
  return true;
}

}  // namespace tardis
