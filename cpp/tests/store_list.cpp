// SPDX-License-Identifier: Apache-2.0
// Listing and checking a store that is in use, without its lock.
#include <atomic>
#include <chrono>
#include <set>
#include <thread>

#include "store/list.h"
#include "store/live_verify.h"
#include "store_support.h"

namespace tardis::testing {
namespace {

class StoreList : public ::testing::Test {
 protected:
  std::vector<ObjectInfo> list() {
    std::vector<ObjectInfo> objects;
    const Status status = list_store(folder.path(), [&](const ObjectInfo& object) {
      objects.push_back(object);
      return true;
    });
    EXPECT_TRUE(status) << status.error().message;
    return objects;
  }
  VerifyResult check() {
    auto result = verify_live_store(folder.path(), {});
    if (!result) {
      ADD_FAILURE() << result.error().message;
      return {};
    }
    return *result;
  }
  // A store with 12 pages of namespace 1 that was closed: its segments are clean.
  void fill() {
    auto store = open_store(folder.path(), small_store(4));
    Space(*store, 1, {}).put(1, 0, 12);
    ASSERT_TRUE(store->close());
  }

  TempFolder folder{memory_parent()};
};

TEST_F(StoreList, TellsWhatWasStoredWhileItIsOpen) {
  auto store = open_store(folder.path(), small_store(4));
  Space a(*store, 1, {}), b(*store, 2, {3, {8 * 1024, 512}});
  a.put(1, 0, 20);
  b.put(7, 0, 5);
  const auto objects = list();
  ASSERT_EQ(objects.size(), 25u);
  std::set<std::pair<std::uint32_t, std::uint32_t>> places;
  std::set<Hash256> keys;
  for (const ObjectInfo& object : objects) {
    EXPECT_TRUE(places.emplace(object.segment, object.slot).second);
    EXPECT_TRUE(keys.insert(object.key).second);
    const bool second = object.fingerprint == b.fingerprint();
    EXPECT_EQ(object.parts, second ? 3u : 1u);
    EXPECT_EQ(object.payload_bytes, second ? 3u * (8 * 1024 + 512) : 64u * 1024);
    EXPECT_GT(object.generation, 0u);
    EXPECT_FALSE(object.quarantined);
    const OnDisk disk = find_on_disk(folder.path(), object.key);
    EXPECT_EQ(object.root_digest, disk.header.root_digest);
    EXPECT_EQ(object.parent, disk.header.parent);
    EXPECT_EQ(object.flush_group, disk.header.flush_group);
  }
  for (std::uint64_t i = 0; i < 20; ++i) EXPECT_EQ(keys.count(page_key(1, i)), 1u);
  for (std::uint64_t i = 0; i < 5; ++i) EXPECT_EQ(keys.count(page_key(7, i)), 1u);
}

TEST_F(StoreList, StopsWhenAsked) {
  fill();
  int seen = 0;
  EXPECT_TRUE(list_store(folder.path(), [&](const ObjectInfo&) { return ++seen < 5; }));
  EXPECT_EQ(seen, 5);
}

TEST_F(StoreList, LeavesOutWhatDoesNotProveItself) {
  fill();
  const OnDisk damaged = find_on_disk(folder.path(), page_key(1, 3));
  flip_bit(damaged.file, damaged.header_offset + 20);
  OnDisk bad = find_on_disk(folder.path(), page_key(1, 4));
  bad.header.flags |= kSlotQuarantined;
  seal(bad.header);
  write_bytes(bad.file, bad.header_offset, &bad.header, sizeof bad.header);
  const auto objects = list();
  ASSERT_EQ(objects.size(), 11u);
  for (const ObjectInfo& object : objects) {
    EXPECT_NE(object.key, page_key(1, 3));
    EXPECT_EQ(object.quarantined, object.key == page_key(1, 4));
  }
  flip_bit(damaged.file, 100);  // the segment's superblock
  EXPECT_TRUE(list().empty());
}

TEST_F(StoreList, AFolderWithoutAStoreIsAnError) {
  const auto visit = [](const ObjectInfo&) { return true; };
  EXPECT_EQ(list_store(folder.path(), visit).error().code, Code::kNotFound);
  EXPECT_EQ(list_store(folder.path() + "/none", visit).error().code, Code::kNotFound);
  EXPECT_EQ(verify_live_store(folder.path(), {}).error().code, Code::kNotFound);
}

TEST_F(StoreList, FindsAFlippedBitInASegmentThatNobodyWrites) {
  fill();
  const OnDisk page = find_on_disk(folder.path(), page_key(1, 5));
  flip_bit(page.file, page.payload_offset + 1000);
  auto store = open_store(folder.path(), small_store(4));
  const VerifyResult found = check();
  EXPECT_EQ(found.report.objects, 12u);
  EXPECT_EQ(found.report.bad_payloads, 1u);
  EXPECT_EQ(found.report.torn + found.report.bad_headers + found.report.unreadable_segments, 0u);
  ASSERT_EQ(found.problems.size(), 1u);
  EXPECT_NE(found.problems[0].find(hex(page.header.key.data(), 32)), std::string::npos) << found.problems[0];
  EXPECT_EQ(check().report.bad_payloads, 1u) << "nothing may have been changed";
}

TEST_F(StoreList, FindsADamagedHeaderAndSegment) {
  fill();
  const OnDisk page = find_on_disk(folder.path(), page_key(1, 5));
  flip_bit(page.file, page.header_offset + 20);
  EXPECT_EQ(check().report.bad_headers, 1u);
  EXPECT_EQ(check().report.objects, 11u);
  flip_bit(page.file, 100);
  EXPECT_EQ(check().report.unreadable_segments, 1u);
}

TEST_F(StoreList, InASegmentBeingWrittenAFailingPageIsNoFault) {
  auto store = open_store(folder.path(), small_store(4));
  Space space(*store, 1, {});
  space.put(1, 0, 12);
  EXPECT_EQ(check().report.objects, 12u);
  const OnDisk page = find_on_disk(folder.path(), page_key(1, 5));
  flip_bit(page.file, page.payload_offset + 1000);  // as a write over an evicted page's slot that was given up would
  const VerifyResult found = check();
  EXPECT_EQ(found.report.torn, 1u);
  EXPECT_EQ(found.report.bad_payloads, 0u);
  EXPECT_TRUE(found.problems.empty());
}

TEST_F(StoreList, StopsVerifyingWhenAsked) {
  fill();
  const auto stopped = verify_live_store(folder.path(), [](std::uint64_t, std::uint64_t) { return false; });
  ASSERT_FALSE(stopped);
  EXPECT_EQ(stopped.error().code, Code::kClosed);
}

// Two slot classes force segments to be re-classed while they are read.
TEST_F(StoreList, TellsNothingWrongWhileWritersEvict) {
  auto store = open_store(folder.path(), small_store(2));
  Space a(*store, 1, {}), b(*store, 2, {1, {12 * 1024}});
  std::atomic<bool> done{false};
  std::set<Hash256> possible;
  constexpr std::uint64_t kChains = 40;
  for (std::uint64_t chain = 0; chain < kChains; ++chain) {
    for (std::uint64_t i = 0; i < 16; ++i) possible.insert(page_key(chain, i));
  }
  std::thread writer([&] {
    for (std::uint64_t chain = 0; !done; chain = (chain + 1) % kChains) (chain % 8 < 6 ? a : b).put(chain, 0, 16);
  });
  std::size_t listed = 0;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (int round = 0; round < 3 || stats_of(*store).evicted_pages < 500; ++round) {
    if (std::chrono::steady_clock::now() > deadline) break;
    for (const ObjectInfo& object : list()) {
      ++listed;
      EXPECT_EQ(possible.count(object.key), 1u);
      EXPECT_EQ(object.payload_bytes, object.fingerprint == a.fingerprint() ? 64u * 1024 : 12u * 1024);
    }
    const VerifyResult found = check();
    EXPECT_EQ(found.report.bad_payloads + found.report.bad_headers, 0u)
        << (found.problems.empty() ? "" : found.problems[0]);
  }
  done = true;
  writer.join();
  EXPECT_GT(listed, 0u);
  EXPECT_GE(stats_of(*store).evicted_pages, 500u);
}

}  // namespace
}  // namespace tardis::testing
