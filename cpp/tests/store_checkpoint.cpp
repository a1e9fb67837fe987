// SPDX-License-Identifier: Apache-2.0
// What a checkpoint saves, and that nothing is believed because of it that is not so.
#include "store_closed.h"

namespace tardis::testing {
namespace {

class StoreCheckpoint : public ClosedStore {};

TEST_F(StoreCheckpoint, ACheckpointSavesTheScanOfSegmentsNotWrittenSince) {
  in_killed_process([&] {
    auto store = open_store(folder.path(), small_store(4));
    Space space(*store, 1, {});
    EXPECT_EQ(space.put(1, 0, 96), 96u);  // two segments
    EXPECT_EQ(*store->checkpoint(), 2u);
    EXPECT_EQ(space.put(2, 0, 10), 10u);  // a third
    EXPECT_TRUE(store->flush());
    store.release();
  });
  EXPECT_EQ(segment().flags, 0u);
  auto store = open_store(folder.path(), small_store(4));
  Space space(*store, 1, {});
  EXPECT_EQ(space.fetch(1, 0, 96) + space.fetch(2, 0, 10), 106u);
  EXPECT_EQ(stats_of(*store).recovered_scanned, 1u);
  expect_slots_conserved(*store);
}

TEST_F(StoreCheckpoint, WhatWasWrittenOrDeletedAfterACheckpointCounts) {
  in_killed_process([&] {
    auto store = open_store(folder.path(), small_store(1));
    Space a(*store, 1, {}), b(*store, 2, {});
    a.put(1, 0, 10);
    b.put(1, 0, 10);
    EXPECT_EQ(*store->checkpoint(), 1u);
    EXPECT_TRUE(store->clear(a.fingerprint()));
    EXPECT_EQ(b.put(2, 0, 5), 5u);
    EXPECT_TRUE(store->flush());
    store.release();
  });
  auto store = open_store(folder.path(), small_store(1));
  Space a(*store, 1, {}), b(*store, 2, {});
  EXPECT_EQ(a.run(1, 0, 10), 0u) << "deleted after the checkpoint";
  EXPECT_EQ(b.fetch(1, 0, 10) + b.fetch(2, 0, 5), 15u);
  EXPECT_EQ(stats_of(*store).recovered_scanned, 1u);
}

TEST_F(StoreCheckpoint, CheckpointsComeByThemselvesAndSparePagesBeingWritten) {
  StoreOptions options = small_store(4);
  options.checkpoint_seconds = 1;
  auto store = open_store(folder.path(), options);
  Space space(*store, 1, {});
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(2500);
  std::uint64_t chain = 0;
  while (std::chrono::steady_clock::now() < end) space.put(chain++ % 60, 0, 6);
  EXPECT_GE(stats_of(*store).checkpoints, 1u);
  expect_slots_conserved(*store);
  for (chain = 0; chain < 60; ++chain) space.get(chain, 0, 6);
  EXPECT_EQ(stats_of(*store).get_pages_corrupt, 0u);
}

// Damage anywhere in the checkpoint costs time, nothing else.
TEST_F(StoreCheckpoint, ADamagedCheckpointIsIgnoredWhereItIsDamaged) {
  make_clean(96);
  const std::string file = folder.file("index.checkpoint");
  const auto whole = file_contents(file, 0, std::filesystem::file_size(file));
  const auto restore = [&](std::size_t bytes) {
    std::ofstream stream(file, std::ios::binary | std::ios::trunc);
    stream.write(reinterpret_cast<const char*>(whole.data()), static_cast<std::streamsize>(bytes));
  };
  const auto check = [&](const std::string& what) {
    auto store = open_store(folder.path(), small_store(4));
    Space space(*store, 1, {});
    EXPECT_EQ(space.fetch(1, 0, 96), 96u) << what;
    EXPECT_GT(stats_of(*store).recovered_scanned, 0u) << what;
    expect_slots_conserved(*store);
    store.release();  // as it is: closing would write another
  };
  for (std::size_t at = 0; at < whole.size(); at += 397) {
    in_killed_process([&] {
      restore(whole.size());
      flip_bit(file, at);
      check("bit in byte " + std::to_string(at));
    });
  }
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{511}, std::size_t{512}, whole.size() - 1}) {
    in_killed_process([&] {
      restore(bytes);
      check("cut to " + std::to_string(bytes));
    });
  }
  restore(whole.size());
  auto store = open_store(folder.path(), small_store(4));
  Space space(*store, 1, {});
  EXPECT_EQ(space.fetch(1, 0, 96), 96u);
  EXPECT_EQ(stats_of(*store).recovered_scanned, 0u);
}

// Somebody puts the checkpoint of yesterday back.
TEST_F(StoreCheckpoint, AnOldCheckpointTellsNothingOfSegmentsWrittenSince) {
  make_clean(40);
  std::filesystem::copy_file(folder.file("index.checkpoint"), folder.file("old"));
  {
    auto store = open_store(folder.path(), small_store(1));
    Space space(*store, 1, {});
    for (std::uint64_t chain = 2; chain < 20; ++chain) space.put(chain, 0, 12);
    EXPECT_TRUE(store->clear(space.fingerprint()));
    EXPECT_EQ(space.put(3, 0, 5), 5u);
  }
  std::filesystem::copy_file(folder.file("old"), folder.file("index.checkpoint"),
                             std::filesystem::copy_options::overwrite_existing);
  auto store = open_store(folder.path(), small_store(1));
  Space space(*store, 1, {});
  EXPECT_EQ(space.run(1, 0, 40), 0u);
  EXPECT_EQ(space.fetch(3, 0, 5), 5u);
  EXPECT_EQ(stats_of(*store).slots_live, 5u);
}

}  // namespace
}  // namespace tardis::testing
