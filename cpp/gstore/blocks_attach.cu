// SPDX-License-Identifier: Apache-2.0
// File blocks for rows in memory whose bytes the store has by now.
#include <cuda_runtime.h>

#include "gstore/block_table.cuh"

namespace tardis::gstore {
namespace {

__global__ void __launch_bounds__(kThreads)
    blocks_attach(const tardis_gpu_blocks blocks, const std::uint64_t* handles, const std::uint32_t* file_blocks,
                  const std::uint32_t* count, std::uint32_t max_count, std::uint8_t* statuses,
                  tardis_gpu_ticket* ticket, tardis_gpu_report* report) {
  const std::uint64_t files = tier_begin(blocks, TARDIS_GPU_FILE);
  for_each_element(count, max_count, statuses, ticket, report, [&](std::uint32_t i, bool counts) {
    if (!counts) return BlockStatus::kOk;
    const std::uint64_t handle = handles[i];
    Row row{};
    // As if it moved, so that its home is this thread's.
    BlockStatus status =
        update_row(blocks, handle, row, [&](Row& change) { return begin_move(change, handle, kMostRefs, 0, 0); });
    if (status != BlockStatus::kOk) return status;
    volatile std::uint64_t* const home = blocks.home + number_of(handle);
    if (*home != kNone) {
      status = BlockStatus::kThere;
    } else if (take_number(blocks.pool[TARDIS_GPU_FILE], file_blocks[i])) {
      *home = files + file_blocks[i];
    } else {
      status = BlockStatus::kNoBlock;
    }
    update_row(blocks, handle, row, [&](Row& change) { return end_move(change, handle, kNoBlock); });
    return status;
  });
}

}  // namespace
}  // namespace tardis::gstore

extern "C" int tardis_gpu_blocks_attach(const tardis_gpu_blocks* blocks, const uint64_t* handles,
                                        const uint32_t* file_blocks, const uint32_t* count, uint32_t max_count,
                                        uint8_t* statuses, tardis_gpu_ticket* ticket, tardis_gpu_report* report,
                                        void* cuda_stream) {
  using namespace tardis::gstore;
  if (blocks == nullptr || handles == nullptr || file_blocks == nullptr || count == nullptr || max_count == 0 ||
      ticket == nullptr) {
    return cudaErrorInvalidValue;
  }
  blocks_attach<<<block_grid(max_count), kThreads, 0, static_cast<cudaStream_t>(cuda_stream)>>>(
      *blocks, handles, file_blocks, count, max_count, statuses, ticket, report);
  return cudaGetLastError();
}
