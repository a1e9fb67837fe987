// SPDX-License-Identifier: Apache-2.0
// Which objects go when the store is full. No process keeps a list for the others: each looks at a sample of the
// records, all of them in a small store, and takes the least valuable.
#include <algorithm>
#include <queue>
#include <random>
#include <unordered_map>

#include "base/clock.h"
#include "store/index.h"

namespace tardis {
namespace {

constexpr std::size_t kSample = 8192;       // records looked at, at least
constexpr std::size_t kSamplePerSlot = 16;  // and for each slot wanted

}  // namespace

std::vector<Index::Candidate> Index::sample(SlotClass slot_class, std::size_t least,
                                            const std::function<bool(std::uint32_t)>& usable) const {
  std::vector<std::uint32_t> segments;
  std::uint64_t slots = 0;
  const std::uint32_t end = table_.header().segments_end.load();
  for (std::uint32_t id = 0; id < end; ++id) {
    const LiveSegment& s = table_.segment(id);
    if (s.state.load() != SegmentState::kReady || class_of(id) != slot_class || !usable(id)) continue;
    if (s.counts[static_cast<std::size_t>(SlotState::kLive)].load() == 0) continue;
    segments.push_back(id);
    slots += s.slots.load();
  }
  std::vector<Candidate> found;
  const auto consider = [&](GlobalSlot slot) {
    if (stamp(slot).live()) found.push_back({record(slot).score.load(std::memory_order_relaxed), slot});
  };
  if (slots <= std::max(least, kSample)) {
    for (const std::uint32_t id : segments) {
      const std::uint32_t count = table_.segment(id).slots.load();
      for (std::uint32_t slot = 0; slot < count; ++slot) consider(global({id, slot}));
    }
    return found;
  }
  std::minstd_rand random(static_cast<std::uint32_t>(monotonic_ns()));
  for (std::size_t i = 0; i < std::max(least, kSample); ++i) {
    const std::uint32_t id = segments[random() % segments.size()];
    consider(global({id, static_cast<std::uint32_t>(random() % table_.segment(id).slots.load())}));
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

std::size_t Index::evict(SlotClass slot_class, std::size_t need, const std::function<bool(std::uint32_t)>& usable,
                         std::optional<NamespaceId> only, const std::function<void(const IndexEntry&)>& evicted) {
  const std::vector<Candidate> candidates = sample(slot_class, need * kSamplePerSlot, usable);
  const std::unordered_set<GlobalSlot> in_use = leased();
  std::unordered_set<std::uint64_t> extended;  // by writes in flight
  for_each_pin(&LiveProcess::parents, &LiveProcess::parents_end, [&](std::uint64_t key) { extended.insert(key); });
  const auto leaf = [&](const Candidate& c) { return record(c.slot).children.load() == 0 && !in_use.contains(c.slot); };
  std::vector<Candidate> first;
  std::copy_if(candidates.begin(), candidates.end(), std::back_inserter(first), leaf);
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> leaves(std::greater<>(), std::move(first));
  std::vector<GlobalSlot> dying;
  while (!leaves.empty() && dying.size() < need) {
    const GlobalSlot slot = leaves.top().slot;
    leaves.pop();
    const auto entry = read(slot);
    if (!entry || (only && entry->space != *only) || record(slot).children.load() > 0 ||
        extended.contains(short_key(entry->key)))
      continue;
    if (!change(slot, entry->stamp, entry->stamp.with(SlotState::kDying))) continue;
    remove_word(*entry);
    table_.header().payload_bytes.fetch_sub(entry->payload_bytes);
    dying.push_back(slot);
    evicted(*entry);
    const auto parent = release_parent(*entry);
    if (parent && class_of(where(*parent).segment) == slot_class && usable(where(*parent).segment)) {
      const Candidate next{record(*parent).score.load(std::memory_order_relaxed), *parent};
      if (leaf(next)) leaves.push(next);
    }
  }
  // A reader that pinned one of them before it was marked finds its bytes untouched until it has finished.
  const std::unordered_set<GlobalSlot> now_in_use = leased();
  std::size_t freed = 0;
  for (const GlobalSlot slot : dying) {
    if (now_in_use.contains(slot)) continue;
    const Stamp now = stamp(slot);
    if (now.state() == SlotState::kDying && change(slot, now, now.with(SlotState::kFree))) ++freed;
  }
  return freed;
}

std::optional<std::uint64_t> Index::coldest(SlotClass slot_class) const {
  std::optional<std::uint64_t> lowest;
  for (const Candidate& c : sample(slot_class, 0, [](std::uint32_t) { return true; })) {
    if (record(c.slot).children.load() == 0 && (!lowest || c.score < *lowest)) lowest = c.score;
  }
  return lowest;
}

std::vector<IndexEntry> Index::descendants(const std::vector<IndexEntry>& roots) const {
  struct Parent {
    NamespaceId space;
    std::uint64_t key;
    bool operator==(const Parent&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Parent& p) const { return p.key ^ (std::uint64_t{p.space} << 48); }
  };
  std::unordered_multimap<Parent, IndexEntry, Hash> children;
  for_each([&](const IndexEntry& entry) {
    if (entry.parent != 0) children.emplace(Parent{entry.space, entry.parent}, entry);
  });
  std::unordered_set<GlobalSlot> seen;
  for (const IndexEntry& root : roots) seen.insert(root.slot);
  std::vector<IndexEntry> order, frontier = roots;
  while (!frontier.empty()) {
    const IndexEntry entry = frontier.back();
    frontier.pop_back();
    const auto [first, last] = children.equal_range(Parent{entry.space, short_key(entry.key)});
    for (auto it = first; it != last; ++it) {
      if (!seen.insert(it->second.slot).second) continue;
      order.push_back(it->second);
      frontier.push_back(it->second);
    }
  }
  return order;
}

std::vector<SlotClass> Index::classes() const {
  std::vector<SlotClass> found;
  const std::uint32_t end = table_.header().segments_end.load();
  for (std::uint32_t id = 0; id < end; ++id) {
    if (table_.segment(id).state.load() != SegmentState::kReady) continue;
    const SlotClass own = class_of(id);
    if (std::find(found.begin(), found.end(), own) == found.end()) found.push_back(own);
  }
  return found;
}

}  // namespace tardis
