// SPDX-License-Identifier: Apache-2.0
// Blocks of HBM that somebody else takes and gives back, such as SGLang's allocator: no row has them.
#include <cuda_runtime.h>

#include "gstore/block_table.cuh"

namespace tardis::gstore {
namespace {

__global__ void __launch_bounds__(kThreads)
    blocks_mark(const tardis_gpu_blocks blocks, std::uint32_t taken, const std::int64_t* ids,
                const std::uint32_t* count, std::uint32_t max_count, std::uint8_t* statuses, tardis_gpu_ticket* ticket,
                tardis_gpu_report* report) {
  const tardis_gpu_pool& pool = blocks.pool[TARDIS_GPU_HBM];
  for_each_element(count, max_count, statuses, ticket, report, [&](std::uint32_t i, bool counts) {
    if (!counts) return BlockStatus::kOk;
    const std::int64_t id = ids[i];
    if (id < 0 || id >= static_cast<std::int64_t>(pool.size)) return BlockStatus::kStale;
    const auto number = static_cast<std::uint32_t>(id);
    if (taken != 0) return take_number(pool, number) ? BlockStatus::kOk : BlockStatus::kNoBlock;
    const std::uint32_t bit = 1u << number % 32;
    if ((atomicAnd(pool.bits + number / 32, ~bit) & bit) == 0) return BlockStatus::kNoBlock;
    fence();  // forbids that the number is counted as free before its bit is cleared
    atomicAdd(pool.control + kFree, 1);
    return BlockStatus::kOk;
  });
}

}  // namespace
}  // namespace tardis::gstore

extern "C" int tardis_gpu_blocks_mark(const tardis_gpu_blocks* blocks, uint32_t taken, const int64_t* ids,
                                      const uint32_t* count, uint32_t max_count, uint8_t* statuses,
                                      tardis_gpu_ticket* ticket, tardis_gpu_report* report, void* cuda_stream) {
  using namespace tardis::gstore;
  if (blocks == nullptr || taken > 1 || ids == nullptr || count == nullptr || max_count == 0 || ticket == nullptr) {
    return cudaErrorInvalidValue;
  }
  blocks_mark<<<block_grid(max_count), kThreads, 0, static_cast<cudaStream_t>(cuda_stream)>>>(
      *blocks, taken, ids, count, max_count, statuses, ticket, report);
  return cudaGetLastError();
}
