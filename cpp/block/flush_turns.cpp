// SPDX-License-Identifier: Apache-2.0
#include "block/flush_turns.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace tardis {
namespace {

constexpr unsigned kCountShift = 16;
constexpr std::uint64_t kBegun = 1u << 15;  // else it still looks whether it may
constexpr std::uint64_t kHolder = kBegun - 1;
constexpr std::chrono::microseconds kPause{100};

}  // namespace

std::uint64_t FlushTurns::begin_read(std::uint64_t oldest) {
  while (true) {
    const std::uint64_t word = shared_.turn.load();
    // A flush that runs just now is one that this batch runs beside.
    const std::uint64_t mark = (word >> kCountShift) + ((word & kBegun) != 0 ? 0 : 1);
    shared_.own_oldest.store(oldest == 0 ? mark : std::min(oldest, mark));
    // Who begins a flush says so, then looks at the marks: unchanged, it has seen this one or will.
    if (shared_.turn.load() == word) return mark;
  }
}

std::uint64_t FlushTurns::end_read(std::uint64_t mark, std::uint64_t oldest) {
  const std::uint64_t begun = shared_.turn.load() >> kCountShift;
  shared_.own_oldest.store(oldest);
  return begun + 1 - mark;
}

// `pass_over`: the holder has not moved for long. `at_any_rate`: reads have been waited for long enough.
bool FlushTurns::try_begin(std::uint64_t word, bool pass_over, bool at_any_rate) {
  const std::uint64_t holder = word & kHolder, count = word >> kCountShift, own = shared_.place + 1;
  if (holder != 0) {
    // What a killed process began has ended, or will without it. In this process one flush waits at a time, so what
    // its place holds was left by one that had the place before.
    const bool gone = holder == own || !shared_.alive(static_cast<std::uint32_t>(holder - 1));
    if (!gone && !pass_over) return false;
    held_ = (count + 1) << kCountShift | kBegun | own;
    if (!gone) return shared_.turn.compare_exchange_strong(word, held_);
    shared_.turn.compare_exchange_strong(word, count << kCountShift);
    return false;
  }
  // Every change is from the word that was seen: whoever was passed over meanwhile finds another, and changes nothing.
  std::uint64_t trying = count << kCountShift | own;
  if (!shared_.turn.compare_exchange_strong(word, trying)) return false;
  held_ = (count + 1) << kCountShift | kBegun | own;
  const bool may = at_any_rate || shared_.all_reads_since(count + 1);
  return shared_.turn.compare_exchange_strong(trying, may ? held_ : count << kCountShift) && may;
}

void FlushTurns::begin_flush() {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kPatience{kPatienceMs};
  const Clock::time_point began = Clock::now();
  Clock::time_point moved = began;
  std::uint64_t last = shared_.turn.load();
  while (true) {
    const std::uint64_t word = shared_.turn.load();
    const Clock::time_point now = Clock::now();
    if (std::exchange(last, word) != word) moved = now;
    if (try_begin(word, now - moved >= kPatience, now - began >= kPatience)) return;
    std::this_thread::sleep_for(kPause);
  }
}

void FlushTurns::end_flush() {
  std::uint64_t word = held_;
  shared_.turn.compare_exchange_strong(word, word >> kCountShift << kCountShift);
}

}  // namespace tardis
