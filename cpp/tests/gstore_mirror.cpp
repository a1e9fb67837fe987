// SPDX-License-Identifier: Apache-2.0
// The GPU's index, on the host, as a mirror of the store's: loaded from it, then told of changes in batches.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "block_support.h"
#include "gstore/host_index.h"
#include "gstore/index_batch.h"
#include "gstore/store_entry.h"
#include "live_segment_support.h"
#include "store_pages.h"

namespace tardis::gstore {
namespace {

using tardis::testing::page_key;
using tardis::testing::TempFolder;

constexpr SlotClass kClass{4096, 1};
constexpr std::uint64_t kSegmentBytes = 4u << 20;
constexpr std::uint32_t kSegments = 2;

class GstoreMirror : public ::testing::Test {
 protected:
  GstoreMirror()
      : table_(make_table(folder_.path())), index_(table_, 0, 1, [](std::uint32_t place) { return place == 0; }) {
    table_.process(0).owner.store(1);
    table_.header().processes_end.store(1);
    slots_ = SegmentGeometry::of(kSegmentBytes, kClass.slot_bytes, kClass.digests_per_slot).slots;
    for (std::uint32_t id = 0; id < kSegments; ++id) {
      EXPECT_TRUE(tardis::testing::add_live_segment(table_, id, kClass, kSegmentBytes));
    }
  }

  static LiveTable make_table(const std::string& folder) {
    auto table = LiveTable::create(folder, {{7}, 1, 2}, {1u << 30, kSegmentBytes, kSegments, 4096});
    if (!table) throw std::runtime_error(table.error().message);
    if (!table->reserve_process(0)) throw std::runtime_error("no memory");
    return std::move(*table);
  }

  // Object `number` in a slot of its choice, if that is free.
  std::optional<IndexEntry> put(std::uint64_t number, std::uint32_t space, std::uint64_t slot) {
    const GlobalSlot at =
        index_.global({static_cast<std::uint32_t>(slot / slots_), static_cast<std::uint32_t>(slot % slots_)});
    const Stamp free = index_.stamp(at);
    if (free.state() != SlotState::kFree) return std::nullopt;
    const Stamp writing(SlotState::kWriting, ++generation_);
    EXPECT_TRUE(index_.change(at, free, writing));
    const IndexEntry entry{.slot = at,
                           .stamp = writing,
                           .key = page_key(number, 0),
                           .space = space,
                           .payload_bytes = static_cast<std::uint32_t>(number + 1),
                           .root = number * 1000 + generation_,
                           .parent = 0};
    if (index_.publish(entry, false, 1) != Index::Published::kYes) return std::nullopt;
    return index_.find(space, page_key(number, 0));
  }

  // Both say the same of every object there could be.
  void expect_same(const HostIndex& mirror, std::uint64_t numbers) {
    for (std::uint32_t space = 0; space < 3; ++space) {
      for (std::uint64_t number = 0; number < numbers; ++number) {
        const Hash256 hash = page_key(number, 0);
        const auto entry = index_.find(space, hash);
        Key key;
        std::memcpy(&key, hash.data(), sizeof key);
        const auto answer = mirror.find(key, static_cast<std::uint16_t>(space));
        ASSERT_EQ(answer.status, entry ? 1u : 0u) << number << " in " << space;
        if (!entry) continue;
        ASSERT_EQ(answer.location, entry->slot);
        ASSERT_EQ(answer.generation, entry->stamp.generation());
        ASSERT_EQ(answer.root, entry->root);
        ASSERT_EQ(answer.payload_bytes, entry->payload_bytes);
      }
    }
  }

  const TempFolder folder_{"/dev/shm"};
  LiveTable table_;
  Index index_;
  std::uint32_t slots_ = 0;
  std::uint64_t generation_ = 0;
};

TEST_F(GstoreMirror, LoadedThenToldOfChangesInBatches) {
  constexpr std::uint64_t kNumbers = 400;
  std::mt19937_64 random(2);
  for (std::uint64_t number = 0; number < kNumbers; number += 2) {
    ASSERT_TRUE(put(number, static_cast<std::uint32_t>(number % 3), number));
  }
  HostIndex mirror(buckets_for(3 * kNumbers));
  index_.for_each([&](const IndexEntry& entry) {
    ASSERT_EQ(mirror.apply(change_of(entry, TARDIS_GPU_INDEX_PUT)), Status::kInserted);
  });
  expect_same(mirror, kNumbers);

  IndexBatch batch;
  for (int round = 0; round < 30; ++round) {
    for (int step = 0; step < 200; ++step) {
      const std::uint64_t number = random() % kNumbers;
      const auto space = static_cast<std::uint32_t>(random() % 3);
      if (const auto entry = index_.find(space, page_key(number, 0))) {
        ASSERT_TRUE(index_.unpublish(*entry));
        batch.add(change_of(*entry, TARDIS_GPU_INDEX_ERASE));
      }
      if (random() % 3 == 0) continue;
      const auto entry = put(number, space, random() % (2 * slots_));
      if (entry) batch.add(change_of(*entry, TARDIS_GPU_INDEX_PUT));
    }
    auto changes = batch.entries();
    std::shuffle(changes.begin(), changes.end(), random);
    for (const auto& change : changes) {
      const Status status = mirror.apply(change);
      ASSERT_TRUE(status == Status::kInserted || status == Status::kReplaced || status == Status::kErased ||
                  status == Status::kAbsent)  // put and erased within one batch
          << static_cast<int>(status);
    }
    batch.clear();
    expect_same(mirror, kNumbers);
  }
}

}  // namespace
}  // namespace tardis::gstore
