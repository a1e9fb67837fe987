// SPDX-License-Identifier: Apache-2.0
// A row of the block table and what may become of it, for host and device code. A row is changed by one exchange of its
// 16 bytes, so BlockId, Ref and Count always belong together.
#pragma once

#include "gstore/blocks.h"
#include "gstore/shared_word.h"

namespace tardis::gstore {

constexpr std::uint64_t kNone = ~std::uint64_t{0};
constexpr std::uint64_t kNoBlock = (std::uint64_t{1} << 40) - 1;  // in a row that is free
constexpr std::uint64_t kSerialMask = (std::uint64_t{1} << 23) - 1;
constexpr std::uint64_t kMovingBit = std::uint64_t{1} << 63;
constexpr std::uint32_t kMostRefs = 0xFFFFFFFFu;

enum class BlockStatus : std::uint32_t {
  kOk = TARDIS_GPU_BLOCKS_OK,
  kStale = TARDIS_GPU_BLOCKS_STALE,
  kReferenced = TARDIS_GPU_BLOCKS_REFERENCED,
  kNotReferenced = TARDIS_GPU_BLOCKS_NOT_REFERENCED,
  kMoving = TARDIS_GPU_BLOCKS_MOVING,
  kNoBlock = TARDIS_GPU_BLOCKS_NO_BLOCK,
  kNoRow = TARDIS_GPU_BLOCKS_NO_ROW,
  kThere = TARDIS_GPU_BLOCKS_THERE,
};

struct alignas(16) Row {
  std::uint64_t where;  // BlockId, serial << 40, kMovingBit
  std::uint64_t use;    // Ref, Count << 32
};
static_assert(sizeof(Row) == 16);

TARDIS_GSTORE_FUNCTION std::uint64_t block_of(const Row& row) { return row.where & kNoBlock; }
TARDIS_GSTORE_FUNCTION std::uint64_t serial_of(const Row& row) { return row.where >> 40 & kSerialMask; }
TARDIS_GSTORE_FUNCTION bool moving(const Row& row) { return (row.where & kMovingBit) != 0; }
TARDIS_GSTORE_FUNCTION std::uint32_t refs_of(const Row& row) { return static_cast<std::uint32_t>(row.use); }
TARDIS_GSTORE_FUNCTION std::uint32_t count_of(const Row& row) { return static_cast<std::uint32_t>(row.use >> 32); }
TARDIS_GSTORE_FUNCTION void set_block(Row& row, std::uint64_t block) { row.where = (row.where & ~kNoBlock) | block; }

// A handle: row | serial << 32. The serial changes when the row is freed.
TARDIS_GSTORE_FUNCTION std::uint64_t handle_of(std::uint32_t number, const Row& row) {
  return serial_of(row) << 32 | number;
}
TARDIS_GSTORE_FUNCTION std::uint32_t number_of(std::uint64_t handle) { return static_cast<std::uint32_t>(handle); }

TARDIS_GSTORE_FUNCTION bool is_row_of(const Row& row, std::uint64_t handle) {
  return block_of(row) != kNoBlock && serial_of(row) == handle >> 32;
}

// ---- changes: each tells whether it may be, and makes it

TARDIS_GSTORE_FUNCTION BlockStatus occupy(Row& row, std::uint64_t block, std::uint32_t refs) {
  set_block(row, block);
  row.use = refs;
  return BlockStatus::kOk;
}

TARDIS_GSTORE_FUNCTION BlockStatus take(Row& row, std::uint64_t handle) {
  if (!is_row_of(row, handle)) return BlockStatus::kStale;
  if (moving(row)) return BlockStatus::kMoving;
  if (refs_of(row) == kMostRefs) return BlockStatus::kReferenced;
  const std::uint64_t count = count_of(row) == 0xFFFFFFFFu ? count_of(row) : count_of(row) + 1;
  row.use = count << 32 | (refs_of(row) + 1);
  return BlockStatus::kOk;
}

TARDIS_GSTORE_FUNCTION BlockStatus give_back(Row& row, std::uint64_t handle) {
  if (!is_row_of(row, handle)) return BlockStatus::kStale;
  if (refs_of(row) == 0) return BlockStatus::kNotReferenced;
  --row.use;
  return BlockStatus::kOk;
}

TARDIS_GSTORE_FUNCTION BlockStatus vacate(Row& row, std::uint64_t handle) {
  if (!is_row_of(row, handle)) return BlockStatus::kStale;
  if (moving(row)) return BlockStatus::kMoving;
  if (refs_of(row) != 0) return BlockStatus::kReferenced;
  row.where = ((serial_of(row) + 1) & kSerialMask) << 40 | kNoBlock;
  row.use = 0;
  return BlockStatus::kOk;
}

TARDIS_GSTORE_FUNCTION BlockStatus begin_move(Row& row, std::uint64_t handle, std::uint32_t holders,
                                              std::uint64_t tier_begin, std::uint64_t tier_end) {
  if (!is_row_of(row, handle)) return BlockStatus::kStale;
  if (moving(row)) return BlockStatus::kMoving;
  if (block_of(row) >= tier_begin && block_of(row) < tier_end) return BlockStatus::kThere;
  if (refs_of(row) > holders) return BlockStatus::kReferenced;
  row.where |= kMovingBit;
  return BlockStatus::kOk;
}

// kNoBlock: it stays where it is.
TARDIS_GSTORE_FUNCTION BlockStatus end_move(Row& row, std::uint64_t handle, std::uint64_t to) {
  if (!is_row_of(row, handle)) return BlockStatus::kStale;
  if (!moving(row)) return BlockStatus::kMoving;
  if (to != kNoBlock) set_block(row, to);
  row.where &= ~kMovingBit;
  return BlockStatus::kOk;
}

// ---- the space of BlockIds

// By selection, not by index: an index into a kernel's parameters would put them in local memory.
TARDIS_GSTORE_FUNCTION tardis_gpu_pool pool_of(const tardis_gpu_blocks& blocks, std::uint32_t tier) {
  tardis_gpu_pool pool = blocks.pool[TARDIS_GPU_FILE];
  if (tier == TARDIS_GPU_HBM) pool = blocks.pool[TARDIS_GPU_HBM];
  if (tier == TARDIS_GPU_DRAM) pool = blocks.pool[TARDIS_GPU_DRAM];
  return pool;
}

TARDIS_GSTORE_FUNCTION std::uint64_t tier_begin(const tardis_gpu_blocks& blocks, std::uint32_t tier) {
  std::uint64_t begin = 0;
  if (tier > TARDIS_GPU_HBM) begin += blocks.pool[TARDIS_GPU_HBM].size;
  if (tier > TARDIS_GPU_DRAM) begin += blocks.pool[TARDIS_GPU_DRAM].size;
  return begin;
}
TARDIS_GSTORE_FUNCTION std::uint64_t tier_end(const tardis_gpu_blocks& blocks, std::uint32_t tier) {
  return tier_begin(blocks, tier) + pool_of(blocks, tier).size;
}
TARDIS_GSTORE_FUNCTION std::uint32_t tier_of(const tardis_gpu_blocks& blocks, std::uint64_t block) {
  if (block < blocks.pool[TARDIS_GPU_HBM].size) return TARDIS_GPU_HBM;
  return block < tier_begin(blocks, TARDIS_GPU_FILE) ? TARDIS_GPU_DRAM : TARDIS_GPU_FILE;
}

// How much a row without references deserves to go: the higher, the sooner.
TARDIS_GSTORE_FUNCTION std::uint32_t eviction_rank(std::uint32_t clock, std::uint32_t used, std::uint32_t count,
                                                   std::uint32_t bonus) {
  const std::uint32_t age = clock - used;  // as long as nothing rests for 2^32 ticks
  const std::uint64_t worth = std::uint64_t{count < 3 ? count : 3} * bonus;
  return age > worth ? age - static_cast<std::uint32_t>(worth) : 0;
}

}  // namespace tardis::gstore
