// SPDX-License-Identifier: Apache-2.0
// Which objects go when the store is full. No process keeps a list for the others. In a small store each looks at every
// record and takes the least valuable; in a large one it looks at a few windows of neighbouring slots and takes from
// the coldest: what was stored together is used together, and the next batch finds its slots side by side.
#include <algorithm>
#include <queue>
#include <random>
#include <unordered_map>

#include "base/clock.h"
#include "store/index.h"

namespace tardis {
namespace {

constexpr std::uint64_t kSmallStore = 8192;  // slots
constexpr std::size_t kWindows = 16;
constexpr std::size_t kWindowSlots = 256, kWindowSlotsPerWanted = 4;

}  // namespace

void Index::consider(GlobalSlot slot, std::vector<Candidate>& found) const {
  if (stamp(slot).live()) found.push_back({record(slot).score.load(std::memory_order_relaxed), slot});
}

std::vector<Index::Candidate> Index::candidates(SlotClass slot_class, std::size_t need, bool all,
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
  std::vector<Candidate> best;
  if (all || slots <= kSmallStore) {
    for (const std::uint32_t id : segments) {
      const std::uint32_t count = table_.segment(id).slots.load();
      for (std::uint32_t slot = 0; slot < count; ++slot) consider(global({id, slot}), best);
    }
    return best;
  }
  const std::size_t window = std::max(kWindowSlots, need * kWindowSlotsPerWanted);
  std::uint64_t best_score = ~std::uint64_t{0};
  std::minstd_rand random(static_cast<std::uint32_t>(monotonic_ns()));
  for (std::size_t i = 0; i < kWindows; ++i) {
    const std::uint32_t id = segments[random() % segments.size()];
    const std::uint32_t count = table_.segment(id).slots.load();
    const std::uint32_t first = random() % count;
    std::vector<Candidate> found;
    for (std::size_t k = 0; k < std::min<std::size_t>(window, count); ++k) {
      consider(global({id, static_cast<std::uint32_t>((first + k) % count)}), found);
    }
    if (found.empty()) continue;
    // As cold as the warmest of those that would go.
    const auto last = found.begin() + static_cast<std::ptrdiff_t>(std::min(need, found.size()) - 1);
    std::nth_element(found.begin(), last, found.end());
    if (last->score >= best_score) continue;
    best_score = last->score;
    best = std::move(found);
  }
  return best;
}

std::size_t Index::evict(SlotClass slot_class, std::size_t need, const std::function<bool(std::uint32_t)>& usable,
                         std::optional<NamespaceId> only, const std::function<void(const IndexEntry&)>& evicted) {
  const std::size_t freed =
      evict_from(candidates(slot_class, need, /*all=*/false, usable), slot_class, need, usable, only, evicted);
  // A window of objects that are all extended, read or of another namespace says nothing of the others.
  return freed > 0
             ? freed
             : evict_from(candidates(slot_class, need, /*all=*/true, usable), slot_class, need, usable, only, evicted);
}

std::size_t Index::evict_from(const std::vector<Candidate>& candidates, SlotClass slot_class, std::size_t need,
                              const std::function<bool(std::uint32_t)>& usable, std::optional<NamespaceId> only,
                              const std::function<void(const IndexEntry&)>& evicted) {
  const std::unordered_set<GlobalSlot> in_use = leased();
  std::unordered_set<std::uint64_t> extended;  // by writes in flight
  for_each_pin(&LiveProcess::parents, &LiveProcess::parents_end,
               [&](std::uint32_t, std::uint64_t key) { extended.insert(key); });
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
  for (const Candidate& c : candidates(slot_class, 1, /*all=*/false, [](std::uint32_t) { return true; })) {
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
