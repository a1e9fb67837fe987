// SPDX-License-Identifier: Apache-2.0
// The same for small commands, which are many: what is done for each of them is not done by one lane. The lanes of one
// warp load chunks side by side, those of another store them.
#pragma once

#include <cstdint>

#include "gio/link_pacer.cuh"
#include "gio/mover.cuh"
#include "gio/mover_control.cuh"

namespace tardis::gio {

// From the loading warp to the storing one.
struct LoadedChunks {
  std::uint32_t count;  // in all, once
  std::uint32_t ended;  // is set
};

template <class Stages>
class JobLoader {
 public:
  __device__ __forceinline__ JobLoader(Stages& stages, const MovedRing* rings, std::uint32_t count,
                                       const LinkTraffic& traffic, LinkGlance& glance)
      : stages_(stages), rings_(rings), count_(count), lane_(threadIdx.x % kWarpLanes), pacer_(traffic, glance) {}

  // Until no ring posts any more.
  __device__ __forceinline__ void run(LoadedChunks& loaded) {
    for_posted_jobs(rings_, count_, [this](std::uint32_t ring, std::uint32_t first, std::uint32_t jobs) {
      load_jobs(ring, first, jobs);
    });
    pacer_.end();
    if (lane_ == 0) {
      loaded.count = loaded_;
      store_release_cta(&loaded.ended, 1);
    }
  }

 private:
  static constexpr unsigned kAll = 0xffffffff;
  static constexpr std::uint32_t kGroup = Stages::kStages / 2;  // chunks that are started together

  // A job a lane, whose chunks are numbered through.
  __device__ __forceinline__ void load_jobs(std::uint32_t ring, std::uint32_t first, std::uint32_t jobs) {
    const MovedRing& moved = rings_[ring];
    std::uint32_t index = 0, chunks = 0, bytes = 0;
    if (lane_ < jobs) {
      index = moved.work.jobs[(first + lane_) % moved.queue->commands];
      const RingSlot& slot = moved.work.slots[index];
      bytes = slot.bytes[0] + slot.bytes[1];
      chunks = (bytes + kChunkBytes - 1) / kChunkBytes;
    }
    pacer_.before(__reduce_add_sync(kAll, bytes));
    std::uint32_t end = chunks;  // the number of the first chunk behind this lane's
#pragma unroll
    for (int distance = 1; distance < kWarpLanes; distance *= 2) {
      const std::uint32_t lower = __shfl_up_sync(kAll, end, distance);
      if (lane_ >= static_cast<unsigned>(distance)) end += lower;
    }
    const std::uint32_t total = __shfl_sync(kAll, end, kWarpLanes - 1);
    for (std::uint32_t base = 0; base < total; base += kGroup) {
      const std::uint32_t number = base + lane_, group = min(kGroup, total - base);
      std::uint32_t owner = 0;  // how many lanes' chunks are all before this number
#pragma unroll
      for (int step = kWarpLanes / 2; step > 0; step /= 2) {
        const std::uint32_t there = __shfl_sync(kAll, end, static_cast<int>(owner) + step - 1);
        if (number >= there) owner += step;
      }
      owner = min(owner, static_cast<std::uint32_t>(kWarpLanes - 1));
      const std::uint32_t slot = __shfl_sync(kAll, index, static_cast<int>(owner));
      const std::uint32_t before = __shfl_sync(kAll, end - chunks, static_cast<int>(owner));
      if (lane_ < group) load_chunk(moved, ring, slot, number - before);
      __syncwarp();
      at_.advance(group);
    }
    loaded_ += total;
  }

  // By each lane its own, into the stage as far behind at_ as its number.
  __device__ __forceinline__ void load_chunk(const MovedRing& moved, std::uint32_t ring, std::uint32_t index,
                                             std::uint32_t number) {
    const RingSlot& slot = moved.work.slots[index];
    const std::uint32_t begin = number * kChunkBytes, total = slot.bytes[0] + slot.bytes[1], front = slot.bytes[0];
    const std::uint32_t end = min(begin + kChunkBytes, total);
    const std::uint32_t split = min(max(begin, front), end);  // what is before it is of the first piece
    const std::uint64_t bounce =
        reinterpret_cast<std::uint64_t>(moved.queue->bounce) + std::uint64_t{index} * moved.queue->slot_bytes;
    const std::uint64_t memory[kPieces] = {slot.memory[0] + begin, slot.memory[1] + (split - front)};
    const std::uint64_t bounced[kPieces] = {bounce + begin, bounce + split};
    const std::uint32_t bytes[kPieces] = {split - begin, end - split};
    const bool reads = slot.op == IoOp::kRead;

    auto position = at_;
    position.advance(lane_);
    barrier_wait(&stages_.emptied[position.stage], position.parity ^ 1);
    Stage& stage = stages_.stages[position.stage];
#pragma unroll
    for (std::uint32_t i = 0; i < kPieces; ++i) {
      stage.destinations[i] = reads ? memory[i] : bounced[i];
      stage.segment_bytes[i] = bytes[i];
    }
    stage.part = name_of(ring, index);
    std::uint64_t* const filled = &stages_.filled[position.stage];
    unsigned char* const data = stages_.data[position.stage];
    barrier_arrive_expecting(filled, end - begin);
#pragma unroll
    for (std::uint32_t i = 0; i < kPieces; ++i) {
      const std::uint32_t offset = i == 0 ? 0 : bytes[0];
      if (bytes[i] != 0) bulk_load(data + offset, reads ? bounced[i] : memory[i], bytes[i], filled);
    }
  }

  Stages& stages_;
  const MovedRing* const rings_;
  const std::uint32_t count_;
  const std::uint32_t lane_;
  RingPosition<Stages> at_;
  LinkPacer pacer_;
  std::uint32_t loaded_ = 0;
};

// The storing warp: a lane for each stage.
template <class Stages>
__device__ __forceinline__ void store_jobs(Stages& stages, const MovedRing* rings, const LoadedChunks& loaded) {
  constexpr unsigned kAll = 0xffffffff;
  static_assert(Stages::kStages <= kWarpLanes && Stages::kDigestWarps == 0, "nobody else empties a stage");
  const unsigned lane = threadIdx.x % kWarpLanes;
  std::uint32_t parity = 0, stored = 0;
  while (true) {
    const bool filled = lane < Stages::kStages && barrier_test(&stages.filled[lane], parity);
    if (filled) {
      const Stage& stage = stages.stages[lane];
      const unsigned char* data = stages.data[lane];
      if (stage.segment_bytes[0] != 0) bulk_store(stage.destinations[0], data, stage.segment_bytes[0]);
      if (stage.segment_bytes[1] != 0) {
        bulk_store(stage.destinations[1], data + stage.segment_bytes[0], stage.segment_bytes[1]);
      }
      bulk_commit();
      bulk_wait_written<0>();
      share_moved(moved_slot(rings, stage.part));
      barrier_arrive(&stages.emptied[lane]);
      parity ^= 1;
    }
    const std::uint32_t now = static_cast<std::uint32_t>(__popc(__ballot_sync(kAll, filled)));
    stored += now;
    if (now == 0 && load_acquire_cta(&loaded.ended) != 0 && stored == loaded.count) return;
  }
}

}  // namespace tardis::gio
