// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string_view>
#include <vector>

#include "base/checksum.h"

namespace tardis {
namespace {

std::vector<unsigned char> random_bytes(std::size_t bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<unsigned char> data(bytes);
  for (auto& byte : data) byte = static_cast<unsigned char>(random());
  return data;
}

TEST(Crc32c, KnownVectors) {
  constexpr std::string_view digits = "123456789";
  EXPECT_EQ(crc32c(digits.data(), digits.size()), 0xE3069283u);
  EXPECT_EQ(detail::crc32c_table(digits.data(), digits.size(), 0), 0xE3069283u);
  EXPECT_EQ(crc32c(nullptr, 0), 0u);
  // RFC 3720, B.4: 32 bytes of zeros, of ones.
  const std::vector<unsigned char> zeros(32, 0);
  const std::vector<unsigned char> ones(32, 0xFF);
  EXPECT_EQ(crc32c(zeros.data(), zeros.size()), 0x8A9136AAu);
  EXPECT_EQ(crc32c(ones.data(), ones.size()), 0x62A8AB43u);
}

TEST(Crc32c, InstructionAndTableAgreeAtEveryLengthAndAlignment) {
  const auto data = random_bytes(600, 1);
  for (std::size_t start = 0; start < 9; ++start) {
    for (std::size_t bytes = 0; bytes + start <= data.size(); bytes += 7) {
      ASSERT_EQ(crc32c(data.data() + start, bytes), detail::crc32c_table(data.data() + start, bytes, 0))
          << start << ' ' << bytes;
    }
  }
}

TEST(Crc32c, SeedChains) {
  const auto data = random_bytes(513, 2);
  const auto whole = crc32c(data.data(), data.size());
  for (std::size_t cut = 0; cut <= data.size(); cut += 19) {
    EXPECT_EQ(crc32c(data.data() + cut, data.size() - cut, crc32c(data.data(), cut)), whole) << cut;
  }
}

TEST(Xxh3, KnownVectors) {
  EXPECT_EQ(xxh3_64(nullptr, 0), 0x2D06800538D394C2u);
  // The reference implementation's sanity buffer is not used here: values of the published `xxhsum -H3` for short
  // strings.
  EXPECT_EQ(xxh3_64("a", 1), 0xE6C632B61E964E1Fu);
  EXPECT_EQ(xxh3_64("abc", 3), 0x78AF5F94892F3950u);
}

TEST(Xxh3, StreamEqualsOneShotForAnySplit) {
  const auto data = random_bytes(40000, 3);
  std::mt19937_64 random(4);
  for (int round = 0; round < 300; ++round) {
    const std::size_t bytes = random() % (data.size() + 1);
    Xxh3Stream stream;
    if (round % 3 == 0) {  // a used stream must start afresh
      stream.update(data.data(), 777);
      stream.reset();
    }
    for (std::size_t at = 0; at < bytes;) {
      const std::size_t step = std::min<std::size_t>(bytes - at, random() % 5000);
      stream.update(data.data() + at, step);
      at += step;
    }
    ASSERT_EQ(stream.digest(), xxh3_64(data.data(), bytes)) << bytes;
    Xxh3Stream copy = stream;
    copy.update(data.data(), 10);
    ASSERT_NE(copy.digest(), stream.digest());
    ASSERT_EQ(stream.digest(), xxh3_64(data.data(), bytes));
  }
}

}  // namespace
}  // namespace tardis
