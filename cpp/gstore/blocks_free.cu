// SPDX-License-Identifier: Apache-2.0
// Rows that nobody refers to go, and their blocks with them.
#include <cuda_runtime.h>

#include "gstore/block_table.cuh"

namespace tardis::gstore {
namespace {

__global__ void __launch_bounds__(kThreads)
    blocks_free(const tardis_gpu_blocks blocks, const std::uint64_t* handles, const std::uint32_t* count,
                std::uint32_t max_count, std::uint8_t* statuses, tardis_gpu_ticket* ticket, tardis_gpu_report* report) {
  for_each_element(count, max_count, statuses, ticket, report, [&](std::uint32_t i, bool counts) {
    if (!counts) return BlockStatus::kOk;
    const std::uint64_t handle = handles[i];
    const std::uint32_t number = number_of(handle);
    Row row{};
    const BlockStatus status = update_row(blocks, handle, row, [&](Row& change) { return vacate(change, handle); });
    if (status != BlockStatus::kOk) return status;
    // The row is this thread's until its number is given back.
    const std::uint64_t home = *static_cast<volatile std::uint64_t*>(blocks.home + number);
    if (block_of(row) != home) give_block(blocks, block_of(row));
    if (home != kNone) give_block(blocks, home);
    blocks.home[number] = kNone;
    fence();  // forbids that the row's next owner's home is overwritten
    give_number(blocks.row_pool, number);
    return status;
  });
}

}  // namespace
}  // namespace tardis::gstore

extern "C" int tardis_gpu_blocks_free(const tardis_gpu_blocks* blocks, const uint64_t* handles, const uint32_t* count,
                                      uint32_t max_count, uint8_t* statuses, tardis_gpu_ticket* ticket,
                                      tardis_gpu_report* report, void* cuda_stream) {
  using namespace tardis::gstore;
  if (blocks == nullptr || handles == nullptr || count == nullptr || max_count == 0 || ticket == nullptr) {
    return cudaErrorInvalidValue;
  }
  blocks_free<<<block_grid(max_count), kThreads, 0, static_cast<cudaStream_t>(cuda_stream)>>>(
      *blocks, handles, count, max_count, statuses, ticket, report);
  return cudaGetLastError();
}
