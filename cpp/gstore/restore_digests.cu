// SPDX-License-Identifier: Apache-2.0
// The digests of the file blocks that are read, side by side as the contexts want them.
#include "gstore/device_warp.cuh"
#include "gstore/restore_work.h"

namespace tardis::gstore {
namespace {

constexpr unsigned kMaxCtas = 32;

__global__ void __launch_bounds__(kThreads)
    restore_digests(const __grid_constant__ tardis_gpu_restore restore, const __grid_constant__ RestoreWork work) {
  const std::uint64_t each = std::uint64_t{restore.shape.layers} * restore.shape.layer_digests;
  const std::uint64_t all = work.counts->files * each;
  const std::uint64_t step = std::uint64_t{gridDim.x} * kThreads;
  for (std::uint64_t at = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x; at < all; at += step) {
    const std::uint64_t file = at / each;
    work.digests[at] = restore.places.digests[work.file_blocks[file] * each + at % each];
  }
}

}  // namespace

int launch_restore_digests(const tardis_gpu_restore& restore, const RestoreWork& work, cudaStream_t stream) {
  restore_digests<<<kMaxCtas, kThreads, 0, stream>>>(restore, work);
  return cudaGetLastError();
}

int load_restore_digests() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, restore_digests);
}

}  // namespace tardis::gstore
