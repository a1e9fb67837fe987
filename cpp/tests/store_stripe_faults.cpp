// SPDX-License-Identifier: Apache-2.0
// Striped segments when one of their folders is away, dead, full or forgotten.
#include <cerrno>

#include "store_stripes_support.h"

namespace tardis::testing {
namespace {

namespace fs = std::filesystem;

TEST_F(StoreStripesTest, APathMayGoAwayAndComeBack) {
  for (const std::size_t paths : {2u, 3u}) {
    for (std::size_t path = 0; path < 3; ++path) fs::remove_all(folder(path));
    fill(options(paths));
    const std::size_t segments = all(".seg").size();
    fs::rename(folder(1), away());
    {
      auto store = open(options(paths));
      Space space(*store, 1, kLayers);
      EXPECT_EQ(found(space, 1, 60), 0u) << "every segment has stripes there";
      EXPECT_EQ(stats_of(*store).segments_unreadable, segments) << "they keep their share of the capacity";
      ASSERT_EQ(space.put(2, 0, 30), 30u);
      EXPECT_EQ(found(space, 2, 30), 30u);
      ASSERT_TRUE(store->close());
    }
    fs::rename(away(), folder(1));
    auto store = open(options(paths));
    Space space(*store, 1, kLayers);
    EXPECT_EQ(found(space, 1, 60), 60u);
    EXPECT_EQ(found(space, 2, 30), 30u);
    EXPECT_EQ(stats_of(*store).paths_out, 0u);
    EXPECT_EQ(stats_of(*store).segments_unreadable, 0u);
    expect_slots_conserved(*store);
    ASSERT_TRUE(store->close());
  }
}

// Half of the segments have their own file on the path that is away, the others only stripes.
TEST_F(StoreStripesTest, WhatWasDeletedWhileAPathWasAwayDoesNotComeBack) {
  for (const bool crash : {false, true}) {
    for (const bool twice : {false, true}) {
      SCOPED_TRACE(std::to_string(crash) + std::to_string(twice));
      for (std::size_t path = 0; path < 3; ++path) fs::remove_all(folder(path));
      fill(options());
      ASSERT_GT(files(folder(1), ".seg").size(), 0u);
      ASSERT_GT(files(folder(1), ".part").size(), 0u);
      fs::rename(folder(1), away());
      const auto clear = [&] {
        auto store = open(options());
        Space space(*store, 1, kLayers);
        auto cleared = store->clear(std::nullopt);
        ASSERT_TRUE(cleared) << cleared.error().message;
        if (crash) {
          store.release();
        } else {
          ASSERT_TRUE(store->close());
        }
      };
      if (crash) {
        in_killed_process(clear);
      } else {
        clear();
      }
      if (twice) {  // still away at another opening
        auto store = open(options());
        ASSERT_TRUE(store->close());
      }
      fs::rename(away(), folder(1));
      auto store = open(options());
      Space space(*store, 1, kLayers);
      EXPECT_EQ(found(space, 1, 60), 0u);
      EXPECT_EQ(stats_of(*store).paths_out, 0u);
      EXPECT_EQ(stats_of(*store).segments_unreadable, 0u);
      ASSERT_EQ(space.put(1, 0, 60), 60u);
      ASSERT_TRUE(store->close());
      EXPECT_EQ(all(".part").size(), all(".seg").size());
      expect_whole_lengths(all(".seg"), all(".part"));
    }
  }
}

TEST_F(StoreStripesTest, APathNamedNoLongerTakesItsStripesWithIt) {
  fill(options(3));
  {
    auto store = open(options(2));
    Space space(*store, 1, kLayers);
    EXPECT_EQ(found(space, 1, 60), 0u);
    EXPECT_EQ(stats_of(*store).segments, 0u);
    EXPECT_EQ(stats_of(*store).segments_unreadable, 0u) << "what can never be whole takes no capacity";
    ASSERT_EQ(space.put(2, 0, 30), 30u);
    ASSERT_TRUE(store->close());
  }
  EXPECT_EQ(all(".part", 2).size(), all(".seg", 2).size());
  auto store = open(options(3));
  Space space(*store, 1, kLayers);
  EXPECT_EQ(found(space, 1, 60), 0u);
  EXPECT_EQ(found(space, 2, 30), 30u);
}

TEST_F(StoreStripesTest, ADeadDriveIsTakenOutAndTheHealthyOneIsNot) {
  for (const std::size_t dead : {0u, 1u, 2u}) {
    for (const char* what : {"read", "write", "flush"}) {
      SCOPED_TRACE(std::string(what) + " of path " + std::to_string(dead));
      for (std::size_t path = 0; path < 3; ++path) fs::remove_all(folder(path));
      broken->all(0);
      auto store = open_breakable(options(3, 64), dead);
      Space space(*store, 1, kLayers);
      ASSERT_EQ(space.put(1, 0, 60), 60u);
      ASSERT_TRUE(store->flush());
      const std::string use = what;
      (use == "read" ? broken->read : use == "write" ? broken->write : broken->flush) = EIO;
      for (std::uint64_t chain = 2; chain < 60 && stats_of(*store).paths_out == 0; ++chain) {
        if (use == "read") {
          space.get(1, chain % 60, 1);
        } else {
          space.put(chain, 0, 4);
          (void)store->flush();
        }
      }
      EXPECT_EQ(stats_of(*store).paths_out, 1u);
      const std::string report = store->path_report_json();
      const std::string out = folder(dead) + "\",\"state\":\"out\"";
      EXPECT_NE(report.find(out), std::string::npos) << report;
      EXPECT_EQ(found(space, 1, 60), 0u) << "every segment has stripes there";
      // The store goes on with the other two.
      ASSERT_EQ(space.put(99, 0, 30), 30u);
      EXPECT_TRUE(use == "flush" || store->flush());
      EXPECT_EQ(found(space, 99, 30), 30u);
      EXPECT_EQ(stats_of(*store).paths_out, 1u) << "a healthy drive is not blamed for its neighbour";
      broken->all(0);
      (void)store->close();
      store.reset();
      // Nothing was deleted: what was durable is back.
      EXPECT_EQ(still(options(3, 64)), 60u);
    }
  }
}

TEST_F(StoreStripesTest, ADriveThatDiesBeforeASecondProcessHasOpenedItsFilesIsTheOneToBlame) {
  auto first = open(options(2, 64));
  Space mine(*first, 1, kLayers);
  ASSERT_EQ(mine.put(1, 0, 60), 60u);
  auto store = open_breakable(options(2, 64), 1);
  Space space(*store, 1, kLayers);
  broken->all(EIO);
  for (std::uint64_t i = 0; i < 60 && stats_of(*store).paths_out == 0; ++i) space.get(1, i, 1);
  EXPECT_EQ(stats_of(*store).paths_out, 1u);
  EXPECT_NE(store->path_report_json().find(folder(1) + "\",\"state\":\"out\""), std::string::npos)
      << store->path_report_json();
  broken->all(0);
}

TEST_F(StoreStripesTest, ADeletionWhileADriveIsDeadHolds) {
  {
    auto store = open_breakable(options(), 1);
    Space space(*store, 1, kLayers);
    ASSERT_EQ(space.put(1, 0, 60), 60u);
    ASSERT_TRUE(store->flush());
    broken->all(EIO);
    auto cleared = store->clear(space.fingerprint());
    ASSERT_TRUE(cleared) << cleared.error().message;
    EXPECT_EQ(found(space, 1, 60), 0u);
    EXPECT_EQ(stats_of(*store).paths_out, 1u);
    broken->all(0);
    (void)store->close();
  }
  EXPECT_EQ(still(options()), 0u);
}

TEST_F(StoreStripesTest, AFullDriveIsLeftOutOfNewSegments) {
  auto store = open_breakable(options(3, 64), 2);
  Space space(*store, 1, kLayers);
  broken->open = ENOSPC;
  ASSERT_EQ(space.put(1, 0, 60), 60u);
  EXPECT_EQ(stats_of(*store).paths_out, 0u);
  EXPECT_EQ(files(folder(2), ".part").size() + files(folder(2), ".seg").size(), 0u);
  EXPECT_EQ(all(".part").size(), all(".seg").size()) << "over the other two";
  EXPECT_EQ(found(space, 1, 60), 60u);
}

}  // namespace
}  // namespace tardis::testing
