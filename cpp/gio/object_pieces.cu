// SPDX-License-Identifier: Apache-2.0
// Page ids to the pieces of all layers: a thread for each piece of a layer, which it makes for every layer.
#include <algorithm>

#include "gio/load_board.cuh"
#include "gio/load_kernels.h"

namespace tardis::gio {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kMostCtas = 4;       // the rest is a stride: beside a compute kernel this should not be seen
constexpr unsigned kMostLayerCtas = 4;  // layers side by side

__global__ void __launch_bounds__(kThreads) object_pieces(const __grid_constant__ ObjectPieces args) {
  const bool two = args.layers[1] != nullptr;
  const std::uint32_t sides = two ? 2 : 1, row = args.pages * sides;
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    count_outside(args.ids, args.pages, args.page_count, args.errors);
    for (std::uint32_t i = threadIdx.x; i < args.count_words; i += kThreads) args.counts[i] = args.count_each;
  }
  const std::uint64_t key_bytes = args.page_bytes[0], layer_bytes = key_bytes + (two ? args.page_bytes[1] : 0);
  for (std::uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < row; i += gridDim.x * kThreads) {
    const std::uint32_t page = i / sides;
    const bool value = i % sides != 0;
    const std::uint32_t id = __ldcg(args.ids + page);
    const std::uint64_t object = __ldcg(args.objects + page) + (value ? key_bytes : 0);
    const std::uint64_t bytes = value ? args.page_bytes[1] : key_bytes;
    const bool inside = id < args.page_count;
    const std::uint64_t* const pools = value ? args.layers[1] : args.layers[0];
    for (std::uint32_t layer = blockIdx.y; layer < args.layer_count; layer += gridDim.y) {
      const std::uint64_t at_pool = __ldg(pools + layer) + (inside ? id * bytes : 0);
      const std::uint64_t at_object = object + layer * layer_bytes;
      const bool to_pool = args.direction == TARDIS_GPU_TO_POOL;
      args.pieces[std::uint64_t{layer} * row + i] = {to_pool ? at_object : at_pool, to_pool ? at_pool : at_object,
                                                     inside ? bytes : 0};
    }
  }
}

}  // namespace

cudaError_t launch_object_pieces(const ObjectPieces& pieces, cudaStream_t stream) {
  const std::uint64_t row = std::uint64_t{pieces.pages} * (pieces.layers[1] != nullptr ? 2 : 1);
  const auto wanted = static_cast<unsigned>((row + kThreads - 1) / kThreads);
  const dim3 ctas(std::clamp(wanted, 1u, kMostCtas), std::clamp(pieces.layer_count, 1u, kMostLayerCtas));
  object_pieces<<<ctas, kThreads, 0, stream>>>(pieces);
  return cudaGetLastError();
}

cudaError_t load_object_pieces() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, object_pieces);
}

}  // namespace tardis::gio
