// SPDX-License-Identifier: Apache-2.0
// Objects whose key and place follow from a number, so that any answer can be checked without a table.
#pragma once

#include <cstdint>

#include "gstore/index_layout.h"

namespace tardis::gstore::testing {

TARDIS_GSTORE_FUNCTION std::uint64_t scramble(std::uint64_t x) {  // SplitMix64
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

TARDIS_GSTORE_FUNCTION Key key_of(std::uint64_t number) {
  Key key;
  for (std::uint64_t i = 0; i < 4; ++i) key.word[i] = scramble(scramble(number) + i);
  return key;
}

// A key that has the same buckets and the same tag: only the record tells them apart. `which` > 0.
TARDIS_GSTORE_FUNCTION Key near_key(std::uint64_t number, std::uint64_t which) {
  const Key from = key_of(number);
  Key key = from;
  key.word[2] = from.word[2] ^ which;                                            // few bits differ
  if (which % 2 == 0) key.word[3] = from.word[3] ^ rotate_left(which, 64 - 21);  // then the first half is the same
  key.word[1] = from.word[1] ^ rotate_left(from.word[2], 21) ^ rotate_left(from.word[3], 42) ^
                rotate_left(key.word[2], 21) ^ rotate_left(key.word[3], 42);
  return key;
}

// What is stored of a key in one generation.
TARDIS_GSTORE_FUNCTION tardis_gpu_index_entry entry_of(const Key& key, std::uint64_t generation, std::uint16_t space,
                                                       std::uint8_t op) {
  const std::uint64_t seed = key.word[0] ^ key.word[1] * 3 ^ key.word[2] * 5 ^ key.word[3] * 7 ^ space;
  tardis_gpu_index_entry entry = {};
  for (int i = 0; i < 4; ++i) entry.key[i] = key.word[i];
  entry.location = scramble(seed + generation) >> 16;
  entry.generation = generation;
  entry.root = scramble(seed - generation);
  entry.payload_bytes = static_cast<std::uint32_t>(scramble(seed ^ generation << 1));
  entry.space = space;
  entry.op = op;
  return entry;
}

// Whether a found answer is the whole of one generation of this key.
TARDIS_GSTORE_FUNCTION bool fits(const tardis_gpu_index_answer& answer, const Key& key, std::uint16_t space) {
  const tardis_gpu_index_entry entry = entry_of(key, answer.generation, space, 0);
  return answer.location == entry.location && answer.root == entry.root && answer.payload_bytes == entry.payload_bytes;
}

}  // namespace tardis::gstore::testing
