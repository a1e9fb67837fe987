// SPDX-License-Identifier: Apache-2.0
// New rows, each with a block of one tier.
#include <cuda_runtime.h>

#include "gstore/block_table.cuh"

namespace tardis::gstore {
namespace {

__global__ void __launch_bounds__(kThreads)
    blocks_alloc(const tardis_gpu_blocks blocks, std::uint32_t tier, const std::uint32_t* count,
                 std::uint32_t max_count, std::uint64_t* handles, std::uint64_t* ids, std::uint8_t* statuses,
                 tardis_gpu_ticket* ticket, tardis_gpu_report* report) {
  __shared__ std::uint32_t found[kWarpsPerCta][kLanes];
  std::uint32_t* mine = found[threadIdx.x / kLanes];
  const std::uint64_t first = tier_begin(blocks, tier);
  for_each_element(count, max_count, statuses, ticket, report, [&](std::uint32_t i, bool counts) {
    const std::uint32_t number = take_numbers(blocks.row_pool, counts, mine);
    const bool has_row = number != ~0u;
    const std::uint32_t block = take_numbers(pool_of(blocks, tier), has_row, mine);
    if (!counts) return BlockStatus::kOk;
    std::uint64_t handle = kNone, id = kNone;
    BlockStatus status = has_row ? BlockStatus::kNoBlock : BlockStatus::kNoRow;
    if (has_row && block == ~0u) give_number(blocks.row_pool, number);
    if (has_row && block != ~0u) {
      id = first + block;
      blocks.home[number] = tier == TARDIS_GPU_FILE ? id : kNone;
      blocks.used[number] = *static_cast<const volatile std::uint32_t*>(blocks.clock);
      const Row before = load_row(blocks.rows, number);
      Row after = before;
      status = occupy(after, id, 1);
      exchange_row(blocks.rows, number, before, after);  // nobody changes a row that is free
      handle = handle_of(number, after);
    }
    handles[i] = handle;
    if (ids != nullptr) ids[i] = id;
    return status;
  });
}

}  // namespace
}  // namespace tardis::gstore

extern "C" int tardis_gpu_blocks_alloc(const tardis_gpu_blocks* blocks, uint32_t tier, const uint32_t* count,
                                       uint32_t max_count, uint64_t* handles, uint64_t* ids, uint8_t* statuses,
                                       tardis_gpu_ticket* ticket, tardis_gpu_report* report, void* cuda_stream) {
  using namespace tardis::gstore;
  if (blocks == nullptr || tier >= TARDIS_GPU_TIERS || count == nullptr || max_count == 0 || handles == nullptr ||
      ticket == nullptr) {
    return cudaErrorInvalidValue;
  }
  blocks_alloc<<<block_grid(max_count), kThreads, 0, static_cast<cudaStream_t>(cuda_stream)>>>(
      *blocks, tier, count, max_count, handles, ids, statuses, ticket, report);
  return cudaGetLastError();
}
