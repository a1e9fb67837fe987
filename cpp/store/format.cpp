// SPDX-License-Identifier: Apache-2.0
#include "store/format.h"

#include <algorithm>

#include "base/checksum.h"

namespace tardis {

std::uint32_t struct_crc(const void* data, std::size_t bytes_before_crc) { return crc32c(data, bytes_before_crc); }

bool all_zero(const void* data, std::size_t bytes) {
  const auto* first = static_cast<const std::uint8_t*>(data);
  return std::all_of(first, first + bytes, [](std::uint8_t byte) { return byte == 0; });
}

SegmentGeometry SegmentGeometry::with(std::uint32_t slots, std::uint64_t slot_bytes, std::uint32_t digests_per_slot) {
  SegmentGeometry g;
  g.slot_bytes = slot_bytes;
  g.digests_per_slot = digests_per_slot;
  g.slots = slots;
  g.header_table_offset = kTableBlockBytes;
  g.digest_table_offset = g.header_table_offset + round_up(slots * kHeaderBytes, kTableBlockBytes);
  const std::uint64_t digest_bytes =
      round_up(std::uint64_t{slots} * digests_per_slot * sizeof(std::uint64_t), kTableBlockBytes);
  g.payload_offset = round_up(g.digest_table_offset + digest_bytes, kFirstPayloadAlign);
  return g;
}

SegmentGeometry SegmentGeometry::of(std::uint64_t segment_bytes, std::uint64_t slot_bytes,
                                    std::uint32_t digests_per_slot) {
  std::uint64_t low = 0, high = slot_bytes == 0 ? 0 : std::min<std::uint64_t>(segment_bytes / slot_bytes, UINT32_MAX);
  while (low < high) {
    const std::uint64_t middle = (low + high + 1) / 2;
    const SegmentGeometry g = with(static_cast<std::uint32_t>(middle), slot_bytes, digests_per_slot);
    if (g.payload_offset + middle * slot_bytes <= segment_bytes) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return with(static_cast<std::uint32_t>(low), slot_bytes, digests_per_slot);
}

SegmentGeometry SegmentGeometry::of(const SegmentSuperblock& s) {
  return {s.slot_bytes, s.digests_per_slot, s.slots, s.header_table_offset, s.digest_table_offset, s.payload_offset};
}

ObjectGeometry ObjectGeometry::of(std::uint32_t parts, std::uint32_t regions, const std::uint64_t* region_bytes,
                                  std::uint32_t block_bytes) {
  ObjectGeometry g;
  g.parts = parts;
  g.regions = regions;
  for (std::uint32_t r = 0; r < regions; ++r) {
    g.region_bytes[r] = region_bytes[r];
    g.part_bytes += region_bytes[r];
  }
  g.part_stride = round_up(g.part_bytes, block_bytes);
  g.chunks_per_part = static_cast<std::uint32_t>((g.part_bytes + kChunkBytes - 1) / kChunkBytes);
  return g;
}

ObjectGeometry ObjectGeometry::of(const SlotHeader& header) {
  ObjectGeometry g;
  g.parts = header.part_count;
  g.regions = 1;
  g.region_bytes[0] = header.part_bytes;
  g.part_bytes = header.part_bytes;
  g.part_stride = header.part_stride;
  g.chunks_per_part = static_cast<std::uint32_t>((g.part_bytes + kChunkBytes - 1) / kChunkBytes);
  return g;
}

}  // namespace tardis
