// SPDX-License-Identifier: Apache-2.0
#include "store/index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "store_pages.h"

namespace tardis::testing {
namespace {

constexpr std::uint64_t kBonus = 10;
constexpr SlotClass kSmall{4096, 1}, kLarge{65536, 4};

IndexEntry entry_of(std::uint64_t chain, std::uint64_t index, SlotClass slot_class = kSmall) {
  IndexEntry entry;
  entry.key = {0, page_key(chain, index)};
  entry.slot_class = slot_class;
  entry.parent = index > 0 ? short_key(page_key(chain, index - 1)) : 0;
  return entry;
}

const auto kAny = [](const IndexEntry&) { return true; };

TEST(StoreIndex, EvictsTheLeastRecentLeafFirst) {
  Index index(kBonus);
  for (std::uint64_t i = 0; i < 3; ++i) index.insert(entry_of(1, i));
  index.insert(entry_of(2, 0));
  std::vector<Hash256> order;
  while (IndexEntry* entry = index.coldest(kSmall, kAny)) {
    order.push_back(entry->key.hash);
    index.erase(*entry);
  }
  // A chain goes from its end; a parent, older than page (2, 0), becomes evictable when its extension is gone.
  EXPECT_EQ(order, (std::vector<Hash256>{page_key(1, 2), page_key(1, 1), page_key(1, 0), page_key(2, 0)}));
}

TEST(StoreIndex, ReuseIsWorthABoundedNumberOfTouches) {
  Index index(kBonus);
  IndexEntry& reused = index.insert(entry_of(1, 0));
  for (int i = 0; i < 50; ++i) index.touch(reused, /*reuse=*/true);  // counts 3 times at most
  std::vector<IndexEntry*> fresh;
  for (std::uint64_t chain = 2; chain < 2 + 3 * kBonus + 1; ++chain) fresh.push_back(&index.insert(entry_of(chain, 0)));
  EXPECT_EQ(index.coldest(kSmall, kAny)->key.hash, page_key(2, 0));
  for (std::size_t i = 0; i + 1 < fresh.size(); ++i) index.erase(*fresh[i]);
  EXPECT_EQ(index.coldest(kSmall, kAny), &reused) << "a page that nobody uses any more must go in the end";
}

TEST(StoreIndex, ARepeatedStoreIsRecencyButNotReuse) {
  Index index(kBonus);
  IndexEntry& a = index.insert(entry_of(1, 0));
  index.insert(entry_of(2, 0));
  index.touch(a, /*reuse=*/false);
  EXPECT_EQ(index.coldest(kSmall, kAny)->key.hash, page_key(2, 0));
  EXPECT_EQ(a.reuses, 0u);
}

TEST(StoreIndex, ClassesAreRankedApart) {
  Index index(kBonus);
  index.insert(entry_of(1, 0, kSmall));
  index.insert(entry_of(2, 0, kLarge));
  EXPECT_EQ(index.coldest(kLarge, kAny)->key.hash, page_key(2, 0));
  EXPECT_EQ(index.coldest_by_class().size(), 2u);
  index.erase(*index.coldest(kLarge, kAny));
  EXPECT_EQ(index.coldest(kLarge, kAny), nullptr);
  EXPECT_EQ(index.coldest_by_class().size(), 1u);
}

TEST(StoreIndex, DescendantsComeChildrenFirst) {
  Index index(kBonus);
  IndexEntry* root = &index.insert(entry_of(1, 0));
  for (std::uint64_t i = 1; i < 6; ++i) index.insert(entry_of(1, i));
  IndexEntry branch = entry_of(2, 0);  // a second extension of page (1, 2)
  branch.parent = short_key(page_key(1, 2));
  index.insert(branch);
  index.insert(entry_of(3, 0));
  const auto found = index.descendants({root});
  EXPECT_EQ(found.size(), 6u);
  for (std::size_t i = 0; i < found.size(); ++i) {
    for (std::size_t k = i + 1; k < found.size(); ++k) EXPECT_NE(found[k]->parent, short_key(found[i]->key.hash));
  }
}

TEST(StoreIndex, ACycleOfParentsEnds) {
  Index index(kBonus);
  IndexEntry a = entry_of(1, 0), b = entry_of(1, 1);
  a.parent = short_key(b.key.hash);
  IndexEntry* root = &index.insert(a);
  index.insert(b);
  EXPECT_EQ(index.descendants({root}).size(), 1u);
  EXPECT_EQ(index.coldest(kSmall, kAny), nullptr);
}

// Random operations beside a model that recomputes everything from scratch.
TEST(StoreIndex, AgreesWithAModel) {
  struct Model {
    IndexEntry entry;  // score and reuses as they should be
  };
  std::mt19937_64 random(5);
  for (int round = 0; round < 20; ++round) {
    Index index(kBonus);
    std::vector<Model> stored;
    std::map<std::uint64_t, std::uint32_t> held;  // parents held by writes in flight
    std::uint64_t clock = 0;
    const auto find = [&](const Hash256& hash) {
      return std::find_if(stored.begin(), stored.end(), [&](const Model& m) { return m.entry.key.hash == hash; });
    };
    const auto evictable = [&](const IndexEntry& entry) {
      const std::uint64_t own = short_key(entry.key.hash);
      return held[own] == 0 &&
             std::none_of(stored.begin(), stored.end(), [&](const Model& m) { return m.entry.parent == own; });
    };
    for (int step = 0; step < 600; ++step) {
      const std::uint64_t chain = random() % 5, at = random() % 6;
      const IndexEntry fresh = entry_of(chain, at, chain % 2 == 0 ? kSmall : kLarge);
      switch (random() % 6) {
        case 0:
        case 1: {
          if (find(fresh.key.hash) != stored.end()) break;
          index.insert(fresh);
          stored.push_back({fresh});
          stored.back().entry.score = ++clock;
          break;
        }
        case 2: {
          const auto it = find(fresh.key.hash);
          if (it == stored.end()) break;
          const bool reuse = random() % 2 == 0;
          index.touch(*index.find(fresh.key), reuse);
          if (reuse) it->entry.reuses = std::min(it->entry.reuses + 1, 3u);
          it->entry.score = ++clock + kBonus * it->entry.reuses;
          break;
        }
        case 3: {
          const SlotClass slot_class = random() % 2 == 0 ? kSmall : kLarge;
          const Model* expected = nullptr;
          for (const Model& m : stored) {
            if (m.entry.slot_class != slot_class || !evictable(m.entry)) continue;
            if (expected == nullptr || m.entry.score < expected->entry.score) expected = &m;
          }
          IndexEntry* found = index.coldest(slot_class, kAny);
          ASSERT_EQ(found == nullptr, expected == nullptr);
          if (found == nullptr) break;
          // Scores may tie when a reuse bonus meets the clock.
          ASSERT_EQ(found->score, expected->entry.score);
          ASSERT_TRUE(find(found->key.hash) != stored.end() && evictable(*found));
          stored.erase(find(found->key.hash));
          index.erase(*found);
          break;
        }
        case 4:
          if (fresh.parent == 0) break;
          index.hold_parent(0, fresh.parent);
          ++held[fresh.parent];
          break;
        case 5:
          if (fresh.parent == 0 || held[fresh.parent] == 0) break;
          index.release_parent(0, fresh.parent);
          --held[fresh.parent];
          break;
      }
      ASSERT_EQ(index.size(), stored.size());
    }
    // Balance: once nothing is held, everything can be evicted, leaves first.
    for (auto& [parent, count] : held) {
      for (; count > 0; --count) index.release_parent(0, parent);
    }
    while (!stored.empty()) {
      IndexEntry* entry = index.coldest(kSmall, kAny);
      if (entry == nullptr) entry = index.coldest(kLarge, kAny);
      ASSERT_NE(entry, nullptr) << stored.size() << " objects can never be evicted";
      stored.erase(find(entry->key.hash));
      index.erase(*entry);
    }
    EXPECT_TRUE(index.coldest_by_class().empty());
  }
}

}  // namespace
}  // namespace tardis::testing
