// SPDX-License-Identifier: Apache-2.0
// What was deleted must not come back, by no way.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "store_support.h"

namespace tardis::testing {
namespace {

class StoreClear : public ::testing::Test {
 protected:
  TempFolder folder{memory_parent()};
};

TEST_F(StoreClear, OneNamespaceOrAll) {
  auto store = open_store(folder.path(), small_store(4));
  Space a(*store, 1, {}), b(*store, 2, {});
  a.put(1, 0, 20);
  b.put(1, 0, 30);
  EXPECT_EQ(*store->clear(a.fingerprint()), 20u);
  EXPECT_EQ(a.run(1, 0, 20), 0u);
  EXPECT_EQ(b.fetch(1, 0, 30), 30u);
  EXPECT_EQ(*store->clear(a.fingerprint()), 0u);
  EXPECT_EQ(a.put(1, 0, 5), 5u);
  EXPECT_EQ(*store->clear(std::nullopt), 35u);
  EXPECT_EQ(stats_of(*store).slots_live, 0u);
  EXPECT_EQ(stats_of(*store).payload_bytes, 0u);
  expect_slots_conserved(*store);
}

TEST_F(StoreClear, HoldsAcrossAReopenAlsoForEvictedPages) {
  {
    auto store = open_store(folder.path(), small_store(2));
    Space a(*store, 1, {}), b(*store, 2, {});
    b.put(9, 0, 10);
    for (std::uint64_t chain = 0; chain < 30; ++chain) a.put(chain, 0, 7);
    EXPECT_GT(stats_of(*store).evicted_pages, 50u);
    // An evicted page's header still lies on disk.
    std::size_t headers = 0;
    for (std::uint64_t chain = 0; chain < 30; ++chain) {
      for (std::uint64_t i = 0; i < 7; ++i)
        headers += !a.has(chain, i) && find_on_disk(folder.path(), page_key(chain, i)).header.generation > 0;
    }
    b.put(9, 0, 10);
    EXPECT_TRUE(store->clear(a.fingerprint()));
  }
  auto store = open_store(folder.path(), small_store(2));
  Space a(*store, 1, {}), b(*store, 2, {});
  for (std::uint64_t chain = 0; chain < 30; ++chain) EXPECT_EQ(a.run(chain, 0, 7), 0u);
  EXPECT_EQ(b.fetch(9, 0, 10), 10u);
}

TEST_F(StoreClear, SaysThatASegmentItCannotReadMayHoldMore) {
  {
    auto store = open_store(folder.path(), small_store(4));
    Space space(*store, 1, {});
    space.put(1, 0, 20);
  }
  flip_bit(segment_file(folder.path(), 0), 20);
  auto store = open_store(folder.path(), small_store(4));
  ASSERT_EQ(stats_of(*store).segments_unreadable, 1u);
  Space space(*store, 1, {});
  space.put(2, 0, 3);
  const auto cleared = store->clear(std::nullopt);
  ASSERT_FALSE(cleared);
  EXPECT_EQ(cleared.error().code, Code::kCorrupt);
  EXPECT_NE(cleared.error().message.find(segment_file(folder.path(), 0)), std::string::npos) << cleared.error().message;
  EXPECT_EQ(stats_of(*store).slots_live, 0u);
}

TEST_F(StoreClear, HoldsForAPageThatWasEvictedWhileItsSlotStaysFree) {
  {
    auto store = open_store(folder.path(), small_store(1));
    Space a(*store, 1, {}), large(*store, 2, {1, {2'500'000}});
    a.put(1, 0, 4);
    EXPECT_EQ(large.put(5, 0, 1), 1u);  // takes the only segment: all of chain 1 is evicted
    EXPECT_EQ(a.run(1, 0, 4), 0u);
    EXPECT_TRUE(store->clear(a.fingerprint()));
    EXPECT_EQ(large.fetch(5, 0, 1), 1u);
  }
  auto store = open_store(folder.path(), small_store(1));
  Space a(*store, 1, {});
  EXPECT_EQ(a.run(1, 0, 4), 0u);
}

TEST_F(StoreClear, IsDurableBeforeItReturns) {
  in_killed_process([&] {
    auto store = open_store(folder.path(), small_store(4));
    Space a(*store, 1, {}), b(*store, 2, {});
    a.put(1, 0, 20);
    b.put(1, 0, 20);
    EXPECT_TRUE(store->flush());
    EXPECT_TRUE(store->clear(a.fingerprint()));
    store.release();
  });
  auto store = open_store(folder.path(), small_store(4));
  Space a(*store, 1, {}), b(*store, 2, {});
  EXPECT_EQ(a.run(1, 0, 20), 0u);
  EXPECT_EQ(b.fetch(1, 0, 20), 20u);
}

TEST_F(StoreClear, AmidStoresAndLoads) {
  std::atomic<bool> stop{false};
  {
    auto store = open_store(folder.path(), small_store(4));
    Space space(*store, 1, {});
    std::vector<std::thread> threads;
    for (std::uint64_t t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        for (std::uint64_t round = 0; !stop; ++round) {
          space.put(t * 1'000'000 + round, 0, 5);
          space.get(t * 1'000'000 + round, 0, 5);
        }
      });
    }
    // Stores overlap all the time; a clear must get its turn nevertheless.
    for (int i = 0; i < 20; ++i)
      EXPECT_TRUE(store->clear(i % 2 == 0 ? std::optional<Fingerprint>(space.fingerprint()) : std::nullopt));
    stop = true;
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(store->clear(std::nullopt));
    expect_slots_conserved(*store);
    EXPECT_EQ(stats_of(*store).slots_live, 0u);
  }
  auto store = open_store(folder.path(), small_store(4));
  EXPECT_EQ(stats_of(*store).recovered_pages, 0u);
}

// Stores that overlap without end must not keep a clear waiting without end.
TEST_F(StoreClear, GoesBeforeStoresThatComeLater) {
  std::mutex mutex;
  std::condition_variable changed;
  bool paused = false, go_on = false;
  auto store =
      open_store(folder.path(), small_store(4), true, hooked([&](std::span<IoRequest> requests) {
                   std::unique_lock lock(mutex);
                   if (paused || requests.front().op == IoRequest::Op::kRead || requests.front().offset < (1u << 20))
                     return;
                   paused = true;
                   changed.notify_all();
                   changed.wait(lock, [&] { return go_on; });
                 }));
  Space space(*store, 1, {});
  std::atomic<bool> later_done{false};
  std::thread first([&] { EXPECT_EQ(space.put(1, 0, 2), 2u); });
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return paused; });
  }
  std::thread clearing([&] { EXPECT_TRUE(store->clear(std::nullopt)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // so that the clear waits for the first store
  std::thread later([&] {
    EXPECT_EQ(space.put(2, 0, 2), 2u);
    later_done = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_FALSE(later_done) << "a store overtook the clear";
  {
    const std::lock_guard lock(mutex);
    go_on = true;
    changed.notify_all();
  }
  for (std::thread* thread : {&first, &clearing, &later}) thread->join();
  EXPECT_FALSE(space.has(1, 0));
  EXPECT_EQ(space.fetch(2, 0, 2), 2u);
}

TEST_F(StoreClear, ASegmentThatFailsDoesNotKeepTheOthersFromBeingCleared) {
  auto faults = std::make_shared<Faults>();
  {
    auto store = open_store(folder.path(), small_store(3), true, faulty(faults));
    Space space(*store, 1, {});
    ASSERT_EQ(space.put(1, 0, 130), 130u);
    ASSERT_TRUE(store->flush());
    {
      const std::lock_guard lock(faults->mutex);
      faults->before = [](const IoRequest& request) {
        return request.op == IoRequest::Op::kWrite && request.file == 0 ? EIO : 0;
      };
    }
    auto cleared = store->clear(std::nullopt);
    ASSERT_FALSE(cleared);
    EXPECT_EQ(cleared.error().code, Code::kIo);
    const std::lock_guard lock(faults->mutex);
    faults->before = {};
  }
  EXPECT_EQ(stats_of(*open_store(folder.path(), small_store(3))).recovered_pages, 0u) << "the checkpoint knows";
  std::filesystem::remove(folder.file("index.checkpoint"));
  auto store = open_store(folder.path(), small_store(3));
  EXPECT_EQ(stats_of(*store).recovered_pages, 48u) << "only those of the segment that failed";
}

}  // namespace
}  // namespace tardis::testing
