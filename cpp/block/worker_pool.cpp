// SPDX-License-Identifier: Apache-2.0
#include "block/worker_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <string>
#include <system_error>

namespace tardis {

Result<std::unique_ptr<WorkerPool>> WorkerPool::create(std::size_t threads, const cpu_set_t* cpus) {
  auto pool = std::make_unique<WorkerPool>(Passkey());
  pool->threads_.reserve(threads);
  // Workers inherit a full mask: signals belong to the host program's threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  if (const int error = pthread_sigmask(SIG_SETMASK, &all, &before); error != 0) {
    return errno_error(error, "pthread_sigmask");
  }
  int failure = 0;
  try {
    for (std::size_t i = 0; i < threads; ++i) pool->threads_.emplace_back([raw = pool.get()] { raw->work(); });
  } catch (const std::system_error& error) {
    failure = error.code().value();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (cpus != nullptr) {
    // Only a matter of speed: where it is refused, the threads run anywhere.
    for (auto& thread : pool->threads_) (void)pthread_setaffinity_np(thread.native_handle(), sizeof *cpus, cpus);
  }
  if (failure != 0) return errno_error(failure, "starting " + std::to_string(threads) + " I/O workers (io_workers)");
  return pool;
}

WorkerPool::~WorkerPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_ready_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void WorkerPool::publish(Job& job, std::size_t count, std::size_t owner_takes) {
  if (count == 0) return;
  const std::lock_guard lock(mutex_);
  job.published_ += count;
  if (job.max_helpers_ == 0) return;
  if (!job.queued_) {
    queue_.push_back(&job);
    job.queued_ = true;
  }
  const std::size_t waiting = job.published_ - job.next_;
  const std::size_t for_workers = std::min(count, waiting - std::min(waiting, owner_takes));
  if (for_workers > 0 && may_help(job)) wake(std::min((for_workers + job.grain_ - 1) / job.grain_, job.max_helpers_));
}

bool WorkerPool::help(Job& job) {
  std::unique_lock lock(mutex_);
  if (job.next_ == job.published_) return false;
  run(job, lock);
  return true;
}

void WorkerPool::run(Job& job, std::unique_lock<std::mutex>& lock) {
  const Range range = claim(job);
  lock.unlock();
  for (std::size_t i = range.begin; i < range.end; ++i) job.body_(i);
  lock.lock();
  job.done_ += range.end - range.begin;
}

void WorkerPool::finish(Job& job) {
  std::unique_lock lock(mutex_);
  while (job.next_ < job.published_) {
    run(job, lock);
    // A job that workers had to stay away from may be theirs again.
    if (job.may_join_ != nullptr && idle_ > 0 && job.queued_ && may_help(job)) wake(1);
  }
  job.all_done_.wait(lock, [&job] { return job.done_ == job.published_; });
}

void WorkerPool::parallel_for(std::size_t count, std::size_t max_parallel, const std::function<void(std::size_t)>& body,
                              const std::function<bool(std::size_t)>* may_join) {
  if (count == 0) return;
  if (count == 1 || max_parallel <= 1) {
    for (std::size_t i = 0; i < count; ++i) body(i);
    return;
  }
  constexpr std::size_t kClaims = 4096;  // bounds the cost of the mutex for very many small indices
  Job job(body, std::min(count, max_parallel), std::max<std::size_t>(1, count / kClaims), may_join);
  publish(job, count, 1);
  finish(job);
}

void WorkerPool::work() {
  pthread_setname_np(pthread_self(), "tardis-io");
  std::unique_lock lock(mutex_);
  for (;;) {
    Job* job = pick();
    if (job == nullptr) {
      if (stop_) return;
      ++idle_;
      work_ready_.wait(lock);
      --idle_;
      continue;
    }
    ++job->helpers_;
    const Range range = claim(*job);
    // A job may have become servable again while this worker was at another one: pass the wake-up on.
    if (idle_ > 0 && pick() != nullptr) wake(1);
    lock.unlock();
    for (std::size_t i = range.begin; i < range.end; ++i) job->body_(i);
    lock.lock();
    --job->helpers_;
    job->done_ += range.end - range.begin;
    // Under the lock: the owner destroys the job as soon as it can see done_ == published_.
    if (job->done_ == job->published_) job->all_done_.notify_one();
  }
}

bool WorkerPool::may_help(const Job& job) {
  // One is the owner.
  return job.helpers_ < job.max_helpers_ && (job.may_join_ == nullptr || (*job.may_join_)(job.helpers_ + 1));
}

WorkerPool::Job* WorkerPool::pick() {
  for (Job* job : queue_) {
    if (may_help(*job)) return job;
  }
  return nullptr;
}

WorkerPool::Range WorkerPool::claim(Job& job) {
  const std::size_t begin = job.next_;
  job.next_ = std::min(job.published_, begin + job.grain_);
  if (job.queued_) {
    queue_.erase(std::find(queue_.begin(), queue_.end(), &job));
    job.queued_ = job.next_ < job.published_;
    if (job.queued_) queue_.push_back(&job);
  }
  return {begin, job.next_};
}

void WorkerPool::wake(std::size_t n) {
  n = std::min(n, idle_);
  for (std::size_t i = 0; i < n; ++i) work_ready_.notify_one();
}

}  // namespace tardis
