// SPDX-License-Identifier: Apache-2.0
// How a thread waits for completions: it spins for as long as a fast drive takes, then sleeps, ever longer. It does not
// yield: on a busy machine that costs a whole time slice, and a sleep of microseconds does not.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include "nvme/ordering.h"

namespace tardis::nvme {

class Backoff {
 public:
  void pause() {
    if (rounds_ < kSpins) {
      relax();
    } else {
      const unsigned steps = rounds_ - kSpins;
      std::this_thread::sleep_for(std::chrono::microseconds(10u << steps / 16));
    }
    rounds_ = std::min(rounds_ + 1, kSpins + kMostSteps);
  }
  void reset() { rounds_ = 0; }

 private:
  static constexpr unsigned kSpins = 256, kMostSteps = 64;
  unsigned rounds_ = 0;
};

}  // namespace tardis::nvme
