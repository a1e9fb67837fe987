// SPDX-License-Identifier: Apache-2.0
#include "block/io_arbiter.h"

#include <algorithm>

namespace tardis {

IoArbiter::ReadBatch::ReadBatch(IoArbiter& arbiter) : arbiter_(arbiter) {
  arbiter_.reads_running_.fetch_add(1, std::memory_order_relaxed);
  const std::lock_guard lock(arbiter_.mutex_);
  const std::uint64_t oldest = arbiter_.oldest_mark();
  place_ = arbiter_.reads_.emplace(arbiter_.reads_.end());
  if (arbiter_.turns_) place_->mark = arbiter_.turns_->begin_read(oldest);
  ++arbiter_.counters_.read_batches;
  if (arbiter_.flushing_) arbiter_.delay(*place_);
}

IoArbiter::ReadBatch::~ReadBatch() {
  arbiter_.reads_running_.fetch_sub(1, std::memory_order_relaxed);
  const std::lock_guard lock(arbiter_.mutex_);
  const Read read = *place_;
  arbiter_.reads_.erase(place_);
  if (arbiter_.turns_) {
    const std::uint64_t flushes = arbiter_.turns_->end_read(read.mark, arbiter_.oldest_mark());
    for (std::uint64_t i = 1; i <= flushes; ++i) arbiter_.count(i);
  }
  if (read.flushes > 0 && --arbiter_.delayed_now_ == 0) arbiter_.turn_.notify_all();
}

std::uint64_t IoArbiter::oldest_mark() const {
  std::uint64_t oldest = 0;
  for (const Read& read : reads_) oldest = oldest == 0 ? read.mark : std::min(oldest, read.mark);
  return oldest;
}

void IoArbiter::delay(Read& read) {
  if (++read.flushes == 1) ++delayed_now_;
  if (!turns_) count(read.flushes);  // else all are counted at its end, those of other processes too
}

void IoArbiter::count(std::uint64_t flushes) {
  if (flushes == 1) {
    ++counters_.delayed;
  } else if (flushes == 2) {
    ++counters_.delayed_again;
  }
  counters_.max_flushes = std::max(counters_.max_flushes, flushes);
}

IoArbiter::WriteBatch::WriteBatch(IoArbiter& arbiter) : arbiter_(arbiter) {
  arbiter_.writes_running_.fetch_add(1, std::memory_order_relaxed);
}

IoArbiter::WriteBatch::~WriteBatch() { arbiter_.writes_running_.fetch_sub(1, std::memory_order_relaxed); }

bool IoArbiter::WriteBatch::may_start(std::size_t in_flight) {
  if (in_flight == 0 || arbiter_.reads_running_.load(std::memory_order_relaxed) == 0) return true;
  const std::size_t writers = std::max<std::size_t>(1, arbiter_.writes_running_.load(std::memory_order_relaxed));
  if (in_flight < kWritesBesideReads / writers) return true;
  if (!yielded_.exchange(true, std::memory_order_relaxed)) {
    arbiter_.writes_yielded_.fetch_add(1, std::memory_order_relaxed);
  }
  return false;
}

bool IoArbiter::flush_may_start(std::uint64_t ticket) const {
  return !flushing_ && serving_ == ticket && delayed_now_ == 0;
}

IoArbiter::Flush::Flush(IoArbiter& arbiter) : arbiter_(arbiter) {
  std::unique_lock lock(arbiter_.mutex_);
  const std::uint64_t ticket = arbiter_.next_ticket_++;
  if (!arbiter_.flush_may_start(ticket)) {
    ++arbiter_.counters_.flushes_postponed;
    arbiter_.turn_.wait(lock, [&] { return arbiter_.flush_may_start(ticket); });
  }
  arbiter_.flushing_ = true;
  for (Read& read : arbiter_.reads_) arbiter_.delay(read);
  lock.unlock();
  if (arbiter_.turns_) arbiter_.turns_->begin_flush();
}

IoArbiter::Flush::~Flush() {
  if (arbiter_.turns_) arbiter_.turns_->end_flush();
  {
    const std::lock_guard lock(arbiter_.mutex_);
    arbiter_.flushing_ = false;
    ++arbiter_.serving_;
  }
  arbiter_.turn_.notify_all();
}

IoArbiter::Counters IoArbiter::counters() const {
  const std::lock_guard lock(mutex_);
  Counters now = counters_;
  now.writes_yielded = writes_yielded_.load(std::memory_order_relaxed);
  return now;
}

}  // namespace tardis
