// SPDX-License-Identifier: Apache-2.0
// XXH3-64 (seed 0, default secret) for host and device: the algorithm of the xxHash specification, arranged so that the
// 32 lanes of a warp share the long form. The arithmetic is plain functions, tested on the CPU against the library
// (cpp/tests/base_xxh3_port.cpp); only loads and shuffles are left to the kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define TARDIS_XXH3_FUNCTION __host__ __device__ __forceinline__
#else
#define TARDIS_XXH3_FUNCTION inline
#endif

namespace tardis::xxh3 {

constexpr std::uint64_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
constexpr std::uint64_t kPrime64_1 = 0x9E3779B185EBCA87u, kPrime64_2 = 0xC2B2AE3D27D4EB4Fu,
                        kPrime64_3 = 0x165667B19E3779F9u, kPrime64_4 = 0x85EBCA77C2B2AE63u,
                        kPrime64_5 = 0x27D4EB2F165667C5u;

constexpr std::size_t kStripeBytes = 64;
constexpr std::size_t kStripesPerBlock = 16;
constexpr std::size_t kBlockBytes = kStripeBytes * kStripesPerBlock;
constexpr std::size_t kSecretBytes = 192;
constexpr std::size_t kShortBytes = 240;  // longer inputs take the long form

// The default secret of the specification.
#define TARDIS_XXH3_SECRET                                                                                            \
  {                                                                                                                   \
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, \
        0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc,   \
        0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24,   \
        0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88,   \
        0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef,   \
        0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7,   \
        0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73,   \
        0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17,   \
        0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe,   \
        0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95,   \
        0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e                                              \
  }

inline constexpr unsigned char kHostSecret[] = TARDIS_XXH3_SECRET;
static_assert(sizeof kHostSecret == kSecretBytes);
#if defined(__CUDACC__)
static __device__ __constant__ const unsigned char kDeviceSecret[kSecretBytes] = TARDIS_XXH3_SECRET;
#endif
#undef TARDIS_XXH3_SECRET

TARDIS_XXH3_FUNCTION const unsigned char* secret() {
#if defined(__CUDA_ARCH__)
  return kDeviceSecret;
#else
  return kHostSecret;
#endif
}

// Little-endian at any address.
TARDIS_XXH3_FUNCTION std::uint64_t read64(const unsigned char* p) {
#if defined(__CUDA_ARCH__)
  std::uint64_t value = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) value = (value << 8) | p[i];
  return value;
#else
  std::uint64_t value;
  std::memcpy(&value, p, 8);
  return value;
#endif
}

TARDIS_XXH3_FUNCTION std::uint32_t read32(const unsigned char* p) {
  return static_cast<std::uint32_t>(p[0]) | static_cast<std::uint32_t>(p[1]) << 8 |
         static_cast<std::uint32_t>(p[2]) << 16 | static_cast<std::uint32_t>(p[3]) << 24;
}

TARDIS_XXH3_FUNCTION std::uint64_t rotate_left(std::uint64_t value, int by) { return value << by | value >> (64 - by); }

TARDIS_XXH3_FUNCTION std::uint64_t swap_bytes(std::uint64_t value) {
  value = (value & 0x00000000FFFFFFFFu) << 32 | value >> 32;
  value = (value & 0x0000FFFF0000FFFFu) << 16 | (value >> 16 & 0x0000FFFF0000FFFFu);
  return (value & 0x00FF00FF00FF00FFu) << 8 | (value >> 8 & 0x00FF00FF00FF00FFu);
}

// The two halves of the 128-bit product, xored.
TARDIS_XXH3_FUNCTION std::uint64_t fold_product(std::uint64_t a, std::uint64_t b) {
#if defined(__CUDA_ARCH__)
  return (a * b) ^ __umul64hi(a, b);
#else
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
#endif
}

TARDIS_XXH3_FUNCTION std::uint64_t avalanche(std::uint64_t hash) {
  hash ^= hash >> 37;
  hash *= 0x165667919E3779F9u;
  return hash ^ hash >> 32;
}

TARDIS_XXH3_FUNCTION std::uint64_t avalanche_xxh64(std::uint64_t hash) {
  hash ^= hash >> 33;
  hash *= kPrime64_2;
  hash ^= hash >> 29;
  hash *= kPrime64_3;
  return hash ^ hash >> 32;
}

// --- up to 240 bytes: one thread
// -------------------------------------------------------------------------------------------

TARDIS_XXH3_FUNCTION std::uint64_t mix16(const unsigned char* input, const unsigned char* key) {
  return fold_product(read64(input) ^ read64(key), read64(input + 8) ^ read64(key + 8));
}

TARDIS_XXH3_FUNCTION std::uint64_t digest_up_to_16(const unsigned char* input, std::size_t bytes) {
  const unsigned char* key = secret();
  if (bytes > 8) {
    const std::uint64_t low = read64(input) ^ read64(key + 24) ^ read64(key + 32);
    const std::uint64_t high = read64(input + bytes - 8) ^ read64(key + 40) ^ read64(key + 48);
    return avalanche(bytes + swap_bytes(low) + high + fold_product(low, high));
  }
  if (bytes >= 4) {
    const std::uint64_t word = read32(input + bytes - 4) + (static_cast<std::uint64_t>(read32(input)) << 32);
    std::uint64_t hash = word ^ read64(key + 8) ^ read64(key + 16);
    hash ^= rotate_left(hash, 49) ^ rotate_left(hash, 24);
    hash *= 0x9FB21C651E98DF25u;
    hash ^= (hash >> 35) + bytes;
    hash *= 0x9FB21C651E98DF25u;
    return hash ^ hash >> 28;
  }
  if (bytes > 0) {
    const std::uint32_t word = static_cast<std::uint32_t>(input[0]) << 16 |
                               static_cast<std::uint32_t>(input[bytes >> 1]) << 24 |
                               static_cast<std::uint32_t>(input[bytes - 1]) | static_cast<std::uint32_t>(bytes) << 8;
    return avalanche_xxh64(static_cast<std::uint64_t>(word) ^
                           static_cast<std::uint64_t>(read32(key) ^ read32(key + 4)));
  }
  return avalanche_xxh64(read64(key + 56) ^ read64(key + 64));
}

TARDIS_XXH3_FUNCTION std::uint64_t digest_17_to_128(const unsigned char* input, std::size_t bytes) {
  const unsigned char* key = secret();
  std::uint64_t sum = bytes * kPrime64_1;
  // Pairs of 16 bytes from both ends towards the middle.
  const int pairs = static_cast<int>((bytes - 1) / 32);
  for (int i = 0; i <= pairs; ++i) {
    sum += mix16(input + 16 * i, key + 32 * i);
    sum += mix16(input + bytes - 16 * (i + 1), key + 32 * i + 16);
  }
  return avalanche(sum);
}

TARDIS_XXH3_FUNCTION std::uint64_t digest_129_to_240(const unsigned char* input, std::size_t bytes) {
  const unsigned char* key = secret();
  std::uint64_t sum = bytes * kPrime64_1;
  for (int i = 0; i < 8; ++i) sum += mix16(input + 16 * i, key + 16 * i);
  sum = avalanche(sum);
  const int rounds = static_cast<int>(bytes / 16);
  for (int i = 8; i < rounds; ++i) sum += mix16(input + 16 * i, key + 16 * (i - 8) + 3);
  return avalanche(sum + mix16(input + bytes - 16, key + 136 - 17));
}

TARDIS_XXH3_FUNCTION std::uint64_t digest_short(const unsigned char* input, std::size_t bytes) {
  if (bytes <= 16) return digest_up_to_16(input, bytes);
  if (bytes <= 128) return digest_17_to_128(input, bytes);
  return digest_129_to_240(input, bytes);
}

// --- longer: a warp
// ---------------------------------------------------------------------------------------------------------- The long
// form keeps eight 64-bit sums. Inside a block (16 stripes of 8 words) they only grow by addition, so lanes take
// stripes side by side and add up before the block's scramble. Lane l owns words 2(l % 4) and 2(l % 4) + 1, and of each
// half block (8 stripes) the stripe l / 4: a load of 16 bytes a lane is 512 contiguous bytes a warp, and the exchange
// between neighbouring words stays inside a lane.

constexpr int kLanes = 32;

struct Words {  // two neighbouring words: of input, of the secret, or of the sums
  std::uint64_t first = 0;
  std::uint64_t second = 0;
};

struct LongShape {
  std::size_t full_blocks;  // scrambled ones
  std::size_t
      tail_stripes;  // whole stripes after them, 0 .. 15; the last 64 bytes follow once more as a stripe of their own
};

TARDIS_XXH3_FUNCTION LongShape long_shape(std::size_t bytes) {
  LongShape shape;
  shape.full_blocks = (bytes - 1) / kBlockBytes;
  shape.tail_stripes = (bytes - 1 - shape.full_blocks * kBlockBytes) / kStripeBytes;
  return shape;
}

TARDIS_XXH3_FUNCTION int lane_pair(int lane) { return lane % 4; }
TARDIS_XXH3_FUNCTION std::size_t lane_stripe(int lane, int half) {
  return static_cast<std::size_t>(lane / 4 + 8 * half);
}
// Where in a block, or in a stripe of its own, the lane's words lie.
TARDIS_XXH3_FUNCTION std::size_t lane_offset(int lane, int half) {
  return lane_stripe(lane, half) * kStripeBytes + 16 * static_cast<std::size_t>(lane_pair(lane));
}

TARDIS_XXH3_FUNCTION Words read_words(const unsigned char* p) { return {read64(p), read64(p + 8)}; }

TARDIS_XXH3_FUNCTION Words initial_sums(int lane) {
  switch (lane_pair(lane)) {
    case 0:
      return {kPrime32_3, kPrime64_1};
    case 1:
      return {kPrime64_2, kPrime64_3};
    case 2:
      return {kPrime64_4, kPrime32_2};
    default:
      return {kPrime64_5, kPrime32_1};
  }
}

TARDIS_XXH3_FUNCTION Words stripe_key(int lane, int half) {
  return read_words(secret() + 8 * lane_stripe(lane, half) + 16 * static_cast<std::size_t>(lane_pair(lane)));
}
TARDIS_XXH3_FUNCTION Words scramble_key(int lane) {
  return read_words(secret() + kSecretBytes - kStripeBytes + 16 * static_cast<std::size_t>(lane_pair(lane)));
}
TARDIS_XXH3_FUNCTION Words last_stripe_key(int lane) {
  return read_words(secret() + kSecretBytes - kStripeBytes - 7 + 16 * static_cast<std::size_t>(lane_pair(lane)));
}

// The other arrangement, for input that many lanes can read at once at little cost (shared memory): each lane adds up
// a pair of words of one block alone, eight blocks a warp, and only whole blocks change hands. Odd blocks are a stripe
// ahead and take their first one last, so that the lanes of two blocks read from different banks.
constexpr int kBlocksAWarp = kLanes / 4;

TARDIS_XXH3_FUNCTION int lane_block(int lane) { return lane / 4; }
TARDIS_XXH3_FUNCTION std::size_t step_stripe(int lane, int step) {
  const int ahead = lane_block(lane) & 1;
  return static_cast<std::size_t>(step < static_cast<int>(kStripesPerBlock) - 1 ? step + ahead : (1 - ahead) * step);
}
TARDIS_XXH3_FUNCTION std::size_t step_offset(int lane, int step) {  // in the lane's block
  return step_stripe(lane, step) * kStripeBytes + 16 * static_cast<std::size_t>(lane_pair(lane));
}
TARDIS_XXH3_FUNCTION Words step_key(int lane, int step) {
  return read_words(secret() + 8 * step_stripe(lane, step) + 16 * static_cast<std::size_t>(lane_pair(lane)));
}

TARDIS_XXH3_FUNCTION std::uint64_t product_of_halves(std::uint64_t value) {
  return (value & 0xFFFFFFFFu) * (value >> 32);
}

TARDIS_XXH3_FUNCTION void accumulate(Words& sums, const Words& input, const Words& key) {
  sums.first += input.second + product_of_halves(input.first ^ key.first);
  sums.second += input.first + product_of_halves(input.second ^ key.second);
}

TARDIS_XXH3_FUNCTION void scramble(Words& sums, const Words& key) {
  sums.first = (sums.first ^ sums.first >> 47 ^ key.first) * kPrime32_1;
  sums.second = (sums.second ^ sums.second >> 47 ^ key.second) * kPrime32_1;
}

TARDIS_XXH3_FUNCTION Words merge_key(int lane) {
  return read_words(secret() + 11 + 16 * static_cast<std::size_t>(lane_pair(lane)));
}

// Every key of a lane's steps, to be read once. Those of neighbouring stripes overlap by a word, so few registers hold
// them.
struct BlockKeys {
  static constexpr int kSteps = static_cast<int>(kStripesPerBlock);
  std::uint64_t words[kSteps];  // of all steps but the last
  Words last_step, scramble, last, merge;

  static TARDIS_XXH3_FUNCTION BlockKeys of(int lane) {
    BlockKeys keys;
    for (int step = 0; step < kSteps - 1; ++step) keys.words[step] = step_key(lane, step).first;
    keys.words[kSteps - 1] = step_key(lane, kSteps - 2).second;
    keys.last_step = step_key(lane, kSteps - 1);
    keys.scramble = scramble_key(lane);
    keys.last = last_stripe_key(lane);
    keys.merge = merge_key(lane);
    return keys;
  }
  TARDIS_XXH3_FUNCTION Words step(int step) const {
    if (step == kSteps - 1) return last_step;
    return {words[step], words[step + 1]};
  }
};

// What lanes 0 .. 3 add up at the end, and what becomes of the total.
TARDIS_XXH3_FUNCTION std::uint64_t merge_pair(const Words& sums, const Words& key) {
  return fold_product(sums.first ^ key.first, sums.second ^ key.second);
}
TARDIS_XXH3_FUNCTION std::uint64_t finish(std::uint64_t merged, std::size_t bytes) {
  return avalanche(static_cast<std::uint64_t>(bytes) * kPrime64_1 + merged);
}

}  // namespace tardis::xxh3
