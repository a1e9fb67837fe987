// SPDX-License-Identifier: Apache-2.0
// Where things are in a tile: 64 tokens (or 64 query rows) of one head in shared memory, as the tensor copies put them
// there and as the matrix instructions read them. Host code can compute all of it.
//
// A tile of 16-bit elements is blocks of 64 columns, each 64 rows of 128 bytes, with the 16-byte pieces of a row
// exchanged by the row's number ("128-byte swizzle"), which keeps eight rows of one column apart in the banks.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define TARDIS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TARDIS_HOST_DEVICE inline
#endif

namespace tardis::attention {

constexpr std::uint32_t kTileRows = 64;
constexpr std::uint32_t kBlockColumns = 64;
constexpr std::uint32_t kRowBytes = 128;
constexpr std::uint32_t kBlockBytes = kTileRows * kRowBytes;
constexpr std::uint32_t kPieceBytes = 16;
constexpr std::uint32_t kSwizzleBytes = 1024;  // the pattern's period: tiles begin at a multiple of it
constexpr std::uint32_t kStepColumns = 16;     // that one matrix instruction sums over

// The offset of a 16-byte piece in a block.
TARDIS_HOST_DEVICE std::uint32_t piece_offset(std::uint32_t row, std::uint32_t piece) {
  return row * kRowBytes + (piece ^ row % 8) * kPieceBytes;
}

// --- matrix descriptors (PTX ISA, "matrix descriptor format" of wgmma)
// -------------------------------------------------

// One operand of 64 rows in a block with 128-byte swizzle: from one group of eight rows to the next are 1,024 bytes.
// This is right for both uses here: along the columns (K, queries) and along the rows (V), where one block is as wide
// as an instruction, so that the distance between blocks does not matter.
TARDIS_HOST_DEVICE std::uint64_t block_descriptor(std::uint32_t shared_address) {
  constexpr std::uint64_t kLeading = 1, kStride = kSwizzleBytes / 16, kSwizzle128 = 1;
  return (shared_address & 0x3FFFF) >> 4 | kLeading << 16 | kStride << 32 | kSwizzle128 << 62;
}

// From there to the 16 columns of step `step` of the tile (K, queries), where the sum is over columns.
TARDIS_HOST_DEVICE std::uint32_t column_step_bytes(std::uint32_t step) {
  constexpr std::uint32_t kSteps = kBlockColumns / kStepColumns;
  return step / kSteps * kBlockBytes + step % kSteps * kStepColumns * 2;
}

// To the 16 rows of step `step` in block `block` (V), where the sum is over rows.
TARDIS_HOST_DEVICE std::uint32_t row_step_bytes(std::uint32_t step, std::uint32_t block) {
  return block * kBlockBytes + step * kStepColumns * kRowBytes;
}

// --- rows of queries
// -----------------------------------------------------------------------------------------------------

constexpr std::uint32_t kConsumerWarps = 4;

// A query row (token of the query, head of the group) goes to a row of the tile such that few of them are spread over
// all four warps, of which each has 16 rows.
TARDIS_HOST_DEVICE std::uint32_t tile_row_of(std::uint32_t query_row) {
  return query_row % kConsumerWarps * 16 + query_row / kConsumerWarps;
}
TARDIS_HOST_DEVICE std::uint32_t query_row_of(std::uint32_t tile_row) {
  return tile_row % 16 * kConsumerWarps + tile_row / 16;
}

// --- entries of page tables
// ----------------------------------------------------------------------------------------------

// The slot at which a tensor copy begins, of a page's number and a place in it. Copies fill what lies outside of a pool
// with zeros, but slots that 31 bits cannot hold would be others': a page that far out is before the pool.
TARDIS_HOST_DEVICE std::int32_t copied_slot(std::uint32_t page, std::uint32_t page_shift, std::uint32_t place) {
  if (page >> (31 - page_shift) != 0) return -static_cast<std::int32_t>(kTileRows);
  return static_cast<std::int32_t>((page << page_shift) + place);
}

// --- which tokens
// --------------------------------------------------------------------------------------------------------

struct TokenRange {
  std::uint32_t begin, end;
};

// What query token `token` of `query_tokens` sees of `length` tokens; empty where the request is shorter than that.
TARDIS_HOST_DEVICE TokenRange seen_by(std::uint32_t length, std::uint32_t query_tokens, std::uint32_t token,
                                      std::int32_t window_left) {
  const std::uint32_t after = query_tokens - 1 - token;  // tokens behind this one
  const std::uint32_t end = length > after ? length - after : 0;
  const std::uint32_t reach = window_left < 0 ? end : static_cast<std::uint32_t>(window_left) + 1;
  return {end > reach ? end - reach : 0, end};
}

// What any of them sees.
TARDIS_HOST_DEVICE TokenRange seen_by_all(std::uint32_t length, std::uint32_t query_tokens, std::int32_t window_left) {
  return {seen_by(length, query_tokens, 0, window_left).begin, length};
}

// The tiles of split `split` of `splits`; tile i is tokens i * 64 and on.
TARDIS_HOST_DEVICE TokenRange tiles_of_split(const TokenRange& tokens, std::uint32_t split, std::uint32_t splits) {
  const std::uint32_t first = tokens.begin / kTileRows;
  const std::uint32_t last = (tokens.end + kTileRows - 1) / kTileRows;
  if (tokens.end <= tokens.begin) return {0, 0};
  const std::uint32_t each = (last - first + splits - 1) / splits;
  const std::uint64_t begin = first + std::uint64_t{split} * each;
  if (begin >= last) return {0, 0};
  const auto from = static_cast<std::uint32_t>(begin);
  return {from, last - from > each ? from + each : last};
}

}  // namespace tardis::attention
