// SPDX-License-Identifier: Apache-2.0
// Reads before writes: the arbiter by itself.
#include "block/io_arbiter.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <span>
#include <thread>
#include <vector>

namespace tardis {
namespace {

using namespace std::chrono_literals;

void pause_microseconds(std::mt19937& random, unsigned most) {
  std::this_thread::sleep_for(std::chrono::microseconds(random() % most));
}

// Threads that read and flush, in turn with each arbiter; none of their batches ran beside two flushes, and the flushes
// were not starved. Counted apart from what the arbiters count. Returns the number of batches.
int work_for_a_second(std::span<IoArbiter> arbiters, unsigned readers, unsigned flushers) {
  std::atomic<bool> stop{false};
  // Of flushes, those begun and those over.
  std::atomic<int> begun{0}, over{0}, most{0}, together{0}, batches{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < readers; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      while (!stop) {  // together they leave hardly a moment without a read batch
        const IoArbiter::ReadBatch batch(arbiters[t % arbiters.size()]);
        const int before = over.load();
        pause_microseconds(random, 3000);
        const int beside = begun.load() - before;
        for (int seen = most.load(); beside > seen && !most.compare_exchange_weak(seen, beside);) {
        }
        ++batches;
      }
    });
  }
  for (unsigned t = 0; t < flushers; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(100 + t);
      while (!stop) {
        const IoArbiter::Flush flush(arbiters[t % arbiters.size()]);
        if (begun.fetch_add(1) + 1 - over.load() > 1) ++together;
        pause_microseconds(random, 2000);
        ++over;
      }
    });
  }
  std::this_thread::sleep_for(1s);
  stop = true;
  for (auto& thread : threads) thread.join();
  EXPECT_LE(most.load(), 1);
  EXPECT_EQ(together.load(), 0) << "flushes that ran at once";
  EXPECT_GE(over.load(), 20) << "flushes in a second of batches of 3 ms at most";
  return batches;
}

// Two processes' arbiters over words that they share.
struct SharedWords {
  std::atomic<std::uint64_t> turn{0};
  std::array<std::atomic<std::uint64_t>, 2> oldest{};
  std::array<std::atomic<bool>, 2> alive{true, true};

  std::unique_ptr<FlushTurns> view(std::uint32_t place) {
    return std::make_unique<FlushTurns>(FlushTurns::Shared{turn, oldest[place], place,
                                                           [this](std::uint32_t other) { return alive[other].load(); },
                                                           [this, place](std::uint64_t mark) {
                                                             for (std::uint32_t i = 0; i < 2; ++i) {
                                                               const std::uint64_t one = oldest[i];
                                                               if (one != 0 && one < mark && (i == place || alive[i]))
                                                                 return false;
                                                             }
                                                             return true;
                                                           }});
  }
};

TEST(IoArbiter, NoReadBatchOfAnyProcessRunsBesideTwoFlushes) {
  SharedWords words;
  std::array<IoArbiter, 2> arbiters;
  for (std::uint32_t i = 0; i < 2; ++i) arbiters[i].share(words.view(i));
  work_for_a_second(arbiters, 6, 4);
  for (const IoArbiter& arbiter : arbiters) {
    EXPECT_LE(arbiter.counters().max_flushes, 1u);
    EXPECT_EQ(arbiter.counters().delayed_again, 0u);
    EXPECT_GT(arbiter.counters().delayed, 0u);
  }
}

TEST(IoArbiter, AProcessThatWasKilledHoldsNoFlushUpAndOneThatIsStoppedNotForLong) {
  SharedWords words;
  IoArbiter arbiter;
  arbiter.share(words.view(0));
  // The other one was in the middle of a flush, and of a read that an earlier flush had delayed.
  const std::uint64_t flush_of_other = 7u << 16 | 1u << 15 | 2;
  words.turn = flush_of_other;
  words.oldest[1] = 7;
  words.alive[1] = false;
  auto began = std::chrono::steady_clock::now();
  { const IoArbiter::Flush flush(arbiter); }
  EXPECT_LT(std::chrono::steady_clock::now() - began, 500ms);
  words.oldest[1] = 5;
  words.alive[1] = true;
  began = std::chrono::steady_clock::now();
  { const IoArbiter::Flush flush(arbiter); }
  EXPECT_GE(std::chrono::steady_clock::now() - began, 500ms) << "it waits";
  EXPECT_LT(std::chrono::steady_clock::now() - began, 5s) << "and goes on";
}

TEST(IoArbiter, AProcessThatIsStoppedInItsTurnIsPassedOver) {
  SharedWords words;
  std::array<IoArbiter, 2> arbiters;
  for (std::uint32_t i = 0; i < 2; ++i) arbiters[i].share(words.view(i));
  auto stopped = std::make_unique<IoArbiter::Flush>(arbiters[1]);
  const auto began = std::chrono::steady_clock::now();
  auto mine = std::make_unique<IoArbiter::Flush>(arbiters[0]);
  EXPECT_GE(std::chrono::steady_clock::now() - began, 500ms) << "it waits";
  EXPECT_LT(std::chrono::steady_clock::now() - began, 5s) << "and goes on";
  const std::uint64_t held = words.turn;
  stopped.reset();  // it goes on, and must not end the turn of another
  EXPECT_EQ(words.turn.load(), held);
  mine.reset();
  EXPECT_NE(words.turn.load(), held);
  const auto again = std::chrono::steady_clock::now();
  for (IoArbiter& arbiter : arbiters) const IoArbiter::Flush flush(arbiter);
  EXPECT_LT(std::chrono::steady_clock::now() - again, 500ms);
}

TEST(IoArbiter, NoReadBatchRunsBesideTwoFlushesAndFlushesAreNotStarved) {
  IoArbiter arbiter;
  const int batches = work_for_a_second({&arbiter, 1}, 4, 3);
  const auto counters = arbiter.counters();
  EXPECT_EQ(counters.read_batches, static_cast<std::uint64_t>(batches));
  EXPECT_GT(counters.delayed, 0u);
  EXPECT_LE(counters.delayed, counters.read_batches);
  EXPECT_EQ(counters.delayed_again, 0u);
  EXPECT_EQ(counters.max_flushes, 1u);
  EXPECT_GT(counters.flushes_postponed, 0u);
}

// A flush waits for the batch that one has delayed, not for those that begin while it waits.
TEST(IoArbiter, AFlushWaitsForDelayedBatchesOnly) {
  IoArbiter arbiter;
  auto first = std::make_unique<IoArbiter::ReadBatch>(arbiter);
  { const IoArbiter::Flush flush(arbiter); }  // delays `first`
  std::atomic<bool> flushed{false};
  std::thread flusher([&] {
    const IoArbiter::Flush flush(arbiter);
    flushed = true;
  });
  while (arbiter.counters().flushes_postponed == 0) std::this_thread::yield();
  const IoArbiter::ReadBatch second(arbiter);  // never ends in this test
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(flushed);
  first.reset();
  flusher.join();
  EXPECT_TRUE(flushed);
  EXPECT_EQ(arbiter.counters().delayed, 2u);
  EXPECT_EQ(arbiter.counters().max_flushes, 1u);
}

TEST(IoArbiter, WritesKeepLittleInFlightBesideReads) {
  IoArbiter arbiter;
  IoArbiter::WriteBatch writes(arbiter);
  EXPECT_TRUE(writes.may_start(1000));
  EXPECT_EQ(arbiter.counters().writes_yielded, 0u);
  {
    const IoArbiter::ReadBatch reads(arbiter);
    EXPECT_TRUE(writes.may_start(0));
    EXPECT_TRUE(writes.may_start(IoArbiter::kWritesBesideReads - 1));
    EXPECT_EQ(arbiter.counters().writes_yielded, 0u);
    EXPECT_FALSE(writes.may_start(IoArbiter::kWritesBesideReads));
    EXPECT_FALSE(writes.may_start(IoArbiter::kWritesBesideReads));
    EXPECT_EQ(arbiter.counters().writes_yielded, 1u) << "one batch, asked twice";
    // The bound is of all write batches together, but each goes on.
    IoArbiter::WriteBatch other(arbiter);
    EXPECT_FALSE(writes.may_start(IoArbiter::kWritesBesideReads / 2));
    EXPECT_TRUE(other.may_start(0));
  }
  EXPECT_TRUE(writes.may_start(1000));
}

}  // namespace
}  // namespace tardis
