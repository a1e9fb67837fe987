// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

#include "store/store.h"

namespace tardis {

// The sums of tardis_stats.
struct Store::Counters {
#define TARDIS_COUNTER(name) std::atomic<std::uint64_t> name{0};
  TARDIS_STATS_SUMS(TARDIS_COUNTER)
#undef TARDIS_COUNTER
};

class Store::Call {
 public:
  explicit Call(Store& store) : store_(store), open_((store.calls_.fetch_add(1) & kClosed) == 0) {
    if (!open_) leave();
  }
  ~Call() {
    if (open_) leave();
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  explicit operator bool() const { return open_; }
  static Error closed() { return {Code::kClosed, "the store is closed"}; }

 private:
  void leave() {
    if (store_.calls_.fetch_sub(1) == kClosed + 1) store_.calls_.notify_all();
  }

  Store& store_;
  const bool open_;
};

}  // namespace tardis
