// SPDX-License-Identifier: Apache-2.0
// XXH3-64 (payload digests) and CRC-32C (headers).
#pragma once

#include <cstddef>
#include <cstdint>

namespace tardis {

// XXH3-64 with seed 0 and the default secret; uses AVX2 or AVX-512 where the CPU has it. `data` may be null if bytes is
// 0.
std::uint64_t xxh3_64(const void* data, std::size_t bytes);

// The same value for data that comes in several pieces. Not thread-safe; copyable; reusable after reset().
class Xxh3Stream {
 public:
  Xxh3Stream() { reset(); }

  void reset();
  void update(const void* data, std::size_t bytes);
  // May be called at any point; the stream goes on afterwards.
  std::uint64_t digest() const;

 private:
  // The library's state, which its header asks to be aligned for AVX-512. checksum.cpp asserts that it fits.
  alignas(64) unsigned char state_[576];
};

// CRC-32C (Castagnoli), as of iSCSI and ext4: crc32c("123456789", 9) == 0xE3069283. `seed` is the CRC of the bytes
// before, so that crc32c(b, m, crc32c(a, n)) is the CRC of a followed by b.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t seed = 0);

namespace detail {
// The path for CPUs without a CRC instruction; crc32c() chooses. Here for its test.
std::uint32_t crc32c_table(const void* data, std::size_t bytes, std::uint32_t seed);
}  // namespace detail

}  // namespace tardis
