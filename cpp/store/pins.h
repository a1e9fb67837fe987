// SPDX-License-Identifier: Apache-2.0
// One process's entries in a table that other processes scan: slots it reads, keys it writes.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "store/live_layout.h"

namespace tardis {

class PinTable {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  PinTable(std::span<std::atomic<std::uint64_t>> pins, std::atomic<std::uint32_t>& end)
      : pins_(pins), end_(end), used_(pins.size() / 64) {}

  // Where the value was put; kNone: the table is full. Sequentially consistent, so that whoever takes something away
  // and then scans, and whoever pins it and then looks whether it is still there, cannot both miss the other.
  std::uint32_t add(std::uint64_t value) {
    for (std::uint32_t word = 0; word < used_.size(); ++word) {
      std::uint64_t bits = used_[word].load(std::memory_order_relaxed);
      while (bits != ~std::uint64_t{0}) {
        const auto bit = static_cast<std::uint32_t>(std::countr_one(bits));
        if (!used_[word].compare_exchange_weak(bits, bits | std::uint64_t{1} << bit, std::memory_order_acquire))
          continue;
        const std::uint32_t at = word * 64 + bit;
        std::uint32_t end = end_.load();
        while (end <= at && !end_.compare_exchange_weak(end, at + 1)) {
        }
        pins_[at].store(value);
        return at;
      }
    }
    return kNone;
  }

  void remove(std::uint32_t at) {
    if (at == kNone) return;
    pins_[at].store(0);
    used_[at / 64].fetch_and(~(std::uint64_t{1} << at % 64), std::memory_order_release);
  }

 private:
  const std::span<std::atomic<std::uint64_t>> pins_;
  std::atomic<std::uint32_t>& end_;
  std::vector<std::atomic<std::uint64_t>> used_;  // a bit for each
};

}  // namespace tardis
