// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/medium_runner.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "nvme/soft/threads.h"

namespace tardis::nvme {
namespace {

enum class Use : std::uint8_t { kRead, kWrite, kFlush };

Use use_of(const MediumRequest& request) {
  switch (request.op) {
    case MediumRequest::Op::kRead:
      return Use::kRead;
    case MediumRequest::Op::kFlush:
      return Use::kFlush;
    default:
      return Use::kWrite;
  }
}

}  // namespace

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
    work_ready_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;  // what was submitted is done before the end
    // All that is alike, for the medium has many in flight at a time, and the drive gets them at once. What is not
    // alike would wait for all of it (a flush), or be taken for it (a device lets writes wait for reads).
    const Use use = use_of(queue_.front());
    std::ptrdiff_t n = 1;
    const auto most = static_cast<std::ptrdiff_t>(std::min(batch_, queue_.size()));
    while (n < most && use_of(queue_[static_cast<std::size_t>(n)]) == use) ++n;
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
