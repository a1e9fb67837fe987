// SPDX-License-Identifier: Apache-2.0
// One warp an object. Layers of few chunks, which most are, are digested side by side, a layer a lane.
#include "gio/root_digests.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "gio/digest_of_digests.cuh"

namespace tardis::gio {
namespace {

constexpr int kLanes = xxh3::kLanes;
constexpr int kWarps = 4;           // of a CTA
constexpr unsigned kMostCtas = 32;  // the rest is a stride: beside a compute kernel this should not be seen

// The lane's layer of the next 32, of at most kShortDigests chunks. Rows are padded to an odd number of words, so that
// lanes read from different banks.
struct ShortLayers {
  std::uint64_t rows[kLanes][kShortDigests + 1];
};

__global__ void __launch_bounds__(kWarps* kLanes) check_roots(const tardis_gpu_root_args args) {
  extern __shared__ ShortLayers shared[];
  const int warp = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
  ShortLayers& scratch = shared[warp];
  xxh3::BlockKeys keys;  // microseconds, for those who need them
  if (args.chunks_per_layer > kShortDigests || args.layers > kShortDigests) keys = xxh3::BlockKeys::of(lane);
  const std::uint32_t told = __ldcg(args.object_count);
  const std::uint32_t objects = told < args.max_objects ? told : args.max_objects;
  for (std::uint32_t object = blockIdx.x * kWarps + warp; object < objects; object += gridDim.x * kWarps) {
    const std::uint64_t address =
        args.objects != nullptr ? load_digest(args.objects + object) : args.object_base + object * args.object_stride;
    if (address == 0 || address % sizeof(std::uint64_t) != 0) {
      if (lane == 0) {
        args.status[object] = TARDIS_GPU_ROOT_REFUSED;
        atomicAdd(args.errors, 1u);
      }
      continue;
    }
    const auto* const digests = reinterpret_cast<const std::uint64_t*>(address);
    std::uint64_t* const layers = args.layer_digests + std::uint64_t{object} * args.layers;
    const std::uint32_t chunks = args.chunks_per_layer;
    if (chunks <= kShortDigests) {
      for (std::uint32_t first = 0; first < args.layers; first += kLanes) {
        const std::uint32_t count = min(args.layers - first, static_cast<std::uint32_t>(kLanes));
        for (std::uint32_t i = lane; i < count * chunks; i += kLanes) {
          scratch.rows[i / chunks][i % chunks] = load_digest(digests + std::uint64_t{first} * chunks + i);
        }
        __syncwarp();  // forbids that a lane reads its row before others have filled it
        if (static_cast<std::uint32_t>(lane) < count) {
          layers[first + lane] = xxh3::digest_short(reinterpret_cast<const unsigned char*>(scratch.rows[lane]),
                                                    chunks * sizeof(std::uint64_t));
        }
        __syncwarp();  // forbids that the next rows are written while a lane still reads
      }
    } else {
      for (std::uint32_t layer = 0; layer < args.layers; ++layer) {
        const std::uint64_t digest = digest_of_many(digests + std::uint64_t{layer} * chunks, chunks, lane, keys);
        if (lane == 0) layers[layer] = digest;
      }
    }
    __threadfence_block();
    __syncwarp();  // with the fence: forbids that a lane reads a layer's digest before its lane has written it
    const std::uint64_t root =
        args.layers <= kShortDigests
            ? digest_of_few(static_cast<std::uint32_t>(lane) < args.layers ? load_digest(layers + lane) : 0,
                            args.layers, lane, scratch.rows[0])
            : digest_of_many(layers, args.layers, lane, keys);
    if (lane == 0) {
      const bool good = root == load_digest(args.expected_roots + object);
      args.status[object] = good ? TARDIS_GPU_ROOT_GOOD : TARDIS_GPU_ROOT_MISMATCH;
      if (!good) atomicAdd(args.errors, 1u);
    }
  }
}

bool is_valid(const tardis_gpu_root_args* args) {
  return args != nullptr && args->object_count != nullptr && args->max_objects != 0 && args->layers != 0 &&
         args->chunks_per_layer != 0 && args->expected_roots != nullptr && args->layer_digests != nullptr &&
         args->status != nullptr && args->errors != nullptr;
}

}  // namespace
}  // namespace tardis::gio

extern "C" int tardis_gpu_check_roots(const tardis_gpu_root_args* args, void* cuda_stream) {
  using namespace tardis::gio;
  if (!is_valid(args)) return cudaErrorInvalidValue;
  const unsigned ctas = std::min((args->max_objects - 1) / kWarps + 1, kMostCtas);
  check_roots<<<ctas, kWarps * kLanes, kWarps * sizeof(ShortLayers), static_cast<cudaStream_t>(cuda_stream)>>>(*args);
  return cudaGetLastError();
}

extern "C" int tardis_gpu_check_roots_load(void) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, tardis::gio::check_roots);
}
