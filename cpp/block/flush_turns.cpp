// SPDX-License-Identifier: Apache-2.0
#include "block/flush_turns.h"

#include <algorithm>
#include <chrono>
#include <thread>

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

bool FlushTurns::try_begin(bool at_any_rate) {
  std::uint64_t word = shared_.turn.load();
  const std::uint64_t holder = word & kHolder;
  if (holder != 0) {
    // What a killed process began has ended, or will without it. In this process one flush waits at a time, so what
    // its place holds was left by one that had the place before.
    if (holder - 1 != shared_.place && shared_.alive(static_cast<std::uint32_t>(holder - 1))) return false;
    shared_.turn.compare_exchange_strong(word, word >> kCountShift << kCountShift);
    return false;
  }
  if (!shared_.turn.compare_exchange_strong(word, word | (shared_.place + 1))) return false;
  const std::uint64_t count = word >> kCountShift;
  if (at_any_rate || shared_.all_reads_since(count + 1)) {
    shared_.turn.store((count + 1) << kCountShift | kBegun | (shared_.place + 1));
    return true;
  }
  shared_.turn.store(word);
  return false;
}

void FlushTurns::begin_flush() {
  const auto patient_until = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
  while (!try_begin(std::chrono::steady_clock::now() >= patient_until)) std::this_thread::sleep_for(kPause);
}

void FlushTurns::end_flush() { shared_.turn.store(shared_.turn.load() >> kCountShift << kCountShift); }

}  // namespace tardis
