// SPDX-License-Identifier: Apache-2.0
// The kernels of loads and offloads, and what they hand each other. For CUDA code.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "gio/load_launch.h"
#include "gio/pieces.h"

namespace tardis::gio {

// What a load keeps in the last row of its pieces: the move of digests, and how many pages the rings read.
struct LoadWords {
  Piece digests;
  std::uint32_t pieces;      // 1
  std::uint32_t ring_pages;  // all pages from files, or 0: the board says so, or it was waited for in vain
};
static_assert(sizeof(LoadWords) <= 2 * sizeof(Piece), "a row has room for a page of K and V");

inline std::uint32_t sides_of(const tardis_gpu_pools& pools) { return pools.layers[1] != nullptr ? 2 : 1; }

// object_pieces: the pieces of all layers of pages between pools and objects, [layer][page][K, V] without gaps.
struct ObjectPieces {
  const std::uint64_t* layers[kMaxSegments];
  std::uint32_t page_bytes[kMaxSegments];
  std::uint32_t layer_count;
  std::uint32_t page_count;  // of the pools
  const std::uint32_t* ids;
  const std::uint64_t* objects;
  std::uint32_t pages;
  std::uint32_t direction;  // enum tardis_gpu_direction
  Piece* pieces;
  std::uint32_t* counts;  // each of the first count_words becomes count_each
  std::uint32_t count_words, count_each;
  std::uint32_t* errors;  // mapped: ids outside are added, by one thread
};
cudaError_t launch_object_pieces(const ObjectPieces& pieces, cudaStream_t stream);
cudaError_t load_object_pieces();

// load_gate: waits until the board says ready.
struct LoadGate {
  tardis_load_board* board;
  const std::uint64_t* board_digests;
  std::uint64_t* digests;       // in HBM
  std::uint64_t digests_bytes;  // of all pages from files
  const std::uint32_t* file_ids;
  std::uint32_t file_pages;
  std::uint32_t page_count;  // of the pools
  std::uint32_t* flags;      // of the rings, one a layer
  std::uint32_t layer_count;
  LoadWords* words;
  std::uint64_t patience_ns;
};
cudaError_t launch_load_gate(const LoadGate& gate, cudaStream_t stream);
cudaError_t load_load_gate();

// load_settle: tells what became of a layer, and lands what was read again.
struct LoadSettling {
  tardis_load_board* board;
  std::uint32_t* landed;  // words of the board, of this layer
  const std::uint32_t* repaired;
  const std::uint32_t* repairs;
  const tardis_load_repair* list;
  std::uint32_t most_repairs;
  const std::uint32_t* flag;
  const LoadWords* words;
  const std::uint32_t* file_ids;
  std::uint32_t file_pages;
  std::uint32_t page_count;
  std::uint64_t pools[kMaxSegments];  // of this layer
  std::uint32_t page_bytes[kMaxSegments];
  std::uint64_t patience_ns;
};
cudaError_t launch_load_settle(const LoadSettling& settling, cudaStream_t stream);
cudaError_t load_load_settle();

}  // namespace tardis::gio
