// SPDX-License-Identifier: Apache-2.0
// What the movers carry, and how it is cut into chunks and shared between CTAs: arithmetic for host and device (C++17).
#pragma once

#include <cstdint>

#include "gio/mover.h"

#if defined(__CUDACC__)
#define TARDIS_GIO_FUNCTION __host__ __device__ __forceinline__
#else
#define TARDIS_GIO_FUNCTION inline
#endif

namespace tardis::gio {

using Piece = tardis_gpu_piece;

constexpr std::uint32_t kChunkBytes = 16 << 10;  // of one stage of the ring, and of one digest (docs/on-disk-format.md)
constexpr int kMaxSegments = 2;                  // K and V
constexpr std::uint32_t kBulkAlign = 16;         // bulk copies take addresses and sizes that are multiples of it

// One after the other one part of an object, as its digests see it: K then V, or a single piece (the second is empty).
struct Part {
  Piece pieces[kMaxSegments];

  TARDIS_GIO_FUNCTION std::uint64_t bytes() const { return pieces[0].bytes + pieces[1].bytes; }
  TARDIS_GIO_FUNCTION std::uint64_t chunks() const {
    return bytes() / kChunkBytes + (bytes() % kChunkBytes == 0 ? 0 : 1);  // no sum that a huge size would overflow
  }
};

// What one stage holds: up to 16 KiB of a part, from and to one or two places.
struct Chunk {
  Piece segments[kMaxSegments];  // an empty one is not the first
  std::uint32_t bytes;

  // False: an address or a size is not a multiple of 16, so bulk copies cannot carry it.
  TARDIS_GIO_FUNCTION bool is_aligned() const {
    std::uint64_t bits = 0;
    for (const Piece& segment : segments) bits |= segment.source | segment.destination | segment.bytes;
    return bits % kBulkAlign == 0;
  }
};

TARDIS_GIO_FUNCTION Chunk chunk_of(const Part& part, std::uint64_t number) {
  const std::uint64_t start = number * kChunkBytes;
  const Piece& first = part.pieces[0];
  const Piece& second = part.pieces[1];
  Chunk chunk = {};
  if (start < first.bytes) {
    const std::uint64_t rest = first.bytes - start;
    const std::uint64_t taken = rest < kChunkBytes ? rest : kChunkBytes;
    chunk.segments[0] = {first.source + start, first.destination + start, taken};
    const std::uint64_t room = kChunkBytes - taken;
    const std::uint64_t more = second.bytes < room ? second.bytes : room;
    if (more != 0) chunk.segments[1] = {second.source, second.destination, more};
    chunk.bytes = static_cast<std::uint32_t>(taken + more);
  } else {
    const std::uint64_t at = start - first.bytes;
    const std::uint64_t rest = second.bytes - at;
    const std::uint64_t taken = rest < kChunkBytes ? rest : kChunkBytes;
    chunk.segments[0] = {second.source + at, second.destination + at, taken};
    chunk.bytes = static_cast<std::uint32_t>(taken);
  }
  return chunk;
}

// The chunks of a call are numbered through, and each round of `ctas` of them gives one to each CTA. The order turns
// by one every round, so that a pattern in the sizes (large, small, large, small) does not give one CTA all large ones.
TARDIS_GIO_FUNCTION std::uint64_t owned_chunk(std::uint64_t round, std::uint32_t cta, std::uint32_t ctas) {
  const std::uint32_t turn = ctas == 1   ? 0
                             : ctas == 2 ? round % 2
                             : ctas == 3 ? round % 3
                             : ctas == 4 ? round % 4
                                         : round % ctas;  // a division by a constant, where it can be
  return round * ctas + (cta >= turn ? cta - turn : cta + ctas - turn);
}

}  // namespace tardis::gio
