// SPDX-License-Identifier: Apache-2.0
#include <dirent.h>

#include <thread>

#include "store_support.h"

namespace tardis::testing {
namespace {

using Engine = BlockDeviceOptions::Engine;
using Direct = BlockDeviceOptions::Direct;

struct Case {
  const char* name;
  Layout layout;
};

const Case kCases[] = {
    {"tiny", {1, {64}}},
    {"odd", {1, {12345}}},
    {"parts_with_padding", {3, {20000, 12345}}},
    {"four_regions", {2, {1, 70000, 16384, 777}}},
    {"many_parts", {80, {1536, 1536}}},
    {"one_mib", {4, {128 * 1024, 128 * 1024}}},
    {"eight_mib", {2, {2 * 1024 * 1024 + 512, 2 * 1024 * 1024 - 512}}},
};

struct Path {
  const char* name;
  bool disk;
  Engine engine;
  Direct direct;
};

const Path kPaths[] = {
    {"disk_sync_direct", true, Engine::kSync, Direct::kAuto},
    {"disk_sync_buffered", true, Engine::kSync, Direct::kOff},
    {"disk_io_uring", true, Engine::kIoUring, Direct::kAuto},
    {"memory_sync", false, Engine::kSync, Direct::kAuto},
    {"memory_io_uring", false, Engine::kIoUring, Direct::kAuto},
};

class StoreRoundTrip : public ::testing::TestWithParam<Path> {};

TEST_P(StoreRoundTrip, EveryLayoutSurvivesAReopen) {
  const Path& path = GetParam();
  const TempFolder folder(path.disk ? std::string() : memory_parent());
  StoreOptions options = small_store(6, path.engine);
  options.device.direct = path.direct;
  options.segment_bytes = 20u << 20;
  options.capacity_bytes = 8 * options.segment_bytes + kMetadataBytes;
  for (int opening = 0; opening < 2; ++opening) {
    auto opened = Store::open(folder.path(), options, true);
    if (!opened && path.engine == Engine::kIoUring) GTEST_SKIP() << opened.error().message;
    ASSERT_TRUE(opened) << opened.error().message;
    Store& store = **opened;
    for (std::size_t i = 0; i < std::size(kCases); ++i) {
      SCOPED_TRACE(kCases[i].name);
      Space space(store, static_cast<std::uint8_t>(i), kCases[i].layout);
      if (opening == 0) {
        EXPECT_EQ(space.put(i, 0, 2), 2u);
      }
      EXPECT_EQ(space.fetch(i, 0, 2), 2u);
      EXPECT_EQ(space.run(i, 0, 3), 2u);
      // Memory at any address, and regions that touch each other.
      for (const std::size_t distance : {std::size_t{4}, std::size_t{513}}) {
        PageMemory memory(kCases[i].layout.parts, kCases[i].layout.regions, 1, distance, 0);
        const Hash256 key = page_key(100 + i + distance * 10, 0);
        std::uint8_t ok = 0;
        memory.write(0, space.seed(key));
        if (opening == 0) {
          EXPECT_TRUE(store.set(space.id(), &key, nullptr, memory.pieces(), 1, &ok));
        }
        memory.poison();
        EXPECT_TRUE(store.get(space.id(), &key, memory.pieces(), 1, &ok));
        EXPECT_TRUE(ok == 1 && memory.holds(0, space.seed(key)));
      }
    }
    expect_slots_conserved(store);
    EXPECT_EQ(stats_of(store).get_pages_corrupt, 0u);
    EXPECT_TRUE(store.close());
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, StoreRoundTrip, ::testing::ValuesIn(kPaths),
                         [](const auto& info) { return std::string(info.param.name); });

class StoreObjects : public ::testing::Test {
 protected:
  TempFolder folder{memory_parent()};
};

TEST_F(StoreObjects, ADuplicateInACallIsStoredOnce) {
  auto store = open_store(folder.path(), small_store(2));
  Space space(*store, 1, {});
  PageMemory memory(1, {64 * 1024}, 4);
  std::vector<Hash256> keys = {page_key(1, 0), page_key(1, 1), page_key(1, 0), page_key(1, 1)};
  for (std::size_t i = 0; i < 4; ++i) memory.write(i, space.seed(keys[i]));
  std::vector<std::uint8_t> ok(4);
  ASSERT_TRUE(store->set(space.id(), keys.data(), nullptr, memory.pieces(), 4, ok.data()));
  EXPECT_EQ(ok, std::vector<std::uint8_t>(4, 1));
  EXPECT_EQ(stats_of(*store).slots_live, 2u);
  memory.poison();
  ASSERT_TRUE(store->get(space.id(), keys.data(), memory.pieces(), 4, ok.data()));
  EXPECT_EQ(ok, std::vector<std::uint8_t>(4, 1));
  for (std::size_t i = 0; i < 4; ++i) EXPECT_TRUE(memory.holds(i, space.seed(keys[i])));
}

// Keys that agree in the 64 bits that headers keep of a parent are still different keys.
TEST_F(StoreObjects, KeysWithEqualFirstBytesAreDifferent) {
  auto store = open_store(folder.path(), small_store(2));
  Space space(*store, 1, {});
  std::vector<Hash256> keys(3);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i][31] = static_cast<std::uint8_t>(i + 1);
  PageMemory memory(1, {64 * 1024}, 3);
  for (std::size_t i = 0; i < 3; ++i) memory.write(i, i);
  std::vector<std::uint8_t> ok(3);
  ASSERT_TRUE(store->set(space.id(), keys.data(), nullptr, memory.pieces(), 3, ok.data()));
  memory.poison();
  ASSERT_TRUE(store->get(space.id(), keys.data(), memory.pieces(), 3, ok.data()));
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(ok[i] == 1 && memory.holds(i, i)) << i;
}

TEST_F(StoreObjects, EmptyCallsAndWrongHandles) {
  auto store = open_store(folder.path(), small_store(2));
  Space space(*store, 1, {});
  EXPECT_TRUE(store->set(space.id(), nullptr, nullptr, nullptr, 0, nullptr));
  EXPECT_TRUE(store->get(space.id(), nullptr, nullptr, 0, nullptr));
  EXPECT_EQ(*store->lookup(space.id(), nullptr, 0), 0u);
  const Hash256 key = page_key(1, 0);
  PageMemory memory(1, {64 * 1024}, 1);
  std::uint8_t ok = 7;
  const auto code = [](const Status& status) { return status ? Code::kOk : status.error().code; };
  EXPECT_EQ(code(store->set(99, &key, nullptr, memory.pieces(), 1, &ok)), Code::kInvalidArgument);
  EXPECT_EQ(ok, 0);
  EXPECT_EQ(code(store->get(99, &key, memory.pieces(), 1, &ok)), Code::kInvalidArgument);
  EXPECT_EQ(*store->clear(Fingerprint{99}), 0u) << "a namespace that nobody has opened";
  EXPECT_EQ(*store->lookup(99, &key, 1), 0u);
  EXPECT_TRUE(store->flush());
  EXPECT_TRUE(store->close());
  EXPECT_TRUE(store->close());
  EXPECT_EQ(code(store->set(space.id(), &key, nullptr, memory.pieces(), 1, &ok)), Code::kClosed);
  EXPECT_EQ(code(store->get(space.id(), &key, memory.pieces(), 1, &ok)), Code::kClosed);
  EXPECT_EQ(code(store->flush()), Code::kClosed);
  EXPECT_EQ(store->clear(std::nullopt).error().code, Code::kClosed);
  EXPECT_EQ(store->lookup(space.id(), &key, 1).error().code, Code::kClosed);
  EXPECT_EQ(store->open_namespace({}, "{}", 1, std::vector<std::uint64_t>{64}).error().code, Code::kClosed);
  // What tools print at the end must not need a device that is gone.
  EXPECT_NE(store->path_report_json().find("\"engine\""), std::string::npos);
  EXPECT_EQ(stats_of(*store).set_calls, 1u);
}

TEST_F(StoreObjects, SetIsIdempotent) {
  auto store = open_store(folder.path(), small_store(2));
  Space space(*store, 1, {});
  EXPECT_EQ(space.put(1, 0, 4), 4u);
  const auto written = stats_of(*store).io_writes;
  EXPECT_EQ(space.put(1, 0, 4), 4u);
  EXPECT_EQ(stats_of(*store).io_writes, written);
  EXPECT_EQ(stats_of(*store).set_pages_present, 4u);
  EXPECT_EQ(space.put(1, 2, 4), 4u);
  EXPECT_EQ(stats_of(*store).slots_live, 6u);
  EXPECT_EQ(space.fetch(1, 0, 6), 6u);
}

TEST_F(StoreObjects, LookupAndGetStopAtTheFirstAbsentPage) {
  auto store = open_store(folder.path(), small_store(2));
  Space space(*store, 1, {});
  space.put(1, 0, 2);
  space.put(1, 3, 2);
  EXPECT_EQ(space.run(1, 0, 5), 2u);
  EXPECT_EQ(space.get(1, 0, 5), (std::vector<std::uint8_t>{1, 1, 0, 0, 0}));
  EXPECT_EQ(stats_of(*store).get_pages_missed, 3u);
}

TEST_F(StoreObjects, NamespacesDoNotMix) {
  auto store = open_store(folder.path(), small_store(2));
  Space a(*store, 1, {}), b(*store, 2, {});
  a.put(1, 0, 3);
  EXPECT_EQ(b.run(1, 0, 3), 0u);
  EXPECT_EQ(b.fetch(1, 0, 3), 0u);
  b.put(1, 0, 2);
  EXPECT_EQ(a.fetch(1, 0, 3), 3u);
  EXPECT_EQ(b.fetch(1, 0, 3), 2u);
}

TEST_F(StoreObjects, ANamespaceKeepsItsTextAndLayout) {
  auto store = open_store(folder.path(), small_store(2));
  Space space(*store, 1, {});
  const Fingerprint same{1, 0x77};
  const std::vector<std::uint64_t> regions = {64 * 1024}, other = {32 * 1024};
  EXPECT_EQ(store->open_namespace(same, "another text", 1, regions).error().code, Code::kInvalidArgument);
  EXPECT_EQ(store->open_namespace(same, "{\"test\": 1}", 1, other).error().code, Code::kInvalidArgument);
  EXPECT_EQ(store->open_namespace(same, "{\"test\": 1}", 2, other).error().code, Code::kInvalidArgument);
  EXPECT_EQ(*store->open_namespace(same, "{\"test\": 1}", 1, regions), space.id());
  const auto invalid = [&](std::uint32_t parts, const std::vector<std::uint64_t>& r) {
    return store->open_namespace({5}, "{}", parts, r).error().code;
  };
  EXPECT_EQ(invalid(0, regions), Code::kInvalidArgument);
  EXPECT_EQ(invalid(1, {}), Code::kInvalidArgument);
  EXPECT_EQ(invalid(1, {0}), Code::kInvalidArgument);
  EXPECT_EQ(invalid(1, {64, 64, 64, 64, 64}), Code::kInvalidArgument);
  EXPECT_EQ(invalid(0xFFFFFFFF, {~0ull, ~0ull}), Code::kInvalidArgument);
  EXPECT_EQ(invalid(1, {kTestSegment}), Code::kInvalidArgument);
}

TEST_F(StoreObjects, ManyThreadsOpenTheSameNewNamespace) {
  auto store = open_store(folder.path(), small_store(2));
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (std::uint8_t i = 0; i < 20; ++i) {
        const std::vector<std::uint64_t> regions = {4096};
        if (!store->open_namespace({i, 9}, std::string(2000, 'x') + std::to_string(i), 1, regions)) ++failures;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
}

TEST_F(StoreObjects, NoDescriptorIsLeaked) {
  const auto open_descriptors = [] {
    DIR* folder = ::opendir("/proc/self/fd");
    int count = 0;
    while (::readdir(folder) != nullptr) ++count;
    ::closedir(folder);
    return count;
  };
  const int before = open_descriptors();
  for (const Engine engine : {Engine::kSync, Engine::kAuto}) {
    for (int round = 0; round < 3; ++round) {
      auto store = open_store(folder.path(), small_store(3, engine));
      Space space(*store, 1, {});
      space.put(static_cast<std::uint64_t>(round), 0, 60);
    }
    EXPECT_FALSE(Store::open(folder.path() + "/nowhere", small_store(1), false));
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST_F(StoreObjects, AReadOnlyFolderIsRefusedByName) {
  { auto store = open_store(folder.path(), small_store(2)); }
  const auto open_as_another_user = [&]() -> Result<std::unique_ptr<Store>> {
    // Root may write anywhere; anybody else is stopped by the folder's mode.
    const bool root = ::geteuid() == 0;
    ::chmod(folder.path().c_str(), root ? 0555 : 0500);
    if (root && ::seteuid(65534) != 0) return errno_error(errno, "seteuid");
    auto store = Store::open(folder.path(), small_store(2), true);
    if (root && ::seteuid(0) != 0) ::_exit(1);
    ::chmod(folder.path().c_str(), 0700);
    return store;
  };
  auto store = open_as_another_user();
  ASSERT_FALSE(store);
  EXPECT_EQ(store.error().code, Code::kPermission);
  EXPECT_NE(store.error().message.find(folder.path()), std::string::npos);
}

TEST_F(StoreObjects, APathThatIsAFileIsRefused) {
  std::ofstream(folder.file("file")) << "x";
  auto store = Store::open(folder.file("file"), small_store(2), true);
  ASSERT_FALSE(store);
  EXPECT_NE(store.error().message.find(folder.file("file")), std::string::npos);
  auto below = Store::open(folder.file("file") + "/store", small_store(2), true);
  ASSERT_FALSE(below);
}

TEST_F(StoreObjects, AbsurdSizesAreRefused) {
  StoreOptions options = small_store(2);
  options.segment_bytes = ~0ull - 8191;
  EXPECT_EQ(Store::open(folder.path() + "/a", options, true).error().code, Code::kInvalidArgument);
  options = small_store(2);
  options.capacity_bytes = 1;
  EXPECT_EQ(Store::open(folder.path() + "/b", options, true).error().code, Code::kInvalidArgument);
  options = small_store(2);
  options.free_space_floor = ~0ull;
  EXPECT_FALSE(Store::open(folder.path() + "/c", options, true));
}

}  // namespace
}  // namespace tardis::testing
