// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "gstore/index_layout.h"

extern "C" uint64_t tardis_gpu_index_memory_bytes(uint64_t entries) {
  return tardis::gstore::buckets_for(entries) * tardis::gstore::kBucketBytes;
}

extern "C" int tardis_gpu_index_place(tardis_gpu_index* index, void* memory, uint64_t memory_bytes) {
  using namespace tardis::gstore;
  const std::uint64_t buckets = memory_bytes / kBucketBytes;
  if (index == nullptr || memory == nullptr || reinterpret_cast<std::uintptr_t>(memory) % 256 != 0 || buckets < 2 ||
      buckets > 0xFFFFFFFFu) {
    return cudaErrorInvalidValue;
  }
  index->words = static_cast<std::uint64_t*>(memory);
  index->records = index->words + buckets * kLanes;
  index->buckets = static_cast<std::uint32_t>(buckets);
  index->patience = 0;
  return cudaSuccess;
}
