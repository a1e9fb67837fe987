// SPDX-License-Identifier: Apache-2.0
// The running index: which object is in which slot, which objects extend which, and which may be evicted first.
// Not thread-safe: the store guards it with one mutex that is never held during I/O.
#pragma once

#include <compare>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <unordered_map>
#include <vector>

#include "store/format.h"

namespace tardis {

using NamespaceId = std::uint32_t;

struct SlotRef {
  std::uint32_t segment = 0;
  std::uint32_t slot = 0;
  auto operator<=>(const SlotRef&) const = default;
};

struct ObjectKey {
  NamespaceId space = 0;
  Hash256 hash{};
  bool operator==(const ObjectKey&) const = default;
};

// The first 8 bytes of a key, as headers store the parent. Keys are SHA-256 values; 0 stands for "no parent known".
inline std::uint64_t short_key(const Hash256& hash) {
  std::uint64_t value;
  std::memcpy(&value, hash.data(), sizeof value);
  return value;
}

struct IndexEntry {
  ObjectKey key;
  SlotRef where;
  SlotClass slot_class{};
  std::uint64_t parent = 0;
  std::uint64_t generation = 0;
  std::uint64_t root = 0;
  std::uint64_t payload_bytes = 0;
  bool suspect = false;  // recovered from a dirty segment without reading its payload
  // Eviction order: objects without a stored extension, lowest score first.
  std::uint64_t score = 0;
  std::uint32_t reuses = 0;
  bool listed = false;
};

class Index {
 public:
  // `reuse_bonus`: how many touches of other objects one reuse is worth (capped at kMaxReuses reuses).
  explicit Index(std::uint64_t reuse_bonus) : reuse_bonus_(reuse_bonus) {}

  IndexEntry* find(const ObjectKey& key);
  // The key must be absent. The returned address is stable until erase().
  IndexEntry& insert(IndexEntry entry);
  void erase(IndexEntry& entry);

  // Marks use; a reuse (a load, not a repeated store) also counts towards importance.
  void touch(IndexEntry& entry, bool reuse);

  // While an extension is being written its parent must not be evicted.
  void hold_parent(NamespaceId space, std::uint64_t parent);
  void release_parent(NamespaceId space, std::uint64_t parent);

  // The evictable object of this class with the lowest score that `usable` accepts, or null.
  IndexEntry* coldest(SlotClass slot_class, const std::function<bool(const IndexEntry&)>& usable) const;
  // Classes that have evictable objects, with the score of their coldest.
  std::vector<std::pair<SlotClass, std::uint64_t>> coldest_by_class() const;

  // Every stored object that extends one of `roots`, transitively, children before parents. O(objects).
  std::vector<IndexEntry*> descendants(const std::vector<IndexEntry*>& roots);

  std::size_t size() const { return entries_.size(); }
  template <class Visit>
  void for_each(Visit visit) {
    for (auto& [key, entry] : entries_) visit(entry);
  }

 private:
  struct KeyHash {
    std::size_t operator()(const ObjectKey& key) const {
      return short_key(key.hash) ^ (std::uint64_t{key.space} << 48);
    }
  };
  struct Parent {
    NamespaceId space;
    std::uint64_t key;
    bool operator==(const Parent&) const = default;
  };
  struct ParentHash {
    std::size_t operator()(const Parent& p) const { return p.key ^ (std::uint64_t{p.space} << 48); }
  };
  struct Ranked {
    std::uint64_t score;
    IndexEntry* entry;
    auto operator<=>(const Ranked&) const = default;
  };
  static constexpr std::uint32_t kMaxReuses = 3;

  void list(IndexEntry& entry);
  void unlist(IndexEntry& entry);
  bool has_extension(const IndexEntry& entry) const;

  std::unordered_map<ObjectKey, IndexEntry, KeyHash> entries_;
  std::unordered_map<Parent, std::uint32_t, ParentHash> extensions_;  // stored or being written, by parent
  // The parents' entries by short key: where an erased last extension makes its parent evictable.
  std::unordered_multimap<Parent, IndexEntry*, ParentHash> by_short_key_;
  std::map<SlotClass, std::set<Ranked>> evictable_;
  std::uint64_t reuse_bonus_;
  std::uint64_t clock_ = 0;
};

}  // namespace tardis
