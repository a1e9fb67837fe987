// SPDX-License-Identifier: Apache-2.0
// A ring of stages in shared memory that carries chunks from one place in global memory to another, for any kernel: one
// warp loads, one stores, further ones may digest what passes. Bulk copies do the moving; the warps only start them.
// Global memory here is HBM or mapped pinned host memory, on either side.
//
// How a CTA uses it: reserve sizeof(MoverRing<...>) of shared memory at a multiple of 128, let one thread call init(),
// __syncthreads(), then one warp runs a Loader (load() ..., finish()), one store_chunks(), and kDigestWarps of them
// digest_chunks(). All 32 lanes of a warp must call these together.
#pragma once

#include <cstdint>

#include "gio/bulk_copy.cuh"
#include "gio/pieces.h"
#include "gpu/xxh3_warp.cuh"

namespace tardis::gio {

constexpr int kWarpLanes = 32;

enum class StageKind : std::uint32_t {
  kBulk,
  kBytewise,  // loaded and stored by the lanes: an address or a size is not a multiple of 16
  kEnd,       // nothing comes behind it
};

// What the storing and the digesting warps need to know of a stage. The last three fields are the caller's words.
struct alignas(16) Stage {
  std::uint64_t destinations[kMaxSegments];
  std::uint32_t segment_bytes[kMaxSegments];
  StageKind kind;
  std::uint32_t bytes;
  std::uint32_t part;         // names what the chunk belongs to
  std::uint32_t chunk;        // its number there
  std::uint32_t part_chunks;  // of how many
};

template <int kStages_, int kDigestWarps_>
struct MoverRing {
  static constexpr int kStages = kStages_;
  static constexpr int kDigestWarps = kDigestWarps_;
  // A stage is always digested by the same warp, which so meets every phase of its barrier. One that met every second
  // phase only could take a phase that is to come for the one before the last, since loads complete in any order.
  static_assert(kDigestWarps == 0 || kStages % kDigestWarps == 0);

  alignas(128) unsigned char data[kStages][kChunkBytes];
  std::uint64_t filled[kStages];   // completes when a stage's bytes are there
  std::uint64_t emptied[kStages];  // completes when the storing warp, and the digesting one if any, are done with it
  Stage stages[kStages];

  // One thread; a __syncthreads() must follow.
  __device__ void init() {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&filled[i], 1);
      barrier_init(&emptied[i], kDigestWarps > 0 ? 2 : 1);
    }
    fence_barrier_init();
  }
};

// A place in the ring and how often it came by, as the parity that barriers are waited for with.
template <class Ring>
struct RingPosition {
  std::uint32_t stage = 0;
  std::uint32_t parity = 0;
  std::uint32_t stages = Ring::kStages;  // that are used

  __device__ __forceinline__ void advance(std::uint32_t by = 1) {
    stage += by;
    if (stage >= stages) {
      stage -= stages;
      parity ^= 1;
    }
  }
};

// --- copies by lanes, where bulk copies cannot -----------------------------------------------------------------------

// Volatile: past L1, which does not see what DMA or other SMs wrote since.
template <class Word>
__device__ __forceinline__ void copy_words(unsigned char* to, const unsigned char* from, std::uint32_t words,
                                           int lane) {
  constexpr std::uint32_t kInFlight = 8;
  for (std::uint32_t first = lane; first < words; first += kInFlight * kWarpLanes) {
    Word values[kInFlight] = {};
#pragma unroll
    for (std::uint32_t i = 0; i < kInFlight; ++i) {
      const std::uint32_t at = first + i * kWarpLanes;
      if (at < words) values[i] = reinterpret_cast<const volatile Word*>(from)[at];
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kInFlight; ++i) {
      const std::uint32_t at = first + i * kWarpLanes;
      if (at < words) reinterpret_cast<Word*>(to)[at] = values[i];
    }
  }
}

// Any alignment.
__device__ __noinline__ inline void copy_by_lanes(unsigned char* to, const unsigned char* from, std::uint32_t bytes,
                                                  int lane) {
  const auto either =
      static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from));
  std::uint32_t done = 0;
  if (either % 8 == 0) {
    copy_words<std::uint64_t>(to, from, bytes / 8, lane);
    done = bytes / 8 * 8;
  } else if (either % 4 == 0) {
    copy_words<std::uint32_t>(to, from, bytes / 4, lane);
    done = bytes / 4 * 4;
  }
  copy_words<unsigned char>(to + done, from + done, bytes - done, lane);
}

// --- the loading warp ------------------------------------------------------------------------------------------------

__device__ __forceinline__ Piece piece_of_lane(const Piece& piece, int lane) {
  return {__shfl_sync(xxh3::kAllLanes, piece.source, lane), __shfl_sync(xxh3::kAllLanes, piece.destination, lane),
          __shfl_sync(xxh3::kAllLanes, piece.bytes, lane)};
}

__device__ __forceinline__ Chunk chunk_of_lane(const Chunk& chunk, int lane) {
  return {{piece_of_lane(chunk.segments[0], lane), piece_of_lane(chunk.segments[1], lane)},
          __shfl_sync(xxh3::kAllLanes, chunk.bytes, lane)};
}

template <class Ring>
class Loader {
 public:
  // `stages`: how many of the ring to use; the storing warp must be told the same, and digesting warps want all.
  __device__ explicit Loader(Ring& ring, std::uint32_t stages = Ring::kStages)
      : ring_(ring), at_{0, 0, stages}, lane_(static_cast<int>(threadIdx.x) % kWarpLanes) {}

  // Whether load() would find a free stage at once.
  __device__ __forceinline__ bool has_room() const { return barrier_test(&ring_.emptied[at_.stage], at_.parity ^ 1); }

  // Waits for a free stage and starts loading one chunk (not empty) into it; its words are handed on in Stage. What was
  // acquired of the source before (a completion of the command that wrote it) needs a fence_proxy_async() in lane 0
  // between that and this.
  __device__ __forceinline__ void load(const Chunk& chunk, std::uint32_t part, std::uint32_t number,
                                       std::uint32_t part_chunks) {
    if (chunk.is_aligned()) {
      if (lane_ == 0) load_bulk(chunk, part, number, part_chunks);
    } else {
      load_bytewise(chunk, part, number, part_chunks);
    }
    advance();
  }

  // The same for `count` chunks, the first of lane 0, the next of lane 1, and so on: with small chunks it is the start
  // of a copy that costs, and each lane has prepared its own.
  __device__ __forceinline__ void load_each(int count, const Chunk& mine, std::uint32_t part, std::uint32_t number,
                                            std::uint32_t part_chunks) {
    const unsigned aligned = __ballot_sync(xxh3::kAllLanes, mine.is_aligned());
    for (int i = 0; i < count; ++i) {
      if ((aligned >> i & 1) != 0) {
        if (lane_ == i) load_bulk(mine, part, number, part_chunks);
      } else {
        load_bytewise(chunk_of_lane(mine, i), __shfl_sync(xxh3::kAllLanes, part, i),
                      __shfl_sync(xxh3::kAllLanes, number, i), __shfl_sync(xxh3::kAllLanes, part_chunks, i));
      }
      advance();
    }
  }

  // Tells the other warps that nothing comes any more. Nothing may be loaded after it.
  __device__ void finish() {
    constexpr int kEnds = Ring::kDigestWarps > 1 ? Ring::kDigestWarps : 1;  // each digesting warp meets one of them
    for (int i = 0; i < kEnds; ++i) {
      if (lane_ == 0) {
        wait_for_room();
        ring_.stages[at_.stage].kind = StageKind::kEnd;
        barrier_arrive(&ring_.filled[at_.stage]);
      }
      advance();
    }
  }

 private:
  // Forbids that a lane comes to a stage again before the one that fills it now has waited for it: it would take the
  // phase before the last for the one that is to come.
  __device__ __forceinline__ void advance() {
    __syncwarp();
    at_.advance();
  }

  __device__ __forceinline__ void wait_for_room() { barrier_wait(&ring_.emptied[at_.stage], at_.parity ^ 1); }

  __device__ __forceinline__ void describe(const Chunk& chunk, StageKind kind, std::uint32_t part, std::uint32_t number,
                                           std::uint32_t part_chunks) {
    ring_.stages[at_.stage] = {
        {chunk.segments[0].destination, chunk.segments[1].destination},
        {static_cast<std::uint32_t>(chunk.segments[0].bytes), static_cast<std::uint32_t>(chunk.segments[1].bytes)},
        kind,
        chunk.bytes,
        part,
        number,
        part_chunks};
  }

  // One lane.
  __device__ __forceinline__ void load_bulk(const Chunk& chunk, std::uint32_t part, std::uint32_t number,
                                            std::uint32_t part_chunks) {
    wait_for_room();
    describe(chunk, StageKind::kBulk, part, number, part_chunks);
    std::uint64_t* const filled = &ring_.filled[at_.stage];
    unsigned char* const data = ring_.data[at_.stage];
    barrier_arrive_expecting(filled, chunk.bytes);
    bulk_load(data, chunk.segments[0].source, static_cast<std::uint32_t>(chunk.segments[0].bytes), filled);
    if (chunk.segments[1].bytes != 0) {
      bulk_load(data + chunk.segments[0].bytes, chunk.segments[1].source,
                static_cast<std::uint32_t>(chunk.segments[1].bytes), filled);
    }
  }

  __device__ __forceinline__ void load_bytewise(const Chunk& chunk, std::uint32_t part, std::uint32_t number,
                                                std::uint32_t part_chunks) {
    wait_for_room();
    unsigned char* data = ring_.data[at_.stage];
#pragma unroll
    for (int i = 0; i < kMaxSegments; ++i) {
      const auto bytes = static_cast<std::uint32_t>(chunk.segments[i].bytes);
      copy_by_lanes(data, reinterpret_cast<const unsigned char*>(chunk.segments[i].source), bytes, lane_);
      data += bytes;
    }
    fence_proxy_async();  // forbids that a later bulk load into this stage is overtaken by these stores
    __syncwarp();         // forbids that lane 0 reports the stage filled before the other lanes have stored
    if (lane_ == 0) {
      describe(chunk, StageKind::kBytewise, part, number, part_chunks);
      barrier_arrive(&ring_.filled[at_.stage]);
    }
  }

  Ring& ring_;
  RingPosition<Ring> at_;
  const int lane_;
};

// --- the storing warp ------------------------------------------------------------------------------------------------

// Of a mover whose kernel's end is news enough.
struct NoReport {
  static constexpr bool kWanted = false;
  __device__ void landed(const Stage&) {}
};

// Stores chunks in the order they were loaded until the end comes. Report: if kWanted, landed(stage) is called by lane
// 0 once the bytes of a chunk are in their destination and visible to that thread (a __threadfence(), or _system()
// where the destination is host memory, before a flag makes them so to others). kPending: stores in flight.
template <int kPending, class Ring, class Report>
__device__ void store_chunks(Ring& ring, Report& report, std::uint32_t stages = Ring::kStages) {
  static_assert(kPending < Ring::kStages, "some stages must be loading");
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  RingPosition<Ring> at = {0, 0, stages}, oldest = at;  // the next to store; the oldest that is still being stored
  std::uint32_t storing = 0;

  const auto retire = [&](std::uint32_t left) {  // lane 0: all but the newest `left`
    for (; storing > left; --storing) {
      if constexpr (Report::kWanted) report.landed(ring.stages[oldest.stage]);
      barrier_arrive(&ring.emptied[oldest.stage]);
      oldest.advance();
    }
  };

  for (;; at.advance()) {
    if constexpr (Report::kWanted) {
      // With nothing to store, those that wait for a report must not wait for the next chunk.
      if (!barrier_test(&ring.filled[at.stage], at.parity) && lane == 0 && storing != 0) {
        bulk_wait_written<0>();
        retire(0);
      }
      __syncwarp();
    }
    barrier_wait(&ring.filled[at.stage], at.parity);
    const Stage& stage = ring.stages[at.stage];
    const StageKind kind = stage.kind;
    if (kind == StageKind::kEnd) break;
    const unsigned char* data = ring.data[at.stage];
    if (kind == StageKind::kBytewise) {
      for (int i = 0; i < kMaxSegments; ++i) {
        copy_by_lanes(reinterpret_cast<unsigned char*>(stage.destinations[i]), data, stage.segment_bytes[i], lane);
        data += stage.segment_bytes[i];
      }
      if constexpr (Report::kWanted) __threadfence_system();  // each lane's stores, before lane 0 reports them
      __syncwarp();  // forbids that lane 0 frees the stage before the other lanes have read it
    }
    if (lane == 0) {
      if (kind == StageKind::kBulk) {
        bulk_store(stage.destinations[0], data, stage.segment_bytes[0]);
        if (stage.segment_bytes[1] != 0) {
          bulk_store(stage.destinations[1], data + stage.segment_bytes[0], stage.segment_bytes[1]);
        }
      }
      bulk_commit();  // an empty group too, so that groups count stages
      ++storing;
      if constexpr (Report::kWanted) {
        bulk_wait_written<kPending>();
      } else {
        bulk_wait_read<kPending>();
      }
      retire(kPending);
    }
    __syncwarp();
  }
  if (lane == 0) {
    bulk_wait_written<0>();  // shared memory may go to another CTA only when nothing reads it any more
    retire(0);
  }
  __syncwarp();
}

// --- digesting warps -------------------------------------------------------------------------------------------------

struct SharedLoad {
  static __device__ __forceinline__ xxh3::Words at(const unsigned char* p) {
    const ulonglong2 value = *reinterpret_cast<const ulonglong2*>(p);
    return {value.x, value.y};
  }
  static __device__ __forceinline__ xxh3::Words anywhere(const unsigned char* p) { return xxh3::read_words(p); }
};

// Digests every kDigestWarps-th chunk, from the `warp`-th on, until the end comes. Sink: wants(stage), the same in all
// lanes, whether the chunk is to be digested; then all lanes call digested(stage, digest), the digest being that of the
// stage's bytes in all of them. By then the stage itself may hold something else.
template <class Ring, class Sink>
__device__ void digest_chunks(Ring& ring, int warp, const xxh3::BlockKeys& keys, Sink&& sink) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  RingPosition<Ring> at;
  for (at.advance(warp);; at.advance(Ring::kDigestWarps)) {
    barrier_wait(&ring.filled[at.stage], at.parity);
    const Stage stage = ring.stages[at.stage];
    if (stage.kind == StageKind::kEnd) break;
    const bool wanted = sink.wants(stage);
    const unsigned char* data = ring.data[at.stage];
    std::uint64_t digest = 0;
    if (wanted && stage.bytes > xxh3::kShortBytes) {
      digest = xxh3::digest_by_blocks<SharedLoad>(data, stage.bytes, lane, keys);
    } else if (wanted) {
      if (lane == 0) digest = xxh3::digest_short(data, stage.bytes);
      digest = __shfl_sync(xxh3::kAllLanes, digest, 0);
    }
    __syncwarp();  // forbids that lane 0 frees the stage before the other lanes have read it
    if (lane == 0) barrier_arrive(&ring.emptied[at.stage]);
    if (wanted) sink.digested(stage, digest);
  }
}

}  // namespace tardis::gio
