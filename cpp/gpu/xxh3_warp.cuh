// SPDX-License-Identifier: Apache-2.0
// The long form of XXH3-64 by the 32 lanes of a warp, over whatever memory its loader reads.
#pragma once

#include "gpu/xxh3.h"

namespace tardis::xxh3 {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// The lane's part of the secret: to be read once, since constant memory serves diverging lanes one after the other.
struct LaneKeys {
  Words stripe[2], scramble, last, merge;

  static __device__ __forceinline__ LaneKeys of(int lane) {
    return {{stripe_key(lane, 0), stripe_key(lane, 1)}, scramble_key(lane), last_stripe_key(lane), merge_key(lane)};
  }
};

__device__ __forceinline__ std::uint64_t add_over_stripes(std::uint64_t value) {
#pragma unroll
  for (int distance = 4; distance < kLanes; distance *= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

// Adds the lanes' shares of one block to the sums, which every lane of the same pair then holds.
__device__ __forceinline__ void add_share(Words& sums, const Words& share) {
  sums.first += add_over_stripes(share.first);
  sums.second += add_over_stripes(share.second);
}

// For more than 240 bytes. All 32 lanes must call it, with the same arguments. Load::at reads the 16 bytes at a
// multiple of 16 from the start of the input, Load::anywhere at any address. kBlocksInFlight blocks (1 KiB each) are
// loaded ahead.
template <class Load, int kBlocksInFlight>
__device__ __forceinline__ std::uint64_t digest_long(const unsigned char* input, std::size_t bytes, int lane,
                                                     const LaneKeys& keys) {
  const LongShape shape = long_shape(bytes);
  Words sums = initial_sums(lane);

  std::size_t block = 0;
  for (; block + kBlocksInFlight <= shape.full_blocks; block += kBlocksInFlight) {
    Words loaded[kBlocksInFlight][2];
#pragma unroll
    for (int i = 0; i < kBlocksInFlight; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        loaded[i][half] = Load::at(input + (block + i) * kBlockBytes + lane_offset(lane, half));
      }
    }
#pragma unroll
    for (int i = 0; i < kBlocksInFlight; ++i) {
      Words share;
      accumulate(share, loaded[i][0], keys.stripe[0]);
      accumulate(share, loaded[i][1], keys.stripe[1]);
      add_share(sums, share);
      scramble(sums, keys.scramble);
    }
  }
  for (; block < shape.full_blocks; ++block) {
    Words share;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      accumulate(share, Load::at(input + block * kBlockBytes + lane_offset(lane, half)), keys.stripe[half]);
    }
    add_share(sums, share);
    scramble(sums, keys.scramble);
  }

  Words share;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (lane_stripe(lane, half) < shape.tail_stripes) {
      accumulate(share, Load::at(input + block * kBlockBytes + lane_offset(lane, half)), keys.stripe[half]);
    }
  }
  if (lane < 4) {
    // The last 64 bytes start anywhere: no vector load.
    const unsigned char* last = input + bytes - kStripeBytes + lane_offset(lane, 0);
    accumulate(share, bytes % 16 == 0 ? Load::at(last) : Load::anywhere(last), keys.last);
  }
  add_share(sums, share);

  std::uint64_t merged = merge_pair(sums, keys.merge);
  merged += __shfl_xor_sync(kAllLanes, merged, 1);
  merged += __shfl_xor_sync(kAllLanes, merged, 2);
  return finish(merged, bytes);
}

// The same digest with every lane adding up a block: few shuffles and a short chain of dependent steps. Load as above.
template <class Load>
__device__ __forceinline__ std::uint64_t digest_by_blocks(const unsigned char* input, std::size_t bytes, int lane,
                                                          const BlockKeys& keys) {
  const LongShape shape = long_shape(bytes);
  Words sums = initial_sums(lane);  // the same in all lanes of a pair
  for (std::size_t first = 0; first <= shape.full_blocks; first += kBlocksAWarp) {
    const std::size_t mine = first + lane_block(lane);
    const unsigned char* const block = input + mine * kBlockBytes;
    Words share;
    if (first + kBlocksAWarp <= shape.full_blocks) {
#pragma unroll
      for (int step = 0; step < static_cast<int>(kStripesPerBlock); ++step) {
        accumulate(share, Load::at(block + step_offset(lane, step)), keys.step(step));
      }
    } else {
      const std::size_t stripes =
          mine < shape.full_blocks ? kStripesPerBlock : (mine == shape.full_blocks ? shape.tail_stripes : 0);
#pragma unroll
      for (int step = 0; step < static_cast<int>(kStripesPerBlock); ++step) {
        if (step_stripe(lane, step) < stripes) {
          accumulate(share, Load::at(block + step_offset(lane, step)), keys.step(step));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kBlocksAWarp; ++i) {
      const int from = 4 * i + lane_pair(lane);
      const std::uint64_t words[2] = {__shfl_sync(kAllLanes, share.first, from),
                                      __shfl_sync(kAllLanes, share.second, from)};
      if (first + i > shape.full_blocks) break;
      sums.first += words[0];
      sums.second += words[1];
      if (first + i < shape.full_blocks) scramble(sums, keys.scramble);
    }
  }
  const unsigned char* const last = input + bytes - kStripeBytes + 16 * static_cast<std::size_t>(lane_pair(lane));
  accumulate(sums, bytes % 16 == 0 ? Load::at(last) : Load::anywhere(last), keys.last);

  std::uint64_t merged = merge_pair(sums, keys.merge);
  merged += __shfl_xor_sync(kAllLanes, merged, 1);
  merged += __shfl_xor_sync(kAllLanes, merged, 2);
  return finish(merged, bytes);
}

}  // namespace tardis::xxh3
