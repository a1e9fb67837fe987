// SPDX-License-Identifier: Apache-2.0
// One warp a part. A kernel of its own, since what the moving CTAs wrote needs no fence between kernels; and short,
// since it is seen on the link as a pause.
#include "gio/part_digests.h"

#include <algorithm>

#include "gio/digest_of_digests.cuh"
#include "gio/programmatic.cuh"
#include "gio/read_part.cuh"

namespace tardis::gio {
namespace {

constexpr int kLanes = xxh3::kLanes;
constexpr int kWarps = 8;            // of a CTA
constexpr unsigned kMostCtas = 128;  // the rest is a stride

__device__ __forceinline__ void settle(const tardis_gpu_digest_args& args, std::uint32_t part,
                                       tardis_gpu_part_status status) {
  args.status[part] = status;
  if (status != TARDIS_GPU_PART_GOOD) atomicAdd(args.errors, 1u);
}

__global__ void __launch_bounds__(kWarps* kLanes)
    finish_parts(const tardis_gpu_move_args move, const tardis_gpu_digest_args args) {
  __shared__ std::uint64_t scratch[kWarps][kShortDigests];
  const int warp = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
  xxh3::BlockKeys keys;
  if (args.chunks_per_part > kShortDigests) keys = xxh3::BlockKeys::of(lane);
  wait_for_kernel_before();
  const std::uint32_t parts = parts_of(move, args.pieces_per_part);
  for (std::uint32_t part = blockIdx.x * kWarps + warp; part < parts; part += gridDim.x * kWarps) {
    // Loaded before it is known how many there are: one way to memory instead of two.
    const std::uint64_t first = std::uint64_t{part} * args.chunks_per_part;
    const bool is_chunk = static_cast<std::uint32_t>(lane) < args.chunks_per_part;
    const std::uint64_t mine = is_chunk ? load_digest(args.chunk_digests + first + lane) : 0;
    const std::uint64_t expected =
        is_chunk && args.expected_chunks != nullptr ? load_digest(args.expected_chunks + first + lane) : 0;
    const std::uint64_t expected_part = args.expected_parts != nullptr ? load_digest(args.expected_parts + part) : 0;
    const std::uint64_t chunks = read_part(move.pieces, part, parts, args.pieces_per_part).chunks();
    if (chunks == 0) continue;
    if (chunks > args.chunks_per_part) {
      if (lane == 0) settle(args, part, TARDIS_GPU_PART_TOO_LONG);
      continue;
    }
    const auto count = static_cast<std::uint32_t>(chunks);
    bool equal = true;
    if (args.expected_chunks != nullptr) {
      if (static_cast<std::uint32_t>(lane) < count) equal = mine == expected;
      for (std::uint32_t i = lane + kLanes; i < count; i += kLanes) {
        equal = equal && load_digest(args.chunk_digests + first + i) == load_digest(args.expected_chunks + first + i);
      }
    }
    if (args.expected_parts != nullptr || args.part_digests != nullptr) {
      const std::uint64_t digest = count <= kShortDigests
                                       ? digest_of_few(mine, count, lane, scratch[warp])
                                       : digest_of_many(args.chunk_digests + first, count, lane, keys);
      if (args.part_digests != nullptr && lane == 0) args.part_digests[part] = digest;
      if (args.expected_parts != nullptr) equal = equal && digest == expected_part;
    }
    equal = __all_sync(xxh3::kAllLanes, equal);
    if (lane == 0) settle(args, part, equal ? TARDIS_GPU_PART_GOOD : TARDIS_GPU_PART_MISMATCH);
  }
}

}  // namespace

cudaError_t prepare_part_digests() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, finish_parts);
}

cudaError_t enqueue_part_digests(const tardis_gpu_move_args& move, const tardis_gpu_digest_args& digests,
                                 cudaStream_t stream) {
  const unsigned parts = move.max_pieces / digests.pieces_per_part;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch = {};
  launch.gridDim = std::clamp((parts + kWarps - 1) / kWarps, 1u, kMostCtas);
  launch.blockDim = kWarps * kLanes;
  launch.stream = stream;
  launch.attrs = &early;
  launch.numAttrs = 1;
  return cudaLaunchKernelEx(&launch, finish_parts, move, digests);
}

}  // namespace tardis::gio
