// SPDX-License-Identifier: Apache-2.0
// References: one more, with Count, or one less.
#include <cuda_runtime.h>

#include "gstore/block_table.cuh"

namespace tardis::gstore {
namespace {

__global__ void __launch_bounds__(kThreads)
    blocks_use(const tardis_gpu_blocks blocks, std::uint32_t use, const std::uint64_t* handles,
               const std::uint32_t* count, std::uint32_t max_count, std::uint64_t* ids, std::uint8_t* statuses,
               tardis_gpu_ticket* ticket, tardis_gpu_report* report) {
  const bool more = use == TARDIS_GPU_REF;
  if (more && blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(blocks.clock, 1);
  for_each_element(count, max_count, statuses, ticket, report, [&](std::uint32_t i, bool counts) {
    if (!counts) return BlockStatus::kOk;
    const std::uint64_t handle = handles[i];
    Row row{};
    const BlockStatus status = update_row(
        blocks, handle, row, [&](Row& change) { return more ? take(change, handle) : give_back(change, handle); });
    const bool done = status == BlockStatus::kOk;
    if (done && more) blocks.used[number_of(handle)] = *static_cast<const volatile std::uint32_t*>(blocks.clock);
    if (ids != nullptr) ids[i] = done ? block_of(row) : kNone;
    return status;
  });
}

}  // namespace
}  // namespace tardis::gstore

extern "C" int tardis_gpu_blocks_use(const tardis_gpu_blocks* blocks, uint32_t use, const uint64_t* handles,
                                     const uint32_t* count, uint32_t max_count, uint64_t* ids, uint8_t* statuses,
                                     tardis_gpu_ticket* ticket, tardis_gpu_report* report, void* cuda_stream) {
  using namespace tardis::gstore;
  if (blocks == nullptr || use > TARDIS_GPU_UNREF || handles == nullptr || count == nullptr || max_count == 0 ||
      ticket == nullptr) {
    return cudaErrorInvalidValue;
  }
  blocks_use<<<block_grid(max_count), kThreads, 0, static_cast<cudaStream_t>(cuda_stream)>>>(
      *blocks, use, handles, count, max_count, ids, statuses, ticket, report);
  return cudaGetLastError();
}
