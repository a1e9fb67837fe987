// SPDX-License-Identifier: Apache-2.0
// Rows and pools on the device.
#pragma once

#include "gstore/block_row.h"
#include "gstore/device_warp.cuh"

namespace tardis::gstore {

__device__ __forceinline__ Row load_row(const std::uint64_t* rows, std::uint32_t number) {
  Row row;
  asm volatile(
      "{ .reg .b128 both;\n\t"
      "ld.relaxed.gpu.global.b128 both, [%2];\n\t"
      "mov.b128 {%0, %1}, both; }"
      : "=l"(row.where), "=l"(row.use)
      : "l"(__cvta_generic_to_global(rows + 2ull * number))
      : "memory");
  return row;
}

// What the row was; it is `desired` now if that equals `expected`. Acquire and release: forbids that what a holder did
// with a block is done after it gave the row away, or what the next one does before it got it.
__device__ __forceinline__ Row exchange_row(std::uint64_t* rows, std::uint32_t number, const Row& expected,
                                            const Row& desired) {
  Row found;
  asm volatile(
      "{ .reg .b128 have, want, was;\n\t"
      "mov.b128 have, {%3, %4};\n\t"
      "mov.b128 want, {%5, %6};\n\t"
      "atom.acq_rel.gpu.global.cas.b128 was, [%2], have, want;\n\t"
      "mov.b128 {%0, %1}, was; }"
      : "=l"(found.where), "=l"(found.use)
      : "l"(__cvta_generic_to_global(rows + 2ull * number)), "l"(expected.where), "l"(expected.use), "l"(desired.where),
        "l"(desired.use)
      : "memory");
  return found;
}

// change(row) as in block_row.h, done at once or not at all. `before`: the row as it was last seen.
template <class Change>
__device__ __forceinline__ BlockStatus update_row(const tardis_gpu_blocks& blocks, std::uint64_t handle, Row& before,
                                                  Change change) {
  const std::uint32_t number = number_of(handle);
  if (number >= blocks.row_pool.size) return BlockStatus::kStale;
  before = load_row(blocks.rows, number);
  for (;;) {  // somebody else's exchange succeeded whenever this one does not
    Row after = before;
    const BlockStatus status = change(after);
    if (status != BlockStatus::kOk) return status;
    const Row found = exchange_row(blocks.rows, number, before, after);
    if (found.where == before.where && found.use == before.use) return BlockStatus::kOk;
    before = found;
  }
}

// ---- pools. A number is taken in two steps: one of the free ones is reserved by their count, then a bit is found,
// which is there as long as bits are cleared before the count grows.

enum PoolControl { kFree = 0, kNext = 1 };

__device__ __forceinline__ std::uint32_t reserve(const tardis_gpu_pool& pool, std::uint32_t wanted) {
  std::uint32_t free = *static_cast<volatile std::uint32_t*>(pool.control + kFree);
  for (;;) {
    const std::uint32_t granted = wanted < free ? wanted : free;
    if (granted == 0) return 0;
    const std::uint32_t found = atomicCAS(pool.control + kFree, free, free - granted);
    if (found == free) return granted;
    free = found;
  }
}

__device__ __forceinline__ void give_number(const tardis_gpu_pool& pool, std::uint32_t number) {
  atomicAnd(pool.bits + number / 32, ~(1u << number % 32));
  fence();  // forbids that the number is counted as free before its bit is cleared
  atomicAdd(pool.control + kFree, 1);
}

// A number that the caller names.
__device__ __forceinline__ bool take_number(const tardis_gpu_pool& pool, std::uint32_t number) {
  if (number >= pool.size || reserve(pool, 1) == 0) return false;
  if ((atomicOr(pool.bits + number / 32, 1u << number % 32) & 1u << number % 32) == 0) return true;
  atomicAdd(pool.control + kFree, 1);
  return false;
}

// All lanes of a warp; those that want a number get one, or all ones. `found`: 32 words of this warp's shared memory.
__device__ __forceinline__ std::uint32_t take_numbers(const tardis_gpu_pool& pool, bool wants, std::uint32_t* found) {
  const std::uint32_t self = threadIdx.x % kLanes;
  const std::uint32_t wanting = __ballot_sync(kAllLanes, wants);
  if (wanting == 0) return ~0u;
  std::uint32_t granted = 0, start = 0;
  if (self == 0) {
    granted = reserve(pool, static_cast<std::uint32_t>(__popc(wanting)));
    start = *static_cast<volatile std::uint32_t*>(pool.control + kNext);
  }
  granted = __shfl_sync(kAllLanes, granted, 0);
  start = __shfl_sync(kAllLanes, start, 0);
  if (granted == 0) return ~0u;
  fence();  // forbids that a bit is looked at before the number was reserved
  const std::uint32_t words = (pool.size + 31) / 32;
  // A word apart from the next warp, so that warps which look at once do not want the same bits.
  start = (start + blockIdx.x * (blockDim.x / kLanes) + threadIdx.x / kLanes) % words;
  Deadline deadline;
  std::uint32_t have = 0;
  while (have < granted) {
    const std::uint32_t at = start + self;
    std::uint32_t word = at < words ? *static_cast<volatile std::uint32_t*>(pool.bits + at) : ~0u;
    if (at == words - 1 && pool.size % 32 != 0) word |= ~0u << pool.size % 32;  // numbers beyond the last
    const auto free = static_cast<std::uint32_t>(__popc(~word));
    std::uint32_t before = free;  // of lanes up to this one
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const std::uint32_t other = __shfl_up_sync(kAllLanes, before, distance);
      if (self >= static_cast<std::uint32_t>(distance)) before += other;
    }
    before -= free;
    const std::uint32_t need = granted - have;
    std::uint32_t share = before >= need ? 0 : (free < need - before ? free : need - before);
    std::uint32_t mask = 0;
    for (std::uint32_t rest = ~word; share > 0; --share, rest &= rest - 1) mask |= rest & (0u - rest);
    std::uint32_t mine = mask == 0 ? 0 : mask & ~atomicOr(pool.bits + at, mask);
    std::uint32_t position = static_cast<std::uint32_t>(__popc(mine));
    const std::uint32_t got = position;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const std::uint32_t other = __shfl_up_sync(kAllLanes, position, distance);
      if (self >= static_cast<std::uint32_t>(distance)) position += other;
    }
    const std::uint32_t all = __shfl_sync(kAllLanes, position, kLanes - 1);
    for (position += have - got; mine != 0; mine &= mine - 1, ++position) {
      found[position] = at * 32 + static_cast<std::uint32_t>(__ffs(static_cast<int>(mine))) - 1;
    }
    have += all;
    if (have < granted) start = start + kLanes < words ? start + kLanes : 0;
    if (__any_sync(kAllLanes, deadline.passed(Deadline::kWriterPatience))) break;
  }
  if (self == 0) {
    *static_cast<volatile std::uint32_t*>(pool.control + kNext) = start;
    if (have < granted) atomicAdd(pool.control + kFree, granted - have);
  }
  __syncwarp();
  const auto rank = static_cast<std::uint32_t>(__popc(wanting & ((1u << self) - 1)));
  const std::uint32_t number = wants && rank < have ? found[rank] : ~0u;
  __syncwarp();  // forbids that `found` is used again before every lane has read it
  return number;
}

__device__ __forceinline__ void give_block(const tardis_gpu_blocks& blocks, std::uint64_t block) {
  const std::uint32_t tier = tier_of(blocks, block);
  give_number(pool_of(blocks, tier), static_cast<std::uint32_t>(block - tier_begin(blocks, tier)));
}

// ---- batches: a thread an element, whole warps, so that their lanes may take numbers together

__device__ __forceinline__ void count_status(BatchTotals& totals, bool counts, BlockStatus status) {
  if (counts) atomicAdd(&totals.by_status[static_cast<int>(status)], 1);
}

// one(i, counts): i is below the count where `counts`; all lanes of a warp call it together. It returns the status.
template <class One>
__device__ __forceinline__ void for_each_element(const std::uint32_t* count_memory, std::uint32_t max_count,
                                                 std::uint8_t* statuses, tardis_gpu_ticket* ticket,
                                                 tardis_gpu_report* report, One one) {
  __shared__ BatchTotals totals;
  begin_batch(totals);
  const std::uint32_t count = batch_count(count_memory, max_count);
  const std::uint32_t rounded = (count + kLanes - 1) / kLanes * kLanes;
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t at = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; at < rounded; at += step) {
    const auto i = static_cast<std::uint32_t>(at);
    const bool counts = i < count;
    const BlockStatus status = one(i, counts);
    if (counts && statuses != nullptr) statuses[i] = static_cast<std::uint8_t>(status);
    count_status(totals, counts, status);
  }
  end_batch(totals, count, ticket, report);
}

constexpr std::uint32_t kMaxBlockCtas = 132 * 4;
inline dim3 block_grid(std::uint32_t max_count) {
  const std::uint32_t wanted = (max_count - 1) / kThreads + 1;
  return dim3(wanted < kMaxBlockCtas ? wanted : kMaxBlockCtas);
}

}  // namespace tardis::gstore
