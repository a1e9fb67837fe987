// SPDX-License-Identifier: Apache-2.0
// What a device counts of its requests.
#pragma once

#include <atomic>
#include <cstdint>

#include "block/block_device.h"
#include "block/io_arbiter.h"

namespace tardis {

// Thread-safe.
class TransferCounters {
 public:
  void started(std::uint64_t requests = 1) {
    const std::uint64_t now = in_flight_.fetch_add(requests, kRelaxed) + requests;
    std::uint64_t peak = peak_in_flight_.load(kRelaxed);
    while (now > peak && !peak_in_flight_.compare_exchange_weak(peak, now, kRelaxed)) {
    }
  }
  void ended(std::uint64_t requests = 1) { in_flight_.fetch_sub(requests, kRelaxed); }
  // A request whose error is set. `bytes`: its length.
  void finished(const IoRequest& request, std::uint64_t bytes, bool bounced) {
    const bool read = request.op == IoRequest::Op::kRead;
    (read ? reads_ : writes_).fetch_add(1, kRelaxed);
    if (request.error == 0) {
      (read ? read_bytes_ : written_bytes_).fetch_add(bytes, kRelaxed);
    } else {
      errors_.fetch_add(1, kRelaxed);
    }
    if (bounced) {
      bounced_requests_.fetch_add(1, kRelaxed);
      bounced_bytes_.fetch_add(bytes, kRelaxed);
    }
  }

  // With those of the order that the requests went in.
  BlockDeviceCounters tell(const IoArbiter::Counters& order) const {
    BlockDeviceCounters now;
    now.reads = reads_.load(kRelaxed);
    now.writes = writes_.load(kRelaxed);
    now.read_bytes = read_bytes_.load(kRelaxed);
    now.written_bytes = written_bytes_.load(kRelaxed);
    now.bounced_requests = bounced_requests_.load(kRelaxed);
    now.bounced_bytes = bounced_bytes_.load(kRelaxed);
    now.errors = errors_.load(kRelaxed);
    now.peak_in_flight = peak_in_flight_.load(kRelaxed);
    now.read_batches = order.read_batches;
    now.read_batches_delayed = order.delayed;
    now.read_batches_delayed_again = order.delayed_again;
    now.max_flushes_per_read_batch = order.max_flushes;
    now.writes_yielded = order.writes_yielded;
    now.flushes_postponed = order.flushes_postponed;
    return now;
  }

 private:
  static constexpr auto kRelaxed = std::memory_order_relaxed;
  std::atomic<std::uint64_t> reads_{0}, writes_{0}, read_bytes_{0}, written_bytes_{0}, bounced_requests_{0},
      bounced_bytes_{0}, errors_{0}, in_flight_{0}, peak_in_flight_{0};
};

}  // namespace tardis
