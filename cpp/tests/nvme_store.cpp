// SPDX-License-Identifier: Apache-2.0
// The store on an NvmeDevice over a namespace in memory.
#include <atomic>
#include <thread>

#include "nvme_store_support.h"
#include "store/list.h"
#include "store/live_verify.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;

class NvmeStore : public ::testing::Test {
 protected:
  std::unique_ptr<Store> open(const StoreOptions& options) {
    return open_store(home.path(), options, true, on(memory));
  }
  Error refusal(const StoreOptions& options, const DeviceFactory& device) {
    const auto store = Store::open(home.path(), options, true, device);
    EXPECT_FALSE(store);
    return store ? Error{Code::kOk, ""} : store.error();
  }

  TempFolder home{memory_parent()};
  std::shared_ptr<MemoryNamespace> memory = std::make_shared<MemoryNamespace>(64 * kMiB);
};

TEST_F(NvmeStore, StoresReadsAndFindsPagesAgain) {
  const Layout layout{3, {20'000, 12'345}};
  {
    auto store = open(small_store(4));
    Space space(*store, 1, layout);
    EXPECT_EQ(space.put(1, 0, 50), 50u);
    EXPECT_EQ(space.fetch(1, 0, 50), 50u);
    EXPECT_TRUE(store->flush());
    const std::string free = "\"free_bytes\":";
    EXPECT_NE(
        store->path_report_json().find(free + std::to_string(62 * kMiB - stats_of(*store).segments * kTestSegment)),
        std::string::npos)
        << store->path_report_json();
    EXPECT_TRUE(store->close());
    EXPECT_NE(store->path_report_json().find("\"engine\":\"nvme\""), std::string::npos);
    EXPECT_NE(store->path_report_json().find(free + "0"), std::string::npos);
  }
  for (const bool checkpoint : {true, false}) {
    if (!checkpoint) std::filesystem::remove(home.file("index.checkpoint"));
    auto store = open(small_store(4));
    Space space(*store, 1, layout);
    EXPECT_EQ(space.run(1, 0, 60), 50u);
    EXPECT_EQ(space.fetch(1, 0, 50), 50u);
    EXPECT_EQ(stats_of(*store).recovered_scanned, checkpoint ? 0u : stats_of(*store).segments);
    expect_slots_conserved(*store);
    EXPECT_TRUE(store->close());
  }
  for (const auto& item : std::filesystem::directory_iterator(home.file("segments"))) {
    EXPECT_EQ(item.file_size(), 0u);
  }
}

TEST_F(NvmeStore, EvictsDeletesAndListsAsOnFiles) {
  StoreOptions options = small_store(3);
  {
    auto store = open(options);
    Space space(*store, 1, {});
    for (std::uint64_t chain = 0; chain < 20; ++chain) EXPECT_EQ(space.put(chain, 0, 20), 20u);
    EXPECT_GT(stats_of(*store).evicted_pages, 0u);
    EXPECT_EQ(stats_of(*store).segments, 3u);
    EXPECT_EQ(space.fetch(19, 0, 20), 20u);
    expect_slots_conserved(*store);
    // Pages of another size make a segment change its class.
    Space large(*store, 2, {2, {150'000}});
    EXPECT_EQ(large.put(1, 0, 4), 4u);
    EXPECT_EQ(large.fetch(1, 0, 4), 4u);
    EXPECT_TRUE(store->close());
  }
  std::uint64_t listed = 0;
  ASSERT_TRUE(list_closed_store(home.path(), on(memory), [&](const ObjectInfo&) { return ++listed != 0; }));
  EXPECT_GT(listed, 50u);
  auto verified = verify_store(home.path(), /*repair=*/false, {}, on(memory));
  ASSERT_TRUE(verified) << verified.error().message;
  EXPECT_EQ(verified->report.objects, listed);
  EXPECT_EQ(verified->report.bad_headers + verified->report.bad_payloads + verified->report.torn, 0u);
  const auto inspected = inspect_store(home.path(), on(memory));
  ASSERT_TRUE(inspected) << inspected.error().message;
  EXPECT_NE(inspected->find("\"objects\":" + std::to_string(listed)), std::string::npos) << *inspected;
  EXPECT_NE(inspected->find("\"allocated_bytes\":" + std::to_string(3 * kTestSegment)), std::string::npos)
      << *inspected;
  {
    auto store = open(options);
    Space space(*store, 1, {});
    ASSERT_TRUE(store->clear(std::nullopt));
    EXPECT_FALSE(space.has(19, 0));
    EXPECT_TRUE(store->close());
  }
  listed = 0;
  ASSERT_TRUE(list_closed_store(home.path(), on(memory), [&](const ObjectInfo&) { return ++listed != 0; }));
  EXPECT_EQ(listed, 0u);
}

TEST_F(NvmeStore, AKilledProcessLosesNothingThatWasFlushed) {
  // The child's namespace is memory of its own: what it wrote is told by a shared file.
  const std::string image = home.file("image");
  in_killed_process([&] {
    auto store = open(small_store(4));
    Space space(*store, 1, {});
    EXPECT_EQ(space.put(1, 0, 20), 20u);
    EXPECT_TRUE(store->flush());
    std::vector<char> bytes(memory->bytes());
    memory->contents.read(0, bytes.data(), bytes.size());
    std::ofstream(image, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    (void)store.release();
  });
  const auto bytes = file_contents(image, 0, memory->bytes());
  ASSERT_EQ(bytes.size(), memory->bytes());
  memory->contents.write(0, bytes.data(), bytes.size());
  auto store = open(small_store(4));
  Space space(*store, 1, {});
  EXPECT_EQ(space.fetch(1, 0, 20), 20u);
}

TEST_F(NvmeStore, TakesTheCapacityThatFits) {
  StoreOptions options = small_store(1);
  options.capacity_bytes = 0;
  options.free_space_floor = std::uint64_t{1} << 60;  // of file systems
  auto store = open(options);
  const std::uint64_t total = stats_of(*store).capacity_bytes;
  EXPECT_GT(total, 60 * kMiB);
  EXPECT_LT(total, 64 * kMiB);
  Space space(*store, 1, {1, {1'000'000}});
  for (std::uint64_t chain = 0; chain < 40; ++chain) EXPECT_EQ(space.put(chain, 0, 3), 3u);
  EXPECT_EQ(stats_of(*store).segments, (total - kMetadataBytes) / kTestSegment);
  EXPECT_GT(stats_of(*store).evicted_pages, 0u);
  EXPECT_TRUE(store->close());
  options.capacity_bytes = total + 1;
  const Error error = refusal(options, on(memory));
  EXPECT_EQ(error.code, Code::kInvalidArgument);
  EXPECT_NE(error.message.find(std::to_string(total)), std::string::npos) << error.message;
  EXPECT_NE(error.message.find(std::to_string(total + 1)), std::string::npos) << error.message;
  TempFolder other{memory_parent()};
  const auto fresh = Store::open(other.path(), options, true, on(std::make_shared<MemoryNamespace>(64 * kMiB)));
  ASSERT_FALSE(fresh);
  EXPECT_EQ(fresh.error().code, Code::kInvalidArgument);
}

// Ranges are whole MiB: fewer such segments fit than the capacity counts. The store goes on with those.
TEST_F(NvmeStore, AnOddSegmentSizeLeavesRoomUnused) {
  StoreOptions options = small_store(1);
  options.segment_bytes = kTestSegment + 4096;
  options.capacity_bytes = 0;
  auto store = open(options);
  Space space(*store, 1, {1, {1'000'000}});
  for (std::uint64_t chain = 0; chain < 40; ++chain) EXPECT_EQ(space.put(chain, 0, 3), 3u);
  EXPECT_EQ(stats_of(*store).segments, 12u);
  EXPECT_EQ(space.fetch(39, 0, 3), 3u);
}

TEST_F(NvmeStore, GivesBackWhatASmallerCapacityLeavesFree) {
  {
    auto store = open(small_store(6));
    Space space(*store, 1, {});
    for (std::uint64_t chain = 0; chain < 10; ++chain) EXPECT_EQ(space.put(chain, 0, 20), 20u);
    EXPECT_TRUE(store->close());
  }
  {
    auto store = open(small_store(2));
    EXPECT_EQ(stats_of(*store).segments, 2u);
    // What is deleted now is not in a segment that comes back with its number.
    EXPECT_TRUE(store->clear(std::nullopt));
    EXPECT_TRUE(store->close());
  }
  auto store = open(small_store(6));
  Space space(*store, 1, {});
  EXPECT_EQ(stats_of(*store).slots_live, 0u);
  EXPECT_EQ(space.put(77, 0, 5), 5u);
  for (std::uint64_t chain = 100; chain < 115; ++chain) EXPECT_EQ(space.put(chain, 0, 20), 20u);
  EXPECT_EQ(stats_of(*store).segments, 6u);
  EXPECT_TRUE(store->close());
  std::filesystem::remove(home.file("index.checkpoint"));
  store = open(small_store(6));
  Space again(*store, 1, {});
  for (std::uint64_t chain = 0; chain < 10; ++chain) {
    for (std::uint64_t i = 0; i < 20; ++i) EXPECT_FALSE(again.has(chain, i)) << "a deleted page came back";
  }
  EXPECT_EQ(again.fetch(77, 0, 5), again.run(77, 0, 5));
}

// The namespace is full of an older store's segments, of the same numbers and classes: none of its pages may appear.
TEST_F(NvmeStore, StaleSegmentsBelowNewOnesAreNeverRead) {
  {
    auto store = open(small_store(12));
    Space space(*store, 1, {});
    for (std::uint64_t chain = 0; chain < 40; ++chain) EXPECT_EQ(space.put(chain, 0, 15), 15u);
    EXPECT_TRUE(store->close());
  }
  TempFolder fresh{memory_parent()};
  auto store = open_store(fresh.path(), small_store(12), true, on(memory, {.force = true}));
  Space space(*store, 1, {});
  EXPECT_EQ(space.put(1000, 0, 3), 3u);
  for (std::uint64_t chain = 2000; chain < 2020; ++chain) EXPECT_EQ(space.put(chain, 0, 10), 10u);
  EXPECT_TRUE(store->close());
  std::filesystem::remove(fresh.file("index.checkpoint"));
  store = open_store(fresh.path(), small_store(12), true, on(memory));
  const tardis_stats s = stats_of(*store);
  EXPECT_EQ(s.slots_live, 203u);
  expect_slots_conserved(*store);
  EXPECT_TRUE(store->close());
  auto verified = verify_store(fresh.path(), false, {}, on(memory));
  ASSERT_TRUE(verified);
  EXPECT_EQ(verified->report.objects, 203u);
  EXPECT_EQ(verified->report.bad_headers, 0u);
  // The older folder does not get its volume back.
  EXPECT_EQ(refusal(small_store(12), on(memory)).code, Code::kInvalidArgument);
}

// The index is made for as many objects as fit of the size that is there.
TEST_F(NvmeStore, TheIndexKnowsTheSizeOfTheObjects) {
  memory = std::make_shared<MemoryNamespace>(std::uint64_t{1} << 30);
  StoreOptions options = small_store(240);
  auto store = open(options);
  {
    Space space(*store, 1, {1, {4096}});
    EXPECT_EQ(space.put(1, 0, 5), 5u);
  }
  const std::uint64_t before = stats_of(*store).index_bytes;
  EXPECT_TRUE(store->close());
  store = open(options);
  EXPECT_GE(stats_of(*store).slots_total, 600u);
  EXPECT_GT(stats_of(*store).index_bytes, before);
}

TEST_F(NvmeStore, ManyThreadsUseItWhileItGrowsAndEvicts) {
  auto store = open(small_store(6));
  std::vector<std::thread> threads;
  std::atomic<std::uint64_t> found = 0;
  Space space(*store, 1, {});
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t round = 0; round < 30; ++round) {
        EXPECT_EQ(space.put(t * 100 + round, 0, 5), 5u);
        found += space.fetch(t * 100 + round, 0, 5);
        found += space.fetch((t + 1) % 4 * 100 + round, 0, 5);
        if (round % 8 == t) {
          EXPECT_TRUE(store->flush());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(found, 300u);
  EXPECT_EQ(stats_of(*store).segments, 6u);
  EXPECT_EQ(stats_of(*store).get_pages_corrupt, 0u);
  expect_slots_conserved(*store);
}

TEST_F(NvmeStore, IsNotTakenForAStoreOfFiles) {
  {
    auto store = open(small_store(3));
    Space space(*store, 1, {});
    EXPECT_EQ(space.put(1, 0, 10), 10u);
    EXPECT_TRUE(store->close());
  }
  const auto names = std::distance(std::filesystem::directory_iterator(home.file("segments")), {});
  for (const Error& error : {refusal(small_store(3), open_block_device), verify_store(home.path(), true, {}).error(),
                             inspect_store(home.path()).error(), verify_live_store(home.path(), {}).error(),
                             list_store(home.path(), [](const ObjectInfo&) { return true; }).error()}) {
    EXPECT_EQ(error.code, Code::kInvalidArgument);
    EXPECT_NE(error.message.find("raw namespace"), std::string::npos) << error.message;
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(home.file("segments")), {}), names);
  auto store = open(small_store(3));
  Space space(*store, 1, {});
  EXPECT_EQ(space.fetch(1, 0, 10), 10u);
  EXPECT_TRUE(store->close());
  // Nor a store of files for one on a namespace.
  TempFolder files{memory_parent()};
  { auto plain = open_store(files.path(), small_store(3)); }
  const auto error = Store::open(files.path(), small_store(3), true, on(std::make_shared<MemoryNamespace>(64 * kMiB)));
  ASSERT_FALSE(error);
  EXPECT_EQ(error.error().code, Code::kInvalidArgument);
  EXPECT_NE(error.error().message.find("in files"), std::string::npos);
  auto plain = open_store(files.path(), small_store(3));
  EXPECT_NE(plain, nullptr);
}

TEST_F(NvmeStore, ASecondStoreOnTheNamespaceIsBusy) {
  auto store = open(small_store(3));
  EXPECT_EQ(refusal(small_store(3), on(memory)).code, Code::kBusy);
  Space space(*store, 1, {});
  EXPECT_EQ(space.put(1, 0, 10), 10u);
}

TEST_F(NvmeStore, WorksOnBlocksOf4096Bytes) {
  memory = std::make_shared<MemoryNamespace>(64 * kMiB, 4096);
  auto store = open(small_store(4));
  Space space(*store, 1, {3, {5000, 3000}});
  EXPECT_EQ(space.put(1, 0, 30), 30u);
  EXPECT_EQ(space.fetch(1, 0, 30), 30u);
  EXPECT_TRUE(store->close());
  store = open(small_store(4));
  Space again(*store, 1, {3, {5000, 3000}});
  EXPECT_EQ(again.fetch(1, 0, 30), 30u);
}

TEST_F(NvmeStore, AFailedFlushUnpublishesItsPagesAndAFailedReadIsAMiss) {
  auto store = open(small_store(4));
  Space space(*store, 1, {});
  EXPECT_EQ(space.put(1, 0, 5), 5u);
  EXPECT_TRUE(store->flush());
  EXPECT_EQ(space.put(2, 0, 5), 5u);
  memory->before_flush = [] { return EIO; };
  EXPECT_FALSE(store->flush());
  memory->before_flush = nullptr;
  EXPECT_EQ(space.run(2, 0, 5), 0u);
  memory->before = [](const NamespaceRequest& r) { return r.op == NamespaceRequest::Op::kRead ? EIO : 0; };
  EXPECT_EQ(space.fetch(1, 0, 5), 0u);
  memory->before = nullptr;
  EXPECT_GT(stats_of(*store).slots_quarantined, 0u) << "what the medium lost";
  EXPECT_EQ(space.put(1, 0, 5), 5u);
  EXPECT_EQ(space.fetch(1, 0, 5), 5u);
}

}  // namespace
}  // namespace tardis::nvme::testing
