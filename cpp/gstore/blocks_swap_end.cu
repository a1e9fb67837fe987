// SPDX-License-Identifier: Apache-2.0
// Rows that have moved, or have not.
#include <cuda_runtime.h>

#include "gstore/block_table.cuh"

namespace tardis::gstore {
namespace {

__global__ void __launch_bounds__(kThreads)
    blocks_swap_end(const tardis_gpu_blocks blocks, const std::uint64_t* handles, const std::uint64_t* to,
                    const std::uint8_t* good, const std::uint32_t* count, std::uint32_t max_count,
                    std::uint8_t* statuses, tardis_gpu_ticket* ticket, tardis_gpu_report* report) {
  const std::uint64_t files = tier_begin(blocks, TARDIS_GPU_FILE);
  for_each_element(count, max_count, statuses, ticket, report, [&](std::uint32_t i, bool counts) {
    if (!counts) return BlockStatus::kOk;
    const std::uint64_t handle = handles[i], target = to[i];
    if (target == kNone) return BlockStatus::kNoBlock;
    const std::uint32_t number = number_of(handle);
    if (number >= blocks.row_pool.size) return BlockStatus::kStale;
    Row row = load_row(blocks.rows, number);
    Row probe = row;
    const BlockStatus may = end_move(probe, handle, kNoBlock);
    if (may != BlockStatus::kOk) return may;
    // Until the move ends, the row's home is this thread's.
    volatile std::uint64_t* home = blocks.home + number;
    const bool moved = good == nullptr || good[i] != 0;
    const bool is_home = *home == target;
    if (moved && target >= files) *home = target;
    const BlockStatus status = update_row(
        blocks, handle, row, [&](Row& change) { return end_move(change, handle, moved ? target : kNoBlock); });
    if (status != BlockStatus::kOk) return status;
    if (moved && block_of(row) < files) give_block(blocks, block_of(row));
    if (!moved && !is_home) give_block(blocks, target);
    return status;
  });
}

}  // namespace
}  // namespace tardis::gstore

extern "C" int tardis_gpu_blocks_swap_end(const tardis_gpu_blocks* blocks, const uint64_t* handles, const uint64_t* to,
                                          const uint8_t* good, const uint32_t* count, uint32_t max_count,
                                          uint8_t* statuses, tardis_gpu_ticket* ticket, tardis_gpu_report* report,
                                          void* cuda_stream) {
  using namespace tardis::gstore;
  if (blocks == nullptr || handles == nullptr || to == nullptr || count == nullptr || max_count == 0 ||
      ticket == nullptr) {
    return cudaErrorInvalidValue;
  }
  blocks_swap_end<<<block_grid(max_count), kThreads, 0, static_cast<cudaStream_t>(cuda_stream)>>>(
      *blocks, handles, to, good, count, max_count, statuses, ticket, report);
  return cudaGetLastError();
}
