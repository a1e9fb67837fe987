// SPDX-License-Identifier: Apache-2.0
#include "store/index.h"

#include <algorithm>
#include <unordered_set>

namespace tardis {

IndexEntry* Index::find(const ObjectKey& key) {
  const auto it = entries_.find(key);
  return it == entries_.end() ? nullptr : &it->second;
}

IndexEntry& Index::insert(IndexEntry fresh) {
  const ObjectKey key = fresh.key;
  IndexEntry& entry = entries_.emplace(key, std::move(fresh)).first->second;
  entry.listed = false;
  by_short_key_.emplace(Parent{key.space, short_key(key.hash)}, &entry);
  hold_parent(key.space, entry.parent);
  entry.score = ++clock_ + reuse_bonus_ * std::min(entry.reuses, kMaxReuses);
  if (!has_extension(entry)) list(entry);
  return entry;
}

void Index::erase(IndexEntry& entry) {
  unlist(entry);
  const NamespaceId space = entry.key.space;
  const std::uint64_t parent = entry.parent;
  const auto [first, last] = by_short_key_.equal_range(Parent{space, short_key(entry.key.hash)});
  for (auto it = first; it != last; ++it) {
    if (it->second == &entry) {
      by_short_key_.erase(it);
      break;
    }
  }
  entries_.erase(ObjectKey(entry.key));
  release_parent(space, parent);
}

void Index::touch(IndexEntry& entry, bool reuse) {
  const bool was_listed = entry.listed;
  unlist(entry);
  if (reuse && entry.reuses < kMaxReuses) ++entry.reuses;
  entry.score = ++clock_ + reuse_bonus_ * entry.reuses;
  if (was_listed) list(entry);
}

void Index::hold_parent(NamespaceId space, std::uint64_t parent) {
  if (parent == 0) return;
  if (extensions_[Parent{space, parent}]++ > 0) return;
  const auto [first, last] = by_short_key_.equal_range(Parent{space, parent});
  for (auto it = first; it != last; ++it) unlist(*it->second);
}

void Index::release_parent(NamespaceId space, std::uint64_t parent) {
  if (parent == 0) return;
  const auto it = extensions_.find(Parent{space, parent});
  if (it == extensions_.end() || --it->second > 0) return;
  extensions_.erase(it);
  const auto [first, last] = by_short_key_.equal_range(Parent{space, parent});
  for (auto parent_it = first; parent_it != last; ++parent_it) list(*parent_it->second);
}

IndexEntry* Index::coldest(SlotClass slot_class, const std::function<bool(const IndexEntry&)>& usable) const {
  const auto it = evictable_.find(slot_class);
  if (it == evictable_.end()) return nullptr;
  for (const Ranked& ranked : it->second) {
    if (usable(*ranked.entry)) return ranked.entry;
  }
  return nullptr;
}

std::vector<std::pair<SlotClass, std::uint64_t>> Index::coldest_by_class() const {
  std::vector<std::pair<SlotClass, std::uint64_t>> result;
  for (const auto& [slot_class, ranked] : evictable_) {
    if (!ranked.empty()) result.emplace_back(slot_class, ranked.begin()->score);
  }
  return result;
}

std::vector<IndexEntry*> Index::descendants(const std::vector<IndexEntry*>& roots) {
  std::unordered_multimap<Parent, IndexEntry*, ParentHash> children;
  for (auto& [key, entry] : entries_) {
    if (entry.parent != 0) children.emplace(Parent{key.space, entry.parent}, &entry);
  }
  std::unordered_set<const IndexEntry*> seen(roots.begin(), roots.end());
  std::vector<IndexEntry*> order;
  std::vector<IndexEntry*> frontier = roots;
  while (!frontier.empty()) {
    IndexEntry* entry = frontier.back();
    frontier.pop_back();
    const auto [first, last] = children.equal_range(Parent{entry->key.space, short_key(entry->key.hash)});
    for (auto it = first; it != last; ++it) {
      if (!seen.insert(it->second).second) continue;
      order.push_back(it->second);
      frontier.push_back(it->second);
    }
  }
  std::reverse(order.begin(), order.end());
  return order;
}

void Index::list(IndexEntry& entry) {
  if (entry.listed) return;
  evictable_[entry.slot_class].insert({entry.score, &entry});
  entry.listed = true;
}

void Index::unlist(IndexEntry& entry) {
  if (!entry.listed) return;
  const auto it = evictable_.find(entry.slot_class);
  it->second.erase({entry.score, &entry});
  if (it->second.empty()) evictable_.erase(it);
  entry.listed = false;
}

bool Index::has_extension(const IndexEntry& entry) const {
  return extensions_.contains(Parent{entry.key.space, short_key(entry.key.hash)});
}

}  // namespace tardis
