// SPDX-License-Identifier: Apache-2.0
// Fills an IOCB from page ids that lie where the GPU reads them, so that a graph can be replayed with other ids.
#include "gio/prepare_kernel.h"

#include <cuda_runtime.h>

namespace tardis::gio {
namespace {

constexpr unsigned kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    prepare_contexts(const __grid_constant__ LayerPages layer, IoContext* contexts, std::uint32_t* count) {
  const std::uint32_t wanted = layer.commands(*layer.count), commands = layer.commands_per_page();
  const std::uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i == 0) *count = wanted;
  if (i < wanted && wanted <= kMostContexts) contexts[i] = layer.context(i / commands, i % commands);
}

}  // namespace
}  // namespace tardis::gio

int tardis_gpu_gio_prepare(const tardis::gio::LayerPages* layer, tardis::gio::IoContext* contexts_dev,
                           std::uint32_t* count_dev, void* cuda_stream) {
  using namespace tardis::gio;
  if (layer == nullptr || contexts_dev == nullptr || count_dev == nullptr || layer->most_bytes == 0 ||
      layer->bytes() == 0 ||
      (layer->digests != 0 && layer->commands_per_page() > 1 && layer->most_bytes % kDigestedBytes != 0)) {
    return cudaErrorInvalidValue;
  }
  prepare_contexts<<<kMostContexts / kThreads, kThreads, 0, static_cast<cudaStream_t>(cuda_stream)>>>(
      *layer, contexts_dev, count_dev);
  return cudaGetLastError();
}

int tardis_gpu_gio_prepare_load() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, tardis::gio::prepare_contexts);
}
