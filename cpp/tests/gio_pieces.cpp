// SPDX-License-Identifier: Apache-2.0
// How the movers cut parts into chunks and share them between CTAs (gio/pieces.h), on the CPU.
#include "gio/pieces.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

namespace tardis::gio {
namespace {

constexpr std::uint64_t kSource0 = 0x100000000, kSource1 = 0x200000000, kTarget0 = 0x300000000, kTarget1 = 0x400000000;

Part part_of(std::uint64_t first, std::uint64_t second) {
  return {{{kSource0, kTarget0, first}, {kSource1, kTarget1, second}}};
}

// The chunks of a part, put together again, are the part: in order, nothing twice, nothing left out.
void expect_whole(std::uint64_t first, std::uint64_t second) {
  SCOPED_TRACE(testing::Message() << first << " + " << second << " bytes");
  const Part part = part_of(first, second);
  std::uint64_t at = 0;  // in the part
  for (std::uint64_t number = 0; number < part.chunks(); ++number) {
    const Chunk chunk = chunk_of(part, number);
    std::uint64_t bytes = 0;
    for (int i = 0; i < kMaxSegments; ++i) {
      const Piece& segment = chunk.segments[i];
      if (segment.bytes == 0) {
        ASSERT_NE(i, 0) << "an empty first segment";
        continue;
      }
      const bool in_first = at < first;
      ASSERT_EQ(segment.source, in_first ? kSource0 + at : kSource1 + at - first);
      ASSERT_EQ(segment.destination, in_first ? kTarget0 + at : kTarget1 + at - first);
      ASSERT_LE(segment.bytes, in_first ? first - at : first + second - at);
      at += segment.bytes;
      bytes += segment.bytes;
    }
    ASSERT_EQ(chunk.bytes, bytes);
    ASSERT_EQ(bytes, std::min<std::uint64_t>(kChunkBytes, part.bytes() - number * kChunkBytes));
  }
  EXPECT_EQ(at, first + second);
}

TEST(GioPieces, ChunksAreTheirPart) {
  const std::uint64_t sizes[] = {0, 1, 15, 16, 17, 2048, 16383, 16384, 16385, 32768, 40960, 131072};
  for (const std::uint64_t first : sizes) {
    for (const std::uint64_t second : sizes) expect_whole(first, second);
  }
  std::mt19937_64 random(testing::UnitTest::GetInstance()->random_seed());
  for (int i = 0; i < 500; ++i) expect_whole(random() % 200000, random() % 200000);
}

TEST(GioPieces, SizesNearTheEndOfTheirType) {
  const Part part = part_of(UINT64_MAX, 0);
  EXPECT_EQ(part.chunks(), UINT64_MAX / kChunkBytes + 1);
  const Chunk last = chunk_of(part, part.chunks() - 1);
  EXPECT_EQ(last.bytes, UINT64_MAX % kChunkBytes);
}

TEST(GioPieces, OnlyMultiplesOf16AreBulkCopies) {
  for (const std::uint64_t offset : {0, 1, 8, 16}) {
    for (int field = 0; field < 6; ++field) {
      Part part = part_of(1024, 1024);
      std::uint64_t* const fields[] = {&part.pieces[0].source, &part.pieces[0].destination, &part.pieces[0].bytes,
                                       &part.pieces[1].source, &part.pieces[1].destination, &part.pieces[1].bytes};
      *fields[field] += offset;
      EXPECT_EQ(chunk_of(part, 0).is_aligned(), offset % 16 == 0) << "field " << field << ", offset " << offset;
    }
  }
  // A large size that is no multiple costs its last chunk only.
  const Part part = part_of(5 * kChunkBytes + 3, 0);
  for (std::uint64_t i = 0; i < 5; ++i) EXPECT_TRUE(chunk_of(part, i).is_aligned());
  EXPECT_FALSE(chunk_of(part, 5).is_aligned());
}

TEST(GioPieces, EveryChunkHasOneCta) {
  for (std::uint32_t ctas = 1; ctas <= TARDIS_GPU_MAX_MOVER_CTAS; ++ctas) {
    std::set<std::uint64_t> seen;
    for (std::uint32_t cta = 0; cta < ctas; ++cta) {
      std::uint64_t previous = 0;
      for (std::uint64_t round = 0; round < 100; ++round) {
        const std::uint64_t chunk = owned_chunk(round, cta, ctas);
        EXPECT_TRUE(round == 0 || chunk > previous) << "a CTA's chunks rise";
        EXPECT_TRUE(seen.insert(chunk).second) << "chunk " << chunk << " twice";
        previous = chunk;
      }
    }
    EXPECT_EQ(seen.size(), 100u * ctas);
    EXPECT_EQ(*seen.rbegin(), 100u * ctas - 1) << "no gap";
  }
}

TEST(GioPieces, AlternatingSizesAreShared) {
  // Large and small in turn, or one large in `ctas`: no CTA has more than its share of the large ones.
  for (std::uint32_t ctas = 2; ctas <= TARDIS_GPU_MAX_MOVER_CTAS; ++ctas) {
    for (const std::uint32_t period : {2u, ctas}) {
      std::vector<int> large(ctas);
      for (std::uint32_t cta = 0; cta < ctas; ++cta) {
        for (std::uint64_t round = 0; round < 120; ++round) large[cta] += owned_chunk(round, cta, ctas) % period == 0;
      }
      EXPECT_LE(*std::max_element(large.begin(), large.end()) - *std::min_element(large.begin(), large.end()), 4);
    }
  }
}

}  // namespace
}  // namespace tardis::gio
