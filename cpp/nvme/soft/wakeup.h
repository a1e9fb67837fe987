// SPDX-License-Identifier: Apache-2.0
// Sleep of one thread that many may end, at the price of one atomic operation where it is awake.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace tardis::nvme {

class Wakeup {
 public:
  void notify() {
    // A read that is also a write is ordered after the caller's stores before it (the doorbell): either the sleeper
    // sees those when it looks once more, or this sees that it sleeps.
    if ((state_.fetch_or(0) & kSleeping) != 0) wake();
  }

  // `work` looks for work once more, after others can see that this thread is about to sleep, and says if there was
  // any.
  template <class Work>
  void sleep(std::uint64_t timeout_ns, Work work) {
    const std::uint32_t asleep = state_.fetch_or(kSleeping) | kSleeping;
    if (!work()) {
      const timespec limit{static_cast<time_t>(timeout_ns / 1'000'000'000),
                           static_cast<long>(timeout_ns % 1'000'000'000)};
      ::syscall(SYS_futex, &state_, FUTEX_WAIT_PRIVATE, asleep, &limit, nullptr, 0);
    }
    state_.fetch_and(~kSleeping);
  }

 private:
  static constexpr std::uint32_t kSleeping = 1;
  void wake() {
    state_.fetch_add(2);  // a sleeper that has not got to the kernel yet does not fall asleep on the old value
    ::syscall(SYS_futex, &state_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  alignas(64) std::atomic<std::uint32_t> state_{0};
};

}  // namespace tardis::nvme
