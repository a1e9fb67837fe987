// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

#include "store/store.h"

namespace tardis {

// Named as in tardis_stats, which explains them.
struct Store::Counters {
  using Counter = std::atomic<std::uint64_t>;
  Counter set_calls = 0, set_pages = 0, set_pages_written = 0, set_pages_present = 0, set_pages_dropped = 0,
          set_pages_failed = 0, set_bytes = 0, set_nanoseconds = 0;
  Counter get_calls = 0, get_pages = 0, get_pages_hit = 0, get_pages_missed = 0, get_pages_raced = 0,
          get_pages_torn = 0, get_pages_corrupt = 0, get_pages_failed = 0, get_bytes = 0, get_nanoseconds = 0;
  Counter lookups = 0, lookup_pages = 0, lookup_hit_pages = 0;
  Counter evicted_pages = 0, evicted_bytes = 0, cleared_pages = 0;
  Counter flush_groups = 0, flush_failures = 0, flush_unpublished_pages = 0;
  Counter recovered_pages = 0, recovered_verified = 0, recovered_rejected = 0;
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
