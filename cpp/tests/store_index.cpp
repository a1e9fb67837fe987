// SPDX-License-Identifier: Apache-2.0
#include "store/index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <thread>

#include "block_support.h"
#include "live_segment_support.h"
#include "store_pages.h"

namespace tardis::testing {
namespace {

constexpr std::uint64_t kBonus = 10;
constexpr SlotClass kSmall{4096, 1}, kLarge{65536, 4};
const auto kAnySegment = [](std::uint32_t) { return true; };

// An index over a table of its own, with two segments of small slots and one of large ones.
class StoreIndex : public ::testing::Test {
 protected:
  StoreIndex() : StoreIndex(4096) {}
  explicit StoreIndex(std::uint64_t objects)
      : table_(make_table(folder_.path(), objects)),
        index_(table_, 0, kBonus, [](std::uint32_t place) { return place == 0; }) {
    table_.process(0).owner.store(1);
    table_.header().processes_end.store(1);
    make_segment(0, kSmall);
    make_segment(1, kSmall);
    make_segment(2, kLarge);
  }

  static LiveTable make_table(const std::string& folder, std::uint64_t objects) {
    auto table = LiveTable::create(folder, {{7}, 1, 2}, {1u << 30, 4u << 20, 4, objects});
    if (!table) throw std::runtime_error(table.error().message);
    if (!table->reserve_process(0)) throw std::runtime_error("no memory");
    return std::move(*table);
  }

  void make_segment(std::uint32_t id, SlotClass slot_class) {
    ASSERT_TRUE(add_live_segment(table_, id, slot_class, 4u << 20));
  }

  // Stores page `index` of a chain in a free slot.
  Index::Published put(std::uint64_t chain, std::uint64_t index, SlotClass slot_class = kSmall,
                       std::optional<std::uint64_t> parent = {}, bool suspect = false) {
    for (std::uint32_t id = slot_class == kSmall ? 0 : 2; id < 3; ++id) {
      for (std::uint32_t slot = 0; slot < table_.segment(id).slots.load(); ++slot) {
        const GlobalSlot at = index_.global({id, slot});
        const Stamp free = index_.stamp(at);
        if (free.state() != SlotState::kFree) continue;
        const Stamp writing(SlotState::kWriting, ++generation_);
        EXPECT_TRUE(index_.change(at, free, writing));
        return index_.publish({.slot = at,
                               .stamp = writing,
                               .key = page_key(chain, index),
                               .space = 0,
                               .payload_bytes = 100,
                               .root = chain * 1000 + index,
                               .parent = parent.value_or(index > 0 ? short_key(page_key(chain, index - 1)) : 0)},
                              suspect, index_.tick(1));
      }
    }
    return Index::Published::kFull;
  }
  std::optional<IndexEntry> find(std::uint64_t chain, std::uint64_t index) {
    return index_.find(0, page_key(chain, index));
  }
  std::vector<Hash256> evict(std::size_t need, SlotClass slot_class = kSmall) {
    std::vector<Hash256> order;
    const std::size_t freed = index_.evict(slot_class, need, kAnySegment, std::nullopt,
                                           [&](const IndexEntry& entry) { order.push_back(entry.key); });
    EXPECT_EQ(freed, order.size());
    return order;
  }
  std::uint32_t count(SlotState state) {
    std::uint32_t sum = 0;
    for (std::uint32_t id = 0; id < 3; ++id) sum += table_.segment(id).counts[static_cast<std::size_t>(state)].load();
    return sum;
  }

  const TempFolder folder_{"/dev/shm"};
  LiveTable table_;
  Index index_;
  std::uint64_t generation_ = 0;
};

TEST_F(StoreIndex, FindsWhatWasPublishedAndNothingElse) {
  for (std::uint64_t i = 0; i < 300; ++i) EXPECT_EQ(put(1, i), Index::Published::kYes);
  std::vector<Hash256> keys;
  for (std::uint64_t i = 0; i < 310; ++i) keys.push_back(page_key(1, i));
  EXPECT_EQ(index_.run(0, keys.data(), keys.size()), 300u);
  EXPECT_EQ(index_.run(1, keys.data(), keys.size()), 0u) << "another namespace";
  EXPECT_EQ(index_.run(0, keys.data(), 0), 0u);
  EXPECT_EQ(find(1, 7)->root, 1007u);
  EXPECT_TRUE(index_.unpublish(*find(1, 40)));
  EXPECT_EQ(index_.run(0, keys.data(), keys.size()), 40u);
  EXPECT_FALSE(find(1, 40));
  EXPECT_EQ(put(1, 41), Index::Published::kDuplicate);
  EXPECT_EQ(count(SlotState::kLive), 299u);
}

TEST_F(StoreIndex, EvictsTheLeastRecentLeafFirst) {
  for (std::uint64_t i = 0; i < 3; ++i) put(1, i);
  put(2, 0);
  // A chain goes from its end; a parent, older than page (2, 0), becomes evictable when its extension is gone.
  EXPECT_EQ(evict(10), (std::vector<Hash256>{page_key(1, 2), page_key(1, 1), page_key(1, 0), page_key(2, 0)}));
  EXPECT_EQ(count(SlotState::kLive), 0u);
}

TEST_F(StoreIndex, ReuseIsWorthABoundedNumberOfTouches) {
  put(1, 0);
  for (int i = 0; i < 50; ++i) index_.touch(*find(1, 0), index_.tick(1), /*reuse=*/true);  // counts 3 times at most
  for (std::uint64_t chain = 2; chain < 2 + 3 * kBonus + 2; ++chain) put(chain, 0);
  EXPECT_EQ(evict(1).front(), page_key(2, 0));
  const auto rest = evict(3 * kBonus);
  EXPECT_NE(std::find(rest.begin(), rest.end(), page_key(1, 0)), rest.end())
      << "a page that nobody uses any more must go in the end";
}

TEST_F(StoreIndex, ARepeatedStoreIsRecencyButNotReuse) {
  put(1, 0);
  put(2, 0);
  index_.touch(*find(1, 0), index_.tick(1), /*reuse=*/false);
  EXPECT_EQ(evict(1).front(), page_key(2, 0));
}

TEST_F(StoreIndex, ClassesAreRankedApart) {
  put(1, 0, kSmall);
  put(2, 0, kLarge);
  EXPECT_EQ(index_.classes().size(), 2u);
  EXPECT_EQ(evict(5, kLarge), (std::vector<Hash256>{page_key(2, 0)}));
  EXPECT_FALSE(index_.coldest(kLarge));
  EXPECT_TRUE(index_.coldest(kSmall));
}

TEST_F(StoreIndex, ALeasedOrExtendedObjectStays) {
  put(1, 0);
  put(2, 0);
  put(3, 0);
  const GlobalSlot leased = find(1, 0)->slot;
  const std::uint32_t lease = index_.lease(leased), parent = index_.parents().add(short_key(page_key(2, 0)));
  EXPECT_EQ(evict(5), (std::vector<Hash256>{page_key(3, 0)}));
  index_.end_lease(lease, leased);
  index_.parents().remove(parent);
  EXPECT_EQ(evict(5), (std::vector<Hash256>{page_key(1, 0), page_key(2, 0)}));
}

TEST_F(StoreIndex, ADeletedObjectKeepsItsSlotUntilTheLastLeaseEnds) {
  put(1, 0);
  const IndexEntry entry = *find(1, 0);
  const std::uint32_t first = index_.lease(entry.slot), second = index_.lease(entry.slot);
  EXPECT_TRUE(index_.unpublish(entry));
  EXPECT_FALSE(find(1, 0));
  EXPECT_EQ(count(SlotState::kDying), 1u);
  index_.end_lease(first, entry.slot);
  EXPECT_EQ(count(SlotState::kDying), 1u);
  index_.end_lease(second, entry.slot);
  EXPECT_EQ(count(SlotState::kDying), 0u);
}

TEST_F(StoreIndex, TheLeasesOfADeadProcessDoNotCount) {
  put(1, 0);
  ASSERT_TRUE(table_.reserve_process(1));
  table_.header().processes_end.store(2);
  table_.process(1).owner.store(99);
  table_.process(1).leases_end.store(1);
  table_.process(1).leases[0].store(find(1, 0)->slot + 1);
  EXPECT_EQ(evict(1).size(), 1u);
}

TEST_F(StoreIndex, DescendantsAreFoundThroughBranches) {
  for (std::uint64_t i = 0; i < 6; ++i) put(1, i);
  put(2, 0, kSmall, short_key(page_key(1, 2)));  // a second extension of page (1, 2)
  put(3, 0);
  EXPECT_EQ(index_.descendants({*find(1, 0)}).size(), 6u);
  EXPECT_EQ(index_.descendants({*find(1, 3)}).size(), 2u);
}

TEST_F(StoreIndex, ACycleOfParentsEnds) {
  put(1, 0, kSmall, short_key(page_key(1, 1)));
  put(1, 1, kSmall, short_key(page_key(1, 0)));
  EXPECT_EQ(index_.descendants({*find(1, 0)}).size(), 1u);
}

TEST_F(StoreIndex, WhatACrashMayHaveTornGivesWayToAFreshCopy) {
  EXPECT_EQ(put(1, 0, kSmall, {}, /*suspect=*/true), Index::Published::kYes);
  EXPECT_EQ(put(1, 0), Index::Published::kYes);
  EXPECT_FALSE(find(1, 0)->stamp.suspect());
  EXPECT_EQ(count(SlotState::kLive), 1u);
}

// What a process leaves that was killed between two steps.
TEST_F(StoreIndex, WordsThatLeadNowhereAreHarmlessAndGiveTheirPlaceAway) {
  put(1, 0);
  const IndexEntry entry = *find(1, 0);
  // Killed after the record was freed and before the word was taken out of the hash table.
  index_.change(entry.slot, entry.stamp, entry.stamp.with(SlotState::kFree));
  EXPECT_FALSE(find(1, 0));
  EXPECT_EQ(put(2, 0), Index::Published::kYes);  // the slot is used again; the old word leads to another object
  EXPECT_FALSE(find(1, 0));
  EXPECT_TRUE(find(2, 0));
  EXPECT_EQ(put(1, 0), Index::Published::kYes);
  EXPECT_TRUE(find(1, 0));
}

class TinyStoreIndex : public StoreIndex {
 protected:
  TinyStoreIndex() : StoreIndex(1) {}  // 64 buckets of 8 words
};

TEST_F(TinyStoreIndex, AFullHashTableGivesUpTheLeastValuable) {
  for (std::uint64_t i = 0; i < 700; ++i) EXPECT_EQ(put(i, 0), Index::Published::kYes) << i;
  const std::uint32_t live = count(SlotState::kLive);
  EXPECT_GT(live, 450u) << "of 512 words";
  EXPECT_LT(live, 513u);
  EXPECT_EQ(count(SlotState::kWriting), 0u);
  for (std::uint64_t i = 690; i < 700; ++i) EXPECT_TRUE(find(i, 0)) << "the newest";
  EXPECT_EQ(evict(1000).size(), live);
}

// Random operations beside a model that recomputes everything from scratch.
TEST_F(StoreIndex, AgreesWithAModel) {
  struct Model {
    std::uint64_t chain, index;
    SlotClass slot_class;
    std::uint64_t score;
    std::uint32_t reuses = 0;
  };
  std::mt19937_64 random(5);
  std::vector<Model> stored;
  std::uint64_t clock = 0;
  const auto find_model = [&](const Hash256& hash) {
    return std::find_if(stored.begin(), stored.end(),
                        [&](const Model& m) { return page_key(m.chain, m.index) == hash; });
  };
  const auto evictable = [&](const Model& m) {
    return std::none_of(stored.begin(), stored.end(),
                        [&](const Model& other) { return other.chain == m.chain && other.index == m.index + 1; });
  };
  for (int step = 0; step < 6000; ++step) {
    const std::uint64_t chain = random() % 9, at = random() % 6;
    const SlotClass slot_class = chain % 2 == 0 ? kSmall : kLarge;
    const auto known = find_model(page_key(chain, at));
    ASSERT_EQ(find(chain, at).has_value(), known != stored.end());
    switch (random() % 4) {
      case 0:
      case 1: {
        // In prefix order, as a server stores: an extension that comes before its prefix is not counted.
        if (known != stored.end() || (at > 0 && find_model(page_key(chain, at - 1)) == stored.end())) break;
        const bool orphan = find_model(page_key(chain, at + 1)) != stored.end();
        ASSERT_EQ(put(chain, at, slot_class), Index::Published::kYes);
        if (orphan) index_.adopt(0, short_key(page_key(chain, at)));
        stored.push_back({chain, at, slot_class, ++clock});
        break;
      }
      case 2: {
        if (known == stored.end()) break;
        const bool reuse = random() % 2 == 0;
        index_.touch(*find(chain, at), index_.tick(1), reuse);
        if (reuse) known->reuses = std::min(known->reuses + 1, 3u);
        known->score = ++clock + kBonus * known->reuses;
        break;
      }
      case 3: {
        const Model* expected = nullptr;
        for (const Model& m : stored) {
          if (m.slot_class != slot_class || !evictable(m)) continue;
          if (expected == nullptr || m.score < expected->score) expected = &m;
        }
        const auto gone = evict(1, slot_class);
        ASSERT_EQ(gone.empty(), expected == nullptr);
        if (gone.empty()) break;
        const auto it = find_model(gone.front());
        ASSERT_TRUE(it != stored.end() && evictable(*it));
        // Scores may tie when a reuse bonus meets the clock.
        ASSERT_EQ(it->score, expected->score);
        stored.erase(it);
        break;
      }
    }
    ASSERT_EQ(count(SlotState::kLive), stored.size());
    ASSERT_EQ(table_.header().payload_bytes.load(), 100 * stored.size());
  }
  EXPECT_EQ(evict(1000, kSmall).size() + evict(1000, kLarge).size(), stored.size()) << "some can never be evicted";
}

// Several threads publish, find, unpublish and evict the same few keys.
TEST_F(StoreIndex, ThreadsThatMeetOnTheSameKeysLeaveEachOnce) {
  std::vector<std::thread> threads;
  std::atomic<std::uint64_t> generation{1};
  for (std::uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      for (int i = 0; i < 4000; ++i) {
        const std::uint64_t chain = random() % 20;
        if (random() % 3 == 0) {
          if (const auto entry = find(chain, 0)) index_.unpublish(*entry);
          continue;
        }
        const GlobalSlot at = index_.global({t % 2, (t / 2) * 300 + static_cast<std::uint32_t>(random() % 300)});
        const Stamp free = index_.stamp(at);
        const Stamp writing(SlotState::kWriting, generation.fetch_add(1));
        if (free.state() != SlotState::kFree || !index_.change(at, free, writing)) continue;
        index_.publish({.slot = at,
                        .stamp = writing,
                        .key = page_key(chain, 0),
                        .space = 0,
                        .payload_bytes = 100,
                        .root = chain,
                        .parent = 0},
                       false, index_.tick(1));
        if (const auto entry = find(chain, 0)) {
          EXPECT_EQ(entry->root, chain);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::map<Hash256, int> seen;
  index_.for_each([&](const IndexEntry& entry) { ++seen[entry.key]; });
  for (const auto& [key, times] : seen) EXPECT_EQ(times, 1);
  EXPECT_EQ(count(SlotState::kLive), seen.size());
  EXPECT_EQ(count(SlotState::kWriting) + count(SlotState::kDying), 0u);
  EXPECT_EQ(table_.header().payload_bytes.load(), 100 * seen.size());
}

}  // namespace
}  // namespace tardis::testing
