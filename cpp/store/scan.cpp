// SPDX-License-Identifier: Apache-2.0
#include "store/scan.h"

#include <algorithm>

#include "store/transfer.h"

namespace tardis {
namespace {

constexpr std::uint64_t kVerifyBytes = 64u << 20;  // memory for one round of reads

}  // namespace

Belief judge(const SlotHeader& h, std::uint32_t slot, const SegmentFacts& facts) {
  if (all_zero(&h, sizeof h)) return Belief::kFree;
  if (!sealed(h)) return Belief::kBad;
  if (h.segment_epoch != facts.epoch) return Belief::kFree;
  if (h.format_version != kFormatVersion || h.segment != facts.segment || h.slot != slot) return Belief::kBad;
  if (h.kind == SlotKind::kFree) return Belief::kFree;
  if ((h.flags & kSlotQuarantined) != 0 || h.kind != SlotKind::kKvPage) return Belief::kQuarantined;
  const SegmentGeometry& g = facts.geometry;
  const bool fits = h.slot_bytes == g.slot_bytes && h.part_count > 0 && h.part_bytes > 0 &&
                    h.part_bytes <= g.slot_bytes && h.part_stride == round_up(h.part_bytes, facts.block_bytes) &&
                    h.part_count <= g.slot_bytes / h.part_stride && h.payload_bytes == h.part_count * h.part_bytes &&
                    ObjectGeometry::of(h).chunks() <= g.digests_per_slot &&
                    g.slot_offset(slot) + h.part_count * h.part_stride <= facts.file_bytes;
  return fits ? Belief::kObject : Belief::kBad;
}

void verify_claims(BlockDevice& device, std::vector<Claim>& claims,
                   const std::function<bool(std::uint64_t)>& progress) {
  std::uint64_t done = 0;
  for (std::size_t next = 0; next < claims.size();) {
    const std::size_t first = next;
    std::uint64_t bytes = 0;
    while (next < claims.size()) {
      const std::uint64_t own = round_up(ObjectGeometry::of(claims[next].header).stored_bytes(), kTableBlockBytes);
      if (next > first && bytes + own > kVerifyBytes) break;
      bytes += own;
      ++next;
    }
    AlignedBuffer memory(bytes, kTableBlockBytes);
    std::vector<std::vector<std::uint64_t>> pieces(next - first);
    Transfer payload(device, IoRequest::Op::kRead);
    std::uint64_t at = reinterpret_cast<std::uint64_t>(memory.data());
    for (std::size_t i = first; i < next; ++i) {
      const ObjectGeometry g = ObjectGeometry::of(claims[i].header);
      for (std::uint32_t part = 0; part < g.parts; ++part) pieces[i - first].push_back(at + part * g.part_stride);
      payload.add(claims[i].file, claims[i].offset, g, pieces[i - first].data());
      at += round_up(g.stored_bytes(), kTableBlockBytes);
    }
    payload.run(/*digests=*/true);
    for (std::size_t i = first; i < next; ++i) {
      claims[i].error = payload.error(i - first);
      claims[i].verified = claims[i].error == 0 && payload.root(i - first) == claims[i].header.root_digest;
    }
    done += bytes;
    if (progress && !progress(done)) return;
  }
}

}  // namespace tardis
