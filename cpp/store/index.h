// SPDX-License-Identifier: Apache-2.0
// The running index over the shared table: which object is in which slot, which objects extend which, and which may be
// evicted. Every function may be called by any thread of any process at any time; none waits for another.
#pragma once

#include <functional>
#include <optional>
#include <unordered_set>
#include <vector>

#include "store/checkpoint.h"
#include "store/live_table.h"
#include "store/pins.h"

namespace tardis {

struct SlotRef {
  std::uint32_t segment = 0;
  std::uint32_t slot = 0;
  auto operator<=>(const SlotRef&) const = default;
};

// A slot by its number in the whole store.
using GlobalSlot = std::uint64_t;

// The first 8 bytes of a key, as headers store the parent. Keys are SHA-256 values; 0 stands for "no parent known".
std::uint64_t short_key(const Hash256& hash);

// A consistent copy of a record.
struct IndexEntry {
  GlobalSlot slot = 0;
  Stamp stamp;
  Hash256 key{};
  NamespaceId space = 0;
  std::uint32_t payload_bytes = 0;
  std::uint64_t root = 0;
  std::uint64_t parent = 0;
};

class Index {
 public:
  // Whether the process in this place of the table lives, by its lock.
  using Alive = std::function<bool(std::uint32_t process)>;

  // `self`: this process's place. `reuse_bonus`: how many touches of other objects one reuse is worth (capped at
  // kMaxReuses reuses).
  Index(LiveTable& table, std::uint32_t self, std::uint64_t reuse_bonus, Alive alive);

  SlotRef where(GlobalSlot slot) const;
  GlobalSlot global(SlotRef where) const;
  SlotRecord& record(GlobalSlot slot) const { return table_.record(slot); }
  Stamp stamp(GlobalSlot slot) const { return Stamp(record(slot).stamp.load()); }

  // ---- finding
  std::optional<IndexEntry> find(NamespaceId space, const Hash256& hash) const;
  // Length of the leading run of hashes that can be found.
  std::size_t run(NamespaceId space, const Hash256* hashes, std::size_t n) const;
  // The live object in this slot, if there is one.
  std::optional<IndexEntry> read(GlobalSlot slot) const;
  template <class Visit>  // visit(const IndexEntry&)
  void for_each(Visit visit) const {
    const std::uint32_t end = table_.header().segments_end.load();
    for (std::uint32_t id = 0; id < end; ++id) for_each_in(id, visit);
  }
  template <class Visit>
  void for_each_in(std::uint32_t segment, Visit visit) const {
    const LiveSegment& s = table_.segment(segment);
    if (s.state.load() != SegmentState::kReady) return;
    const GlobalSlot first = GlobalSlot{segment} * table_.stride();
    for (std::uint32_t slot = 0; slot < s.slots.load(); ++slot) {
      if (const auto entry = read(first + slot)) visit(*entry);
    }
  }

  // ---- changing
  // Moves the slot on if it is still as `from` says. Keeps the counts.
  bool change(GlobalSlot slot, Stamp from, Stamp to);
  // A slot in state kWriting becomes a live object, unless another object with this key is there already, or the hash
  // table has no room; then the slot is free. A table that was made for fewer objects gives up the least valuable of
  // those that share the key's buckets.
  enum class Published { kYes, kDuplicate, kFull };
  Published publish(const IndexEntry& entry, bool suspect, std::uint64_t score);
  // Nobody finds it any more; its slot becomes free at once, or when the last lease on it ends. false: it was not
  // there.
  bool unpublish(const IndexEntry& entry);
  // Its slot is not used again; `recorded`: also not after the store was closed.
  bool quarantine(const IndexEntry& entry, bool recorded);
  void trust(const IndexEntry& entry);  // its payload was read and fits
  // For recovery and checkpoints, while no other process uses the table: as publish(), of objects that are known to be
  // alone; a record as it is, if there is something to be known of it; and every `children` from the parents' names.
  void restore(std::uint32_t segment, const std::vector<CheckpointEntry>& entries,
               const std::vector<NamespaceId>& spaces);
  std::optional<CheckpointEntry> save(GlobalSlot slot) const;
  void count_children();
  // A dying slot on which there is no lease becomes free.
  void settle(GlobalSlot slot);
  // Its header is gone from the medium: a slot in quarantine becomes free once there is no lease on it.
  void end_quarantine(GlobalSlot slot);

  // ---- use and order
  std::uint64_t tick(std::size_t count) { return table_.header().clock.fetch_add(count) + 1; }
  // A reuse (a load, not a repeated store) also counts towards importance.
  void touch(const IndexEntry& entry, std::uint64_t now, bool reuse);
  // This object is an extension of one that was stored (again) just now.
  void adopt(NamespaceId space, std::uint64_t parent);

  // ---- what this process has in hand
  // Keeps the slot from being reused. After it the caller checks that the entry still holds.
  std::uint32_t lease(GlobalSlot slot) { return leases_.add(slot + 1); }
  void end_lease(std::uint32_t pin, GlobalSlot slot);
  PinTable& parents() { return parents_; }
  PinTable& writing() { return writing_; }
  // Short keys of objects that other living processes write just now.
  std::unordered_set<std::uint64_t> written_elsewhere() const;
  // Slots under a lease of any living process.
  std::unordered_set<GlobalSlot> leased() const;

  // ---- eviction (eviction.cpp)
  // Objects of this class, the least valuable first and extensions before what they extend, in segments that `usable`
  // accepts, of one namespace or of any. Returns how many slots became free; `evicted(entry)` is told of each object.
  std::size_t evict(SlotClass slot_class, std::size_t need, const std::function<bool(std::uint32_t)>& usable,
                    std::optional<NamespaceId> only, const std::function<void(const IndexEntry&)>& evicted);
  // The lowest score of an evictable object in this class, of those that evict() would look at; nothing if there is
  // none.
  std::optional<std::uint64_t> coldest(SlotClass slot_class) const;
  // Every stored object that extends one of `roots`, transitively. O(objects).
  std::vector<IndexEntry> descendants(const std::vector<IndexEntry>& roots) const;
  std::vector<SlotClass> classes() const;  // of the segments, each once
  SlotClass class_of(std::uint32_t segment) const;

  static constexpr std::uint32_t kMaxReuses = 3;

 private:
  struct Place {
    std::uint64_t first, second;  // buckets
    std::uint64_t tag;            // in place, with the slot's bits zero
  };
  struct Candidate {
    std::uint64_t score;
    GlobalSlot slot;
    auto operator<=>(const Candidate&) const = default;
  };

  void restore(GlobalSlot slot, const CheckpointEntry& entry, NamespaceId space);
  Place place(NamespaceId space, std::uint64_t short_key) const;
  std::optional<IndexEntry> match(std::uint64_t word, const Place& place, NamespaceId space, const Hash256& hash) const;
  std::optional<GlobalSlot> find_short(NamespaceId space, std::uint64_t short_key) const;
  bool insert_word(const Place& place, GlobalSlot slot);
  bool make_room(const Place& place);
  void remove_word(const IndexEntry& entry);
  std::optional<IndexEntry> other_with_key(const IndexEntry& entry) const;
  // The parent, if this was its last extension.
  std::optional<GlobalSlot> release_parent(const IndexEntry& entry);
  void lay_off(const IndexEntry& entry);  // what follows a live object's end
  template <class Pins, class Visit>      // visit(process, value) for each pin of a living process
  void for_each_pin(Pins LiveProcess::*pins, std::atomic<std::uint32_t> LiveProcess::*end, Visit visit) const;
  void consider(GlobalSlot slot, std::vector<Candidate>& found) const;
  std::vector<Candidate> candidates(SlotClass slot_class, std::size_t need, bool all,
                                    const std::function<bool(std::uint32_t)>& usable) const;
  std::size_t evict_from(const std::vector<Candidate>& candidates, SlotClass slot_class, std::size_t need,
                         const std::function<bool(std::uint32_t)>& usable, std::optional<NamespaceId> only,
                         const std::function<void(const IndexEntry&)>& evicted);

  LiveTable& table_;
  const std::uint32_t self_;
  const std::uint64_t reuse_bonus_;
  const Alive alive_;
  PinTable leases_, parents_, writing_;
};

template <class Pins, class Visit>
void Index::for_each_pin(Pins LiveProcess::*pins, std::atomic<std::uint32_t> LiveProcess::*end, Visit visit) const {
  const std::uint32_t processes = table_.header().processes_end.load();
  for (std::uint32_t id = 0; id < processes; ++id) {
    LiveProcess& process = table_.process(id);
    if (process.owner.load() == 0) continue;
    const std::uint32_t count = (process.*end).load();
    bool checked = id == self_;
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint64_t value = (process.*pins)[i].load();
      if (value == 0) continue;
      if (!checked && !alive_(id)) break;
      checked = true;
      visit(id, value);
    }
  }
}

}  // namespace tardis
