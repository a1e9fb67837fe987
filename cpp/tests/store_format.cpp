// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>

#include "store/digest.h"
#include "store_support.h"

namespace tardis::testing {
namespace {

std::uint32_t bitwise_crc32c(const std::vector<std::uint8_t>& data, std::size_t bytes) {
  std::uint32_t crc = ~0u;
  for (std::size_t i = 0; i < bytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0u);
  }
  return ~crc;
}

std::uint64_t little_endian(const std::vector<std::uint8_t>& data, std::size_t at, std::size_t bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < bytes; ++i) value |= std::uint64_t{data[at + i]} << (8 * i);
  return value;
}

std::string text(const std::vector<std::uint8_t>& data, std::size_t at, std::size_t bytes) {
  return {data.begin() + static_cast<std::ptrdiff_t>(at), data.begin() + static_cast<std::ptrdiff_t>(at + bytes)};
}

// Numbers of the format, written out: a store of this release must be readable by the next.
TEST(StoreFormat, BytesOnDisk) {
  const TempFolder folder(memory_parent());
  {
    auto store = open_store(folder.path(), small_store(4));
    ASSERT_NE(store, nullptr);
    Space space(*store, 9, {2, {20000, 12345}});
    ASSERT_EQ(space.put(1, 0, 2), 2u);
    EXPECT_TRUE(store->close());
  }
  const auto s = file_contents(folder.file("tardis.store"), 0, 5000);
  ASSERT_EQ(s.size(), 4096u);
  EXPECT_EQ(text(s, 0, 8), "TARDISST");
  EXPECT_EQ(little_endian(s, 8, 4), 1u);                                  // format version
  EXPECT_EQ(little_endian(s, 12, 4), 16384u);                             // digest chunk
  EXPECT_EQ(little_endian(s, 32, 8), 4 * kTestSegment + kMetadataBytes);  // capacity
  EXPECT_EQ(little_endian(s, 40, 8), kTestSegment);
  const std::uint64_t block = little_endian(s, 48, 4);
  EXPECT_TRUE(block >= 512 && block <= 4096);
  EXPECT_EQ(little_endian(s, 508, 4), bitwise_crc32c(s, 508));

  const std::string file = segment_file(folder.path(), 0);
  const auto g = file_contents(file, 0, 4096);
  ASSERT_EQ(g.size(), 4096u);
  EXPECT_EQ(std::filesystem::file_size(file), kTestSegment);
  EXPECT_EQ(text(g, 0, 8), "TARDISSG");
  EXPECT_EQ(little_endian(g, 8, 4), 1u);
  EXPECT_EQ(little_endian(g, 12, 4), 0u);  // flags: clean
  EXPECT_EQ(text(g, 16, 16), text(s, 16, 16));
  EXPECT_EQ(little_endian(g, 32, 4), 0u);  // segment id
  EXPECT_EQ(little_endian(g, 36, 4), 0u);  // epoch
  EXPECT_EQ(little_endian(g, 40, 8), kTestSegment);
  const std::uint64_t stride = (32345 + block - 1) / block * block;
  const std::uint64_t slot_bytes = little_endian(g, 48, 8), slots = little_endian(g, 56, 4);
  EXPECT_EQ(slot_bytes, (2 * stride + 4095) / 4096 * 4096);
  EXPECT_EQ(little_endian(g, 60, 4), 4u);  // digests a slot: 2 parts of 2 chunks
  EXPECT_EQ(little_endian(g, 64, 8), 4096u);
  const std::uint64_t digest_table = little_endian(g, 72, 8), payload = little_endian(g, 80, 8);
  EXPECT_EQ(digest_table, 4096 + (slots * 512 + 4095) / 4096 * 4096);
  EXPECT_EQ(payload, 1u << 20);
  EXPECT_EQ(slots, (kTestSegment - payload) / slot_bytes);
  EXPECT_EQ(little_endian(g, 508, 4), bitwise_crc32c(g, 508));
  EXPECT_TRUE(std::all_of(g.begin() + 512, g.end(), [](auto byte) { return byte == 0; }));

  const Hash256 keys[2] = {page_key(1, 0), page_key(1, 1)};
  for (std::uint64_t slot = 0; slot < 2; ++slot) {
    const auto h = file_contents(file, 4096 + slot * 512, 512);
    EXPECT_EQ(text(h, 0, 8), "TARDISSL");
    EXPECT_EQ(little_endian(h, 8, 4), 1u);   // format version
    EXPECT_EQ(little_endian(h, 12, 2), 1u);  // kind: KV page
    EXPECT_EQ(little_endian(h, 14, 2), 0u);  // flags
    EXPECT_TRUE(std::equal(keys[slot].begin(), keys[slot].end(), h.begin() + 16));
    EXPECT_EQ(h[48], 9);  // fingerprint
    EXPECT_EQ(h[49], 0x77);
    EXPECT_EQ(little_endian(h, 64, 8), slot == 0 ? 0u : short_key(keys[0]));
    EXPECT_EQ(little_endian(h, 72, 8), slot + 1);  // generation
    EXPECT_EQ(little_endian(h, 80, 4), 0u);        // segment
    EXPECT_EQ(little_endian(h, 84, 4), slot);
    EXPECT_EQ(little_endian(h, 88, 4), 0u);  // segment epoch
    EXPECT_EQ(little_endian(h, 92, 4), 2u);  // parts
    EXPECT_EQ(little_endian(h, 96, 8), slot_bytes);
    EXPECT_EQ(little_endian(h, 104, 8), 32345u);
    EXPECT_EQ(little_endian(h, 112, 8), stride);
    EXPECT_EQ(little_endian(h, 120, 8), 2 * 32345u);
    EXPECT_EQ(little_endian(h, 136, 8), 1u);  // flush group
    EXPECT_EQ(little_endian(h, 144, 8), 0u);  // last durable group
    EXPECT_EQ(little_endian(h, 508, 4), bitwise_crc32c(h, 508));

    // Payload: the parts one after another, each padded with zeros. Digests over the parts without padding.
    std::uint64_t part_digests[2];
    std::vector<std::uint8_t> page(2 * 32345);
    fill_page(page.data(), page.size(), page_seed(9, keys[slot]));
    for (std::uint64_t part = 0; part < 2; ++part) {
      const auto stored = file_contents(file, payload + slot * slot_bytes + part * stride, stride);
      EXPECT_TRUE(
          std::equal(stored.begin(), stored.begin() + 32345, page.begin() + static_cast<std::ptrdiff_t>(part * 32345)));
      EXPECT_TRUE(std::all_of(stored.begin() + 32345, stored.end(), [](auto byte) { return byte == 0; }));
      const std::uint64_t chunks[2] = {xxh3_64(stored.data(), 16384), xxh3_64(stored.data() + 16384, 32345 - 16384)};
      part_digests[part] = xxh3_64(chunks, sizeof chunks);
      const auto table = file_contents(file, digest_table + slot * 32 + part * 16, 16);
      EXPECT_EQ(little_endian(table, 0, 8), chunks[0]);
      EXPECT_EQ(little_endian(table, 8, 8), chunks[1]);
    }
    EXPECT_EQ(little_endian(h, 128, 8), xxh3_64(part_digests, sizeof part_digests));
  }
}

TEST(StoreFormat, GeometryHasRoomForEverythingAndWastesNothing) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 2000; ++round) {
    const std::uint64_t segment = kMinSegmentBytes + random() % (256u << 20) / 4096 * 4096;
    const std::uint64_t slot = round % 2 == 0 ? std::uint64_t{4096} << (random() % 12) : (1 + random() % 2048) * 4096;
    const auto digests = static_cast<std::uint32_t>(slot / kChunkBytes + 1 + random() % 100);
    const auto fits = [&](const SegmentGeometry& g, std::uint64_t slots) {
      const std::uint64_t tables = 4096 + round_up(slots * 512, 4096) + round_up(slots * digests * 8, 4096);
      return round_up(tables, 1u << 20) + slots * g.slot_bytes <= segment;
    };
    const SegmentGeometry g = SegmentGeometry::of(segment, slot, digests);
    EXPECT_EQ(g.slot_bytes, slot);  // power-of-two pages keep power-of-two strides
    EXPECT_EQ(g.header_table_offset, 4096u);
    EXPECT_GE(g.digest_table_offset, g.header_table_offset + g.slots * kHeaderBytes);
    EXPECT_GE(g.payload_offset, g.digest_table_offset + std::uint64_t{g.slots} * digests * 8);
    EXPECT_EQ(g.payload_offset % (1u << 20), 0u);
    EXPECT_TRUE(g.slots == 0 || g.slot_offset(g.slots - 1) + slot <= segment);
    EXPECT_FALSE(fits(g, g.slots + 1)) << segment << " " << slot << " " << digests;
  }
}

TEST(StoreFormat, GeometryOfHostileNumbersStaysInsideTheSegment) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 2000; ++round) {
    const std::uint64_t segment = kTestSegment << (random() % 19);
    const std::uint64_t slot = (random() >> (random() % 64)) / kSlotAlign * kSlotAlign;  // others are refused at once
    const auto digests = static_cast<std::uint32_t>(random() >> (32 + random() % 32));
    const SegmentGeometry g = SegmentGeometry::of(segment, slot, digests);
    if (g.slots == 0) continue;
    const auto end = static_cast<unsigned __int128>(g.payload_offset) + static_cast<unsigned __int128>(g.slots) * slot;
    const auto tables =
        static_cast<unsigned __int128>(g.digest_table_offset) + static_cast<unsigned __int128>(g.slots) * digests * 8;
    EXPECT_TRUE(end <= segment && tables <= g.payload_offset) << segment << " " << slot << " " << digests;
  }
}

TEST(StoreFormat, DigestEqualsAPlainImplementation) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 150; ++round) {
    const auto parts = static_cast<std::uint32_t>(1 + random() % 4);
    std::vector<std::uint64_t> regions(1 + random() % kMaxRegions);
    for (std::uint64_t& bytes : regions) {
      bytes = random() % 3 == 0 ? (1 + random() % 4) * 16384 : 1 + random() % (random() % 2 == 0 ? 100 : 60000);
    }
    const ObjectGeometry g = ObjectGeometry::of(parts, static_cast<std::uint32_t>(regions.size()), regions.data(), 512);
    PageMemory memory(parts, regions, 1, random() % 64, random() % 2 * 64);
    const std::uint64_t seed = random();
    memory.write(0, seed);

    std::vector<std::uint8_t> flat(memory.page_bytes());
    fill_page(flat.data(), flat.size(), seed);
    std::vector<std::uint64_t> expected, expected_parts;
    for (std::uint32_t part = 0; part < parts; ++part) {
      const std::size_t before = expected.size();
      for (std::uint64_t at = 0; at < g.part_bytes; at += 16384) {
        expected.push_back(
            xxh3_64(flat.data() + part * g.part_bytes + at, std::min<std::uint64_t>(16384, g.part_bytes - at)));
      }
      expected_parts.push_back(xxh3_64(expected.data() + before, (expected.size() - before) * 8));
    }

    const tardis_object_layout layout = [&] {
      tardis_object_layout c{parts, static_cast<std::uint32_t>(regions.size()), {}};
      std::copy(regions.begin(), regions.end(), c.region_bytes);
      return c;
    }();
    std::vector<std::uint64_t> chunks(expected.size()), part_digests(parts);
    std::uint64_t root = 0;
    ASSERT_EQ(tardis_digest(&layout, memory.pieces(), chunks.data(), part_digests.data(), &root), TARDIS_OK);
    EXPECT_EQ(chunks, expected);
    EXPECT_EQ(part_digests, expected_parts);
    EXPECT_EQ(root, xxh3_64(expected_parts.data(), parts * 8));
    // In any cut, as requests of different sizes make it.
    const std::uint32_t cut = static_cast<std::uint32_t>(random() % (g.chunks_per_part + 1));
    std::vector<std::uint64_t> pieces(g.chunks_per_part);
    digest_chunks(g, memory.pieces(), 0, cut, pieces.data());
    digest_chunks(g, memory.pieces(), cut, g.chunks_per_part, pieces.data() + cut);
    EXPECT_TRUE(std::equal(pieces.begin(), pieces.end(), expected.begin()));
  }
}

TEST(StoreFormat, HeadersThatProveThemselvesMustStillFitTheirSegment) {
  const SegmentGeometry g = SegmentGeometry::of(kTestSegment, 65536, 4);
  const SegmentFacts facts{3, 7, g, kTestSegment, 512};
  const auto good = [&] {
    SlotHeader h{};
    h.magic = SlotHeader::kMagic;
    h.format_version = kFormatVersion;
    h.kind = SlotKind::kKvPage;
    h.segment = 3;
    h.slot = 5;
    h.segment_epoch = 7;
    h.part_count = 2;
    h.slot_bytes = 65536;
    h.part_bytes = 32345;
    h.part_stride = 32768;
    h.payload_bytes = 2 * 32345;
    return h;
  }();
  const auto verdict = [&](const std::function<void(SlotHeader&)>& change) {
    SlotHeader h = good;
    change(h);
    seal(h);
    return judge(h, 5, facts);
  };
  EXPECT_EQ(verdict([](SlotHeader&) {}), Belief::kObject);
  EXPECT_EQ(verdict([](SlotHeader& h) { h.segment_epoch = 6; }), Belief::kFree);
  EXPECT_EQ(verdict([](SlotHeader& h) { h.kind = SlotKind::kFree; }), Belief::kFree);
  EXPECT_EQ(verdict([](SlotHeader& h) { h.flags = kSlotQuarantined; }), Belief::kQuarantined);
  EXPECT_EQ(verdict([](SlotHeader& h) { h.kind = static_cast<SlotKind>(2); }), Belief::kQuarantined);
  const std::vector<std::function<void(SlotHeader&)>> lies = {
      [](SlotHeader& h) { h.segment = 4; }, [](SlotHeader& h) { h.slot = 6; },
      [](SlotHeader& h) { h.format_version = 2; }, [](SlotHeader& h) { h.slot_bytes = 4096; },
      [](SlotHeader& h) { h.part_count = 0, h.payload_bytes = 0; },
      [](SlotHeader& h) { h.part_count = 3, h.payload_bytes = 3 * 32345; },
      [](SlotHeader& h) { h.part_count = 0xFFFFFFFF, h.payload_bytes = 0xFFFFFFFFull * 32345; },
      [](SlotHeader& h) { h.part_bytes = 0, h.payload_bytes = 0; },
      [](SlotHeader& h) { h.part_bytes = ~0ull - 100, h.payload_bytes = 2 * h.part_bytes; },
      [](SlotHeader& h) { h.part_bytes = 1ull << 63, h.part_stride = 1ull << 63, h.payload_bytes = 0; },
      [](SlotHeader& h) { h.part_stride = 0; }, [](SlotHeader& h) { h.part_stride = 32769; },
      // More padding than a block: recovery reads padding into one block of memory.
      [](SlotHeader& h) { h.part_count = 1, h.part_bytes = 1, h.payload_bytes = 1, h.part_stride = 65536; },
      [](SlotHeader& h) { h.payload_bytes = 2 * 32345 + 1; },
      [](SlotHeader& h) {
        h.part_count = 128, h.part_bytes = 1, h.part_stride = 512, h.payload_bytes = 128;
      },  // 128 digests
  };
  for (std::size_t i = 0; i < lies.size(); ++i) EXPECT_EQ(verdict(lies[i]), Belief::kBad) << "lie " << i;
  SlotHeader beyond = good;
  seal(beyond);
  EXPECT_EQ(judge(beyond, 5, {3, 7, g, g.slot_offset(5) + 65535, 512}), Belief::kBad)
      << "past the end of a truncated file";
  EXPECT_EQ(judge(SlotHeader{}, 5, facts), Belief::kFree);
}

}  // namespace
}  // namespace tardis::testing
