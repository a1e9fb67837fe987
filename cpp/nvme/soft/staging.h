// SPDX-License-Identifier: Apache-2.0
// Runs of memory from one buffer, taken in a circle and given back in any order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>

namespace tardis::nvme {

class StagingRing {
 public:
  StagingRing(std::byte* memory, std::size_t bytes) : memory_(memory), bytes_(bytes) {}

  std::size_t bytes() const { return bytes_; }
  // Null: not now; for ever, if more than bytes().
  std::byte* take(std::size_t bytes) {
    if (bytes == 0 || bytes > bytes_) return nullptr;
    std::size_t at = 0;
    if (!taken_.empty()) {
      const std::size_t begin = taken_.front().at, end = taken_.back().at + taken_.back().bytes;
      if (taken_.back().at >= begin) {
        at = bytes_ - end >= bytes ? end : 0;
        if (at == 0 && bytes > begin) return nullptr;
      } else {
        at = end;
        if (begin - end < bytes) return nullptr;
      }
    }
    taken_.push_back({at, bytes, false});
    return memory_ + at;
  }
  void give_back(const std::byte* memory) {
    const auto at = static_cast<std::size_t>(memory - memory_);
    std::find_if(taken_.begin(), taken_.end(), [at](const Run& run) { return run.at == at && !run.free; })->free = true;
    while (!taken_.empty() && taken_.front().free) taken_.pop_front();
  }

 private:
  struct Run {
    std::size_t at, bytes;
    bool free;
  };
  std::byte* const memory_;
  const std::size_t bytes_;
  std::deque<Run> taken_;  // in the order of taking
};

}  // namespace tardis::nvme
