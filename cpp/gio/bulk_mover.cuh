// SPDX-License-Identifier: Apache-2.0
// Moves bytes between bounce slots and scattered memory with bulk copies: one warp loads chunks for all rings of the
// CTA, one stores them.
#pragma once

#include <cstdint>

#include "gio/link_pacer.cuh"
#include "gio/mover.cuh"
#include "gio/mover_control.cuh"

namespace tardis::gio {

__device__ __forceinline__ Part part_of(const RingSlot& slot, std::byte* bounce) {
  const auto slot_address = reinterpret_cast<std::uint64_t>(bounce);
  Part part = {};
  std::uint64_t at = slot_address;
#pragma unroll
  for (std::uint32_t i = 0; i < kPieces; ++i) {
    const bool reads = slot.op == IoOp::kRead;
    part.pieces[i] = {reads ? at : slot.memory[i], reads ? slot.memory[i] : at, slot.bytes[i]};
    at += slot.bytes[i];
  }
  return part;
}

// The loading warp, until no ring of the CTA posts any more.
template <class Stages>
__device__ __forceinline__ void load_parts(Stages& stages, const MovedRing* rings, std::uint32_t count,
                                           const LinkTraffic& traffic, LinkGlance& glance) {
  Loader<Stages> loader(stages);
  LinkPacer pacer(traffic, glance);
  for_posted_jobs(rings, count, [&](std::uint32_t ring, std::uint32_t first, std::uint32_t jobs) {
    const MovedRing& moved = rings[ring];
    for (std::uint32_t job = first; job != first + jobs; ++job) {
      const std::uint32_t index = moved.work.jobs[job % moved.queue->commands];
      const RingSlot& slot = moved.work.slots[index];
      const Part part = part_of(slot, moved.queue->bounce + std::uint64_t{index} * moved.queue->slot_bytes);
      const auto chunks = static_cast<std::uint32_t>(part.chunks());
      const std::uint32_t digested = slot.digests != 0 ? 1 : 0;  // in place of the number of chunks
      for (std::uint32_t i = 0; i < chunks; ++i) {
        const Chunk chunk = chunk_of(part, i);
        pacer.before(chunk.bytes);
        loader.load(chunk, name_of(ring, index), i, digested);
      }
    }
  });
  loader.finish();
  pacer.end();
}

// For store_chunks().
struct JobReport {
  static constexpr bool kWanted = true;
  const MovedRing* rings;
  __device__ __forceinline__ void landed(const Stage& stage) { share_moved(moved_slot(rings, stage.part)); }
};

}  // namespace tardis::gio
