// SPDX-License-Identifier: Apache-2.0
// Where decode attention finds things in shared memory: what matrix descriptors address is what tensor copies have put
// there; every query row and every token is somewhere, once.
#include "attention/tile.h"

#include <gtest/gtest.h>

#include <set>

#include "attention/decode_shape.h"

namespace tardis::attention {
namespace {

// How the copy engine and the matrix unit see an address with 128-byte swizzle: bits 7 to 9 are added to bits 4 to 6.
std::uint32_t swizzled(std::uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// A tensor copy of a box of 64 columns of two bytes: rows of 128 bytes one after the other, swizzled.
std::uint32_t copied_to(std::uint32_t box, std::uint32_t row, std::uint32_t column) {
  return swizzled(box + row * kRowBytes + column * 2);
}

struct Descriptor {
  std::uint32_t start, leading, stride;
};

Descriptor fields_of(std::uint64_t bits) {
  EXPECT_EQ(bits >> 62, 1U) << "128-byte swizzle";
  EXPECT_EQ(bits >> 49 & 7, 0U) << "the pattern begins at a multiple of 1,024 bytes";
  return {static_cast<std::uint32_t>(bits & 0x3FFF) * 16, static_cast<std::uint32_t>(bits >> 16 & 0x3FFF) * 16,
          static_cast<std::uint32_t>(bits >> 32 & 0x3FFF) * 16};
}

// PTX ISA, canonical layouts of wgmma with 128-byte swizzle. Along the columns: eight rows of 128 bytes, the next eight
// a stride on. Along the rows (transposed): 64 columns and eight rows, the next eight rows a stride on.
std::uint32_t element_of(std::uint64_t descriptor, std::uint32_t row, std::uint32_t column) {
  const Descriptor d = fields_of(descriptor);
  return swizzled(d.start + row / 8 * d.stride + row % 8 * kRowBytes + column * 2);
}

TEST(AttentionTile, DescriptorsOfColumnsFindWhatWasCopied) {
  for (const std::uint32_t tile : {0U, 16384U, 3 * 16384U}) {
    for (std::uint32_t step = 0; step < 16; ++step) {
      const std::uint64_t descriptor = block_descriptor(tile + column_step_bytes(step));
      for (std::uint32_t row = 0; row < kTileRows; ++row) {
        for (std::uint32_t i = 0; i < kStepColumns; ++i) {
          const std::uint32_t column = step * kStepColumns + i;
          const std::uint32_t block = tile + column / kBlockColumns * kBlockBytes;
          ASSERT_EQ(element_of(descriptor, row, i), copied_to(block, row, column % kBlockColumns))
              << "tile " << tile << ", row " << row << ", column " << column;
        }
      }
    }
  }
}

TEST(AttentionTile, DescriptorsOfRowsFindWhatWasCopied) {
  for (std::uint32_t step = 0; step < kTileRows / kStepColumns; ++step) {
    for (std::uint32_t block = 0; block < 4; ++block) {
      const std::uint64_t descriptor = block_descriptor(32768 + row_step_bytes(step, block));
      for (std::uint32_t row = 0; row < kStepColumns; ++row) {
        for (std::uint32_t column = 0; column < kBlockColumns; ++column) {
          ASSERT_EQ(element_of(descriptor, row, column),
                    copied_to(32768 + block * kBlockBytes, step * kStepColumns + row, column));
        }
      }
    }
  }
}

// A tile of several boxes, one under the other, is laid out as one of a single box.
TEST(AttentionTile, BoxesOfPagesJoinToOneTile) {
  for (const std::uint32_t box_rows : {16U, 32U}) {
    for (std::uint32_t row = 0; row < kTileRows; ++row) {
      const std::uint32_t box = row / box_rows * box_rows * kRowBytes;
      for (std::uint32_t column = 0; column < kBlockColumns; ++column) {
        ASSERT_EQ(copied_to(box, row % box_rows, column), copied_to(0, row, column));
      }
    }
  }
}

TEST(AttentionTile, PiecesAreWhereCopiesPutThem) {
  for (std::uint32_t row = 0; row < kTileRows; ++row) {
    for (std::uint32_t piece = 0; piece < 8; ++piece) {
      ASSERT_EQ(piece_offset(row, piece), copied_to(0, row, piece * 8));
    }
  }
}

TEST(AttentionTile, QueryRowsAreSpreadOverTheWarps) {
  std::set<std::uint32_t> rows;
  for (std::uint32_t row = 0; row < kTileRows; ++row) {
    ASSERT_EQ(query_row_of(tile_row_of(row)), row);
    EXPECT_EQ(tile_row_of(row) / 16, row % kConsumerWarps);
    rows.insert(tile_row_of(row));
  }
  EXPECT_EQ(rows.size(), kTileRows);
}

TEST(AttentionTile, AQuerySeesTheTokensOfItsWindow) {
  for (std::uint32_t length = 0; length < 9; ++length) {
    for (std::uint32_t queries = 1; queries < 5; ++queries) {
      for (std::int32_t window = -1; window < 9; ++window) {
        for (std::uint32_t token = 0; token < queries; ++token) {
          const std::int64_t at = std::int64_t{length} - queries + token;  // its own place; before 0: it is not there
          const TokenRange seen = seen_by(length, queries, token, window);
          const TokenRange any = seen_by_all(length, queries, window);
          for (std::int64_t t = 0; t < length; ++t) {
            const bool wanted = at >= 0 && t <= at && (window < 0 || t >= at - window);
            ASSERT_EQ(t >= seen.begin && t < seen.end, wanted) << "length " << length << ", query " << token << " of "
                                                               << queries << ", window " << window << ", " << t;
            ASSERT_TRUE(!wanted || (t >= any.begin && t < any.end));
          }
        }
      }
    }
  }
}

TEST(AttentionTile, EveryTileIsOfOneSplit) {
  for (const std::uint32_t length : {0U, 1U, 63U, 64U, 65U, 640U, 1000U, 100'000U}) {
    for (const std::uint32_t begin : {0U, 1U, 63U, 64U, 600U}) {
      for (const std::uint32_t splits : {1U, 2U, 3U, 7U, 30U, 256U}) {
        std::uint32_t next = begin / kTileRows;
        for (std::uint32_t split = 0; split < splits; ++split) {
          const TokenRange tiles = tiles_of_split({begin, length}, split, splits);
          ASSERT_LE(tiles.begin, tiles.end);
          if (tiles.begin == tiles.end) continue;
          ASSERT_EQ(tiles.begin, next);
          next = tiles.end;
        }
        ASSERT_EQ(next, begin < length ? (length + kTileRows - 1) / kTileRows : begin / kTileRows);
      }
    }
  }
}

TEST(AttentionTile, TheLastSplitOfTheLongestContextHasItsTiles) {
  const TokenRange tiles = tiles_of_split({0, 1U << 30}, 255, 256);
  EXPECT_EQ(tiles.begin, 65'536U * 255);
  EXPECT_EQ(tiles.end, 65'536U * 256);
}

TEST(AttentionTile, PagesThatFitNoSlotAreBeforeThePool) {
  for (const std::uint32_t shift : {4U, 5U, 6U, 7U}) {
    const std::uint32_t pages = 1U << (31 - shift), last = (1U << shift) - 1;
    EXPECT_EQ(copied_slot(0, shift, 0), 0);
    EXPECT_EQ(copied_slot(3, shift, last), static_cast<std::int32_t>((3U << shift) + last));
    EXPECT_EQ(copied_slot(pages - 1, shift, last), 0x7FFFFFFF) << "the last slot that a pool can have";
    for (const std::uint32_t page :
         {pages, pages + 1, 2 * pages, 2 * pages + 1, (1U << 30) - 1, 0xBFFFFFFFU, 1U << 31}) {
      for (const std::uint32_t place : {0U, last}) {
        const std::int64_t slot = copied_slot(page, shift, place);
        EXPECT_LE(slot + kTileRows, 0) << "page " << page << " of " << last + 1 << " tokens: a box may be a tile long";
      }
    }
  }
}

template <class Shape>
void expect_room(std::uint32_t stages) {
  EXPECT_EQ(Shape::kStages, stages);
  EXPECT_LE(Shape::kCtasPerSm * (Shape::kSharedBytes + kSystemShared), kSmShared);
  EXPECT_LE(Shape::kSharedBytes, 227U << 10);
}

TEST(AttentionTile, SharedMemoryHasRoomForItsCtas) {
  expect_room<DecodeShape<2, 64>>(13);
  expect_room<DecodeShape<2, 128>>(6);
  expect_room<DecodeShape<2, 256>>(6);
  expect_room<DecodeShape<1, 64>>(16);
  expect_room<DecodeShape<1, 128>>(10);
  expect_room<DecodeShape<1, 256>>(10);
}

}  // namespace
}  // namespace tardis::attention
