// SPDX-License-Identifier: Apache-2.0
// Sink of digest_chunks(): the digest of each chunk goes to its place in [part][chunk]. Who reads them waits for the
// kernel's end.
#pragma once

#include <cstdint>

#include "gio/mover.cuh"
#include "gio/mover.h"

namespace tardis::gio {

struct ChunkDigests {
  std::uint64_t* digests;
  std::uint32_t chunks_per_part;

  __device__ __forceinline__ bool wants(const Stage& stage) const { return stage.part_chunks <= chunks_per_part; }
  __device__ __forceinline__ void digested(const Stage& stage, std::uint64_t digest) const {
    if (threadIdx.x % kWarpLanes == 0) digests[std::uint64_t{stage.part} * chunks_per_part + stage.chunk] = digest;
  }
};

}  // namespace tardis::gio
