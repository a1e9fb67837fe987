// SPDX-License-Identifier: Apache-2.0
// A store over several folders: where objects go, and what is left when a folder is missing, fails or is forgotten.
#include "store/folder.h"
#include "store_broken_folder.h"
#include "store_support.h"

namespace tardis::testing {
namespace {

namespace fs = std::filesystem;

class StorePathsTest : public ::testing::Test {
 protected:
  std::string home() const { return parent.path() + "/a"; }
  std::string second() const { return parent.path() + "/b"; }
  StoreOptions options(std::optional<std::vector<std::string>> more, std::uint64_t segments = 16) const {
    StoreOptions o = small_store(segments);
    o.live_folder = memory_parent();
    o.more_paths = std::move(more);
    return o;
  }
  StoreOptions both(std::uint64_t segments = 16) const { return options(std::vector{second()}, segments); }
  std::unique_ptr<Store> open(const StoreOptions& o) const { return open_store(home(), o); }
  std::unique_ptr<Store> open_breakable(const StoreOptions& o) {
    broken->prefix = second() + "/";
    return open_store(home(), o, true, breakable(broken));
  }
  static std::size_t segments_in(const std::string& folder) {
    std::size_t count = 0;
    for (const auto& item : fs::directory_iterator(folder + "/segments")) count += item.path().extension() == ".seg";
    return count;
  }
  static Code refused(const std::string& folder, const StoreOptions& o, std::string* message = nullptr) {
    auto store = Store::open(folder, o, true);
    if (store) return Code::kOk;
    if (message != nullptr) *message = store.error().message;
    return store.error().code;
  }
  // Of single pages, since a run ends at the first that is missing.
  static std::size_t found(Space& space, std::uint64_t chain, std::size_t pages) {
    std::size_t hits = 0;
    for (std::size_t i = 0; i < pages; ++i) hits += space.fetch(chain, i, 1);
    return hits;
  }
  void fill(const StoreOptions& o, std::size_t pages = 256) {
    auto store = open(o);
    Space space(*store, 1, {});
    for (std::size_t at = 0; at < pages; at += 64) ASSERT_EQ(space.put(1, at, 64), 64u);
    ASSERT_TRUE(store->close());
  }

  TempFolder parent{memory_parent()};
  std::shared_ptr<BrokenFolder> broken = std::make_shared<BrokenFolder>();
};

TEST_F(StorePathsTest, ABatchIsSpreadAndFoundAgainWithAndWithoutACheckpoint) {
  {
    auto store = open(both());
    Space space(*store, 1, {});
    ASSERT_EQ(space.put(1, 0, 64), 64u);
    EXPECT_GE(segments_in(home()), 1u) << "one batch uses both drives";
    EXPECT_GE(segments_in(second()), 1u);
    for (std::size_t at = 64; at < 512; at += 64) ASSERT_EQ(space.put(1, at, 64), 64u);
    EXPECT_EQ(space.fetch(1, 0, 512), 512u);
    EXPECT_EQ(stats_of(*store).paths, 2u);
    EXPECT_EQ(stats_of(*store).paths_out, 0u);
    expect_slots_conserved(*store);
    ASSERT_TRUE(store->close());
  }
  for (const bool checkpoint : {true, false}) {
    if (!checkpoint) fs::remove(home() + "/index.checkpoint");
    auto store = open(options(std::nullopt));
    Space space(*store, 1, {});
    EXPECT_EQ(space.fetch(1, 0, 512), 512u);
    EXPECT_EQ(stats_of(*store).recovered_scanned == 0, checkpoint);
    ASSERT_TRUE(store->close());
  }
  const auto verified = verify_store(home(), false, {});
  ASSERT_TRUE(verified);
  EXPECT_EQ(verified->report.objects, 512u);
  EXPECT_TRUE(verified->problems.empty());
}

TEST_F(StorePathsTest, ShortBatchesTakeTurns) {
  auto store = open(both());
  Space space(*store, 1, {});
  for (std::size_t i = 0; i < 40; ++i) ASSERT_EQ(space.put(i, 0, 1), 1u);
  EXPECT_EQ(segments_in(home()), 1u);
  EXPECT_EQ(segments_in(second()), 1u);
}

TEST_F(StorePathsTest, TheCapacityIsOneNumberOverAllPaths) {
  constexpr std::uint64_t kSegments = 6;
  auto store = open(both(kSegments));
  Space space(*store, 1, {});
  for (std::size_t chain = 0; chain < 20; ++chain) {
    ASSERT_EQ(space.put(chain, 0, 64), 64u);
    EXPECT_LE(segments_in(home()) + segments_in(second()), kSegments);
    EXPECT_EQ(space.fetch(chain, 0, 64), 64u);
  }
  EXPECT_GT(stats_of(*store).evicted_pages, 0u);
  expect_slots_conserved(*store);
  ASSERT_TRUE(store->close());
}

TEST_F(StorePathsTest, OfAKilledProcessNothingFlushedIsLost) {
  in_killed_process([&] {
    auto store = open(both());
    Space space(*store, 1, {});
    ASSERT_EQ(space.put(1, 0, 200), 200u);
    ASSERT_TRUE(store->flush());
    ASSERT_EQ(space.put(2, 0, 10), 10u);
    store.release();  // no close before the kill
  });
  auto store = open(both());
  Space space(*store, 1, {});
  EXPECT_EQ(space.fetch(1, 0, 200), 200u);
  space.fetch(2, 0, 10);
  expect_slots_conserved(*store);
}

TEST_F(StorePathsTest, AMissingPathIsLeftOutAndItsPagesAreMissesUntilItReturns) {
  fill(both());
  fs::rename(second(), parent.path() + "/elsewhere");
  {
    auto store = open(both());
    Space space(*store, 1, {});
    const std::size_t hits = found(space, 1, 256);
    EXPECT_GT(hits, 0u);
    EXPECT_LT(hits, 256u);
    EXPECT_EQ(stats_of(*store).paths_out, 1u);
    EXPECT_NE(store->path_report_json().find("not mounted?"), std::string::npos) << store->path_report_json();
    EXPECT_FALSE(fs::exists(second())) << "nothing is made where a drive should be mounted";
    ASSERT_EQ(space.put(2, 0, 64), 64u);
    EXPECT_EQ(space.fetch(2, 0, 64), 64u);
    ASSERT_TRUE(store->close());
  }
  fs::rename(parent.path() + "/elsewhere", second());
  auto store = open(both());
  Space space(*store, 1, {});
  EXPECT_EQ(found(space, 1, 256), 256u);
  EXPECT_EQ(space.fetch(2, 0, 64), 64u);
  EXPECT_EQ(stats_of(*store).paths_out, 0u);
  expect_slots_conserved(*store);
}

TEST_F(StorePathsTest, WhatWasDeletedWhileAPathWasAwayDoesNotComeBack) {
  for (const bool crash : {false, true}) {
    SCOPED_TRACE(crash);
    fs::remove_all(parent.path() + "/a");
    fs::remove_all(parent.path() + "/b");
    fill(both());
    fs::rename(second(), parent.path() + "/elsewhere");
    const auto clear = [&] {
      auto store = open(both());
      Space space(*store, 1, {});
      auto cleared = store->clear(std::nullopt);
      ASSERT_TRUE(cleared) << cleared.error().message;
      EXPECT_GT(*cleared, 0u);
      if (crash) {
        store.release();  // no close before the kill
      } else {
        ASSERT_TRUE(store->close());
      }
    };
    if (crash) {
      in_killed_process(clear);
    } else {
      clear();
    }
    fs::rename(parent.path() + "/elsewhere", second());
    auto store = open(both());
    Space space(*store, 1, {});
    EXPECT_EQ(found(space, 1, 256), 0u);
    EXPECT_EQ(stats_of(*store).paths_out, 0u) << "it is used again";
    ASSERT_EQ(space.put(1, 0, 64), 64u);
    ASSERT_TRUE(store->close());
    EXPECT_GE(segments_in(second()), 1u);
  }
}

// Group numbers prove what was durable only among folders that were together: a store that went on without one may have
// used the same numbers again.
TEST_F(StorePathsTest, OfAPathThatWasAwayAfterACrashEveryDirtyPageIsReadBeforeItIsBelieved) {
  in_killed_process([&] {
    auto store = open(both());
    Space space(*store, 1, {});
    ASSERT_EQ(space.put(1, 0, 64), 64u);  // not flushed
    store.release();                      // nor closed
  });
  std::string torn;
  for (const auto& item : fs::directory_iterator(second() + "/segments")) torn = item.path().string();
  const auto super = read_struct<SegmentSuperblock>(torn, 0);
  flip_bit(torn, super.payload_offset + 5);
  fs::rename(second(), parent.path() + "/elsewhere");
  {
    auto store = open(both());
    Space space(*store, 1, {});
    for (std::uint64_t chain = 2; chain < 8; ++chain) {  // later groups, each proving those before
      ASSERT_EQ(space.put(chain, 0, 8), 8u);
      ASSERT_TRUE(store->flush());
    }
    ASSERT_TRUE(store->close());
  }
  fs::rename(parent.path() + "/elsewhere", second());
  auto store = open(both());
  Space space(*store, 1, {});
  const tardis_stats s = stats_of(*store);
  EXPECT_GT(s.recovered_verified, 0u);
  EXPECT_GE(s.recovered_rejected, 1u) << "the flipped page is not even listed";
  EXPECT_EQ(found(space, 1, 64), 63u);
  EXPECT_EQ(stats_of(*store).get_pages_torn, 0u);
}

TEST_F(StorePathsTest, APathNamedNoLongerIsForgottenAndStartsEmptyWhenNamedAgain) {
  fill(both());
  std::size_t at_home = 0;
  {
    auto store = open(options(std::vector<std::string>()));
    Space space(*store, 1, {});
    at_home = found(space, 1, 256);
    EXPECT_GT(at_home, 0u);
    EXPECT_LT(at_home, 256u);
    EXPECT_EQ(stats_of(*store).paths, 1u);
    ASSERT_TRUE(store->close());
  }
  auto store = open(both());
  Space space(*store, 1, {});
  EXPECT_EQ(stats_of(*store).paths, 2u);
  EXPECT_EQ(found(space, 1, 256), at_home);
}

TEST_F(StorePathsTest, AStoreThatIsGivenNoPathsUsesThoseThatItHas) {
  fill(both());
  auto store = open(options(std::nullopt));
  Space space(*store, 1, {});
  EXPECT_EQ(found(space, 1, 256), 256u);
}

TEST_F(StorePathsTest, APathMayMoveToAnotherMountPoint) {
  fill(both());
  const std::string moved = parent.path() + "/moved";
  fs::rename(second(), moved);
  {
    auto store = open(options(std::vector{moved}));
    Space space(*store, 1, {});
    EXPECT_EQ(found(space, 1, 256), 256u);
    ASSERT_TRUE(store->close());
  }
  auto store = open(options(std::nullopt));
  EXPECT_EQ(stats_of(*store).paths_out, 0u) << "the new place is remembered";
}

TEST_F(StorePathsTest, WrongFoldersAreRefusedByName) {
  fill(both());
  std::string why;
  EXPECT_EQ(refused(home(), options(std::vector{home()}), &why), Code::kInvalidArgument);
  EXPECT_NE(why.find("own folder"), std::string::npos) << why;
  EXPECT_EQ(refused(home(), options(std::vector{second(), second()}), &why), Code::kInvalidArgument);
  EXPECT_NE(why.find("twice"), std::string::npos) << why;
  EXPECT_EQ(refused(home(), options(std::vector<std::string>{"relative"}), &why), Code::kInvalidArgument);
  EXPECT_EQ(refused(home(), options(std::vector{std::string("/") + std::string(1200, 'x')}), &why),
            Code::kInvalidArgument);
  // A folder of another store: as its own folder, and as its further one.
  const std::string other = parent.path() + "/other";
  { auto store = open_store(other, options(std::vector{parent.path() + "/other-b"})); }
  EXPECT_EQ(refused(home(), options(std::vector{other}), &why), Code::kInvalidArgument);
  EXPECT_NE(why.find("store of its own"), std::string::npos) << why;
  EXPECT_EQ(refused(home(), options(std::vector{parent.path() + "/other-b"}), &why), Code::kInvalidArgument);
  EXPECT_NE(why.find("another store"), std::string::npos) << why;
  // A copy of one that it has.
  fs::copy(second(), parent.path() + "/copy", fs::copy_options::recursive);
  EXPECT_EQ(refused(home(), options(std::vector{second(), parent.path() + "/copy"}), &why), Code::kInvalidArgument);
  EXPECT_NE(why.find("copy"), std::string::npos) << why;
  // Too many.
  std::vector<std::string> many;
  for (int i = 0; i < 16; ++i) many.push_back(parent.path() + "/m" + std::to_string(i));
  EXPECT_EQ(refused(parent.path() + "/fresh", options(many), &why), Code::kInvalidArgument);
  EXPECT_NE(why.find("at most 15"), std::string::npos) << why;
  EXPECT_FALSE(fs::exists(parent.path() + "/fresh")) << "nothing is made for a list that is refused";
  // Nothing of it did harm.
  auto store = open(both());
  Space space(*store, 1, {});
  EXPECT_EQ(found(space, 1, 256), 256u);
}

// The copy has the list of the original's folders, and would take them for its own.
TEST_F(StorePathsTest, ACopyOfTheStoresOwnFolderDoesNotGetTheOthers) {
  const std::string copy = parent.path() + "/copy-of-a";
  auto store = open(both());
  Space space(*store, 1, {});
  fs::copy(home(), copy, fs::copy_options::recursive);
  ASSERT_EQ(space.put(1, 0, 128), 128u);
  std::string why;
  EXPECT_EQ(refused(copy, options(std::nullopt), &why), Code::kBusy);
  EXPECT_NE(why.find("another copy"), std::string::npos) << why;
  EXPECT_EQ(space.fetch(1, 0, 128), 128u);
  ASSERT_TRUE(store->close());
  store.reset();
  // Nor afterwards: what the original has stored there since is not the copy's to remove.
  {
    auto second_life = open(both());
    ASSERT_TRUE(second_life->close());
  }
  const std::size_t before = segments_in(second());
  {
    auto other = open_store(copy, options(std::nullopt));
    ASSERT_NE(other, nullptr);
    EXPECT_EQ(stats_of(*other).paths_out, 1u);
    EXPECT_TRUE(other->clear(std::nullopt));
    ASSERT_TRUE(other->close());
  }
  EXPECT_EQ(segments_in(second()), before);
  auto again = open(both());
  Space after(*again, 1, {});
  EXPECT_EQ(found(after, 1, 128), 128u);
}

TEST_F(StorePathsTest, AFolderThatIsPutBackFromACopyBringsNothingBackThatWasDeleted) {
  fill(both());
  for (const bool while_open : {false, true}) {
    SCOPED_TRACE(while_open);
    const std::string copy = parent.path() + "/copy-of-b" + std::to_string(while_open);
    if (!while_open) fs::copy(second(), copy, fs::copy_options::recursive);
    {
      auto store = open(both());
      Space space(*store, 1, {});
      ASSERT_GT(found(space, 1, 256), 0u);
      if (while_open) fs::copy(second(), copy, fs::copy_options::recursive);
      ASSERT_TRUE(store->clear(std::nullopt));
      ASSERT_TRUE(store->close());
    }
    fs::remove_all(second());
    fs::rename(copy, second());
    {
      auto store = open(both());
      Space space(*store, 1, {});
      EXPECT_EQ(found(space, 1, 256), 0u);
      EXPECT_EQ(stats_of(*store).paths_out, 0u);
      ASSERT_TRUE(store->close());
    }
    fill(both());
  }
}

// Of two drives one is dead, and the other is mounted in its place.
TEST_F(StorePathsTest, ADriveInThePlaceOfOneThatIsAwayDoesNotMakeThatOneForgotten) {
  const std::string third = parent.path() + "/c";
  const auto all = options(std::vector{second(), third});
  fill(all);
  fs::rename(second(), parent.path() + "/dead");
  fs::rename(third, second());
  fs::create_directory(third);  // an empty mount point
  {
    auto store = open(all);
    EXPECT_EQ(stats_of(*store).paths, 3u);
    EXPECT_EQ(stats_of(*store).paths_out, 1u);
    EXPECT_TRUE(fs::is_empty(third)) << "nothing is made in a mount point";
    Space space(*store, 1, {});
    EXPECT_GT(found(space, 1, 256), 0u);
    ASSERT_TRUE(store->close());
  }
  fs::remove(third);
  fs::rename(second(), third);
  fs::rename(parent.path() + "/dead", second());
  auto store = open(all);
  Space space(*store, 1, {});
  EXPECT_EQ(found(space, 1, 256), 256u);
}

TEST_F(StorePathsTest, ProcessesJoinWhileAPathIsOutAndCannotBeWritten) {
  auto store = open_breakable(both());
  Space space(*store, 1, {});
  ASSERT_EQ(space.put(1, 0, 128), 128u);
  broken->write = EROFS;
  for (std::uint64_t chain = 2; chain < 8; ++chain) space.put(chain, 0, 64);
  ASSERT_EQ(stats_of(*store).paths_out, 1u);
  fs::permissions(second(), fs::perms::owner_read | fs::perms::owner_exec);
  for (const auto& list : {both(), options(std::nullopt)}) {
    std::string why;
    EXPECT_EQ(refused(home(), list, &why), Code::kOk) << why;
  }
  fs::permissions(second(), fs::perms::owner_all);
}

TEST_F(StorePathsTest, AFolderWhoseFilesCannotBeMendedCostsItsOwnPagesOnly) {
  fill(both());
  const std::string broken_file = fs::directory_iterator(second() + "/segments")->path();
  fs::resize_file(broken_file, 2u << 20);
  fs::create_directory(second() + "/segments/000099-00.part");  // which cannot be removed as a file
  broken->prefix = second() + "/";
  broken->write = EIO;  // the length is restored, and then the superblock is to be written
  auto store = open_breakable(both());
  ASSERT_NE(store, nullptr);
  Space space(*store, 1, {});
  EXPECT_GT(found(space, 1, 256), 100u);
  EXPECT_GE(stats_of(*store).segments_unreadable, 1u);
  broken->all(0);
  ASSERT_TRUE(store->close());
}

TEST_F(StorePathsTest, ProcessesThatNameOtherFoldersAreRefused) {
  auto first = open(both());
  std::string why;
  EXPECT_EQ(refused(home(), options(std::vector<std::string>()), &why), Code::kInvalidArgument);
  EXPECT_NE(why.find(second()), std::string::npos) << why;
  EXPECT_EQ(refused(home(), options(std::vector{parent.path() + "/c"}), &why), Code::kInvalidArgument);
  EXPECT_NE(why.find(parent.path() + "/c"), std::string::npos) << why;
  EXPECT_FALSE(fs::exists(parent.path() + "/c"));
  EXPECT_EQ(refused(home(), both()), Code::kOk);
  EXPECT_EQ(refused(home(), options(std::nullopt)), Code::kOk);
  // A path that the others use must be reachable from here too.
  fs::rename(second(), parent.path() + "/elsewhere");
  EXPECT_EQ(refused(home(), both(), &why), Code::kBusy);
  EXPECT_NE(why.find("cannot be reached"), std::string::npos) << why;
  fs::rename(parent.path() + "/elsewhere", second());
}

TEST_F(StorePathsTest, TwoProcessesFindEachOthersPagesOnEveryPath) {
  auto one = open(both());
  auto two = open(both());
  Space here(*one, 1, {}), there(*two, 1, {});
  ASSERT_EQ(here.put(1, 0, 200), 200u);
  EXPECT_EQ(there.fetch(1, 0, 200), 200u);
  ASSERT_EQ(there.put(2, 0, 200), 200u);
  EXPECT_EQ(here.fetch(2, 0, 200), 200u);
  expect_slots_conserved(*one);
}

TEST_F(StorePathsTest, ADriveThatFailsEveryWriteIsTakenOutAndTheStoreGoesOn) {
  auto store = open_breakable(both(64));
  Space space(*store, 1, {});
  ASSERT_EQ(space.put(1, 0, 128), 128u);
  ASSERT_TRUE(store->flush());
  broken->write = EROFS;
  int failures = 0;
  for (std::uint64_t chain = 2; chain < 20; ++chain) failures += space.put(chain, 0, 64) < 64;
  EXPECT_GE(failures, 1);
  EXPECT_LE(failures, 4);
  const tardis_stats s = stats_of(*store);
  EXPECT_EQ(s.paths_out, 1u);
  EXPECT_EQ(s.paths_taken_out, 1u);
  EXPECT_NE(store->path_report_json().find("Read-only file system"), std::string::npos) << store->path_report_json();
  EXPECT_EQ(space.put(50, 0, 64), 64u);
  EXPECT_EQ(space.fetch(50, 0, 64), 64u);
  const std::size_t hits = found(space, 1, 128);
  EXPECT_GT(hits, 0u);
  EXPECT_LT(hits, 128u);
  broken->all(0);
  ASSERT_TRUE(store->close());
  // Nothing was deleted meanwhile: what was durable there is back.
  auto again = open(both(64));
  Space after(*again, 1, {});
  EXPECT_EQ(found(after, 1, 128), 128u);
  expect_slots_conserved(*again);
}

TEST_F(StorePathsTest, ADriveThatFailsEveryReadIsTakenOutAndItsPagesAreMisses) {
  auto store = open_breakable(both());
  Space space(*store, 1, {});
  ASSERT_EQ(space.put(1, 0, 256), 256u);
  broken->read = EIO;
  for (int i = 0; i < 400 && stats_of(*store).paths_out == 0; ++i) space.get(1, static_cast<std::uint64_t>(i) % 256, 1);
  EXPECT_EQ(stats_of(*store).paths_out, 1u);
  broken->read = 0;
  const std::size_t hits = found(space, 1, 256);
  EXPECT_GT(hits, 0u);
  EXPECT_LT(hits, 256u);
  EXPECT_EQ(space.put(2, 0, 64), 64u);
}

TEST_F(StorePathsTest, OneBadFileDoesNotTakeADriveOut) {
  auto store = open_breakable(both());
  Space space(*store, 1, {});
  ASSERT_EQ(space.put(1, 0, 256), 256u);
  for (int i = 0; i < 10; ++i) {
    broken->read = EIO;
    space.get(1, 200, 1);
    space.get(1, 10, 1);
    broken->read = 0;
    for (std::uint64_t page = 20; page < 100; page += 8) space.get(1, page, 8);
  }
  EXPECT_EQ(stats_of(*store).paths_out, 0u);
}

TEST_F(StorePathsTest, ADriveThatCannotFlushIsTakenOut) {
  auto store = open_breakable(both());
  Space space(*store, 1, {});
  ASSERT_EQ(space.put(1, 0, 128), 128u);
  ASSERT_TRUE(store->flush());
  broken->flush = EIO;
  for (std::uint64_t chain = 2; chain < 12 && stats_of(*store).paths_out == 0; ++chain) {
    space.put(chain, 0, 64);
    (void)store->flush();
  }
  EXPECT_EQ(stats_of(*store).paths_out, 1u);
  ASSERT_EQ(space.put(30, 0, 64), 64u);
  EXPECT_TRUE(store->flush());
  EXPECT_EQ(space.fetch(30, 0, 64), 64u);
}

TEST_F(StorePathsTest, ADeletionThatAPathCannotDoTakesItOutAndHolds) {
  {
    auto store = open_breakable(both());
    Space space(*store, 1, {});
    ASSERT_EQ(space.put(1, 0, 256), 256u);
    ASSERT_TRUE(store->flush());
    broken->all(EIO);
    auto cleared = store->clear(space.fingerprint());
    ASSERT_TRUE(cleared) << cleared.error().message;
    EXPECT_EQ(space.run(1, 0, 256), 0u);
    EXPECT_EQ(found(space, 1, 256), 0u);
    EXPECT_EQ(stats_of(*store).paths_out, 1u);
    broken->all(0);
    EXPECT_FALSE(store->close()) << "the flush that failed is told once";
  }
  auto store = open(both());
  Space space(*store, 1, {});
  EXPECT_EQ(found(space, 1, 256), 0u);
  EXPECT_EQ(stats_of(*store).paths_out, 0u);
}

TEST_F(StorePathsTest, TheLastPathIsNeverTakenOut) {
  broken->prefix = home() + "/";
  auto store = open_store(home(), options(std::vector<std::string>()), true, breakable(broken));
  Space space(*store, 1, {});
  ASSERT_EQ(space.put(1, 0, 64), 64u);
  broken->read = EIO;
  for (std::uint64_t i = 0; i < 10; ++i) space.get(1, i, 1);
  broken->read = 0;
  EXPECT_EQ(stats_of(*store).paths_out, 0u);
  EXPECT_EQ(space.put(2, 0, 8), 8u);
}

TEST_F(StorePathsTest, AFullDriveIsNotAFailingOne) {
  auto store = open_breakable(both());
  Space space(*store, 1, {});
  ASSERT_EQ(space.put(1, 0, 64), 64u);
  broken->open = ENOSPC;
  for (std::uint64_t chain = 2; chain < 12; ++chain) ASSERT_EQ(space.put(chain, 0, 64), 64u);
  EXPECT_EQ(stats_of(*store).paths_out, 0u);
}

}  // namespace
}  // namespace tardis::testing
