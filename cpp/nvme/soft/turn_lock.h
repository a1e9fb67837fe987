// SPDX-License-Identifier: Apache-2.0
// A lock that one thread takes all the time, and others seldom: whoever waits gets it at the next turn, where a mutex
// would let the busy thread have it again and again.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

namespace tardis::nvme {

class TurnLock {
 public:
  void lock() {
    const std::uint32_t turn = next_.fetch_add(1, std::memory_order_relaxed);
    // Acquire: nothing under the lock is read before the lock is had.
    while (serving_.load(std::memory_order_acquire) != turn) sched_yield();
  }
  // Release: what was changed under the lock is seen by whoever takes it next.
  void unlock() { serving_.store(serving_.load(std::memory_order_relaxed) + 1, std::memory_order_release); }

 private:
  alignas(64) std::atomic<std::uint32_t> next_{0};
  std::atomic<std::uint32_t> serving_{0};
};

}  // namespace tardis::nvme
