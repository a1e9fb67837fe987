// SPDX-License-Identifier: Apache-2.0
// What one run() is to the rest of its device.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "block/block_device.h"
#include "block/io_arbiter.h"
#include "block/queue_tuner.h"

namespace tardis {

// Shared by the runs of a device.
struct RunState {
  RunState(QueueTuner::Limits reads, QueueTuner::Limits writes) : read_tuner(reads), write_tuner(writes) {}

  IoArbiter arbiter;
  QueueTuner read_tuner, write_tuner;
  std::atomic<std::uint64_t> running{0}, started{0};
};

// Lives as long as the run. A run with a read in it counts as reading.
class RunScope {
 public:
  RunScope(RunState& state, std::span<const IoRequest> requests);
  ~RunScope();
  RunScope(const RunScope&) = delete;
  RunScope& operator=(const RunScope&) = delete;

  unsigned depth() const { return depth_; }
  // Whether a further request may start beside `in_flight` of this run. Any thread.
  bool may_start(std::size_t in_flight) { return in_flight < depth_ && (!writing_ || writing_->may_start(in_flight)); }

 private:
  RunState& state_;
  const std::span<const IoRequest> requests_;
  std::optional<IoArbiter::ReadBatch> reading_;
  std::optional<IoArbiter::WriteBatch> writing_;
  QueueTuner& tuner_;
  const bool measures_;  // it fills the queue, so that its rate says something about the depth
  const unsigned depth_;
  const bool began_alone_;
  const std::uint64_t number_;  // of this run
  const std::uint64_t began_ns_;
};

}  // namespace tardis
