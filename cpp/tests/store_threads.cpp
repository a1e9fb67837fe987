// SPDX-License-Identifier: Apache-2.0
// Everything at once; most telling in a build with TARDIS_SANITIZE=thread.
#include <atomic>
#include <thread>

#include "store_support.h"

namespace tardis::testing {
namespace {

using Engine = BlockDeviceOptions::Engine;

struct Load {
  const char* name;
  Engine engine;
  bool faults;
};

class StoreThreads : public ::testing::TestWithParam<Load> {};

TEST_P(StoreThreads, WritersReadersEvictionClearFlushAndClose) {
  const TempFolder folder(memory_parent());
  auto faults = std::make_shared<Faults>();
  std::mt19937_64 dice(1), flush_dice(2);
  if (GetParam().faults) {
    faults->before = [&](const IoRequest&) { return dice() % 50 == 0 ? EIO : 0; };
    faults->before_flush = [&](FileId) { return flush_dice() % 20 == 0 ? EIO : 0; };
  }
  StoreOptions options = small_store(3, GetParam().engine);
  options.flush_milliseconds = 1;
  options.flush_bytes = 300'000;
  auto opened = Store::open(folder.path(), options, true, faulty(faults));
  if (!opened && GetParam().engine == Engine::kIoUring) GTEST_SKIP() << opened.error().message;
  ASSERT_TRUE(opened) << opened.error().message;
  Store& store = **opened;
  const bool calm = !GetParam().faults;
  std::array<Space, 3> spaces = {Space(store, 1, {1, {16 * 1024}}), Space(store, 2, {2, {20000, 12345}}),
                                 Space(store, 3, {1, {150'000}})};
  std::vector<std::thread> threads;
  std::atomic<bool> stop{false};
  for (std::uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      while (!stop) {
        Space& space = spaces[random() % 3];
        const std::uint64_t chain = random() % 30;  // shared: writers meet on the same pages
        space.put(chain, space.run(chain, 0, 20), 1 + random() % 4);
      }
    });
    threads.emplace_back([&, t] {
      std::mt19937_64 random(10 + t);
      while (!stop) spaces[random() % 3].get(random() % 30, random() % 3, 1 + random() % 8);
    });
  }
  threads.emplace_back([&] {
    for (int i = 0; !stop; ++i) {
      const Status status = store.flush();
      EXPECT_TRUE(status || !calm || status.error().code == Code::kClosed);
      tardis_stats s = stats_of(store);
      EXPECT_EQ(s.slots_total, s.slots_live + s.slots_free + s.slots_quarantined + s.slots_writing);
      if (i % 20 == 0) {
        auto cleared = store.clear(i % 40 == 0 ? std::nullopt : std::optional<Fingerprint>(spaces[1].fingerprint()));
        EXPECT_TRUE(cleared || !calm || cleared.error().code == Code::kClosed);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  if (calm) {
    EXPECT_EQ(stats_of(store).get_pages_corrupt, 0u);
    EXPECT_EQ(stats_of(store).slots_quarantined, 0u);
  }
  const Status closed = store.close();  // amid all of it
  EXPECT_TRUE(closed || !calm) << closed.error().message;
  stop = true;
  for (std::thread& thread : threads) thread.join();
  {
    const std::lock_guard lock(faults->mutex);
    faults->before = {};
  }
  {
    const std::lock_guard lock(faults->flush_mutex);
    faults->before_flush = {};
  }
  auto again = open_store(folder.path(), options);
  ASSERT_NE(again, nullptr);
  std::array<Space, 3> after = {Space(*again, 1, {1, {16 * 1024}}), Space(*again, 2, {2, {20000, 12345}}),
                                Space(*again, 3, {1, {150'000}})};
  for (Space& space : after) {
    for (std::uint64_t chain = 0; chain < 30; ++chain) {
      for (std::uint64_t i = 0; i < 24; ++i) space.get(chain, i, 1);
    }
  }
  EXPECT_EQ(stats_of(*again).get_pages_corrupt, 0u);
  const tardis_stats s = stats_of(*again);
  EXPECT_EQ(s.slots_total, s.slots_live + s.slots_free + s.slots_quarantined);
  EXPECT_EQ(s.slots_quarantined, 0u);
  EXPECT_TRUE(again->close());
}

INSTANTIATE_TEST_SUITE_P(Loads, StoreThreads,
                         ::testing::Values(Load{"sync", Engine::kSync, false},
                                           Load{"io_uring", Engine::kIoUring, false},
                                           Load{"faults", Engine::kSync, true}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(StoreThreadsOnce, ConcurrentSetsOfTheSamePagesStoreThemOnce) {
  const TempFolder folder(memory_parent());
  auto store = open_store(folder.path(), small_store(4));
  Space space(*store, 1, {});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (std::uint64_t chain = 0; chain < 10; ++chain) EXPECT_EQ(space.put(chain, 0, 5), 5u);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(stats_of(*store).slots_live, 50u);
  expect_slots_conserved(*store);
}

TEST(StoreThreadsOnce, SeveralThreadsCloseAtOnce) {
  const TempFolder folder(memory_parent());
  auto store = open_store(folder.path(), small_store(2));
  Space space(*store, 1, {});
  space.put(1, 0, 5);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      EXPECT_TRUE(store->close());
      // Closed means closed for whoever was told so: the store can be opened again at once.
      EXPECT_EQ(StoreFolder(folder.path()).owner(), "");
    });
  }
  for (std::thread& thread : threads) thread.join();
  auto again = open_store(folder.path(), small_store(2));
  Space after(*again, 1, {});
  EXPECT_EQ(after.fetch(1, 0, 5), 5u);
}

}  // namespace
}  // namespace tardis::testing
