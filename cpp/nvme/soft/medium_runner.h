// SPDX-License-Identifier: Apache-2.0
// Threads that wait for a drive, so that those that serve queues need not.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "base/status.h"
#include "nvme/soft/medium.h"

namespace tardis::nvme {

class MediumRunner {
 public:
  // `done` is called as a Medium's completion is.
  MediumRunner(Medium& medium, std::size_t batch, Medium::Completion done)
      : medium_(medium), batch_(batch), done_(std::move(done)) {}
  ~MediumRunner();
  Status start(std::size_t threads);

  void submit(std::span<const MediumRequest> requests);
  Medium& medium() { return medium_; }
  std::uint64_t cpu_ns() const;

 private:
  void work();

  Medium& medium_;
  const std::size_t batch_;
  const Medium::Completion done_;
  std::mutex mutex_;
  std::condition_variable work_ready_;
  std::deque<MediumRequest> queue_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace tardis::nvme
