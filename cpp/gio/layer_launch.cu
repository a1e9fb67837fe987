// SPDX-License-Identifier: Apache-2.0
#include "gio/layer_launch.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include "gio/layer_call.h"
#include "gio/mover.h"
#include "gio/prepare_kernel.h"
#include "gio/ring_kernel.h"
#include "gstore/index.h"

namespace {

using WaitValue = decltype(&cuStreamWaitValue32);

struct Wait {
  WaitValue call = nullptr;
  cudaError_t error = cudaErrorNotSupported;
};

// Looked up once, through the runtime: the library must load where no libcuda is.
const Wait& wait_value() {
  static const Wait found = [] {
    constexpr unsigned kVersion = 12000;  // of the entry points that stream capture takes
    Wait wait;
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    wait.error = cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &entry, kVersion, cudaEnableDefault, &result);
    if (wait.error == cudaSuccess && result != cudaDriverEntryPointSuccess) wait.error = cudaErrorNotSupported;
    wait.call = reinterpret_cast<WaitValue>(entry);
    return wait;
  }();
  return found;
}

}  // namespace

int tardis_gpu_gio_layer(const tardis_gio_layer* layer, void* cuda_stream) {
  using namespace tardis::gio;
  if (layer == nullptr || complaint_of(*layer) != nullptr) return cudaErrorInvalidValue;
  const LayerPages pages = pages_of(*layer);
  const int prepared =
      tardis_gpu_gio_prepare(&pages, static_cast<IoContext*>(layer->contexts), layer->context_count, cuda_stream);
  if (prepared != cudaSuccess) return prepared;
  const IoControlBlock iocb = control_block_of(*layer);
  return tardis_gpu_gio_run(static_cast<const GrantedQueue*>(layer->queues), layer->rings, &iocb, layer->ctas,
                            cuda_stream);
}

int tardis_gpu_gio_wait(const std::uint32_t* flag_dev, void* cuda_stream) {
  if (flag_dev == nullptr) return cudaErrorInvalidValue;
  const Wait& wait = wait_value();
  if (wait.error != cudaSuccess) return wait.error;
  const CUresult result = wait.call(static_cast<CUstream>(cuda_stream), reinterpret_cast<CUdeviceptr>(flag_dev),
                                    tardis::gio::kIoDone, CU_STREAM_WAIT_VALUE_GEQ);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorUnknown;
}

int tardis_gpu_load() {
  int result = wait_value().error;
  if (result == cudaSuccess) result = tardis_gpu_gio_load();
  if (result == cudaSuccess) result = tardis_gpu_gio_prepare_load();
  if (result == cudaSuccess) result = tardis_gpu_mover_prepare();
  if (result == cudaSuccess) result = tardis_gpu_index_load_lookup();
  if (result == cudaSuccess) result = tardis_gpu_index_load_apply();
  return result;
}

void tardis_gpu_gio_layer_sizes(tardis_gio_sizes* sizes) { *sizes = tardis::gio::layer_sizes(); }

const char* tardis_gpu_error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
