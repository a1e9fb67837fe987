// SPDX-License-Identifier: Apache-2.0
// What a run of commands (io_run.h) needs of whoever answers for its queue: the driver of this process, or a client of
// the process that has the driver (broker/).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include "nvme/registered_memory.h"

namespace tardis::nvme {

class IoQueue;

struct IoTiming {
  std::uint32_t io_timeout_ms = 0;
  std::uint32_t retries = 0;             // of one command
  std::uint32_t max_retry_delay_ms = 0;  // longer waits that a controller asks for end in the error
  std::array<std::uint32_t, 4> retry_delay_ms{};
};

struct IoCounters {
  std::atomic<std::uint64_t> commands{0}, read_bytes{0}, written_bytes{0}, bounced_commands{0}, bounced_bytes{0},
      errors{0}, retries{0}, timeouts{0}, queue_faults{0}, aborts{0}, aborted{0}, queue_deletions{0}, resets{0};
};

// Thread-safe.
class IoHost {
 public:
  virtual ~IoHost() = default;

  // Of a queue that is suspect or not healthy: ends what cannot go on, in every case within a bound, and makes the
  // queue usable again if that is possible. Called by the queue's owner, which finds the ends of its commands in it.
  virtual void recover(IoQueue& queue) = 0;
  // Whether anybody can still be expected to work on it.
  virtual bool healthy(IoQueue& queue) = 0;
  virtual int closed_error() const = 0;  // errno for what cannot be sent any more
  virtual std::shared_ptr<const RegionTable> regions() const = 0;
  virtual IoTiming timing() const = 0;

  IoCounters& count() { return count_; }

 protected:
  IoCounters count_;
};

}  // namespace tardis::nvme
