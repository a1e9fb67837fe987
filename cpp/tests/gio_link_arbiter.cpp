// SPDX-License-Identifier: Apache-2.0
// The rules of the link arbiter, and its host side with threads. Kernels: gpu_gio_link_check.cu.
#include "gio/link_arbiter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "gio/link_host.h"

namespace tardis::gio {
namespace {

constexpr std::uint32_t kRestore = TARDIS_GPU_LINK_RESTORE, kLoadBack = TARDIS_GPU_LINK_LOAD_BACK,
                        kWriteBehind = TARDIS_GPU_LINK_WRITE_BEHIND;
constexpr std::uint32_t kIn = TARDIS_GPU_LINK_IN, kOut = TARDIS_GPU_LINK_OUT;
constexpr std::uint64_t kSecond = 1'000'000'000;

LinkLook look_at(const tardis_gpu_link_words& words, std::uint32_t link_class) {
  return LinkLook::of({words.host.active[0], words.host.active[1], words.device_active[0], words.device_active[1]},
                      words.host.budgets[link_class], link_class);
}

TEST(GioLinkArbiter, UsersAreCountedByClassAndNeverBelowNone) {
  std::mt19937_64 random(testing::UnitTest::GetInstance()->random_seed());
  std::array<std::uint64_t, kLinkClasses> model{};
  std::uint64_t word = 0;
  for (int i = 0; i < 100'000; ++i) {
    const auto link_class = static_cast<std::uint32_t>(random() % kLinkClasses);
    if (random() % 2 == 0) {
      EXPECT_TRUE(add_user(word, link_class));
      ++model[link_class];
    } else {
      EXPECT_EQ(remove_user(word, link_class), model[link_class] != 0);
      model[link_class] -= model[link_class] != 0;
    }
    for (std::uint32_t c = 0; c < kLinkClasses; ++c) ASSERT_EQ(users_of(word, c), model[c]);
  }
}

TEST(GioLinkArbiter, AFullCountStaysAsItIs) {
  std::uint64_t word = 0;
  for (std::uint64_t i = 0; i < kMostUsers; ++i) ASSERT_TRUE(add_user(word, kLoadBack));
  const std::uint64_t full = word;
  EXPECT_FALSE(add_user(word, kLoadBack));
  EXPECT_EQ(word, full);
  EXPECT_EQ(users_of(word, kLoadBack + 1), 0u);
}

TEST(GioLinkArbiter, AClassIsOutrankedByThoseAboveItInAnyWordAndByNoOther) {
  for (std::uint32_t mine = 0; mine < kLinkClasses; ++mine) {
    for (std::uint32_t other = 0; other < kLinkClasses; ++other) {
      for (int place = 0; place < 4; ++place) {
        std::uint64_t active[4] = {};
        ASSERT_TRUE(add_user(active[place], other));
        const LinkLook look = LinkLook::of(active, 7, mine);
        EXPECT_EQ(look.outranked, other < mine) << mine << " beside " << other << " in word " << place;
        EXPECT_EQ(look.users, 1u);
        EXPECT_EQ(look.budget, 7u);
      }
    }
  }
  std::uint64_t active[4] = {};
  for (std::uint64_t& word : active) add_user(word, kWriteBehind);
  EXPECT_EQ(LinkLook::of(active, 0, kWriteBehind).users, 4u);
}

// Users of one class on a clock that jumps from event to event, each looking before each of its groups, as a kernel's
// CTAs do. Returns the bytes that moved from `begin` to `end`.
std::uint64_t moved_on_budget(std::uint64_t budget, std::uint32_t users, std::uint64_t group, std::uint64_t duration,
                              std::uint64_t link_ns_per_group) {
  struct User {
    LinkTurn turn;
    std::uint64_t at = 0;
  };
  std::vector<User> all(users);
  std::uint64_t bytes = 0;
  for (User& user : all) {
    while (user.at < duration) {
      user.turn.look({true, users, budget}, user.at);
      EXPECT_TRUE(user.turn.on_budget());
      user.at = std::max(user.at, user.turn.ready(user.at, group)) + link_ns_per_group;
      if (user.at <= duration) bytes += group;
    }
  }
  return bytes;
}

TEST(GioLinkArbiter, ABudgetIsKeptByAllUsersTogetherAndUsed) {
  for (const std::uint64_t budget : {std::uint64_t{TARDIS_GPU_LINK_LEAST_BUDGET}, 1 * kSecond, 4 * kSecond}) {
    for (const std::uint32_t users : {1u, 2u, 4u, 9u}) {
      for (const std::uint64_t group : {std::uint64_t{16} << 10, std::uint64_t{64} << 10}) {
        SCOPED_TRACE(testing::Message() << budget << " B/s, " << users << " users, groups of " << group);
        const auto bytes = static_cast<double>(moved_on_budget(budget, users, group, kSecond, 3'000));
        EXPECT_LE(bytes, static_cast<double>(budget + users * (group + budget / 50'000)));
        EXPECT_GE(bytes, 0.99 * static_cast<double>(budget) - static_cast<double>(users * group));
      }
    }
  }
}

TEST(GioLinkArbiter, ManyUsersOfOneClassDoNotStarveEachOther) {
  LinkTurn turn;
  turn.look({true, kMostUsers, TARDIS_GPU_LINK_LEAST_BUDGET}, 0);
  // Four chunks, the most that a kernel starts at once on a budget: far from the 20 s after which a barrier gives up.
  EXPECT_LE(turn.ready(0, 4 * kChunkBytes), kSecond / 10);
}

TEST(GioLinkArbiter, ShortCallsGetNoMoreThanALongOne) {
  std::uint64_t at = 0, bytes = 0;
  while (at < kSecond) {
    LinkTurn turn;  // of a call that moves one chunk
    turn.look({true, 1, kSecond}, at);
    at = std::max(at, turn.ready(at, kChunkBytes));
    bytes += kChunkBytes;
  }
  EXPECT_LE(bytes, kSecond + kChunkBytes);
}

TEST(GioLinkArbiter, ATimeWithoutTrafficIsNoAllowance) {
  LinkTurn turn;
  turn.look({true, 1, kSecond}, 0);
  const std::uint64_t late = 10 * kSecond;
  turn.look({true, 1, kSecond}, late);
  EXPECT_GE(turn.ready(late, 1'000'000), late + 1'000'000 - kCatchUpNs);
}

TEST(GioLinkArbiter, GapsBetweenCallsAreNoReasonToGoFaster) {
  LinkTurn turn;
  turn.look({true, 1, kSecond}, 0);
  for (std::uint64_t now = 10'000; now < kLingerNs; now += 10'000) {
    turn.look({false, 1, kSecond}, now);
    EXPECT_TRUE(turn.on_budget());
  }
  turn.look({true, 1, kSecond}, 90'000);
  turn.look({false, 1, kSecond}, 90'000 + kLingerNs - 1);
  EXPECT_TRUE(turn.on_budget());
  turn.look({false, 1, kSecond}, 90'000 + kLingerNs);
  EXPECT_FALSE(turn.on_budget());
}

TEST(GioLinkArbiter, NoBudgetMeansNoLimit) {
  LinkTurn turn;
  turn.look({true, 1, 0}, 0);
  EXPECT_FALSE(turn.on_budget());
  turn.look({true, 1, kSecond}, 0);
  EXPECT_TRUE(turn.on_budget());
  turn.look({true, 1, 0}, 1);  // it was lifted
  EXPECT_FALSE(turn.on_budget());
}

TEST(GioLinkArbiter, UsesOfThreadsEndWithThemAlsoByException) {
  auto words = std::make_unique<tardis_gpu_link_words>();
  std::vector<std::thread> threads;
  std::atomic<bool> wrong{false};
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 20'000; ++i) {
        const auto link_class = static_cast<std::uint32_t>(random() % kLinkClasses);
        const auto direction = static_cast<std::uint32_t>(random() % kLinkDirections);
        try {
          const LinkUse use(*words, link_class, direction);
          const std::uint64_t users = users_of(load_link_word(words->host.active[direction]), link_class);
          if (users < 1 || users > 4) wrong = true;
          if (i % 16 == 0) throw i;
        } catch (int) {
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(wrong);
  EXPECT_EQ(words->host.active[kIn], 0u);
  EXPECT_EQ(words->host.active[kOut], 0u);
  EXPECT_EQ(words->errors, 0u);
}

struct Clock {
  std::uint64_t now = 0;
  std::uint64_t slept = 0;

  void pace(HostPacer& pacer, std::uint64_t bytes) {
    pacer.pace(
        bytes, [this] { return now; },
        [this](std::uint64_t ns) {
          now += ns;
          slept += ns;
        });
  }
};

TEST(GioLinkArbiter, AHostThreadIsHeldBackOnlyWhileItIsOutranked) {
  auto words = std::make_unique<tardis_gpu_link_words>();
  words->host.budgets[kWriteBehind] = kSecond;
  HostPacer pacer(*words, kWriteBehind, kOut);
  EXPECT_FALSE(look_at(*words, kWriteBehind).outranked) << "it does not outrank itself";
  EXPECT_TRUE(look_at(*words, TARDIS_GPU_LINK_CLASSES - 1).users == 1);
  Clock clock;
  for (int i = 0; i < 100; ++i) clock.pace(pacer, 1 << 20);
  EXPECT_EQ(clock.slept, 0u);
  EXPECT_EQ(words->budget_bytes[kWriteBehind], 0u);
  {
    const LinkUse restore(*words, kRestore, kIn);
    for (int i = 0; i < 100; ++i) clock.pace(pacer, 1'000'000);
    EXPECT_NEAR(static_cast<double>(clock.now), 0.1 * kSecond, 0.01 * kSecond) << "100 MB at 1 GB/s";
    EXPECT_EQ(words->budget_bytes[kWriteBehind], 100'000'000u);
    EXPECT_EQ(words->held_ns[kWriteBehind], clock.slept);
  }
  clock.now += kLingerNs;
  const std::uint64_t before = clock.slept;
  for (int i = 0; i < 100; ++i) clock.pace(pacer, 1 << 20);
  EXPECT_EQ(clock.slept, before);
  EXPECT_EQ(words->bytes[kWriteBehind], 200u * (1 << 20) + 100'000'000u);
}

TEST(GioLinkArbiter, AWaitEndsWhenThoseAboveDo) {
  auto words = std::make_unique<tardis_gpu_link_words>();
  words->host.budgets[kWriteBehind] = TARDIS_GPU_LINK_LEAST_BUDGET;
  HostPacer pacer(*words, kWriteBehind, kOut);
  words->device_active[kIn] = one_user(kRestore);  // as a kernel tells it
  Clock clock;
  pacer.pace(
      64 << 20, [&] { return clock.now; },  // for a second
      [&](std::uint64_t ns) {
        clock.now += ns;
        if (clock.now > kSecond / 10) words->device_active[kIn] = 0;
      });
  EXPECT_GT(clock.now, kSecond / 10);
  EXPECT_LT(clock.now, kSecond / 10 + kLingerNs + 1'000'000);
}

// Threads that move as fast as they may beside one that restores now and then: with the real clock.
TEST(GioLinkArbiter, ThreadsKeepToTheBudgetBesideARestoreAndAllOfThemGoOn) {
  auto words = std::make_unique<tardis_gpu_link_words>();
  constexpr std::uint64_t kBudget = 400'000'000;
  words->host.budgets[kWriteBehind] = kBudget;
  std::atomic<bool> stop{false};
  std::array<std::atomic<std::uint64_t>, 3> moved{};
  std::vector<std::thread> threads;
  std::uint64_t begin = 0, bytes = 0;
  {
    const LinkUse restore(*words, kRestore, kIn);
    for (auto& mine : moved) {
      threads.emplace_back([&] {
        HostPacer pacer(*words, kWriteBehind, kOut);
        while (!stop) {
          pacer.pace(256 << 10);
          mine += 256 << 10;
        }
      });
    }
    while (users_of(load_link_word(words->host.active[kOut]), kWriteBehind) != 3) std::this_thread::yield();
    for (auto& mine : moved) bytes -= mine;
    begin = monotonic_ns();
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    for (auto& mine : moved) bytes += mine;
    const double seconds = static_cast<double>(monotonic_ns() - begin) / kSecond;
    EXPECT_LE(static_cast<double>(bytes), 1.1 * kBudget * seconds + 3 * (256 << 10));
    for (auto& mine : moved) EXPECT_GT(mine.load(), kBudget / 3 / 20) << "a thread starved";
    stop = true;
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(words->host.active[kOut], 0u);
}

}  // namespace
}  // namespace tardis::gio
