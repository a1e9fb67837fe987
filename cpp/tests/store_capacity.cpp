// SPDX-License-Identifier: Apache-2.0
// A store that is full: what goes, what stays, and what happens when two page sizes or other programs compete for the
// space.
#include <sys/mount.h>

#include "store_support.h"

namespace tardis::testing {
namespace {

std::uint64_t allocated_on_disk(const std::string& folder) {
  std::uint64_t bytes = 0;
  for (const auto& item : std::filesystem::recursive_directory_iterator(folder)) {
    struct stat status {};
    if (::stat(item.path().c_str(), &status) == 0) bytes += static_cast<std::uint64_t>(status.st_blocks) * 512;
  }
  return bytes;
}

class StoreCapacity : public ::testing::Test {
 protected:
  // Every stored page's parent is stored: chains are seen as their longest stored run, and nothing lies behind it.
  static std::size_t expect_prefixes(Space& space, const std::map<std::uint64_t, std::uint64_t>& lengths) {
    std::size_t live = 0;
    for (const auto& [chain, length] : lengths) {
      const std::size_t run = space.run(chain, 0, length);
      for (std::uint64_t i = run; i < length; ++i)
        EXPECT_FALSE(space.has(chain, i)) << "page " << i << " of " << chain << " behind a hole";
      live += run;
    }
    return live;
  }

  TempFolder folder{memory_parent()};
};

TEST_F(StoreCapacity, AFullStoreStaysWithinItsCapAndKeepsPrefixes) {
  const StoreOptions options = small_store(4);
  auto store = open_store(folder.path(), options);
  Space space(*store, 1, {});
  std::mt19937_64 random(1);
  std::map<std::uint64_t, std::uint64_t> lengths;
  const std::size_t slots = 4 * 48;
  std::size_t written = 0;
  while (written < 3 * slots) {
    const std::uint64_t chain = random() % 40;
    std::uint64_t& length = lengths[chain];
    const std::size_t have = space.run(chain, 0, length), count = 1 + random() % 9;
    EXPECT_EQ(space.put(chain, have, count), count);
    length = std::max(length, have + count);
    written += count;
    if (random() % 8 == 0) {
      EXPECT_EQ(expect_prefixes(space, lengths), stats_of(*store).slots_live);
      EXPECT_LE(allocated_on_disk(folder.path()), options.capacity_bytes);
      EXPECT_GT(space.fetch(chain, 0, have + count), 0u);
    }
  }
  const tardis_stats s = stats_of(*store);
  EXPECT_EQ(s.slots_total, slots);
  EXPECT_EQ(s.segments, 4u);
  EXPECT_GT(s.evicted_pages, slots);
  EXPECT_LE(s.allocated_bytes, s.capacity_bytes);
  expect_slots_conserved(*store);
  EXPECT_TRUE(store->close());
  EXPECT_LE(allocated_on_disk(folder.path()), options.capacity_bytes);
  store = open_store(folder.path(), options);
  Space again(*store, 1, {});
  for (const auto& [chain, length] : lengths) again.get(chain, 0, length);  // checks the bytes
  EXPECT_EQ(stats_of(*store).get_pages_corrupt, 0u);
  expect_slots_conserved(*store);
}

TEST_F(StoreCapacity, AChainLongerThanTheStoreKeepsItsBeginning) {
  auto store = open_store(folder.path(), small_store(2));
  Space space(*store, 1, {});
  EXPECT_EQ(space.put(7, 0, 20), 20u);
  Status why;
  EXPECT_EQ(space.put(1, 0, 150, &why), 96u);
  EXPECT_EQ(why.error().code, Code::kNoSpace);
  EXPECT_NE(why.error().message.find("capacity"), std::string::npos) << why.error().message;
  EXPECT_EQ(space.fetch(1, 0, 150), 96u);
  EXPECT_EQ(stats_of(*store).set_pages_dropped, 54u);
  // Nothing can make room for the next page of a chain that holds the whole store: its own beginning is not given up.
  EXPECT_EQ(space.put(1, 96, 3, &why), 0u);
  EXPECT_EQ(why.error().code, Code::kNoSpace);
  EXPECT_EQ(space.fetch(1, 0, 96), 96u);
  EXPECT_EQ(space.put(2, 0, 3), 3u) << "another chain takes its end";
  EXPECT_EQ(space.run(1, 0, 96), 93u);
  expect_slots_conserved(*store);
}

// A reader that stands still in its batch while others fill the store several times over.
TEST_F(StoreCapacity, PagesBeingReadAreNotOverwritten) {
  std::function<void()> pause = [] {};
  auto store = open_store(folder.path(), small_store(1), true, hooked([&](std::span<IoRequest> requests) {
                            if (requests.front().op == IoRequest::Op::kRead) pause();
                          }));
  Space space(*store, 1, {});
  ASSERT_EQ(space.put(1, 0, 4), 4u);
  ASSERT_EQ(space.put(2, 0, 44), 44u);
  bool paused = false;
  pause = [&] {
    if (std::exchange(paused, true)) return;
    for (std::uint64_t chain = 100; chain < 140; ++chain) EXPECT_EQ(space.put(chain, 0, 7), 7u);
    EXPECT_EQ(space.run(1, 0, 4), 4u) << "a page under a lease was evicted";
    EXPECT_EQ(space.run(2, 0, 44), 0u);
    // Deleting is allowed: the slots stay out of use until the reader has left.
    EXPECT_TRUE(store->clear(std::nullopt));
    EXPECT_EQ(space.put(200, 0, 48), 44u);
    EXPECT_EQ(stats_of(*store).slots_writing, 4u);
  };
  EXPECT_EQ(space.get(1, 0, 4), std::vector<std::uint8_t>(4, 1)) << "bytes were overwritten under the reader";
  expect_slots_conserved(*store);
  EXPECT_EQ(space.put(201, 0, 4), 4u);
}

TEST_F(StoreCapacity, FreeSpaceFloorIsHonouredAndNamed) {
  StoreOptions options = small_store(64);
  {
    auto store = open_store(folder.path(), options);
    Space space(*store, 1, {});
    EXPECT_EQ(space.put(1, 0, 48), 48u);  // one segment
  }
  options.free_space_floor = std::uint64_t{1} << 60;  // more than any disk has: the store must not grow at all
  auto store = open_store(folder.path(), options);
  Space space(*store, 1, {});
  Status why;
  EXPECT_EQ(space.put(1, 48, 10, &why), 0u);
  ASSERT_FALSE(why);
  EXPECT_EQ(why.error().code, Code::kNoSpace);
  EXPECT_NE(why.error().message.find("free_space_floor"), std::string::npos) << why.error().message;
  EXPECT_EQ(stats_of(*store).segments, 1u);
  EXPECT_EQ(space.put(2, 0, 10), 10u) << "the segment there is goes on working";
  EXPECT_EQ(stats_of(*store).segments, 1u);
  EXPECT_FALSE(Store::open(folder.path() + "/new", options, true)) << "a new store asks for the floor too";
}

// A small file system of its own, filled by somebody else.
TEST_F(StoreCapacity, AFullDiskLosesNothing) {
  const std::string mount = folder.file("mount");
  std::filesystem::create_directory(mount);
  if (::mount("tmpfs", mount.c_str(), "tmpfs", 0, "size=20m") != 0) GTEST_SKIP() << "mounting a tmpfs needs root";
  struct Unmount {
    std::string path;
    ~Unmount() { ::umount2(path.c_str(), MNT_DETACH); }
  } unmount{mount};
  StoreOptions options = small_store(64);
  const std::string path = mount + "/store";
  {
    auto store = open_store(path, options);
    Space space(*store, 1, {});
    ASSERT_EQ(space.put(1, 0, 60), 60u);  // two segments
    ASSERT_TRUE(store->flush());
    {
      std::ofstream hog(mount + "/hog", std::ios::binary);
      const std::vector<char> block(1 << 20);
      while (hog.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
      }
    }
    Status why;
    EXPECT_EQ(space.put(1, 60, 100, &why), 36u) << "the free slots of the segments there are";
    ASSERT_FALSE(why);
    EXPECT_EQ(why.error().code, Code::kNoSpace);
    EXPECT_NE(why.error().message.find(path), std::string::npos) << why.error().message;
    EXPECT_EQ(space.fetch(1, 0, 96), 96u);
    EXPECT_TRUE(store->close());
  }
  {
    auto store = open_store(path, options);  // opens on a full disk
    Space space(*store, 1, {});
    EXPECT_EQ(space.fetch(1, 0, 96), 96u);
    EXPECT_EQ(space.put(2, 0, 10), 10u) << "by eviction";
    std::filesystem::remove(mount + "/hog");
    EXPECT_EQ(space.put(3, 0, 90), 90u);
    EXPECT_EQ(stats_of(*store).segments, 4u);
    EXPECT_EQ(space.fetch(3, 0, 90), 90u);
    expect_slots_conserved(*store);
    std::size_t files = 0;
    for ([[maybe_unused]] const auto& item : std::filesystem::directory_iterator(path + "/segments")) ++files;
    EXPECT_EQ(files, 4u) << "a segment that could not be reserved leaves no file";
  }
}

TEST_F(StoreCapacity, PageSizesTakeSegmentsFromEachOther) {
  const StoreOptions options = small_store(4);
  const Layout small{1, {16 * 1024}}, large{4, {100'000, 100'000}};
  {
    auto store = open_store(folder.path(), options);
    Space a(*store, 1, small), b(*store, 2, large);
    std::uint64_t chain = 0;
    for (int turn = 0; turn < 6; ++turn) {
      Space& space = turn % 2 == 0 ? a : b;
      const std::size_t batch = turn % 2 == 0 ? 64 : 2;
      const std::uint64_t first = chain;
      for (int i = 0; i < 16; ++i) EXPECT_EQ(space.put(chain++, 0, batch), batch) << "turn " << turn;
      // The newcomer's latest pages are there, which means that it was given segments of the other's.
      for (std::uint64_t c = first + 12; c < chain; ++c) EXPECT_EQ(space.fetch(c, 0, batch), batch) << "turn " << turn;
      for (std::uint64_t c = 0; c < chain; ++c) {  // whatever is there has the right bytes
        a.fetch(c, 0, 4);
        b.fetch(c, 0, 2);
      }
      expect_slots_conserved(*store);
      const tardis_stats s = stats_of(*store);
      EXPECT_LE(s.allocated_bytes, s.capacity_bytes);
      EXPECT_EQ(s.get_pages_corrupt + s.get_pages_torn, 0u);
    }
    EXPECT_GT(stats_of(*store).evicted_pages, 0u);
    EXPECT_TRUE(store->flush());
  }
  std::uint32_t epochs = 0;
  for (std::uint32_t id = 0; id < 4; ++id)
    epochs += read_struct<SegmentSuperblock>(segment_file(folder.path(), id), 0).epoch;
  EXPECT_GT(epochs, 0u) << "no segment was re-classed";
  auto store = open_store(folder.path(), options);
  Space a(*store, 1, small), b(*store, 2, large);
  for (std::uint64_t chain = 0; chain < 96; ++chain) {
    a.fetch(chain, 0, 64);
    b.fetch(chain, 0, 2);
  }
  EXPECT_EQ(stats_of(*store).get_pages_corrupt, 0u);
  expect_slots_conserved(*store);
}

TEST_F(StoreCapacity, AnEmptySegmentChangesClassWithoutEvictingAnything) {
  auto store = open_store(folder.path(), small_store(2));
  Space a(*store, 1, {1, {16 * 1024}}), b(*store, 2, {1, {64 * 1024}});
  a.put(1, 0, 190);
  a.put(2, 0, 180);
  EXPECT_EQ(stats_of(*store).segments, 2u);
  EXPECT_EQ(*store->clear(a.fingerprint()), 370u);
  EXPECT_EQ(b.put(1, 0, 90), 90u);
  EXPECT_EQ(stats_of(*store).evicted_pages, 0u);
  EXPECT_EQ(b.fetch(1, 0, 90), 90u);
}

}  // namespace
}  // namespace tardis::testing
