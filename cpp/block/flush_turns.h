// SPDX-License-Identifier: Apache-2.0
// Flushes of several processes that share a drive take turns: no read batch of any of them runs beside two.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace tardis {

// One process's view. The words lie in memory that the processes share; a process that was killed holds nobody up, and
// one that is stopped holds a flush up for kPatienceMs at most.
class FlushTurns {
 public:
  static constexpr std::uint64_t kPatienceMs = 1000;

  struct Shared {
    std::atomic<std::uint64_t>&
        turn;  // flushes begun so far << 16 | kBegun | place of the process whose turn it is + 1
    std::atomic<std::uint64_t>& own_oldest;                   // mark of this process's oldest read batch; 0: none
    std::uint32_t place;                                      // of this process
    std::function<bool(std::uint32_t place)> alive;           // of another
    std::function<bool(std::uint64_t mark)> all_reads_since;  // no living process reads since before this mark
  };
  explicit FlushTurns(Shared shared) : shared_(std::move(shared)) {}

  // A read batch begins; `oldest`: the mark of the oldest that runs already, or 0. Returns its mark: 1 + the number of
  // the last flush that it does not run beside.
  std::uint64_t begin_read(std::uint64_t oldest);
  // `oldest` of those that still run, or 0. Returns how many flushes the batch with this mark ran beside.
  std::uint64_t end_read(std::uint64_t mark, std::uint64_t oldest);

  void begin_flush();  // waits for its turn
  void end_flush();

 private:
  bool try_begin(std::uint64_t word, bool pass_over, bool at_any_rate);

  const Shared shared_;
  std::uint64_t held_ = 0;  // the word while it is this process's turn
};

}  // namespace tardis
