// SPDX-License-Identifier: Apache-2.0
// Page ids to pieces: one thread a page.
#include <cuda_runtime.h>

#include <algorithm>

#include "gio/pieces.h"

namespace tardis::gio {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kMaxCtas = 8;  // the rest is a stride: beside a compute kernel this should not be seen

__device__ std::int64_t read_id(const tardis_gpu_page_args& args, std::uint32_t page) {
  return args.id_bytes == 8 ? __ldcg(static_cast<const long long*>(args.page_ids) + page)
                            : __ldcg(static_cast<const int*>(args.page_ids) + page);
}

__global__ void __launch_bounds__(kThreads) page_pieces(const tardis_gpu_page_args args) {
  const std::uint32_t told = __ldcg(args.page_count);
  const std::uint32_t pages = told < args.max_pages ? told : args.max_pages;
  const std::uint32_t sides = args.value_layers != nullptr ? 2 : 1;  // K and V, or one
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.piece_count = pages * sides;
  const std::uint64_t bases[kMaxSegments] = {args.key_layers[args.layer],
                                             sides == 2 ? args.value_layers[args.layer] : 0};
  const std::uint64_t page_bytes = args.page_tokens * args.token_bytes;
  for (std::uint32_t page = blockIdx.x * kThreads + threadIdx.x; page < pages; page += gridDim.x * kThreads) {
    const std::int64_t id = read_id(args, page);
    const bool inside = id >= 0 && args.page_tokens <= args.pool_tokens &&
                        static_cast<std::uint64_t>(id) <= (args.pool_tokens - args.page_tokens) / args.tokens_per_id;
    if (!inside) atomicAdd(args.errors, 1u);
    const std::uint64_t in_pool = inside ? static_cast<std::uint64_t>(id) * args.tokens_per_id * args.token_bytes : 0;
    const std::uint64_t object =
        (args.objects != nullptr ? args.objects[page] : args.object_base + page * args.object_stride) +
        args.part_offset;
#pragma unroll
    for (std::uint32_t side = 0; side < kMaxSegments; ++side) {
      if (side == sides) break;
      const std::uint64_t at_pool = bases[side] + in_pool, at_object = object + side * page_bytes;
      const bool to_pool = args.direction == TARDIS_GPU_TO_POOL;
      args.pieces[std::uint64_t{page} * sides + side] = {to_pool ? at_object : at_pool, to_pool ? at_pool : at_object,
                                                         inside ? page_bytes : 0};
    }
  }
}

}  // namespace
}  // namespace tardis::gio

extern "C" int tardis_gpu_page_pieces(const tardis_gpu_page_args* pages, void* stream) {
  using namespace tardis::gio;
  if (pages == nullptr || pages->page_ids == nullptr || pages->page_count == nullptr || pages->key_layers == nullptr ||
      pages->pieces == nullptr || pages->piece_count == nullptr || pages->errors == nullptr ||
      (pages->id_bytes != 4 && pages->id_bytes != 8) || pages->tokens_per_id == 0 || pages->page_tokens == 0 ||
      pages->token_bytes == 0 || pages->max_pages > UINT32_MAX / kMaxSegments ||
      (pages->direction != TARDIS_GPU_TO_POOL && pages->direction != TARDIS_GPU_FROM_POOL)) {
    return cudaErrorInvalidValue;
  }
  const unsigned wanted = (pages->max_pages + kThreads - 1) / kThreads;
  const unsigned ctas = std::clamp(wanted, 1u, kMaxCtas);
  page_pieces<<<ctas, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*pages);
  return cudaGetLastError();
}
