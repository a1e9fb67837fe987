// SPDX-License-Identifier: Apache-2.0
// What may become of a row of the block table, on the host.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "gstore/block_row.h"

namespace tardis::gstore {
namespace {

tardis_gpu_blocks sized(std::uint32_t hbm, std::uint32_t dram, std::uint32_t file) {
  tardis_gpu_blocks blocks{};
  blocks.pool[TARDIS_GPU_HBM].size = hbm;
  blocks.pool[TARDIS_GPU_DRAM].size = dram;
  blocks.pool[TARDIS_GPU_FILE].size = file;
  return blocks;
}

Row free_row() { return {kNoBlock, 0}; }

TEST(GstoreBlocks, TiersFollowEachOther) {
  const auto blocks = sized(10, 5, 0xFFFFFFFF);
  EXPECT_EQ(tier_of(blocks, 0), static_cast<std::uint32_t>(TARDIS_GPU_HBM));
  EXPECT_EQ(tier_of(blocks, 9), static_cast<std::uint32_t>(TARDIS_GPU_HBM));
  EXPECT_EQ(tier_of(blocks, 10), static_cast<std::uint32_t>(TARDIS_GPU_DRAM));
  EXPECT_EQ(tier_of(blocks, 14), static_cast<std::uint32_t>(TARDIS_GPU_DRAM));
  EXPECT_EQ(tier_of(blocks, 15), static_cast<std::uint32_t>(TARDIS_GPU_FILE));
  EXPECT_EQ(tier_end(blocks, TARDIS_GPU_FILE), 15 + std::uint64_t{0xFFFFFFFF});
  EXPECT_LT(tier_end(blocks, TARDIS_GPU_FILE), kNoBlock);
  const auto without_dram = sized(3, 0, 4);
  EXPECT_EQ(tier_of(without_dram, 2), static_cast<std::uint32_t>(TARDIS_GPU_HBM));
  EXPECT_EQ(tier_of(without_dram, 3), static_cast<std::uint32_t>(TARDIS_GPU_FILE));
}

TEST(GstoreBlocks, FreeRowsAndOtherSerialsAreStale) {
  Row row = free_row();
  const std::uint64_t handle = handle_of(7, row);
  EXPECT_EQ(number_of(handle), 7u);
  EXPECT_EQ(take(row, handle), BlockStatus::kStale);
  EXPECT_EQ(give_back(row, handle), BlockStatus::kStale);
  EXPECT_EQ(vacate(row, handle), BlockStatus::kStale);
  EXPECT_EQ(begin_move(row, handle, 9, 0, 1), BlockStatus::kStale);
  EXPECT_EQ(end_move(row, handle, 3), BlockStatus::kStale);
  occupy(row, 12, 0);
  EXPECT_EQ(take(row, kNone), BlockStatus::kStale);
  EXPECT_EQ(vacate(row, handle), BlockStatus::kOk);
  occupy(row, 12, 0);
  EXPECT_EQ(take(row, handle), BlockStatus::kStale) << "a handle of the row's former owner";
  EXPECT_NE(handle_of(7, row), handle);
}

TEST(GstoreBlocks, SerialsGoRoundWithoutTouchingOtherFields) {
  Row row = {kSerialMask << 40 | kNoBlock, 0};
  occupy(row, 5, 0);
  const std::uint64_t handle = handle_of(1, row);
  ASSERT_EQ(vacate(row, handle), BlockStatus::kOk);
  EXPECT_EQ(serial_of(row), 0u);
  EXPECT_FALSE(moving(row));
  EXPECT_EQ(block_of(row), kNoBlock);
}

TEST(GstoreBlocks, CountSaturatesAndRefsDoNotOverflow) {
  Row row = free_row();
  occupy(row, 1, 0);
  const std::uint64_t handle = handle_of(0, row);
  row.use = std::uint64_t{0xFFFFFFFF} << 32 | 5;
  ASSERT_EQ(take(row, handle), BlockStatus::kOk);
  EXPECT_EQ(count_of(row), 0xFFFFFFFFu);
  EXPECT_EQ(refs_of(row), 6u);
  row.use = kMostRefs;
  EXPECT_EQ(take(row, handle), BlockStatus::kReferenced);
  EXPECT_EQ(refs_of(row), kMostRefs);
  EXPECT_EQ(count_of(row), 0u);
}

TEST(GstoreBlocks, RandomChangesAgreeWithPlainFields) {
  struct Plain {
    bool exists = false, moving = false;
    std::uint64_t handle = 0, block = 0;
    std::uint32_t ref = 0, count = 0;
  } plain;
  Row row = free_row();
  std::mt19937_64 random(3);
  int done[8] = {};
  for (int step = 0; step < 300'000; ++step) {
    const int what = static_cast<int>(random() % 6);
    const bool other = random() % 16 == 0;
    const std::uint64_t handle = other ? plain.handle + (std::uint64_t{1} << 32) : plain.handle;
    const std::uint64_t block = random() % 40;
    const auto holders = static_cast<std::uint32_t>(random() % 3);
    BlockStatus expected = plain.exists && !other ? BlockStatus::kOk : BlockStatus::kStale;
    BlockStatus status = BlockStatus::kOk;
    const bool known = expected == BlockStatus::kOk;
    switch (what) {
      case 0:
        if (plain.exists) continue;
        occupy(row, block, holders);
        plain = {true, false, handle_of(3, row), block, holders, 0};
        expected = BlockStatus::kOk;
        break;
      case 1:
        status = take(row, handle);
        if (known && plain.moving) expected = BlockStatus::kMoving;
        if (expected == BlockStatus::kOk) ++plain.ref, ++plain.count;
        break;
      case 2:
        status = give_back(row, handle);
        if (known && plain.ref == 0) expected = BlockStatus::kNotReferenced;
        if (expected == BlockStatus::kOk) --plain.ref;
        break;
      case 3:
        status = vacate(row, handle);
        if (known && plain.ref != 0) expected = BlockStatus::kReferenced;
        if (known && plain.moving) expected = BlockStatus::kMoving;
        if (expected == BlockStatus::kOk) plain.exists = false;
        break;
      case 4:
        status = begin_move(row, handle, holders, 20, 40);
        if (known && plain.ref > holders) expected = BlockStatus::kReferenced;
        if (known && plain.block >= 20) expected = BlockStatus::kThere;
        if (known && plain.moving) expected = BlockStatus::kMoving;
        if (expected == BlockStatus::kOk) plain.moving = true;
        break;
      default:
        status = end_move(row, handle, holders == 0 ? kNoBlock : block);
        if (known && !plain.moving) expected = BlockStatus::kMoving;
        if (expected == BlockStatus::kOk) {
          plain.moving = false;
          if (holders != 0) plain.block = block;
        }
    }
    ASSERT_EQ(status, expected) << "step " << step << ", change " << what;
    ++done[static_cast<int>(status)];
    ASSERT_EQ(block_of(row) != kNoBlock, plain.exists);
    if (!plain.exists) continue;
    ASSERT_EQ(block_of(row), plain.block);
    ASSERT_EQ(refs_of(row), plain.ref);
    ASSERT_EQ(count_of(row), plain.count);
    ASSERT_EQ(moving(row), plain.moving);
    ASSERT_EQ(handle_of(3, row), plain.handle);
  }
  for (const BlockStatus status : {BlockStatus::kOk, BlockStatus::kStale, BlockStatus::kReferenced,
                                   BlockStatus::kNotReferenced, BlockStatus::kMoving, BlockStatus::kThere}) {
    EXPECT_GT(done[static_cast<int>(status)], 10) << static_cast<int>(status);
  }
}

TEST(GstoreBlocks, RankGrowsWithAgeAndFallsWithUses) {
  EXPECT_EQ(eviction_rank(100, 40, 0, 10), 60u);
  EXPECT_EQ(eviction_rank(100, 40, 2, 10), 40u);
  EXPECT_EQ(eviction_rank(100, 40, 9, 10), 30u) << "three uses at most count";
  EXPECT_EQ(eviction_rank(100, 40, 9, 30), 0u) << "never below zero";
  EXPECT_EQ(eviction_rank(5, 0xFFFFFFFBu, 0, 0), 10u) << "the clock goes round";
  EXPECT_EQ(eviction_rank(5, 5, 0xFFFFFFFF, 0xFFFFFFFF), 0u);
}

}  // namespace
}  // namespace tardis::gstore
