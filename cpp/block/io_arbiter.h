// SPDX-License-Identifier: Apache-2.0
// Reads before writes on one device: while reads run, write batches keep little in flight, and no read batch runs
// beside more than one flush.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>

#include "block/flush_turns.h"

namespace tardis {

// Thread-safe. Never holds a read back. A flush waits for the batches that an earlier flush delayed, and for nothing
// that begins while it waits: so it waits for the read batches of one moment at most, however many keep coming.
class IoArbiter {
  struct Read {
    unsigned flushes = 0;    // of this process that it ran beside
    std::uint64_t mark = 0;  // see FlushTurns
  };

 public:
  struct Counters {
    std::uint64_t read_batches, delayed, delayed_again, max_flushes, writes_yielded, flushes_postponed;
  };

  // Requests that all write batches together keep in flight beside reads. Not 0: reads that never end must not stop
  // writing for ever.
  static constexpr std::size_t kWritesBesideReads = 4;

  class ReadBatch {
   public:
    explicit ReadBatch(IoArbiter& arbiter);
    ~ReadBatch();
    ReadBatch(const ReadBatch&) = delete;
    ReadBatch& operator=(const ReadBatch&) = delete;

   private:
    IoArbiter& arbiter_;
    std::list<Read>::iterator place_;
  };

  class WriteBatch {
   public:
    explicit WriteBatch(IoArbiter& arbiter);
    ~WriteBatch();
    WriteBatch(const WriteBatch&) = delete;
    WriteBatch& operator=(const WriteBatch&) = delete;

    // Whether a further request may start beside `in_flight` of its own. Any thread; asked anew for each request. The
    // first always may.
    bool may_start(std::size_t in_flight);

   private:
    IoArbiter& arbiter_;
    std::atomic<bool> yielded_{false};
  };

  // Waits for the flush's turn; ends it when it goes.
  class Flush {
   public:
    explicit Flush(IoArbiter& arbiter);
    ~Flush();
    Flush(const Flush&) = delete;
    Flush& operator=(const Flush&) = delete;

   private:
    IoArbiter& arbiter_;
  };

  Counters counters() const;
  // From now on flushes also wait for read batches of the other processes, and theirs for those of this one. Before
  // anything is read or flushed.
  void share(std::unique_ptr<FlushTurns> turns) { turns_ = std::move(turns); }

 private:
  bool flush_may_start(std::uint64_t ticket) const;  // mutex held
  void delay(Read& read);                            // mutex held
  void count(std::uint64_t flushes);                 // mutex held; a batch ran beside one more, these in all
  std::uint64_t oldest_mark() const;                 // mutex held

  mutable std::mutex mutex_;
  std::condition_variable turn_;
  std::unique_ptr<FlushTurns> turns_;  // null: nobody else uses the drive
  std::list<Read> reads_;              // that run
  std::size_t delayed_now_ = 0;        // how many of them are delayed
  bool flushing_ = false;
  std::uint64_t next_ticket_ = 0, serving_ = 0;  // flushes go in the order they came
  Counters counters_{};
  std::atomic<std::size_t> reads_running_{0}, writes_running_{0};
  std::atomic<std::uint64_t> writes_yielded_{0};
};

}  // namespace tardis
