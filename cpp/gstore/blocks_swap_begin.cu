// SPDX-License-Identifier: Apache-2.0
// Rows that are about to move, and where to.
#include <cuda_runtime.h>

#include "gstore/block_table.cuh"

namespace tardis::gstore {
namespace {

__global__ void __launch_bounds__(kThreads)
    blocks_swap_begin(const tardis_gpu_blocks blocks, std::uint32_t tier, std::uint32_t holders,
                      const std::uint64_t* handles, const std::uint32_t* count, std::uint32_t max_count,
                      std::uint64_t* from, std::uint64_t* to, std::uint8_t* statuses, tardis_gpu_ticket* ticket,
                      tardis_gpu_report* report) {
  __shared__ std::uint32_t found[kWarpsPerCta][kLanes];
  std::uint32_t* mine = found[threadIdx.x / kLanes];
  const std::uint64_t first = tier_begin(blocks, tier), end = tier_end(blocks, tier);
  for_each_element(count, max_count, statuses, ticket, report, [&](std::uint32_t i, bool counts) {
    std::uint64_t handle = kNone, target = kNone;
    Row row{};
    BlockStatus status = BlockStatus::kStale;
    if (counts) {
      handle = handles[i];
      status =
          update_row(blocks, handle, row, [&](Row& change) { return begin_move(change, handle, holders, first, end); });
    }
    const bool moves = counts && status == BlockStatus::kOk;
    // While it moves, the row's home is this thread's to read.
    if (moves && tier == TARDIS_GPU_FILE)
      target = *static_cast<volatile std::uint64_t*>(blocks.home + number_of(handle));
    const std::uint32_t block = take_numbers(pool_of(blocks, tier), moves && target == kNone, mine);
    if (!counts) return BlockStatus::kOk;
    if (moves && target == kNone && block != ~0u) target = first + block;
    if (moves && target == kNone) {
      update_row(blocks, handle, row, [&](Row& change) { return end_move(change, handle, kNoBlock); });
      status = BlockStatus::kNoBlock;
    }
    const bool done = status == BlockStatus::kOk;
    from[i] = done ? block_of(row) : kNone;
    to[i] = done ? target : kNone;
    return status;
  });
}

}  // namespace
}  // namespace tardis::gstore

extern "C" int tardis_gpu_blocks_swap_begin(const tardis_gpu_blocks* blocks, uint32_t tier, uint32_t holders,
                                            const uint64_t* handles, const uint32_t* count, uint32_t max_count,
                                            uint64_t* from, uint64_t* to, uint8_t* statuses, tardis_gpu_ticket* ticket,
                                            tardis_gpu_report* report, void* cuda_stream) {
  using namespace tardis::gstore;
  if (blocks == nullptr || tier >= TARDIS_GPU_TIERS || handles == nullptr || count == nullptr || max_count == 0 ||
      from == nullptr || to == nullptr || ticket == nullptr) {
    return cudaErrorInvalidValue;
  }
  blocks_swap_begin<<<block_grid(max_count), kThreads, 0, static_cast<cudaStream_t>(cuda_stream)>>>(
      *blocks, tier, holders, handles, count, max_count, from, to, statuses, ticket, report);
  return cudaGetLastError();
}
