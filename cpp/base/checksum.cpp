// SPDX-License-Identifier: Apache-2.0
#include "base/checksum.h"

#include <array>
#include <bit>
#include <cstring>
#include <new>

#define XXH_STATIC_LINKING_ONLY  // the size of XXH3_state_t
#include "xxhash.h"

#if defined(__x86_64__)
#include <nmmintrin.h>

#include "xxh_x86dispatch.h"  // renames XXH3_64bits and XXH3_64bits_update to the dispatching ones
#endif

namespace tardis {
namespace {

static_assert(sizeof(XXH3_state_t) <= 576 && alignof(XXH3_state_t) <= 64);

// Eight tables, so that eight bytes go through per step.
constexpr std::array<std::array<std::uint32_t, 256>, 8> make_crc_tables() {
  std::array<std::array<std::uint32_t, 256>, 8> tables{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) ? 0x82F63B78u : 0u);
    tables[0][i] = crc;
  }
  for (std::uint32_t i = 0; i < 256; ++i) {
    for (std::size_t t = 1; t < 8; ++t) {
      tables[t][i] = (tables[t - 1][i] >> 8) ^ tables[0][tables[t - 1][i] & 0xFFu];
    }
  }
  return tables;
}

constexpr auto kCrcTables = make_crc_tables();

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t crc32c_sse42(const void* data, std::size_t bytes, std::uint32_t seed) {
  const auto* p = static_cast<const unsigned char*>(data);
  std::uint64_t crc = static_cast<std::uint32_t>(~seed);
  for (; bytes >= 8; bytes -= 8, p += 8) {
    std::uint64_t word;
    std::memcpy(&word, p, 8);
    crc = _mm_crc32_u64(crc, word);
  }
  auto narrow = static_cast<std::uint32_t>(crc);
  for (; bytes > 0; --bytes, ++p) narrow = _mm_crc32_u8(narrow, *p);
  return ~narrow;
}
#endif

}  // namespace

std::uint64_t xxh3_64(const void* data, std::size_t bytes) { return XXH3_64bits(data, bytes); }

void Xxh3Stream::reset() {
  // XXH3_64bits_reset leaves the buffer and padding as they are; a copied stream must not read indeterminate bytes.
  std::memset(state_, 0, sizeof state_);
  XXH3_64bits_reset(::new (static_cast<void*>(state_)) XXH3_state_t{});
}

void Xxh3Stream::update(const void* data, std::size_t bytes) {
  if (bytes == 0) return;
  XXH3_64bits_update(std::launder(reinterpret_cast<XXH3_state_t*>(state_)), data, bytes);
}

std::uint64_t Xxh3Stream::digest() const {
  return XXH3_64bits_digest(std::launder(reinterpret_cast<const XXH3_state_t*>(state_)));
}

std::uint32_t detail::crc32c_table(const void* data, std::size_t bytes, std::uint32_t seed) {
  const auto* p = static_cast<const unsigned char*>(data);
  std::uint32_t crc = ~seed;
  if constexpr (std::endian::native == std::endian::little) {
    for (; bytes >= 8; bytes -= 8, p += 8) {
      std::uint32_t low;
      std::uint32_t high;
      std::memcpy(&low, p, 4);
      std::memcpy(&high, p + 4, 4);
      low ^= crc;
      crc = kCrcTables[7][low & 0xFFu] ^ kCrcTables[6][(low >> 8) & 0xFFu] ^ kCrcTables[5][(low >> 16) & 0xFFu] ^
            kCrcTables[4][low >> 24] ^ kCrcTables[3][high & 0xFFu] ^ kCrcTables[2][(high >> 8) & 0xFFu] ^
            kCrcTables[1][(high >> 16) & 0xFFu] ^ kCrcTables[0][high >> 24];
    }
  }
  for (; bytes > 0; --bytes, ++p) crc = (crc >> 8) ^ kCrcTables[0][(crc ^ *p) & 0xFFu];
  return ~crc;
}

std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t seed) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2") != 0;
  if (has_instruction) return crc32c_sse42(data, bytes, seed);
#endif
  return detail::crc32c_table(data, bytes, seed);
}

}  // namespace tardis
