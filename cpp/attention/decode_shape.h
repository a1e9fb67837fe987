// SPDX-License-Identifier: Apache-2.0
// What a decode kernel of one element type and head dimension has in shared memory, and how its threads are divided.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/tile.h"

namespace tardis::attention {

constexpr std::uint32_t kWarpThreads = 32;
constexpr std::uint32_t kConsumerThreads = kConsumerWarps * kWarpThreads;  // one warp group, the first
constexpr std::uint32_t kThreads = kConsumerThreads + kWarpThreads;        // and the producer warp

// Bytes of an SM's shared memory for its CTAs; the system takes 1 KiB of each.
constexpr std::uint32_t kSmShared = 228 << 10, kSystemShared = 1 << 10;

// Stored: the bytes of an element in the pools, 1 (fp8) or 2.
template <std::uint32_t kStored_, std::uint32_t kHeadDim_>
struct DecodeShape {
  static_assert(kHeadDim_ == 64 || kHeadDim_ == 128 || kHeadDim_ == 256);
  static constexpr std::uint32_t kStored = kStored_, kHeadDim = kHeadDim_;
  static constexpr bool kConverted =
      kStored == 1;  // fp8: to bf16 in shared memory, since V must be read across its rows
  static constexpr std::uint32_t kBlocks = kHeadDim / kBlockColumns;
  static constexpr std::uint32_t kTileBytes = kBlocks * kBlockBytes;
  static constexpr std::uint32_t kStageBytes = kTileRows * kHeadDim * kStored;
  // Boxes of one tile of tokens that lie beside each other in a row.
  static constexpr std::uint32_t kBoxColumns = kConverted ? 1 : kBlocks;
  static constexpr std::uint32_t kBoxRowBytes = kConverted ? kHeadDim : kRowBytes;
  // Two CTAs share an SM where their registers allow it: one computes while the other waits.
  static constexpr std::uint32_t kCtasPerSm = kHeadDim == 256 ? 1 : 2;
  static constexpr std::uint32_t kEnoughCtas = kConverted || kHeadDim == 64 ? kCtasPerSm : 1;  // measured
  // Shared memory: queries, what was converted, stages, barriers.
  static constexpr std::uint32_t kConvertedAt = kTileBytes;
  static constexpr std::uint32_t kStagesAt = kConvertedAt + (kConverted ? kTileBytes : 0);
  static constexpr std::uint32_t kMostStages = 16, kBarrierBytes = 16;  // of a stage: filled, emptied
  static constexpr std::uint32_t kRoom = kSmShared / kCtasPerSm - kSystemShared - kMostStages * kBarrierBytes;
  static constexpr std::uint32_t kFitting = (kRoom - kStagesAt) / kStageBytes;
  static constexpr std::uint32_t kStages = kFitting < kMostStages ? kFitting : kMostStages;
  static constexpr std::uint32_t kBarriersAt = kStagesAt + kStages * kStageBytes;
  static constexpr std::uint32_t kSharedBytes = kBarriersAt + kStages * kBarrierBytes;
  static_assert(kStages >= 4, "K and V of one tile, and of the next");
  static_assert(kStagesAt % kSwizzleBytes == 0 && kStageBytes % kSwizzleBytes == 0 && kBarriersAt % 8 == 0);
};

}  // namespace tardis::attention
