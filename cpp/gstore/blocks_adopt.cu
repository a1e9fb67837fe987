// SPDX-License-Identifier: Apache-2.0
// New rows for file blocks that the store has filled.
#include <cuda_runtime.h>

#include "gstore/block_table.cuh"

namespace tardis::gstore {
namespace {

__global__ void __launch_bounds__(kThreads)
    blocks_adopt(const tardis_gpu_blocks blocks, const std::uint32_t* file_blocks, const std::uint32_t* count,
                 std::uint32_t max_count, std::uint64_t* handles, std::uint8_t* statuses, tardis_gpu_ticket* ticket,
                 tardis_gpu_report* report) {
  __shared__ std::uint32_t found[kWarpsPerCta][kLanes];
  std::uint32_t* mine = found[threadIdx.x / kLanes];
  const std::uint64_t first = tier_begin(blocks, TARDIS_GPU_FILE);
  for_each_element(count, max_count, statuses, ticket, report, [&](std::uint32_t i, bool counts) {
    const std::uint32_t number = take_numbers(blocks.row_pool, counts, mine);
    if (!counts) return BlockStatus::kOk;
    handles[i] = kNone;
    if (number == ~0u) return BlockStatus::kNoRow;
    if (!take_number(blocks.pool[TARDIS_GPU_FILE], file_blocks[i])) {
      give_number(blocks.row_pool, number);
      return BlockStatus::kNoBlock;
    }
    const std::uint64_t id = first + file_blocks[i];
    blocks.home[number] = id;
    blocks.used[number] = *static_cast<const volatile std::uint32_t*>(blocks.clock);
    const Row before = load_row(blocks.rows, number);
    Row after = before;
    const BlockStatus status = occupy(after, id, 0);
    exchange_row(blocks.rows, number, before, after);  // nobody changes a row that is free
    handles[i] = handle_of(number, after);
    return status;
  });
}

}  // namespace
}  // namespace tardis::gstore

extern "C" int tardis_gpu_blocks_adopt(const tardis_gpu_blocks* blocks, const uint32_t* file_blocks,
                                       const uint32_t* count, uint32_t max_count, uint64_t* handles, uint8_t* statuses,
                                       tardis_gpu_ticket* ticket, tardis_gpu_report* report, void* cuda_stream) {
  using namespace tardis::gstore;
  if (blocks == nullptr || file_blocks == nullptr || count == nullptr || max_count == 0 || handles == nullptr ||
      ticket == nullptr) {
    return cudaErrorInvalidValue;
  }
  blocks_adopt<<<block_grid(max_count), kThreads, 0, static_cast<cudaStream_t>(cuda_stream)>>>(
      *blocks, file_blocks, count, max_count, handles, statuses, ticket, report);
  return cudaGetLastError();
}
