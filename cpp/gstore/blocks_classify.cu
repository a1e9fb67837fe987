// SPDX-License-Identifier: Apache-2.0
// The four branches of a restore: which answers are in HBM, in pinned memory, in files, or nowhere. One kernel, whose
// lists and counts later kernels of the same graph read. (A small one zeroes the counts before.)
#include <cuda_runtime.h>

#include "gstore/block_table.cuh"

namespace tardis::gstore {
namespace {

__global__ void zero_counts(std::uint32_t* list_counts) {
  if (threadIdx.x < TARDIS_GPU_SOURCES) list_counts[threadIdx.x] = 0;
}

__global__ void __launch_bounds__(kThreads)
    blocks_classify(const tardis_gpu_blocks blocks, const tardis_gpu_index_answer* answers,
                    const std::uint32_t* count_memory, std::uint32_t max_count, std::uint64_t* ids,
                    std::uint32_t* lists, std::uint64_t* taken, std::uint32_t* list_counts, std::uint64_t* sources) {
  if (blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(blocks.clock, 1);
  const std::uint32_t self = threadIdx.x % kLanes;
  const std::uint32_t count = batch_count(count_memory, max_count);
  const std::uint32_t rounded = (count + kLanes - 1) / kLanes * kLanes;
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t at = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; at < rounded; at += step) {
    const auto i = static_cast<std::uint32_t>(at);
    std::uint32_t source = TARDIS_GPU_SOURCES;  // none: beyond the batch
    std::uint64_t handle = kNone;
    if (i < count) {
      source = TARDIS_GPU_SOURCE_MISS;
      std::uint64_t id = kNone;
      if (answers[i].status == TARDIS_GPU_INDEX_FOUND) {
        handle = answers[i].location;
        Row row{};
        const BlockStatus status = update_row(blocks, handle, row, [&](Row& change) { return take(change, handle); });
        if (status == BlockStatus::kOk) {
          id = block_of(row);
          source = tier_of(blocks, id);
          blocks.used[number_of(handle)] = *static_cast<const volatile std::uint32_t*>(blocks.clock);
        }
        if (status == BlockStatus::kMoving) source = TARDIS_GPU_SOURCE_MOVING;
      }
      ids[i] = id;
    }
#pragma unroll
    for (std::uint32_t s = 0; s < TARDIS_GPU_SOURCES; ++s) {
      const std::uint32_t members = __ballot_sync(kAllLanes, source == s);
      if (members == 0) continue;
      const auto n = static_cast<std::uint32_t>(__popc(members));
      std::uint32_t start = 0;
      if (self == 0) {
        start = atomicAdd(list_counts + s, n);
        atomicAdd(reinterpret_cast<unsigned long long*>(sources + s), static_cast<unsigned long long>(n));
      }
      start = __shfl_sync(kAllLanes, start, 0);
      const auto rank = static_cast<std::uint32_t>(__popc(members & ((1u << self) - 1)));
      if (source != s) continue;
      const std::size_t place = std::size_t{s} * max_count + start + rank;
      lists[place] = i;
      if (taken != nullptr) taken[place] = s == TARDIS_GPU_SOURCE_MISS ? kNone : handle;
    }
  }
}

}  // namespace
}  // namespace tardis::gstore

extern "C" int tardis_gpu_blocks_classify(const tardis_gpu_blocks* blocks, const tardis_gpu_index_answer* answers,
                                          const uint32_t* count, uint32_t max_count, uint64_t* ids, uint32_t* lists,
                                          uint64_t* taken, uint32_t* list_counts, uint64_t* sources,
                                          void* cuda_stream) {
  using namespace tardis::gstore;
  if (blocks == nullptr || answers == nullptr || count == nullptr || max_count == 0 || ids == nullptr ||
      lists == nullptr || list_counts == nullptr || sources == nullptr) {
    return cudaErrorInvalidValue;
  }
  const auto stream = static_cast<cudaStream_t>(cuda_stream);
  zero_counts<<<1, kLanes, 0, stream>>>(list_counts);
  blocks_classify<<<block_grid(max_count), kThreads, 0, stream>>>(*blocks, answers, count, max_count, ids, lists, taken,
                                                                  list_counts, sources);
  return cudaGetLastError();
}
