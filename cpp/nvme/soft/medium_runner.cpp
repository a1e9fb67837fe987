// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/medium_runner.h"

#include <algorithm>
#include <utility>

#include "nvme/soft/threads.h"

namespace tardis::nvme {

Status MediumRunner::start(std::size_t threads) {
  for (std::size_t i = 0; i < threads; ++i) {
    Result<std::thread> thread = start_thread("tardis-medium", [this] { work(); }, {});
    if (!thread) return thread.error();
    threads_.push_back(std::move(*thread));
  }
  return {};
}

MediumRunner::~MediumRunner() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_ready_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void MediumRunner::submit(std::span<const MediumRequest> requests) {
  {
    const std::lock_guard lock(mutex_);
    queue_.insert(queue_.end(), requests.begin(), requests.end());
  }
  work_ready_.notify_one();
}

void MediumRunner::work() {
  std::vector<MediumRequest> batch;
  std::unique_lock lock(mutex_);
  while (true) {
    ++free_threads_;
    work_ready_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;  // what was submitted is done before the end
    // All that are free take a share: a thread comes back for more only when the last request of its own has finished.
    const std::size_t share = (queue_.size() + free_threads_ - 1) / free_threads_;
    --free_threads_;
    const auto n = static_cast<std::ptrdiff_t>(std::min(batch_, share));
    batch.assign(queue_.begin(), queue_.begin() + n);
    queue_.erase(queue_.begin(), queue_.begin() + n);
    const bool more = !queue_.empty();
    lock.unlock();
    if (more) work_ready_.notify_one();
    medium_.run(batch, done_);
    lock.lock();
  }
}

std::uint64_t MediumRunner::cpu_ns() const {
  std::uint64_t sum = 0;
  for (const auto& thread : threads_) sum += thread_cpu_ns(thread);
  return sum;
}

}  // namespace tardis::nvme
