// SPDX-License-Identifier: Apache-2.0
// A batch of insertions, replacements and erasures: a warp a change.
#include <cuda_runtime.h>

#include <algorithm>

#include "gstore/device_warp.cuh"
#include "gstore/index_writer.h"

namespace tardis::gstore {
namespace {

constexpr std::uint32_t kMaxCtas = 132 * 8;

__global__ void __launch_bounds__(kThreads, 4)
    index_apply(const tardis_gpu_index index, const tardis_gpu_index_entry* changes, const std::uint32_t* count_memory,
                std::uint32_t max_count, std::uint8_t* statuses, tardis_gpu_ticket* ticket, tardis_gpu_report* report) {
  __shared__ BatchTotals totals;
  begin_batch(totals);
  const std::uint32_t count = batch_count(count_memory, max_count);
  const std::uint32_t warps = gridDim.x * kWarpsPerCta;
  DeviceWarp warp;
  for (std::uint64_t i = blockIdx.x * kWarpsPerCta + threadIdx.x / kLanes; i < count; i += warps) {
    const Status status = IndexWriter<DeviceWarp>(warp, index).apply(changes + i);
    if (warp.self != 0) continue;
    if (statuses != nullptr) statuses[i] = static_cast<std::uint8_t>(status);
    atomicAdd(&totals.by_status[static_cast<int>(status)], 1);
  }
  end_batch(totals, count, ticket, report);
}

}  // namespace
}  // namespace tardis::gstore

extern "C" int tardis_gpu_index_apply(const tardis_gpu_index* index, const tardis_gpu_index_entry* changes,
                                      const uint32_t* count, uint32_t max_count, uint8_t* statuses,
                                      tardis_gpu_ticket* ticket, tardis_gpu_report* report, uint32_t ctas,
                                      void* cuda_stream) {
  using namespace tardis::gstore;
  if (index == nullptr || changes == nullptr || count == nullptr || ticket == nullptr || index->words == nullptr ||
      index->buckets < 2 || max_count == 0) {
    return cudaErrorInvalidValue;
  }
  const std::uint32_t useful = (max_count - 1) / kWarpsPerCta + 1;
  const dim3 grid(std::min(useful, ctas == 0 ? kMaxCtas : ctas));
  index_apply<<<grid, kThreads, 0, static_cast<cudaStream_t>(cuda_stream)>>>(*index, changes, count, max_count,
                                                                             statuses, ticket, report);
  return cudaGetLastError();
}

extern "C" int tardis_gpu_index_load_apply(void) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, tardis::gstore::index_apply);
}
