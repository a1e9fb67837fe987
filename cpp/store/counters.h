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
  explicit Call(Store& store) : store_(store) {
    const std::lock_guard lock(store_.calls_mutex_);
    open_ = !store_.closed_;
    if (open_) ++store_.calls_;
  }
  ~Call() {
    if (!open_) return;
    const std::lock_guard lock(store_.calls_mutex_);
    if (--store_.calls_ == 0) store_.calls_done_.notify_all();
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  explicit operator bool() const { return open_; }
  static Error closed() { return {Code::kClosed, "the store is closed"}; }

 private:
  Store& store_;
  bool open_;
};

}  // namespace tardis
