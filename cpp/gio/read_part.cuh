// SPDX-License-Identifier: Apache-2.0
// The pieces of a part, as the device reads them: they may have changed since an earlier kernel of the same call's
// turn.
#pragma once

#include <cstdint>

#include "gio/pieces.h"

namespace tardis::gio {

// How many parts a call moves: what the device is told, within what it may be.
__device__ __forceinline__ std::uint32_t parts_of(const tardis_gpu_move_args& move, std::uint32_t pieces_per_part) {
  const std::uint32_t told = __ldcg(move.piece_count);
  return (told < move.max_pieces ? told : move.max_pieces) / pieces_per_part;
}

// Behind the last: nothing. Small enough that a piece of nothing costs no more than a look.
__device__ __forceinline__ Part read_part(const Piece* pieces, std::uint32_t part, std::uint32_t parts,
                                          std::uint32_t pieces_per_part) {
  Part out = {};
  if (part >= parts) return out;
  const Piece* const first = pieces + std::uint64_t{part} * pieces_per_part;
  for (std::uint32_t i = 0; i < kMaxSegments && i < pieces_per_part; ++i) {
    const auto* words = reinterpret_cast<const unsigned long long*>(first + i);
    out.pieces[i] = {__ldcg(words), __ldcg(words + 1), __ldcg(words + 2)};
  }
  return out;
}

}  // namespace tardis::gio
