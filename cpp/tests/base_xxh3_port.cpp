// SPDX-License-Identifier: Apache-2.0
// The arithmetic of the GPU digest (gpu/xxh3.h), lane by lane on the CPU, against the library.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "base/checksum.h"
#include "gpu/xxh3.h"

namespace tardis {
namespace {

namespace x = xxh3;

// What the warp of gpu/xxh3_digest.cu does, one lane after the other; sums over lanes stand for its shuffles.
struct EmulatedWarp {
  x::Words sums[x::kLanes];

  void add_shares(const x::Words (&shares)[x::kLanes]) {
    for (int pair = 0; pair < 4; ++pair) {
      x::Words total;
      for (int lane = pair; lane < x::kLanes; lane += 4) {
        total.first += shares[lane].first;
        total.second += shares[lane].second;
      }
      for (int lane = pair; lane < x::kLanes; lane += 4) {
        sums[lane].first += total.first;
        sums[lane].second += total.second;
      }
    }
  }

  std::uint64_t digest(const unsigned char* input, std::size_t bytes) {
    const x::LongShape shape = x::long_shape(bytes);
    for (int lane = 0; lane < x::kLanes; ++lane) sums[lane] = x::initial_sums(lane);
    for (std::size_t block = 0; block < shape.full_blocks; ++block) {
      x::Words shares[x::kLanes];
      for (int lane = 0; lane < x::kLanes; ++lane) {
        for (int half = 0; half < 2; ++half) {
          const auto words = x::read_words(input + block * x::kBlockBytes + x::lane_offset(lane, half));
          x::accumulate(shares[lane], words, x::stripe_key(lane, half));
        }
      }
      add_shares(shares);
      for (int lane = 0; lane < x::kLanes; ++lane) x::scramble(sums[lane], x::scramble_key(lane));
    }
    x::Words shares[x::kLanes];
    for (int lane = 0; lane < x::kLanes; ++lane) {
      for (int half = 0; half < 2; ++half) {
        if (x::lane_stripe(lane, half) >= shape.tail_stripes) continue;
        const auto words = x::read_words(input + shape.full_blocks * x::kBlockBytes + x::lane_offset(lane, half));
        x::accumulate(shares[lane], words, x::stripe_key(lane, half));
      }
      if (lane < 4) {
        const auto words = x::read_words(input + bytes - x::kStripeBytes + x::lane_offset(lane, 0));
        x::accumulate(shares[lane], words, x::last_stripe_key(lane));
      }
    }
    add_shares(shares);
    std::uint64_t merged = 0;
    for (int lane = 0; lane < 4; ++lane) merged += x::merge_pair(sums[lane], x::merge_key(lane));
    return x::finish(merged, bytes);
  }
};

// The arrangement by blocks (digest_by_blocks of gpu/xxh3_warp.cuh) in the same way.
std::uint64_t digest_by_blocks(const unsigned char* input, std::size_t bytes) {
  const x::LongShape shape = x::long_shape(bytes);
  x::Words sums[4];
  for (int pair = 0; pair < 4; ++pair) sums[pair] = x::initial_sums(pair);
  for (std::size_t first = 0; first <= shape.full_blocks; first += x::kBlocksAWarp) {
    x::Words shares[x::kLanes];
    for (int lane = 0; lane < x::kLanes; ++lane) {
      const std::size_t mine = first + x::lane_block(lane);
      const std::size_t stripes =
          mine < shape.full_blocks ? x::kStripesPerBlock : (mine == shape.full_blocks ? shape.tail_stripes : 0);
      for (int step = 0; step < static_cast<int>(x::kStripesPerBlock); ++step) {
        if (x::step_stripe(lane, step) >= stripes) continue;
        const auto words = x::read_words(input + mine * x::kBlockBytes + x::step_offset(lane, step));
        x::accumulate(shares[lane], words, x::BlockKeys::of(lane).step(step));
      }
    }
    for (int lane = 0; lane < x::kLanes; ++lane) {  // in the order of their blocks
      const std::size_t block = first + x::lane_block(lane);
      if (block > shape.full_blocks) break;
      x::Words& of_pair = sums[x::lane_pair(lane)];
      of_pair.first += shares[lane].first;
      of_pair.second += shares[lane].second;
      if (block < shape.full_blocks) x::scramble(of_pair, x::scramble_key(lane));
    }
  }
  std::uint64_t merged = 0;
  for (int pair = 0; pair < 4; ++pair) {
    const auto words = x::read_words(input + bytes - x::kStripeBytes + 16 * pair);
    x::accumulate(sums[pair], words, x::last_stripe_key(pair));
    merged += x::merge_pair(sums[pair], x::merge_key(pair));
  }
  return x::finish(merged, bytes);
}

// By both arrangements, which must agree.
std::uint64_t port_digest(const unsigned char* input, std::size_t bytes) {
  if (bytes <= x::kShortBytes) return x::digest_short(input, bytes);
  const std::uint64_t digest = EmulatedWarp().digest(input, bytes);
  EXPECT_EQ(digest_by_blocks(input, bytes), digest) << bytes << " bytes";
  return digest;
}

std::vector<unsigned char> random_bytes(std::size_t bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<unsigned char> data(bytes);
  for (auto& byte : data) byte = static_cast<unsigned char>(random());
  return data;
}

TEST(Xxh3Port, EveryLengthUpTo3000) {
  // Exactly as long as the input, so that a sanitizer sees a read beyond it.
  for (std::size_t bytes = 0; bytes <= 3000; ++bytes) {
    const auto data = random_bytes(bytes, bytes);
    ASSERT_EQ(port_digest(data.data(), bytes), xxh3_64(data.data(), bytes)) << bytes;
  }
}

TEST(Xxh3Port, WholeChunksAndTheirNeighbours) {
  constexpr std::size_t kChunk = 16 << 10;
  for (std::uint64_t round = 0; round < 50; ++round) {
    for (const std::size_t bytes : {kChunk - 64, kChunk - 1, kChunk, kChunk + 1, kChunk + 64}) {
      const auto data = random_bytes(bytes, round * 7 + bytes);
      ASSERT_EQ(port_digest(data.data(), bytes), xxh3_64(data.data(), bytes)) << bytes;
    }
  }
  const std::vector<unsigned char> zeros(kChunk, 0);
  EXPECT_EQ(port_digest(zeros.data(), kChunk), xxh3_64(zeros.data(), kChunk));
}

TEST(Xxh3Port, RandomLengthsAndAlignments) {
  std::mt19937_64 random(99);
  const auto data = random_bytes(70000, 100);
  for (int round = 0; round < 3000; ++round) {
    const std::size_t start = random() % 64;
    const std::size_t bytes = random() % (round % 2 == 0 ? 20000 : data.size() - start);
    ASSERT_EQ(port_digest(data.data() + start, bytes), xxh3_64(data.data() + start, bytes)) << start << ' ' << bytes;
  }
}

}  // namespace
}  // namespace tardis
