// SPDX-License-Identifier: Apache-2.0
// The producer warp of a decode kernel: finds the pages of its tiles and starts the tensor copies that load them. Each
// lane has a box of its own, so that pages of 16 tokens are found as fast as those of 128.
#pragma once

#include <cstdint>

#include "attention/decode.h"
#include "attention/stage_ring.cuh"

namespace tardis::attention {

template <class Shape>
class Producer {
 public:
  __device__ __forceinline__ Producer(const DecodeParams& params, const StageRing<Shape>& ring, std::uint32_t request,
                                      std::uint32_t head, const TokenRange& tokens)
      : params_(params),
        ring_(ring),
        pages_(params.pages + request * params.page_row),
        tokens_(tokens),
        head_(head),
        box_(lane() / Shape::kBoxColumns),
        column_(lane() % Shape::kBoxColumns) {}

  __device__ __forceinline__ void run(const TokenRange& tiles) {
    StagePlace<Shape> place;
    Box next = box_of(tiles.begin);
    for (std::uint32_t tile = tiles.begin; tile < tiles.end; ++tile) {
      const Box box = next;
      next = tile + 1 < tiles.end ? box_of(tile + 1) : Box{};  // its page table entry comes while this one waits
      const PoolMaps& pool = params_.pools[(box.page & TARDIS_ATTENTION_SECOND_POOL) != 0 ? 1 : 0];
      load(place, box, &pool.keys);
      load(place, box, &pool.values);
    }
  }

 private:
  static_assert(kTileRows / 16 * Shape::kBoxColumns <= kWarpThreads, "a lane for each box of a tile");

  struct Box {
    std::uint32_t token = 0;  // the first
    std::int32_t page = 0;    // as in the page table
    bool wanted = false;      // one of its tokens is
  };

  static __device__ __forceinline__ std::uint32_t lane() { return threadIdx.x % kWarpThreads; }

  __device__ __forceinline__ Box box_of(std::uint32_t tile) const {
    Box box;
    const std::uint32_t box_tokens = 1U << params_.box_shift;
    box.token = tile * kTileRows + box_ * box_tokens;
    box.wanted =
        box_ < kTileRows >> params_.box_shift && box.token < tokens_.end && box.token + box_tokens > tokens_.begin;
    if (box.wanted) box.page = __ldg(pages_ + (box.token >> params_.page_shift));
    return box;
  }

  __device__ __forceinline__ void load(StagePlace<Shape>& place, const Box& box, const CUtensorMap* map) const {
    const std::uint32_t boxes = __popc(__ballot_sync(~0U, box.wanted));
    const std::uint32_t box_bytes = Shape::kBoxRowBytes << params_.box_shift;
    std::uint64_t* const filled = ring_.filled(place.stage);
    wait_for(ring_.emptied(place.stage), place.parity ^ 1);
    if (lane() == 0) barrier_arrive_expecting(filled, boxes * box_bytes);
    __syncwarp();  // forbids that bytes arrive before they are expected
    if (box.wanted) {
      const std::uint32_t page = box.page & ~TARDIS_ATTENTION_SECOND_POOL;
      const std::int32_t slot = copied_slot(page, params_.page_shift, box.token & ((1U << params_.page_shift) - 1));
      unsigned char* const to = ring_.data(place.stage) + column_ * kBlockBytes + box_ * box_bytes;
      load_box(to, map, slot, static_cast<std::int32_t>(column_), static_cast<std::int32_t>(head_), filled);
    }
    place.advance();
  }

  const DecodeParams& params_;
  const StageRing<Shape> ring_;
  const std::int32_t* const pages_;
  const TokenRange tokens_;
  const std::uint32_t head_, box_, column_;
};

}  // namespace tardis::attention
