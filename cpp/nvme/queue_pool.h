// SPDX-License-Identifier: Apache-2.0
// Queues that nobody owns, given out in the order of asking.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "nvme/io_queue.h"

namespace tardis::nvme {

// Thread-safe.
class QueuePool {
 public:
  void add(IoQueue& queue) {
    const std::lock_guard lock(mutex_);
    unowned_.push_back(&queue);
  }

  // A queue pair for one thread, which is waited for.
  class Lease {
   public:
    explicit Lease(QueuePool& pool) : pool_(pool), queue_(pool.acquire()) {}
    ~Lease() { pool_.give_back(queue_); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    IoQueue& operator*() const { return queue_; }

   private:
    QueuePool& pool_;
    IoQueue& queue_;
  };

 private:
  IoQueue& acquire() {
    std::unique_lock lock(mutex_);
    const std::uint64_t ticket = next_ticket_++;
    changed_.wait(lock, [&] { return ticket == served_ && !unowned_.empty(); });
    ++served_;
    IoQueue* const queue = unowned_.back();
    unowned_.pop_back();
    // Whoever asked next waited for this one to be served, too.
    if (!unowned_.empty()) changed_.notify_all();
    return *queue;
  }
  void give_back(IoQueue& queue) {
    {
      const std::lock_guard lock(mutex_);
      unowned_.push_back(&queue);
    }
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<IoQueue*> unowned_;
  std::uint64_t next_ticket_ = 0, served_ = 0;
};

}  // namespace tardis::nvme
