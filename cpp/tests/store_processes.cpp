// SPDX-License-Identifier: Apache-2.0
// Several processes in one store: they see each other's pages, share one capacity, and none depends on another's life.
#include <sys/mount.h>

#include <atomic>
#include <condition_variable>
#include <thread>

#include "child_process.h"
#include "store_support.h"

namespace tardis::testing {
namespace {

void wait_for(const std::atomic<std::uint32_t>& counter, std::uint32_t value) {
  for (int i = 0; i < 20'000 && counter.load() < value; ++i) ::usleep(1000);
  ASSERT_GE(counter.load(), value);
}

class StoreProcesses : public ::testing::Test {
 protected:
  TempFolder folder{memory_parent()};
};

TEST_F(StoreProcesses, SeeEachOthersPagesAtOnce) {
  const StoreOptions options = small_store(4);
  auto first = open_store(folder.path(), options);
  auto second = open_store(folder.path(), options);
  Space a(*first, 1, {}), b(*second, 1, {}), other(*second, 2, {});
  EXPECT_EQ(a.put(1, 0, 10), 10u);
  EXPECT_EQ(b.fetch(1, 0, 10), 10u);
  EXPECT_EQ(b.put(1, 10, 60), 60u);
  EXPECT_EQ(a.fetch(1, 0, 70), 70u);
  EXPECT_EQ(other.run(1, 0, 10), 0u);
  EXPECT_EQ(stats_of(*first).processes, 2u);
  EXPECT_EQ(stats_of(*first).slots_live, stats_of(*second).slots_live);
  EXPECT_TRUE(first->close());
  EXPECT_EQ(b.fetch(1, 0, 70), 70u) << "the others go on";
  EXPECT_EQ(b.put(2, 0, 5), 5u);
  EXPECT_TRUE(second->close());
  auto again = open_store(folder.path(), options);
  Space after(*again, 1, {});
  EXPECT_EQ(after.fetch(1, 0, 70) + after.fetch(2, 0, 5), 75u);
  EXPECT_EQ(stats_of(*again).recovered_scanned, 0u) << "the last one to leave wrote a checkpoint";
  expect_slots_conserved(*again);
}

TEST_F(StoreProcesses, OneCapacityForAll) {
  const StoreOptions options = small_store(4);
  std::vector<std::unique_ptr<Store>> stores;
  std::vector<Space> spaces;
  for (std::uint8_t i = 0; i < 4; ++i) {
    stores.push_back(open_store(folder.path(), options));
    spaces.emplace_back(*stores.back(), i, Layout{});
  }
  for (int round = 0; round < 5; ++round) {
    for (auto& space : spaces) EXPECT_EQ(space.put(static_cast<std::uint64_t>(round), 0, 40), 40u);
  }
  const tardis_stats s = stats_of(*stores[0]);
  EXPECT_EQ(s.segments, 4u);
  EXPECT_LE(s.allocated_bytes, s.capacity_bytes);
  EXPECT_EQ(s.slots_total, 4u * 48u);
  for (auto& space : spaces) {
    for (std::uint64_t chain = 0; chain < 5; ++chain) space.get(chain, 0, 40);  // checks the bytes
  }
  expect_slots_conserved(*stores[1]);
}

// On a drive, where a flush takes its time.
TEST_F(StoreProcesses, NoReadRunsBesideTwoFlushesOfOtherProcesses) {
  TempFolder drive;
  StoreOptions options = small_store(8);
  options.flush_milliseconds = 1;
  auto reading = open_store(drive.path(), options);
  std::array<std::unique_ptr<Store>, 2> writing;
  for (auto& store : writing) store = open_store(drive.path(), options);
  Space mine(*reading, 1, {});
  ASSERT_EQ(mine.put(1, 0, 40), 40u);
  ASSERT_TRUE(reading->flush());
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  for (std::uint8_t i = 0; i < 2; ++i) {
    writers.emplace_back([&, i] {
      Space space(*writing[i], static_cast<std::uint8_t>(2 + i), {});
      for (std::uint64_t chain = 0; !stop; chain = (chain + 1) % 8) {
        space.put(chain, 0, 8);
        EXPECT_TRUE(writing[i]->flush());
        EXPECT_TRUE(writing[i]->clear(space.fingerprint()));
      }
    });
  }
  const auto begin = std::chrono::steady_clock::now();
  const auto passed = [&] { return std::chrono::steady_clock::now() - begin; };
  // On a slow machine until a flush of the others has been met.
  while (passed() < std::chrono::seconds(2) ||
         (stats_of(*reading).read_batches_delayed == 0 && passed() < std::chrono::minutes(1))) {
    EXPECT_EQ(mine.fetch(1, 0, 40), 40u);
  }
  stop = true;
  for (auto& writer : writers) writer.join();
  const tardis_stats s = stats_of(*reading);
  EXPECT_GT(s.read_batches_delayed, 0u) << "flushes of the others are seen here";
  EXPECT_EQ(s.read_batches_delayed_again, 0u);
  EXPECT_LE(s.max_flushes_per_read_batch, 1u);
}

TEST_F(StoreProcesses, ADifferentCapacityIsRefusedWithBothValues) {
  auto store = open_store(folder.path(), small_store(4));
  const auto second = Store::open(folder.path(), small_store(5), true);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, Code::kInvalidArgument);
  for (const std::uint64_t segments : {4, 5}) {
    EXPECT_NE(second.error().message.find(std::to_string(segments * kTestSegment + kMetadataBytes)), std::string::npos)
        << second.error().message;
  }
  StoreOptions unset = small_store(4);
  unset.capacity_bytes = 0;
  EXPECT_TRUE(Store::open(folder.path(), unset, true)) << "who says nothing takes what there is";
}

TEST_F(StoreProcesses, AnotherSharedMemoryIsRefusedWithTheReason) {
  auto store = open_store(folder.path(), small_store(2));
  StoreOptions elsewhere = small_store(2);
  elsewhere.live_folder = folder.file("shm");
  std::filesystem::create_directory(elsewhere.live_folder);
  const auto second = Store::open(folder.path(), elsewhere, true);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, Code::kBusy);
  EXPECT_NE(second.error().message.find(elsewhere.live_folder), std::string::npos) << second.error().message;
  Space space(*store, 1, {});
  EXPECT_EQ(space.put(1, 0, 3), 3u) << "the first is not disturbed";
}

TEST_F(StoreProcesses, SharedMemoryThatIsTooSmallIsRefusedByName) {
  const std::string mount = folder.file("shm");
  std::filesystem::create_directory(mount);
  if (::mount("tmpfs", mount.c_str(), "tmpfs", 0, "size=256k") != 0) GTEST_SKIP() << "mounting a tmpfs needs root";
  StoreOptions options = small_store(2);
  options.live_folder = mount;
  const auto refused = Store::open(folder.file("store"), options, true);
  ::umount2(mount.c_str(), MNT_DETACH);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kNoSpace);
  EXPECT_NE(refused.error().message.find("--shm-size"), std::string::npos) << refused.error().message;
}

TEST_F(StoreProcesses, AnOfflineToolIsToldWhoHasTheStore) {
  auto store = open_store(folder.path(), small_store(2));
  const auto report = verify_store(folder.path(), false, {});
  ASSERT_FALSE(report);
  EXPECT_EQ(report.error().code, Code::kBusy);
  EXPECT_NE(report.error().message.find("pid " + std::to_string(::getpid())), std::string::npos);
  EXPECT_TRUE(store->close());
  EXPECT_TRUE(verify_store(folder.path(), false, {}));
}

TEST_F(StoreProcesses, NothingIsLeftInSharedMemory) {
  StoreOptions options = small_store(2);
  options.live_folder = folder.file("shm");
  std::filesystem::create_directory(options.live_folder);
  const auto tables = [&] {
    const std::filesystem::directory_iterator items(options.live_folder);
    return std::distance(begin(items), end(items));
  };
  {
    auto first = open_store(folder.path(), options);
    auto second = open_store(folder.path(), options);
    EXPECT_EQ(tables(), 1);
  }
  EXPECT_EQ(tables(), 0);
  ChildProcess([&] {
    auto store = open_store(folder.path(), options);
    ::raise(SIGKILL);
  }).join_killed();
  EXPECT_EQ(tables(), 1);
  { auto store = open_store(folder.path(), options); }
  EXPECT_EQ(tables(), 0) << "the table of a killed process goes with the next one's";
}

// Killed at every stage of a set(): the others find no half page, get its slots and segments back, and go on.
TEST_F(StoreProcesses, AKilledWriterHoldsNobodyUp) {
  const StoreOptions options = small_store(1);  // one segment: whoever writes holds all there is
  auto store = open_store(folder.path(), options);
  Space space(*store, 1, {});
  ASSERT_EQ(space.put(1, 0, 10), 10u);
  for (int stage = 1; stage <= 3; ++stage) {
    ChildProcess([&] {
      int writes = 0;
      auto own = open_store(folder.path(), options, true, hooked([&](std::span<IoRequest> requests) {
                              if (requests.front().op == IoRequest::Op::kWrite && ++writes == stage) ::raise(SIGKILL);
                            }));
      Space mine(*own, 1, {});
      mine.put(2, 0, 12);
      ::raise(SIGKILL);
    }).join_killed();
    EXPECT_EQ(space.fetch(1, 0, 10), 10u);
    EXPECT_EQ(space.put(10 + static_cast<std::uint64_t>(stage), 0, 10), 10u) << "stage " << stage;
    space.get(2, 0, 12);  // checks the bytes
    expect_slots_conserved(*store);
  }
  EXPECT_EQ(space.put(20, 0, 48), 48u) << "every slot can be had";
}

TEST_F(StoreProcesses, WhatAKilledProcessPublishedStaysAndIsMadeDurableByOthers) {
  const StoreOptions options = small_store(4);
  auto store = open_store(folder.path(), options);
  ChildProcess([&] {
    auto own = open_store(folder.path(), options);
    Space mine(*own, 1, {});
    mine.put(1, 0, 20);  // its group is never flushed
    ::raise(SIGKILL);
  }).join_killed();
  Space space(*store, 1, {});
  EXPECT_EQ(space.fetch(1, 0, 20), 20u);
  const std::uint64_t held = stats_of(*store).durable_group;
  { auto another = open_store(folder.path(), options); }  // whoever joins takes over what is left
  EXPECT_GT(stats_of(*store).durable_group, held);
  EXPECT_EQ(stats_of(*store).processes, 1u);
}

// A reader in one process stands still in its batch while another fills the store several times over.
TEST_F(StoreProcesses, ALeaseHoldsAgainstOtherProcesses) {
  const StoreOptions options = small_store(1);
  auto writer = open_store(folder.path(), options);
  Space space(*writer, 1, {});
  ASSERT_EQ(space.put(1, 0, 4), 4u);
  SharedValue<std::atomic<std::uint32_t>> step;
  ChildProcess reader([&] {
    auto own = open_store(folder.path(), options, true, hooked([&](std::span<IoRequest> requests) {
                            if (requests.front().op != IoRequest::Op::kRead || step->load() > 0) return;
                            step->store(1);
                            wait_for(*step, 2);
                          }));
    Space mine(*own, 1, {});
    EXPECT_EQ(mine.get(1, 0, 4), std::vector<std::uint8_t>(4, 1)) << "bytes were overwritten under the reader";
  });
  wait_for(*step, 1);
  for (std::uint64_t chain = 100; chain < 130; ++chain) EXPECT_EQ(space.put(chain, 0, 7), 7u);
  EXPECT_EQ(space.run(1, 0, 4), 4u) << "a page under another process's lease was evicted";
  step->store(2);
  reader.join();
}

// The pages under a lease of a process that died can be had.
TEST_F(StoreProcesses, ALeaseDiesWithItsProcess) {
  const StoreOptions options = small_store(1);
  auto store = open_store(folder.path(), options);
  Space space(*store, 1, {});
  ASSERT_EQ(space.put(1, 0, 48), 48u);
  ChildProcess([&] {
    auto own = open_store(folder.path(), options, true, hooked([&](std::span<IoRequest> requests) {
                            if (requests.front().op == IoRequest::Op::kRead) ::raise(SIGKILL);
                          }));
    Space mine(*own, 1, {});
    mine.get(1, 0, 48);
  }).join_killed();
  EXPECT_EQ(space.put(2, 0, 48), 48u);
}

TEST_F(StoreProcesses, TheSameKeysAtOnceAreStoredOnce) {
  constexpr std::uint32_t kProcesses = 4;
  const StoreOptions options = small_store(8);
  auto store = open_store(folder.path(), options);
  SharedValue<std::array<std::atomic<std::uint32_t>, 30>> ready;
  std::vector<std::unique_ptr<ChildProcess>> children;
  for (std::uint32_t p = 0; p < kProcesses; ++p) {
    children.push_back(std::make_unique<ChildProcess>([&] {
      auto own = open_store(folder.path(), options);
      Space mine(*own, 1, {});
      for (std::uint64_t chain = 0; chain < ready->size(); ++chain) {
        (*ready)[chain].fetch_add(1);
        wait_for((*ready)[chain], kProcesses);  // all at once
        EXPECT_EQ(mine.put(chain, 0, 5), 5u);
        EXPECT_EQ(mine.fetch(chain, 0, 5), 5u);
      }
    }));
  }
  for (auto& child : children) child->join();
  EXPECT_EQ(stats_of(*store).slots_live, 5 * ready->size());
  expect_slots_conserved(*store);
}

TEST_F(StoreProcesses, WhatOneDeletesStaysDeletedForAll) {
  const StoreOptions options = small_store(4);
  {
    auto first = open_store(folder.path(), options);
    auto second = open_store(folder.path(), options);
    Space a(*first, 1, {}), b(*second, 1, {}), c(*second, 2, {});
    a.put(1, 0, 20);
    b.put(2, 0, 20);
    c.put(1, 0, 10);
    EXPECT_EQ(*first->clear(a.fingerprint()), 40u);
    EXPECT_EQ(b.run(2, 0, 20), 0u);
    EXPECT_EQ(b.put(2, 0, 3), 3u);
    EXPECT_EQ(c.fetch(1, 0, 10), 10u);
  }
  std::filesystem::remove(folder.file("index.checkpoint"));
  auto store = open_store(folder.path(), options);
  Space space(*store, 1, {});
  EXPECT_EQ(space.run(1, 0, 20), 0u);
  EXPECT_EQ(space.fetch(2, 0, 20), 3u);
}

// How long the tests below go on; the whole suite asks for minutes, a run by hand for as little as tells anything.
double campaign_seconds() {
  const char* text = std::getenv("TARDIS_CAMPAIGN_SECONDS");
  return text == nullptr ? 3.0 : std::atof(text);
}

// A whole host: readers of one namespace beside a writer that keeps the store full. The writer is stopped at random
// moments, as if it held whatever it holds for ever, and in the end killed; then the next one comes. No reader may wait
// for it: each must get on while the writer stands still.
TEST_F(StoreProcesses, ReadersNeverWaitForAWriter) {
  constexpr std::uint32_t kReaders = 8;
  const StoreOptions options = small_store(2, BlockDeviceOptions::Engine::kAuto);
  struct State {
    std::atomic<std::uint32_t> stop, ready;
    std::atomic<std::uint32_t> calls[kReaders], pages[kReaders];
    std::atomic<std::uint32_t> written;
  };
  SharedValue<State> state;
  std::vector<std::unique_ptr<ChildProcess>> readers;
  for (std::uint32_t r = 0; r < kReaders; ++r) {
    readers.push_back(std::make_unique<ChildProcess>([&, r] {
      auto own = open_store(folder.path(), options);
      Space mine(*own, 1, {});
      state->ready.fetch_add(1);
      std::mt19937_64 random(r);
      while (state->stop.load() == 0) {
        const auto ok = mine.get(random() % 40, 0, 1 + random() % 6);  // checks the bytes
        state->calls[r].fetch_add(1);
        state->pages[r].fetch_add(static_cast<std::uint32_t>(std::count(ok.begin(), ok.end(), 1)));
      }
      EXPECT_EQ(stats_of(*own).get_pages_corrupt + stats_of(*own).get_pages_failed, 0u);
    }));
  }
  wait_for(state->ready, kReaders);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(campaign_seconds());
  std::mt19937_64 random(77);
  std::uint32_t stops = 0, waits = 0;
  for (std::uint64_t seed = 0; std::chrono::steady_clock::now() < end; ++seed) {
    const std::uint32_t before = state->written.load();
    ChildProcess writer([&] {
      auto own = open_store(folder.path(), options);
      Space mine(*own, 1, {});
      std::mt19937_64 dice(seed);
      while (true) state->written.fetch_add(static_cast<std::uint32_t>(mine.put(dice() % 40, 0, 1 + dice() % 6)));
    });
    wait_for(state->written, before + 200);
    for (int i = 0; i < 5; ++i) {
      writer.signal(SIGSTOP);
      ++stops;
      std::array<std::uint32_t, kReaders> calls;
      for (std::uint32_t r = 0; r < kReaders; ++r) calls[r] = state->calls[r].load();
      // Two more calls: the first may have begun before the writer stopped.
      for (std::uint32_t r = 0; r < kReaders; ++r) {
        for (int ms = 0; ms < 20'000 && state->calls[r].load() - calls[r] < 2; ++ms) ::usleep(1000);
        waits += state->calls[r].load() - calls[r] < 2;
      }
      writer.signal(SIGCONT);
      ::usleep(static_cast<useconds_t>(random() % 20'000));
    }
    writer.kill();
  }
  EXPECT_EQ(waits, 0u) << "readers that did not get on while the writer stood still, of " << stops << " stops";
  state->stop.store(1);
  for (auto& reader : readers) reader->join();
  for (const auto& pages : state->pages) EXPECT_GT(pages.load(), 0u);
  RecordProperty("stops", static_cast<int>(stops));
  auto store = open_store(folder.path(), options);
  Space space(*store, 1, {});
  for (std::uint64_t chain = 0; chain < 40; ++chain) space.get(chain, 0, 6);
  EXPECT_EQ(stats_of(*store).get_pages_corrupt, 0u);
  expect_slots_conserved(*store);
}

// Nothing grows that should not: blocks on disk, memory, descriptors.
TEST_F(StoreProcesses, LongChurnStaysWithinItsBounds) {
  const StoreOptions options = small_store(4);
  auto store = open_store(folder.path(), options);
  Space small(*store, 1, {1, {16 * 1024}}), large(*store, 2, {2, {100'000}});
  const auto on_disk = [&] {
    std::uint64_t bytes = 0;
    for (const auto& item : std::filesystem::recursive_directory_iterator(folder.path())) {
      struct stat status {};
      if (::stat(item.path().c_str(), &status) == 0) bytes += static_cast<std::uint64_t>(status.st_blocks) * 512;
    }
    return bytes;
  };
  const auto resident = [] {
    std::ifstream file("/proc/self/statm");
    std::uint64_t size = 0, pages = 0;
    file >> size >> pages;
    return pages * 4096;
  };
  const auto descriptors = [] {
    const std::filesystem::directory_iterator items("/proc/self/fd");
    return std::distance(begin(items), end(items));
  };
  std::mt19937_64 random(3);
  const auto churn = [&](double seconds) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (std::chrono::steady_clock::now() < end) {
      Space& space = random() % 2 == 0 ? small : large;
      space.put(random() % 200, 0, 1 + random() % 20);
      space.get(random() % 200, 0, 8);
      if (random() % 200 == 0) {
        EXPECT_TRUE(store->flush());
      }
      EXPECT_LE(on_disk(), options.capacity_bytes);
    }
  };
  churn(0.3 * campaign_seconds());  // until everything has reached its size
  const std::uint64_t memory = resident();
  const auto files = descriptors();
  churn(0.7 * campaign_seconds());
  for (int more = 0; more < 60 && stats_of(*store).evicted_pages <= 100; ++more) churn(1);  // on a slow machine
  EXPECT_LE(descriptors(), files + 2);
  EXPECT_LE(resident(), memory + (8u << 20));
  EXPECT_GT(stats_of(*store).evicted_pages, 100u);
  expect_slots_conserved(*store);
}

TEST_F(StoreProcesses, ManyOpenAndCloseAtOnce) {
  SharedValue<std::atomic<std::uint64_t>> evicted;  // where waiting for a slow process had to end
  std::vector<std::unique_ptr<ChildProcess>> children;
  for (std::uint64_t p = 0; p < 6; ++p) {
    children.push_back(std::make_unique<ChildProcess>([&, p] {
      for (std::uint64_t round = 0; round < 8; ++round) {
        auto own = open_store(folder.file("new"), small_store(4));
        if (own == nullptr) return;
        Space mine(*own, 1, {});
        EXPECT_EQ(mine.put(p * 100 + round, 0, 3), 3u);
        EXPECT_EQ(mine.fetch(p * 100 + round, 0, 3), 3u);
        *evicted += stats_of(*own).evicted_pages;
      }
    }));
  }
  for (auto& child : children) child->join();
  auto store = open_store(folder.file("new"), small_store(4));
  EXPECT_EQ(stats_of(*store).slots_live + *evicted, 6u * 8u * 3u);
  expect_slots_conserved(*store);
}

}  // namespace
}  // namespace tardis::testing
