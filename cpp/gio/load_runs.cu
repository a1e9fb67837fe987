// SPDX-License-Identifier: Apache-2.0
// Loads of pages from pinned memory by copy engines: a command for each run of pages in each layer's K and V.
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "gio/load_launch.h"
#include "gio/sequence.h"

namespace tardis::gio {
namespace {

using RunsCall = struct tardis_gpu_load_runs;

static_assert(sizeof(tardis_gpu_load_run) == 16 && offsetof(tardis_gpu_load_run, page) == 8);
static_assert(sizeof(RunsCall) == 88 && offsetof(RunsCall, runs) == 48 && offsetof(RunsCall, events) == 72 &&
              offsetof(RunsCall, link_class) == 84);

constexpr std::uint64_t kMostPitch = INT32_MAX;  // of cudaMemcpy2DAsync

class LoadRuns {
 public:
  LoadRuns(const RunsCall& load, void* cuda_stream)
      : load_(load),
        pools_(load.pools),
        stream_(static_cast<cudaStream_t>(cuda_stream)),
        sides_(load.pools.host_layers[1] != nullptr ? 2 : 1),
        layer_bytes_(std::uint64_t{load.pools.page_bytes[0]} + load.pools.page_bytes[1]) {}

  bool is_valid() const {
    if (pools_.host_layers[0] == nullptr || pools_.page_bytes[0] == 0 || (pools_.page_bytes[1] != 0) != (sides_ == 2) ||
        pools_.layer_count == 0 || load_.events == nullptr || load_.link_class >= TARDIS_GPU_LINK_CLASSES ||
        load_.object_stride > kMostPitch || load_.object_stride < layer_bytes_ * pools_.layer_count ||
        (load_.runs == nullptr && load_.run_count != 0)) {
      return false;
    }
    for (std::uint32_t i = 0; i < load_.run_count; ++i) {
      const tardis_gpu_load_run& run = load_.runs[i];
      if (run.object == 0 || run.pages == 0 || run.page >= pools_.page_count ||
          run.pages > pools_.page_count - run.page) {
        return false;
      }
    }
    return true;
  }

  int enqueue() const {
    if (load_.link == nullptr) return enqueue_layers();
    const int begun = tardis_gpu_link_begin(load_.link, load_.link_class, TARDIS_GPU_LINK_IN, stream_);
    if (begun != cudaSuccess) return begun;
    const int error = enqueue_layers();
    // In any case, or others would keep to their budgets for ever.
    const int ended = tardis_gpu_link_end(load_.link, load_.link_class, TARDIS_GPU_LINK_IN, stream_);
    return error != cudaSuccess ? error : ended;
  }

 private:
  int enqueue_layers() const {
    Sequence sequence;
    for (std::uint32_t layer = 0; layer < pools_.layer_count; ++layer) {
      for (std::uint32_t side = 0; side < sides_; ++side) {
        for (std::uint32_t i = 0; i < load_.run_count; ++i) {
          sequence.then([&] { return copy(load_.runs[i], layer, side); });
        }
      }
      sequence.then([&] { return cudaEventRecord(static_cast<cudaEvent_t>(load_.events[layer]), stream_); });
    }
    return sequence.error();
  }
  cudaError_t copy(const tardis_gpu_load_run& run, std::uint32_t layer, std::uint32_t side) const {
    const std::uint64_t row = pools_.page_bytes[side];
    const std::uint64_t to = pools_.host_layers[side][layer] + run.page * row;
    const std::uint64_t from = run.object + layer * layer_bytes_ + (side == 0 ? 0 : pools_.page_bytes[0]);
    return cudaMemcpy2DAsync(reinterpret_cast<void*>(to), row, reinterpret_cast<const void*>(from), load_.object_stride,
                             row, run.pages, cudaMemcpyHostToDevice, stream_);
  }

  const RunsCall& load_;
  const tardis_gpu_pools& pools_;
  const cudaStream_t stream_;
  const std::uint32_t sides_;
  const std::uint64_t layer_bytes_;  // of an object
};

}  // namespace
}  // namespace tardis::gio

extern "C" int tardis_gpu_load_runs_enqueue(const struct tardis_gpu_load_runs* load, void* stream) {
  if (load == nullptr) return cudaErrorInvalidValue;
  const tardis::gio::LoadRuns runs(*load, stream);
  return runs.is_valid() ? runs.enqueue() : static_cast<int>(cudaErrorInvalidValue);
}
