// SPDX-License-Identifier: Apache-2.0
// Staging memory: runs that are taken never overlap, and all of it comes back.
#include "nvme/soft/staging.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace tardis::nvme {
namespace {

TEST(NvmeSoftStaging, AgainstAModel) {
  constexpr std::size_t kBytes = 1000;
  std::byte memory[kBytes];
  StagingRing ring(memory, kBytes);
  std::map<std::byte*, std::size_t> taken;
  std::mt19937_64 random(1);
  std::size_t refused = 0;
  for (int i = 0; i < 100'000; ++i) {
    if (random() % 2 == 0 || taken.empty()) {
      const std::size_t bytes = 1 + random() % (random() % 10 == 0 ? kBytes : 200);
      std::byte* const at = ring.take(bytes);
      if (at == nullptr) {
        ASSERT_FALSE(taken.empty()) << bytes;
        ++refused;
        continue;
      }
      ASSERT_GE(at, memory);
      ASSERT_LE(at + bytes, memory + kBytes);
      const auto after = taken.lower_bound(at);
      ASSERT_TRUE(after == taken.end() || at + bytes <= after->first);
      ASSERT_TRUE(after == taken.begin() || std::prev(after)->first + std::prev(after)->second <= at);
      taken[at] = bytes;
    } else {
      auto each = std::next(taken.begin(), static_cast<std::ptrdiff_t>(random() % taken.size()));
      ring.give_back(each->first);
      taken.erase(each);
    }
  }
  EXPECT_GT(refused, 0u);
  for (const auto& [at, bytes] : taken) ring.give_back(at);
  EXPECT_NE(ring.take(kBytes), nullptr);
  EXPECT_EQ(ring.take(1), nullptr);
  EXPECT_EQ(StagingRing(memory, kBytes).take(kBytes + 1), nullptr);
  EXPECT_EQ(StagingRing(nullptr, 0).take(1), nullptr);
}

}  // namespace
}  // namespace tardis::nvme
