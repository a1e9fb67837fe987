// SPDX-License-Identifier: Apache-2.0
// Where objects go: free slots, then new segments up to the capacity, then eviction.
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <thread>

#include "base/clock.h"
#include "store/counters.h"
#include "store/store.h"

namespace tardis {
namespace {

// How long a set() waits for a segment when others write in all of them.
constexpr std::uint64_t kBusyPatienceNs = 1'000'000'000;
constexpr auto kBusyPause = std::chrono::microseconds(200);
// How long it waits for room in a segment that another process holds before it evicts.
constexpr std::uint64_t kRoomPatienceNs = 50'000'000;
constexpr std::size_t kVictimsLookedAt = 32;
// Of a batch that is spread over several paths, each gets at least this much in a row.
constexpr std::uint64_t kLeastRunBytes = 1u << 20;
constexpr double kGoldenTurn = 0.6180339887498949;

std::uint32_t count_of(const LiveSegment& segment, SlotState state) {
  return segment.counts[static_cast<std::size_t>(state)].load();
}

std::uint64_t unit_in(const Segment& segment, const ObjectGeometry& object) {
  return segment.stripes() ? stripe_unit(object, segment.stripes().files) : 0;
}

}  // namespace

// Takes free slots of segments that this process holds or can hold, from where slots were found last: a batch gets
// consecutive slots, and several processes end up in different segments.
void Store::take_free(SlotClass slot_class, std::size_t need, std::optional<std::uint32_t> path, Reservation& out) {
  const std::uint32_t end = table_.header().segments_end.load();
  std::atomic<std::uint32_t>& last = path ? last_on_path_[*path] : last_segment_;
  const std::uint32_t start = last.load(std::memory_order_relaxed);
  for (std::uint32_t i = 0; i < end && out.slots.size() < need; ++i) {
    const std::uint32_t id = (start + i) % end;
    LiveSegment& s = live(id);
    // Being made, or given another class, by somebody: it may have free slots in a moment.
    if (state_of(id) == SegmentState::kCreating || state_of(id) == SegmentState::kReclassing) {
      const Owner maker = s.owner.load();
      if (maker != 0 && owner_alive(maker)) out.busy = true;
    }
    if (state_of(id) != SegmentState::kReady || index_.class_of(id) != slot_class) continue;
    if (path && s.path.load() != *path) continue;
    if (count_of(s, SlotState::kFree) + count_of(s, SlotState::kDying) == 0) continue;
    Segment* owner = segment(id);
    if (owner == nullptr) continue;
    const bool held = std::find(out.held.begin(), out.held.end(), owner) != out.held.end();
    if (!held && !claim(*owner)) {
      out.busy = true;
      continue;
    }
    const std::size_t before = out.slots.size();
    const std::uint32_t count = s.slots.load(), from = s.next_slot.load();
    // Looked at again: another process may have re-classed it before it was claimed.
    const bool usable = s.state.load() == SegmentState::kReady && index_.class_of(id) == slot_class && count > 0;
    for (std::uint32_t step = 0; usable && step < count && out.slots.size() < need; ++step) {
      const std::uint32_t at = (from + step) % count;
      const GlobalSlot slot = index_.global({id, at});
      if (index_.stamp(slot).state() == SlotState::kDying) index_.settle(slot);
      const Stamp free = index_.stamp(slot);
      if (free.state() != SlotState::kFree) continue;
      const std::uint64_t generation = table_.header().next_generation.fetch_add(1);
      if (!index_.change(slot, free, Stamp(SlotState::kWriting, generation))) continue;
      out.slots.push_back({slot, generation, owner});
      s.next_slot.store((at + 1) % count);
    }
    if (out.slots.size() > before) {
      last.store(id, std::memory_order_relaxed);
      if (!held) out.held.push_back(owner);
    } else if (!held) {
      release(*owner);
    }
  }
}

// Bytes of segments that could still be made on each path; 0 where none is in use.
std::array<std::uint64_t, kMaxPaths> Store::room_to_grow() const {
  const std::uint64_t segment_bytes = folder_.superblock().segment_bytes;
  std::uint32_t segments = 0;
  for_each_segment([&](std::uint32_t, SegmentState) { ++segments; });
  const std::uint64_t left = max_segments() - std::min(max_segments(), segments);
  std::array<std::uint64_t, kMaxPaths> room{};
  for (std::uint32_t path = 0; left > 0 && path < kMaxPaths; ++path) {
    if (!path_in_use(path)) continue;
    const auto free = free_bytes(path);
    if (free) room[path] = std::min(left, *free / segment_bytes) * segment_bytes;
  }
  return room;
}

// How many of a batch's objects go to each path: by the space that is free there, in runs that are worth a request. A
// short batch goes to one path, a different one each time.
std::vector<Store::Share> Store::shares(SlotClass slot_class, std::size_t need) {
  std::array<std::uint64_t, kMaxPaths> room = room_to_grow();
  for_each_segment([&](std::uint32_t id, SegmentState state) {
    if (state != SegmentState::kReady || index_.class_of(id) != slot_class) return;
    room[live(id).path.load()] += count_of(live(id), SlotState::kFree) * slot_class.slot_bytes;
  });
  const std::uint64_t sum = std::accumulate(room.begin(), room.end(), std::uint64_t{0});
  std::vector<Share> result;
  if (sum == 0) return result;
  const std::size_t run = std::max<std::size_t>(1, kLeastRunBytes / slot_class.slot_bytes);
  const std::size_t runs = std::max<std::size_t>(1, need / run);
  // Run r of this batch goes where r steps along the paths lead, laid end to end by their room; batches begin at places
  // that are far apart.
  const double turn = static_cast<double>(share_turn_.fetch_add(1, std::memory_order_relaxed)) * kGoldenTurn;
  std::array<std::size_t, kMaxPaths> slots{};
  for (std::size_t r = 0; r < runs; ++r) {
    const double at = turn + (static_cast<double>(r) + 0.5) / static_cast<double>(runs);
    double place = (at - std::floor(at)) * static_cast<double>(sum);
    std::uint32_t path = 0;
    while (path + 1 < kMaxPaths && place >= static_cast<double>(room[path])) {
      place -= static_cast<double>(room[path++]);
    }
    slots[path] += need * (r + 1) / runs - need * r / runs;
  }
  for (std::uint32_t path = 0; path < kMaxPaths; ++path) {
    if (slots[path] > 0 && path_in_use(path)) result.push_back({path, slots[path]});
  }
  return result;
}

// Free slots on one path, and new segments there if need be. What cannot be had there is had elsewhere.
void Store::take_or_grow(const ObjectGeometry& object, std::size_t need, std::uint32_t path, Reservation& out) {
  take_free(object.slot_class(), need, path, out);
  while (out.slots.size() < need) {
    const Result<bool> grown = grow(object, path);
    const std::size_t before = out.slots.size();
    if (!grown || !*grown) return;
    take_free(object.slot_class(), need, path, out);
    if (out.slots.size() == before) return;  // another call was there first
  }
}

Store::Reservation Store::reserve(const ObjectGeometry& object, std::size_t need, std::optional<Error>& failure) {
  const SlotClass slot_class = object.slot_class();
  Reservation out;
  const std::uint64_t began = monotonic_ns();
  if (paths_in_use() > 1 && options_.placement == Placement::kObjects) {
    for (const Share& share : shares(slot_class, need)) {
      take_or_grow(object, out.slots.size() + share.slots, share.path, out);
    }
  }
  while (true) {
    out.busy = false;
    take_free(slot_class, need, std::nullopt, out);
    if (out.slots.size() == need) return out;
    const Result<bool> grown = grow(object, std::nullopt);
    if (!grown) failure = grown.error();
    if (grown && *grown) continue;
    // There is room in a segment that another process holds for a moment: better to wait than to evict. But who has
    // something already does not wait, see below.
    if (out.busy && out.slots.empty() && monotonic_ns() < began + kRoomPatienceNs) {
      std::this_thread::sleep_for(kBusyPause);
      continue;
    }
    const Result<bool> converted = convert_segment(object);
    if (!converted) failure = converted.error();
    if (converted && *converted) continue;
    if (evict(slot_class, need - out.slots.size()) > 0) continue;
    // What other processes hold may have free slots, and objects to evict. Who has something already does not wait: two
    // that wait for each other would wait in vain.
    if (!out.busy || !out.slots.empty() || monotonic_ns() >= began + kBusyPatienceNs) return out;
    std::this_thread::sleep_for(kBusyPause);
  }
}

// True: there is a segment with free slots now, on that path or on any. False: the capacity is used up.
Result<bool> Store::grow(const ObjectGeometry& object, std::optional<std::uint32_t> path) {
  const SlotClass slot_class = object.slot_class();
  const std::lock_guard grow(grow_mutex_);
  const std::uint32_t end = table_.header().segments_end.load();
  for (std::uint32_t id = 0; id < end; ++id) {  // another call may have been here
    const LiveSegment& s = live(id);
    const Owner holder = s.owner.load();
    if (state_of(id) == SegmentState::kReady && index_.class_of(id) == slot_class &&
        (!path || s.path.load() == *path) && count_of(s, SlotState::kFree) > 0 && (holder == 0 || holder == owner_) &&
        s.wanted.load() == 0) {
      return true;
    }
  }
  std::uint32_t id = 0;
  const std::uint32_t limit = max_segments();
  for (; id < limit; ++id) {
    if (Status status = id < end ? Status() : table_.reserve_segment(id); !status) return status.error();
    LiveSegment& s = live(id);
    if (s.state.load() != SegmentState::kNone) continue;
    Owner holder = s.owner.load();
    if (holder != 0 && owner_alive(holder)) continue;
    if (!s.owner.compare_exchange_strong(holder, owner_)) continue;
    if (s.state.load() == SegmentState::kNone) break;
    s.owner.store(0);
  }
  if (id == limit) return false;
  if (options_.placement == Placement::kLayers && !path && create_striped(id, object)) {
    live(id).owner.store(0);
    return true;
  }
  const std::array<std::uint64_t, kMaxPaths> room = room_to_grow();
  std::vector<std::pair<std::uint64_t, std::uint32_t>> candidates;  // the one with the most room first
  for (std::uint32_t one = 0; one < kMaxPaths; ++one) {
    if (path_in_use(one) && (!path || one == *path)) candidates.emplace_back(room[one], one);
  }
  std::sort(candidates.rbegin(), candidates.rend());
  Status status = Error{Code::kIo, "no path of the store is in use"};
  for (const auto& [bytes, one] : candidates) {
    std::uint32_t to_blame = one;
    status = create_segment(id, {&one, 1}, object, to_blame);
    if (status) break;
  }
  if (!status) live(id).state.store(SegmentState::kNone);
  live(id).owner.store(0);
  if (!status) return status.error();
  return true;
}

// What is not a file system has nobody else to leave room for.
Result<std::uint64_t> Store::free_bytes(std::uint32_t path) const {
  if (const auto room = device_->room()) return room->free;
  const auto free = folder_.free_bytes(path);
  if (!free) return free;
  return *free - std::min(*free, options_.free_space_floor);
}

Status Store::check_room(std::uint32_t path, std::uint64_t bytes) {
  if (has_own_room_) return {};  // such a device says so itself when it is asked for more
  const auto free = folder_.free_bytes(path);
  if (!free) return free.error();
  if (*free < bytes || *free - bytes < options_.free_space_floor) {
    return Error{Code::kNoSpace, folder_.paths()[path].folder + ": " + human_bytes(*free) +
                                     " free; another segment of " + human_bytes(bytes) +
                                     " would not leave free_space_floor (" + human_bytes(options_.free_space_floor) +
                                     "); free space there or lower free_space_floor"};
  }
  return {};
}

// For a new segment file.
Result<std::uint32_t> Store::take_number(std::uint32_t path) {
  std::uint32_t number;
  do {
    number = table_.header().paths[path].next_number.fetch_add(1);
    if (number >= kMaxSegments) {
      return Error{Code::kNoSpace, folder_.paths()[path].folder + ": segment numbers are used up; open the store anew"};
    }
    // A file that the store did not count may be in the way.
  } while (::access(folder_.segment_path({path, number}).c_str(), F_OK) == 0);
  return number;
}

// This process holds the id. On several paths: striped over them, the first being the segment's own. `to_blame`: on
// which of them it failed.
Status Store::create_segment(std::uint32_t id, std::span<const std::uint32_t> paths, const ObjectGeometry& object,
                             std::uint32_t& to_blame) {
  const std::uint64_t bytes = folder_.superblock().segment_bytes;
  const SlotClass slot_class = object.slot_class();
  const std::uint64_t unit = stripe_unit(object, static_cast<std::uint32_t>(paths.size()));
  Stripes stripes;
  if (paths.size() > 1) {
    stripes = Stripes::plan(bytes, slot_class, unit, paths);
    if (!stripes) return Error{Code::kNoSpace, "no object of this size fits a striped segment"};
    if (::getrandom(&stripes.nonce, sizeof stripes.nonce, 0) != static_cast<ssize_t>(sizeof stripes.nonce)) {
      return errno_error(errno, "getrandom");
    }
  }
  for (std::uint32_t i = 0; i < paths.size(); ++i) {
    to_blame = paths[i];
    const Status room = check_room(paths[i], stripes ? stripes.bytes_of(i) : bytes);
    if (room) continue;
    path_result(paths[i], IoUse::kWrite, room);
    return room;
  }
  const std::uint32_t path = to_blame = paths.front();
  LiveSegment& s = live(id);
  const SegmentGeometry most = SegmentGeometry::of(bytes, slot_class.slot_bytes, slot_class.digests_per_slot);
  if (Status status = table_.reserve_records(id, most.slots); !status) return status;
  const auto taken = take_number(path);
  if (!taken) return taken.error();
  const std::uint32_t number = *taken;
  s.path.store(path);
  s.number.store(number);
  s.all_paths.store(stripes ? stripes.mask() : 1u << path);
  s.state.store(SegmentState::kCreating);
  std::uint32_t known = table_.header().segments_end.load();
  while (known <= id && !table_.header().segments_end.compare_exchange_weak(known, id + 1)) {
  }
  Segment::Blame blame;
  auto created = Segment::create(*device_, s, folder_, id, slot_class, stripes, unit, blame);
  Status status = created ? folder_.sync_segments_folder(path) : Status(created.error());
  to_blame = blame.path;
  if (status) {
    for (const std::uint32_t one : paths) path_result(one, IoUse::kWrite, status);
  } else {
    path_result(blame.path, IoUse::kWrite, status);
    if (created) created->reset();
    (void)folder_.remove_segment(name_of(id));
    s.state.store(SegmentState::kNone);  // before the number is another's: who takes this over must not remove that one
    std::uint32_t next = number + 1;
    table_.header().paths[path].next_number.compare_exchange_strong(next, number);
    return status;
  }
  Segment* own = adopt_segment(std::move(*created));
  for (auto& count : s.counts) count.store(0);
  s.counts[static_cast<std::size_t>(SlotState::kFree)].store(own->geometry().slots);
  s.doubtful.store(0);
  s.state.store(SegmentState::kReady);
  return {};
}

std::size_t Store::evict(SlotClass slot_class, std::size_t need) {
  // A slot that becomes free in a segment that another process holds is of no use here.
  const auto usable = [&](std::uint32_t id) {
    const Owner holder = live(id).owner.load();
    return holder == 0 || holder == owner_ || !owner_alive(holder);
  };
  std::optional<SlotRef> first;
  const std::size_t freed = index_.evict(slot_class, need, usable, std::nullopt, [&](const IndexEntry& entry) {
    counters_->evicted_pages += 1;
    counters_->evicted_bytes += entry.payload_bytes;
    const SlotRef where = index_.where(entry.slot);
    if (!first || where < *first) first = where;
  });
  if (first) {  // where the search for free slots goes on
    last_segment_.store(first->segment, std::memory_order_relaxed);
    live(first->segment).next_slot.store(first->slot);
  }
  return freed;
}

std::uint32_t Store::room_in(Segment& segment, const ObjectGeometry& object) const {
  return segment.room_for(object.slot_class(), unit_in(segment, object)).slots;
}

// A segment of another class to turn into this one: when this class has too little to evict from, or when the other
// class holds the coldest object of the store. Null if there is none that can be drained now.
Segment* Store::choose_victim(const ObjectGeometry& object) {
  const SlotClass slot_class = object.slot_class();
  const std::vector<SlotClass> classes = index_.classes();
  if (classes.empty() || (classes.size() == 1 && classes.front() == slot_class)) return nullptr;
  std::vector<std::uint32_t> others;
  std::optional<std::uint32_t> empty;
  for_each_segment([&](std::uint32_t id, SegmentState state) {
    if (state != SegmentState::kReady || index_.class_of(id) == slot_class) return;
    Segment* own = segment(id);
    if (own == nullptr || room_in(*own, object) == 0) return;
    others.push_back(id);
    if (!empty && count_of(live(id), SlotState::kFree) == live(id).slots.load()) empty = id;
  });
  if (empty) return segment(*empty);
  constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();
  const std::uint64_t own_coldest = index_.coldest(slot_class).value_or(kNone);
  std::uint64_t other_coldest = kNone;
  for (const SlotClass& other : classes) {
    if (other != slot_class) other_coldest = std::min(other_coldest, index_.coldest(other).value_or(kNone));
  }
  if (other_coldest >= own_coldest) return nullptr;
  std::minstd_rand random(static_cast<std::uint32_t>(monotonic_ns()));
  if (others.size() > kVictimsLookedAt) {
    std::shuffle(others.begin(), others.end(), random);
    others.resize(kVictimsLookedAt);
  }
  const std::unordered_set<GlobalSlot> in_use = index_.leased();
  std::optional<std::uint32_t> victim;
  std::uint64_t victim_score = kNone;
  for (const std::uint32_t id : others) {
    std::uint64_t hottest = 0;
    bool idle = count_of(live(id), SlotState::kWriting) + count_of(live(id), SlotState::kDying) +
                    count_of(live(id), SlotState::kQuarantined) ==
                0;
    index_.for_each_in(id, [&](const IndexEntry& entry) {
      idle = idle && !in_use.contains(entry.slot);
      hottest = std::max(hottest, index_.record(entry.slot).score.load(std::memory_order_relaxed));
    });
    if (!idle || hottest >= victim_score) continue;
    victim = id;
    victim_score = hottest;
  }
  return victim ? segment(*victim) : nullptr;
}

// Everything in it is evicted, and what extends it. False: a slot is still read, or written.
bool Store::drain(Segment& segment) {
  std::vector<IndexEntry> doomed;
  index_.for_each_in(segment.id(), [&](const IndexEntry& entry) { doomed.push_back(entry); });
  // An extension without its prefix can never be reached: it goes too, unless somebody reads it just now.
  const std::unordered_set<GlobalSlot> in_use = index_.leased();
  if (!doomed.empty()) {
    for (const IndexEntry& entry : index_.descendants(doomed)) {
      if (!in_use.contains(entry.slot)) doomed.push_back(entry);
    }
  }
  segment.live().state.store(SegmentState::kDraining);  // nobody takes a slot of it from here on
  for (const IndexEntry& entry : doomed) {
    if (!index_.unpublish(entry)) continue;
    counters_->evicted_pages += 1;
    counters_->evicted_bytes += entry.payload_bytes;
  }
  for (std::uint32_t slot = 0; slot < segment.live().slots.load(); ++slot) {
    const GlobalSlot global = index_.global({segment.id(), slot});
    index_.settle(global);
    if (index_.stamp(global).state() != SlotState::kFree) return false;
  }
  return true;
}

// Every slot is free and nobody else writes in it.
Status Store::reclass(Segment& segment, SlotClass slot_class, std::uint64_t unit) {
  LiveSegment& s = segment.live();
  Status status;
  {
    const std::lock_guard io(segment.io_mutex());
    status = segment.reclass(slot_class, unit);
  }
  if (status) {
    const std::uint32_t slots = s.slots.load();
    for (std::uint32_t slot = 0; slot < slots; ++slot) {
      SlotRecord& record = index_.record(index_.global({segment.id(), slot}));
      record.stamp.store(Stamp(SlotState::kFree, Stamp(record.stamp.load()).generation()).word());
    }
    for (auto& count : s.counts) count.store(0);
    s.counts[static_cast<std::size_t>(SlotState::kFree)].store(slots);
  }
  s.state.store(status ? SegmentState::kReady : SegmentState::kUnreadable);
  return status;
}

Result<bool> Store::convert_segment(const ObjectGeometry& object) {
  const SlotClass slot_class = object.slot_class();
  const std::lock_guard grow(grow_mutex_);
  Segment* victim = choose_victim(object);
  if (victim == nullptr || !claim_alone(*victim)) return false;
  LiveSegment& s = victim->live();
  const std::uint64_t unit = unit_in(*victim, object);
  Status status = table_.reserve_records(victim->id(), room_in(*victim, object));
  if (!status || s.state.load() != SegmentState::kReady || victim->slot_class() == slot_class || !drain(*victim)) {
    SegmentState undone = SegmentState::kDraining;
    s.state.compare_exchange_strong(undone, SegmentState::kReady);
    release(*victim);
    if (!status) return status.error();
    return false;
  }
  s.state.store(SegmentState::kReclassing);
  status = reclass(*victim, slot_class, unit);
  release(*victim);
  if (!status) return status.error();
  return true;
}

Result<std::uint64_t> Store::prune(std::uint64_t target_bytes, const std::optional<Fingerprint>& only) {
  const Call call(*this);
  if (!call) return Call::closed();
  std::optional<NamespaceId> space;
  if (only) {
    space = find_namespace(*only);
    if (!space) return std::uint64_t{0};
  }
  std::uint64_t bytes = table_.header().payload_bytes.load();
  if (space) {
    bytes = 0;
    index_.for_each([&](const IndexEntry& entry) { bytes += entry.space == *space ? entry.payload_bytes : 0; });
  }
  std::uint64_t pages = 0;
  bool progress = true;
  while (bytes > target_bytes && progress) {
    progress = false;
    for (const SlotClass& slot_class : index_.classes()) {
      if (bytes <= target_bytes) break;
      const std::size_t batch =
          std::clamp<std::uint64_t>((bytes - target_bytes) / std::max<std::uint64_t>(slot_class.slot_bytes, 1), 1, 256);
      index_.evict(
          slot_class, batch, [](std::uint32_t) { return true; }, space,
          [&](const IndexEntry& entry) {
            bytes -= std::min<std::uint64_t>(bytes, entry.payload_bytes);
            counters_->evicted_pages += 1;
            counters_->evicted_bytes += entry.payload_bytes;
            ++pages;
            progress = true;
          });
    }
  }
  return pages;
}

}  // namespace tardis
