// SPDX-License-Identifier: Apache-2.0
// The search for a queue depth, on devices made of arithmetic.
#include "block/queue_tuner.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <vector>

namespace tardis {
namespace {

using Rate = std::function<double(unsigned depth)>;  // bytes per nanosecond

// The depths of `runs` runs.
std::vector<unsigned> drive(QueueTuner& tuner, const Rate& rate, unsigned runs) {
  constexpr std::uint64_t kBytes = 128u << 20;
  std::vector<unsigned> depths;
  for (unsigned i = 0; i < runs; ++i) {
    depths.push_back(tuner.next());
    tuner.finished(depths.back(), kBytes, static_cast<std::uint64_t>(kBytes / rate(depths.back())));
  }
  return depths;
}

// Gains in proportion up to `knee`, nothing from there on.
Rate saturating(unsigned knee) {
  return [knee](unsigned depth) { return 4.0 * std::min(depth, knee) / knee; };
}

constexpr QueueTuner::Limits kLimits{32, 64, 256};

TEST(QueueTuner, ClimbsAsFarAsItPays) {
  for (const auto& [knee, expected] : {std::pair{1000u, 256u}, {256u, 256u}, {128u, 128u}, {64u, 64u}, {16u, 32u}}) {
    QueueTuner tuner(kLimits);
    drive(tuner, saturating(knee), 100);
    EXPECT_EQ(tuner.depth(), expected) << knee;
  }
}

TEST(QueueTuner, RestsBetweenSearchesAndFollowsADeviceThatChanges) {
  QueueTuner tuner(kLimits);
  drive(tuner, saturating(64), 100);
  for (const unsigned depth : drive(tuner, saturating(64), QueueTuner::kRest / 2)) ASSERT_EQ(depth, 64u);
  drive(tuner, saturating(256), QueueTuner::kRest + 100);
  EXPECT_EQ(tuner.depth(), 256u);
}

// The machine's other work slows runs by up to a half, a few at a time; both sides of a duel meet it alike.
TEST(QueueTuner, SeesThroughNoise) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    double slow = 1;
    unsigned left = 0;
    const auto noisy = [&](unsigned depth) {
      if (left-- == 0) {
        left = 3 + random() % 10;
        slow = 0.5 + static_cast<double>(random() % 500) / 1000;
      }
      return saturating(128)(depth) * slow * (0.98 + static_cast<double>(random() % 40) / 1000);
    };
    QueueTuner tuner(kLimits);
    drive(tuner, noisy, 100);
    EXPECT_GE(tuner.depth(), 128u) << seed;
  }
}

TEST(QueueTuner, AFixedDepthStays) {
  QueueTuner tuner({48, 48, 48});
  for (const unsigned depth : drive(tuner, saturating(1000), 2000)) ASSERT_EQ(depth, 48u);
}

TEST(QueueTuner, TheSameReportsGiveTheSameDepths) {
  QueueTuner one(kLimits), two(kLimits);
  EXPECT_EQ(drive(one, saturating(100), 3000), drive(two, saturating(100), 3000));
}

TEST(QueueTuner, LimitsThatAreNoPowersOfTwo) {
  QueueTuner tuner({2, 9, 9});
  drive(tuner, saturating(1), 100);
  EXPECT_EQ(tuner.depth(), 2u);
  QueueTuner up({3, 5, 11});
  for (const unsigned depth : drive(up, saturating(100), 100)) ASSERT_TRUE(depth >= 3 && depth <= 11) << depth;
  EXPECT_EQ(up.depth(), 11u);
}

}  // namespace
}  // namespace tardis
