// SPDX-License-Identifier: Apache-2.0
// A fixed set of threads that share out the indices of jobs. Threads sleep when there is nothing to do; whoever waits
// for a job works on it too, so that nested use cannot deadlock.
#pragma once

#include <sched.h>

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
    // At most `max_parallel` calls at once, the owner's included. Workers take `grain` indices at a time. `may_join`,
    // if given, is asked whether one more may run beside so many; it is called under a lock and must not block.
    Job(const std::function<void(std::size_t)>& body, std::size_t max_parallel, std::size_t grain = 1,
        const std::function<bool(std::size_t)>* may_join = nullptr)
        : body_(body), max_helpers_(max_parallel - 1), grain_(grain), may_join_(may_join) {}
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

   private:
    friend class WorkerPool;
    const std::function<void(std::size_t)>& body_;
    const std::size_t max_helpers_;
    const std::size_t grain_;
    const std::function<bool(std::size_t)>* const may_join_;
    // Guarded by the pool's mutex.
    std::size_t published_ = 0;
    std::size_t next_ = 0;
    std::size_t done_ = 0;
    std::size_t helpers_ = 0;
    bool queued_ = false;
    std::condition_variable all_done_;
  };

  // `cpus`: the processors that the threads may use; null: those of the calling thread.
  static Result<std::unique_ptr<WorkerPool>> create(std::size_t threads, const cpu_set_t* cpus = nullptr);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Makes `count` more indices of `job` available. No thread is woken as long as no more than `owner_takes` wait to be
  // run: those the owner will run itself, in help() or finish().
  void publish(Job& job, std::size_t count, std::size_t owner_takes = 0);
  // The owner runs some that wait to be run, if any do.
  bool help(Job& job);
  // Works on `job` and returns when every published index is done.
  void finish(Job& job);

  // body(i) for i in [0, count), by at most `max_parallel` threads with the calling one among them.
  void parallel_for(std::size_t count, std::size_t max_parallel, const std::function<void(std::size_t)>& body,
                    const std::function<bool(std::size_t)>* may_join = nullptr);

  std::size_t threads() const { return threads_.size(); }

 private:
  struct Range {
    std::size_t begin, end;
  };

  void work();
  Job* pick();                           // a queued job that may take another helper, or null; mutex held
  static bool may_help(const Job& job);  // mutex held
  Range claim(Job& job);                 // mutex held; takes an exhausted job off the queue
  void run(Job& job, std::unique_lock<std::mutex>& lock);  // claims, runs and counts
  void wake(std::size_t n);                                // mutex held

  std::mutex mutex_;
  std::condition_variable work_ready_;
  std::deque<Job*>
      queue_;  // jobs with unclaimed indices; served in turn, so that a small job is not stuck behind a large one
  std::size_t idle_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace tardis
