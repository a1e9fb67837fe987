// SPDX-License-Identifier: Apache-2.0
// Entries for pages that were unknown and have been computed. What the index says of such a key already leads nowhere:
// it is replaced, unless it has become newer meanwhile.
#include "gstore/block_row.h"
#include "gstore/device_warp.cuh"
#include "gstore/restore_work.h"

namespace tardis::gstore {
namespace {

constexpr unsigned kCtas = 8;

__global__ void __launch_bounds__(kThreads)
    restore_insert(const __grid_constant__ tardis_gpu_restore restore, const __grid_constant__ RestoreWork work,
                   const std::uint64_t* keys) {
  const std::uint32_t news = work.counts->news;
  for (std::uint32_t k = blockIdx.x * kThreads + threadIdx.x; k < news; k += gridDim.x * kThreads) {
    const std::uint32_t i = work.new_keys[k];
    tardis_gpu_index_entry entry{};
#pragma unroll
    for (int word = 0; word < 4; ++word) entry.key[word] = keys[4 * std::uint64_t{i} + word];
    entry.location = work.new_handles[work.places[i] & 0xFFFFFFu];
    const bool known = work.answers[i].status == TARDIS_GPU_INDEX_FOUND;
    entry.generation = known ? work.answers[i].generation : 0;
    entry.payload_bytes = restore.shape.layers * restore.shape.sides * restore.shape.page_bytes;
    entry.space = static_cast<std::uint16_t>(restore.places.space);
    entry.op = TARDIS_GPU_INDEX_PUT;
    work.entries[k] = entry;
    entry.op = TARDIS_GPU_INDEX_FORGET;
    restore.places.names[number_of(entry.location)] = entry;
  }
}

}  // namespace

int launch_restore_insert(const tardis_gpu_restore& restore, const RestoreWork& work, const void* keys,
                          cudaStream_t stream) {
  restore_insert<<<kCtas, kThreads, 0, stream>>>(restore, work, static_cast<const std::uint64_t*>(keys));
  return cudaGetLastError();
}

int load_restore_insert() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, restore_insert);
}

}  // namespace tardis::gstore
