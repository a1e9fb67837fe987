// SPDX-License-Identifier: Apache-2.0
// A fixed set of threads that share out the indices of jobs. Threads sleep when there is nothing to do; whoever waits
// for a job works on it too, so that nested use cannot deadlock.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/status.h"

namespace tardis {

class WorkerPool {
  struct Passkey {
    explicit Passkey() = default;
  };

 public:
  explicit WorkerPool(Passkey) {}
  // Work that arrives over time: body(0), body(1), ... are called once each, in any order and in parallel, as they are
  // published. Lives on the stack of its owner, which must call finish() before it goes. `body` must not throw.
  class Job {
   public:
    // At most `max_parallel` calls at once, the owner's in finish() included. Workers take `grain` indices at a time.
    Job(const std::function<void(std::size_t)>& body, std::size_t max_parallel, std::size_t grain = 1)
        : body_(body), max_helpers_(max_parallel - 1), grain_(grain) {}
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

   private:
    friend class WorkerPool;
    const std::function<void(std::size_t)>& body_;
    const std::size_t max_helpers_;
    const std::size_t grain_;
    // Guarded by the pool's mutex.
    std::size_t published_ = 0;
    std::size_t next_ = 0;
    std::size_t done_ = 0;
    std::size_t helpers_ = 0;
    bool queued_ = false;
    std::condition_variable all_done_;
  };

  static Result<std::unique_ptr<WorkerPool>> create(std::size_t threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Makes `count` more indices of `job` available. `owner_takes` of them will be run by the owner, which is about to
  // call finish(): no thread is woken for them.
  void publish(Job& job, std::size_t count, std::size_t owner_takes = 0);
  // Works on `job` and returns when every published index is done.
  void finish(Job& job);

  // body(i) for i in [0, count), by at most `max_parallel` threads with the calling one among them.
  void parallel_for(std::size_t count, std::size_t max_parallel, const std::function<void(std::size_t)>& body);

  std::size_t threads() const { return threads_.size(); }

 private:
  struct Range {
    std::size_t begin, end;
  };

  void work();
  Job* pick();               // a queued job that may take another helper, or null; mutex held
  Range claim(Job& job);     // mutex held; takes an exhausted job off the queue
  void wake(std::size_t n);  // mutex held

  std::mutex mutex_;
  std::condition_variable work_ready_;
  std::deque<Job*>
      queue_;  // jobs with unclaimed indices; served in turn, so that a small job is not stuck behind a large one
  std::size_t idle_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace tardis
