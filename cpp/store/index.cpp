// SPDX-License-Identifier: Apache-2.0
#include "store/index.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace tardis {
namespace {

constexpr std::uint64_t kSlotMask = (std::uint64_t{1} << 48) - 1;

std::uint64_t mix(std::uint64_t x) {  // the finalizer of MurmurHash3
  x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCDu;
  x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53u;
  return x ^ (x >> 33);
}

std::uint64_t scale(std::uint64_t hash, std::uint64_t range) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::uint64_t>((static_cast<Wide>(hash) * range) >> 64);
}

std::uint64_t identity_word(NamespaceId space, std::uint32_t payload_bytes) {
  return std::uint64_t{space} << 32 | payload_bytes;
}

std::array<std::uint64_t, 4> words_of(const Hash256& hash) {
  std::array<std::uint64_t, 4> words;
  std::memcpy(words.data(), hash.data(), sizeof words);
  return words;
}

void prefetch(const void* address) { __builtin_prefetch(address); }

}  // namespace

std::uint64_t short_key(const Hash256& hash) { return words_of(hash)[0]; }

Index::Index(LiveTable& table, std::uint32_t self, std::uint64_t reuse_bonus, Alive alive)
    : table_(table),
      self_(self),
      reuse_bonus_(reuse_bonus),
      alive_(std::move(alive)),
      leases_(table.process(self).leases, table.process(self).leases_end),
      parents_(table.process(self).parents, table.process(self).parents_end),
      writing_(table.process(self).writing, table.process(self).writing_end) {}

SlotRef Index::where(GlobalSlot slot) const {
  return {static_cast<std::uint32_t>(slot / table_.stride()), static_cast<std::uint32_t>(slot % table_.stride())};
}

GlobalSlot Index::global(SlotRef where) const { return GlobalSlot{where.segment} * table_.stride() + where.slot; }

Index::Place Index::place(NamespaceId space, std::uint64_t key) const {
  const std::uint64_t hash = mix(key + space * 0x9E3779B97F4A7C15u);
  return {scale(hash, table_.buckets()), scale(mix(hash), table_.buckets()), hash << 48};
}

// Reads without a lock: the copy counts only if the stamp was live before and is the same after it. The loads of the
// words acquire, so that none of them is done after the second look at the stamp.
std::optional<IndexEntry> Index::read(GlobalSlot slot) const {
  const SlotRecord& r = record(slot);
  IndexEntry entry;
  entry.slot = slot;
  entry.stamp = Stamp(r.stamp.load());
  if (!entry.stamp.live()) return std::nullopt;
  std::array<std::uint64_t, 4> key;
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = r.key[i].load(std::memory_order_acquire);
  std::memcpy(entry.key.data(), key.data(), sizeof key);
  const std::uint64_t identity = r.identity.load(std::memory_order_acquire);
  entry.space = static_cast<NamespaceId>(identity >> 32);
  entry.payload_bytes = static_cast<std::uint32_t>(identity);
  entry.root = r.root.load(std::memory_order_acquire);
  entry.parent = r.parent.load(std::memory_order_acquire);
  const Stamp now(r.stamp.load());
  if (!now.live() || now.generation() != entry.stamp.generation()) return std::nullopt;
  return entry;
}

std::optional<IndexEntry> Index::match(std::uint64_t word, const Place& place, NamespaceId space,
                                       const Hash256& hash) const {
  if (word == 0 || ((word ^ place.tag) & ~kSlotMask) != 0) return std::nullopt;
  auto entry = read((word & kSlotMask) - 1);
  if (!entry || entry->space != space || entry->key != hash) return std::nullopt;
  return entry;
}

std::optional<IndexEntry> Index::find(NamespaceId space, const Hash256& hash) const {
  const Place at = place(space, short_key(hash));
  for (const std::uint64_t bucket : {at.first, at.second}) {
    for (const auto& word : table_.bucket(bucket).words) {
      if (auto entry = match(word.load(), at, space, hash)) return entry;
    }
  }
  return std::nullopt;
}

std::size_t Index::run(NamespaceId space, const Hash256* hashes, std::size_t n) const {
  constexpr std::size_t kAhead = 16;  // cache misses in flight
  std::array<Place, kAhead> places;
  for (std::size_t base = 0; base < n; base += kAhead) {
    const std::size_t count = std::min(kAhead, n - base);
    for (std::size_t i = 0; i < count; ++i) {
      places[i] = place(space, short_key(hashes[base + i]));
      prefetch(&table_.bucket(places[i].first));
      prefetch(&table_.bucket(places[i].second));
    }
    for (std::size_t i = 0; i < count; ++i) {
      for (const std::uint64_t bucket : {places[i].first, places[i].second}) {
        for (const auto& word : table_.bucket(bucket).words) {
          const std::uint64_t value = word.load(std::memory_order_relaxed);
          if (value == 0 || ((value ^ places[i].tag) & ~kSlotMask) != 0) continue;
          const SlotRecord& r = record((value & kSlotMask) - 1);
          prefetch(&r);
          prefetch(&r.root);
        }
      }
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (!find(space, hashes[base + i])) return base + i;
    }
  }
  return n;
}

std::optional<GlobalSlot> Index::find_short(NamespaceId space, std::uint64_t key) const {
  if (key == 0) return std::nullopt;
  const Place at = place(space, key);
  for (const std::uint64_t bucket : {at.first, at.second}) {
    for (const auto& word : table_.bucket(bucket).words) {
      const std::uint64_t value = word.load();
      if (value == 0 || ((value ^ at.tag) & ~kSlotMask) != 0) continue;
      const auto entry = read((value & kSlotMask) - 1);
      if (entry && entry->space == space && short_key(entry->key) == key) return entry->slot;
    }
  }
  return std::nullopt;
}

bool Index::change(GlobalSlot slot, Stamp from, Stamp to) {
  std::uint64_t expected = from.word();
  if (!record(slot).stamp.compare_exchange_strong(expected, to.word())) return false;
  auto& counts = table_.segment(where(slot).segment).counts;
  if (from.state() != to.state()) {
    counts[static_cast<std::size_t>(from.state())].fetch_sub(1);
    counts[static_cast<std::size_t>(to.state())].fetch_add(1);
  }
  return true;
}

bool Index::insert_word(const Place& place, GlobalSlot slot) {
  const std::uint64_t word = place.tag | (slot + 1);
  const auto used = [&](std::uint64_t bucket) {
    const auto& words = table_.bucket(bucket).words;
    return std::count_if(words.begin(), words.end(), [](const auto& w) { return w.load() != 0; });
  };
  const bool second_first = used(place.second) < used(place.first);
  for (int attempt = 0; attempt < 2; ++attempt) {
    const std::uint64_t bucket = (attempt == 0) == second_first ? place.second : place.first;
    for (auto& w : table_.bucket(bucket).words) {
      std::uint64_t empty = 0;
      if (w.compare_exchange_strong(empty, word)) return true;
    }
  }
  // A word that leads to no live object of these buckets was left by a process that was killed.
  for (const std::uint64_t bucket : {place.first, place.second}) {
    for (auto& w : table_.bucket(bucket).words) {
      std::uint64_t value = w.load();
      if (value == 0) continue;
      const GlobalSlot other = (value & kSlotMask) - 1;
      const auto entry = read(other);
      bool stale = !entry && stamp(other).state() != SlotState::kWriting && stamp(other).state() != SlotState::kDying;
      if (entry) {
        const Place own = this->place(entry->space, short_key(entry->key));
        stale = own.tag != (value & ~kSlotMask) || (own.first != bucket && own.second != bucket);
      }
      if (stale && w.compare_exchange_strong(value, word)) return true;
    }
  }
  return false;
}

bool Index::make_room(const Place& place) {
  std::optional<IndexEntry> least;
  std::uint64_t least_score = 0;
  for (const std::uint64_t bucket : {place.first, place.second}) {
    for (const auto& word : table_.bucket(bucket).words) {
      const std::uint64_t value = word.load();
      const auto entry = value == 0 ? std::nullopt : read((value & kSlotMask) - 1);
      if (!entry || record(entry->slot).children.load() > 0) continue;
      const std::uint64_t score = record(entry->slot).score.load();
      if (least && score >= least_score) continue;
      least = entry;
      least_score = score;
    }
  }
  return least && unpublish(*least);
}

void Index::remove_word(const IndexEntry& entry) {
  const Place at = place(entry.space, short_key(entry.key));
  const std::uint64_t word = at.tag | (entry.slot + 1);
  for (const std::uint64_t bucket : {at.first, at.second}) {
    for (auto& w : table_.bucket(bucket).words) {
      std::uint64_t expected = word;
      w.compare_exchange_strong(expected, 0);
    }
  }
}

std::optional<IndexEntry> Index::other_with_key(const IndexEntry& entry) const {
  const Place at = place(entry.space, short_key(entry.key));
  for (const std::uint64_t bucket : {at.first, at.second}) {
    for (const auto& word : table_.bucket(bucket).words) {
      auto other = match(word.load(), at, entry.space, entry.key);
      if (other && other->slot != entry.slot) return other;
    }
  }
  return std::nullopt;
}

Index::Published Index::publish(const IndexEntry& entry, bool suspect, std::uint64_t score) {
  const auto free = [&](Stamp from) { change(entry.slot, from, from.with(SlotState::kFree)); };
  const Stamp writing(SlotState::kWriting, entry.stamp.generation());
  if (const auto other = other_with_key(entry)) {
    if (!other->stamp.suspect() || suspect) {  // what a crash may have torn gives way to what was written just now
      free(writing);
      return Published::kDuplicate;
    }
    unpublish(*other);
  }
  SlotRecord& r = record(entry.slot);
  const auto key = words_of(entry.key);
  // Release: not before the stamp said kWriting.
  for (std::size_t i = 0; i < key.size(); ++i) r.key[i].store(key[i], std::memory_order_release);
  r.identity.store(identity_word(entry.space, entry.payload_bytes), std::memory_order_release);
  r.root.store(entry.root, std::memory_order_release);
  r.parent.store(entry.parent, std::memory_order_release);
  r.score.store(score, std::memory_order_release);
  r.children.store(0, std::memory_order_release);
  r.reuses.store(0, std::memory_order_release);
  IndexEntry live = entry;
  live.stamp = Stamp(SlotState::kLive, entry.stamp.generation(), suspect);
  if (!change(entry.slot, writing, live.stamp)) return Published::kFull;  // taken away: this process was thought dead
  table_.header().payload_bytes.fetch_add(entry.payload_bytes);
  adopt(entry.space, entry.parent);
  const Place at = place(entry.space, short_key(entry.key));
  while (!insert_word(at, entry.slot)) {
    if (make_room(at)) continue;
    unpublish(live);
    return Published::kFull;
  }
  // Two that publish one key at once: both words stand before either looks again, so at least one sees the other, and
  // both agree who goes.
  if (const auto other = other_with_key(live)) {
    const bool keep = live.stamp.generation() < other->stamp.generation();
    unpublish(keep ? *other : live);
    if (!keep) return Published::kDuplicate;
  }
  return Published::kYes;
}

void Index::restore(std::uint32_t segment, const std::vector<CheckpointEntry>& entries,
                    const std::vector<NamespaceId>& spaces) {
  constexpr std::size_t kAhead = 16;  // cache misses in flight
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (i + kAhead < entries.size()) {
      const CheckpointEntry& later = entries[i + kAhead];
      const Place at = place(spaces[later.space], short_key(later.key));
      __builtin_prefetch(&table_.bucket(at.first), /*rw=*/1);
      __builtin_prefetch(&table_.bucket(at.second), /*rw=*/1);
    }
    restore(global({segment, entries[i].slot}), entries[i], spaces[entries[i].space]);
  }
}

void Index::restore(GlobalSlot slot, const CheckpointEntry& entry, NamespaceId space) {
  const bool quarantined = entry.state == CheckpointState::kQuarantined;
  SlotRecord& r = record(slot);
  const auto key = words_of(entry.key);
  for (std::size_t i = 0; i < key.size(); ++i) r.key[i].store(key[i], std::memory_order_relaxed);
  r.identity.store(identity_word(space, entry.payload_bytes), std::memory_order_relaxed);
  r.root.store(entry.root, std::memory_order_relaxed);
  r.parent.store(entry.parent, std::memory_order_relaxed);
  r.score.store(entry.score, std::memory_order_relaxed);
  r.children.store(entry.children, std::memory_order_relaxed);
  r.reuses.store(entry.reuses, std::memory_order_relaxed);
  const Stamp stamp(quarantined ? SlotState::kQuarantined : SlotState::kLive, entry.generation,
                    entry.state == CheckpointState::kSuspect);
  change(slot, Stamp(), stamp);
  if (quarantined) return;
  if (insert_word(place(space, short_key(entry.key)), slot)) {
    table_.header().payload_bytes.fetch_add(entry.payload_bytes);
  } else {
    change(slot, stamp, Stamp(SlotState::kFree, entry.generation));  // a miss
  }
}

std::optional<CheckpointEntry> Index::save(GlobalSlot slot) const {
  const SlotRecord& r = record(slot);
  const Stamp now = stamp(slot);
  const bool quarantined = now.state() == SlotState::kQuarantined && !now.suspect();
  if (!now.live() && !quarantined) return std::nullopt;
  CheckpointEntry entry{};
  std::array<std::uint64_t, 4> key;
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = r.key[i].load();
  std::memcpy(entry.key.data(), key.data(), sizeof key);
  const std::uint64_t identity = r.identity.load();
  entry.space = static_cast<std::uint16_t>(identity >> 32);
  entry.payload_bytes = static_cast<std::uint32_t>(identity);
  entry.root = r.root.load();
  entry.parent = r.parent.load();
  entry.generation = now.generation();
  entry.score = r.score.load();
  entry.children = r.children.load();
  entry.reuses = static_cast<std::uint8_t>(r.reuses.load());
  entry.state = !now.live()     ? CheckpointState::kQuarantined
                : now.suspect() ? CheckpointState::kSuspect
                                : CheckpointState::kLive;
  return entry;
}

void Index::count_children() {
  for_each([&](const IndexEntry& entry) { record(entry.slot).children.store(0); });
  for_each([&](const IndexEntry& entry) { adopt(entry.space, entry.parent); });
}

void Index::adopt(NamespaceId space, std::uint64_t parent) {
  if (const auto slot = find_short(space, parent)) record(*slot).children.fetch_add(1);
}

std::optional<GlobalSlot> Index::release_parent(const IndexEntry& entry) {
  const auto parent = find_short(entry.space, entry.parent);
  if (!parent) return std::nullopt;
  // A parent that was stored again meanwhile may not have counted this one: never below zero.
  auto& children = record(*parent).children;
  std::uint32_t count = children.load();
  while (count > 0 && !children.compare_exchange_weak(count, count - 1)) {
  }
  if (count > 1) return std::nullopt;
  return parent;
}

void Index::lay_off(const IndexEntry& entry) {
  remove_word(entry);
  table_.header().payload_bytes.fetch_sub(entry.payload_bytes);
  release_parent(entry);
}

bool Index::unpublish(const IndexEntry& entry) {
  Stamp now = stamp(entry.slot);
  do {
    if (!now.live() || now.generation() != entry.stamp.generation()) return false;
  } while (!change(entry.slot, now, now.with(SlotState::kDying)) && ((now = stamp(entry.slot)), true));
  lay_off(entry);
  settle(entry.slot);
  return true;
}

bool Index::quarantine(const IndexEntry& entry, bool recorded) {
  Stamp now = stamp(entry.slot);
  do {
    if (!now.live() || now.generation() != entry.stamp.generation()) return false;
  } while (!change(entry.slot, now, Stamp(SlotState::kQuarantined, now.generation(), !recorded)) &&
           ((now = stamp(entry.slot)), true));
  lay_off(entry);
  return true;
}

void Index::trust(const IndexEntry& entry) {
  const Stamp suspect(SlotState::kLive, entry.stamp.generation(), true);
  change(entry.slot, suspect, Stamp(SlotState::kLive, entry.stamp.generation()));
}

void Index::settle(GlobalSlot slot) {
  const Stamp now = stamp(slot);
  if (now.state() != SlotState::kDying) return;
  bool leased = false;
  for_each_pin(&LiveProcess::leases, &LiveProcess::leases_end,
               [&](std::uint32_t, std::uint64_t pin) { leased = leased || pin == slot + 1; });
  if (leased) return;
  change(slot, now, now.with(SlotState::kFree));
}

void Index::end_quarantine(GlobalSlot slot) {
  const Stamp now = stamp(slot);
  if (now.state() != SlotState::kQuarantined) return;
  change(slot, now, now.with(SlotState::kDying));
  settle(slot);
}

void Index::touch(const IndexEntry& entry, std::uint64_t now, bool reuse) {
  SlotRecord& r = record(entry.slot);
  std::uint32_t reuses = r.reuses.load(std::memory_order_relaxed);
  if (reuse && reuses < kMaxReuses) r.reuses.store(++reuses, std::memory_order_relaxed);
  r.score.store(now + reuse_bonus_ * reuses, std::memory_order_relaxed);
}

void Index::end_lease(std::uint32_t pin, GlobalSlot slot) {
  leases_.remove(pin);
  if (stamp(slot).state() == SlotState::kDying) settle(slot);
}

std::unordered_set<std::uint64_t> Index::written_elsewhere() const {
  std::unordered_set<std::uint64_t> keys;
  for_each_pin(&LiveProcess::writing, &LiveProcess::writing_end, [&](std::uint32_t process, std::uint64_t key) {
    if (process != self_) keys.insert(key);
  });
  return keys;
}

std::unordered_set<GlobalSlot> Index::leased() const {
  std::unordered_set<GlobalSlot> slots;
  for_each_pin(&LiveProcess::leases, &LiveProcess::leases_end,
               [&](std::uint32_t, std::uint64_t pin) { slots.insert(pin - 1); });
  return slots;
}

SlotClass Index::class_of(std::uint32_t segment) const {
  const LiveSegment& s = table_.segment(segment);
  return {s.slot_bytes.load(), s.digests_per_slot.load()};
}

}  // namespace tardis
