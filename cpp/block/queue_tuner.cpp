// SPDX-License-Identifier: Apache-2.0
#include "block/queue_tuner.h"

#include <algorithm>

namespace tardis {

unsigned QueueTuner::depth() const {
  const std::lock_guard lock(mutex_);
  return depth_;
}

unsigned QueueTuner::next() {
  const std::lock_guard lock(mutex_);
  if (fixed()) return depth_;
  if (search_ == Search::kRest) {
    if (rested_ < kRest) return depth_;
    begin();
  }
  if (search_ == Search::kRest) return depth_;
  challenger_next_ = !challenger_next_;
  return challenger_next_ ? challenger_ : depth_;
}

void QueueTuner::begin() {
  went_up_ = false;
  duel(Search::kUp);
}

void QueueTuner::duel(Search search) {
  own_runs_ = other_runs_ = 0;
  if (search == Search::kUp && depth_ < limits_.most) {
    search_ = Search::kUp;
    challenger_ = std::min(limits_.most, depth_ * 2);
  } else if (!went_up_ && depth_ > limits_.least) {
    search_ = Search::kDown;
    challenger_ = std::max(limits_.least, depth_ / 2);
  } else {
    search_ = Search::kRest;
    rested_ = 0;
  }
}

void QueueTuner::finished(unsigned depth, std::uint64_t bytes, std::uint64_t nanoseconds) {
  const std::lock_guard lock(mutex_);
  if (search_ == Search::kRest) {
    if (rested_ < kRest) ++rested_;
    return;
  }
  const double rate = static_cast<double>(bytes) / static_cast<double>(std::max<std::uint64_t>(1, nanoseconds));
  if (depth == depth_ && own_runs_ < kRounds) own_[own_runs_++] = rate;
  if (depth == challenger_ && other_runs_ < kRounds) other_[other_runs_++] = rate;
  if (own_runs_ == kRounds && other_runs_ == kRounds) decide();
}

void QueueTuner::decide() {
  const double own = median(own_), other = median(other_);
  if (search_ == Search::kUp) {
    if (other > kWorthMore * own) {
      depth_ = challenger_;
      went_up_ = true;
      duel(Search::kUp);
    } else {
      duel(Search::kDown);
    }
  } else if (other >= kWorthNothing * own) {
    depth_ = challenger_;
    duel(Search::kDown);
  } else {
    search_ = Search::kRest;
    rested_ = 0;
  }
}

double QueueTuner::median(std::array<double, kRounds> rates) {
  std::nth_element(rates.begin(), rates.begin() + kRounds / 2, rates.end());
  return rates[kRounds / 2];
}

}  // namespace tardis
