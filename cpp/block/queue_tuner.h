// SPDX-License-Identifier: Apache-2.0
// Finds how many requests a device gains from having in flight.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace tardis {

// Hill climbing by duels: the present depth and one twice or half as large take turns, run by run, so that whatever
// else slows the device meets both alike; the medians decide. More depth must pay (it delays others), less must not
// cost. When neither neighbour wins, the depth stands for a while. Knows no clock: the same reports give the same
// depths. Thread-safe.
class QueueTuner {
 public:
  struct Limits {
    unsigned least = 1, start = 1, most = 1;
  };

  static constexpr std::size_t kRounds = 7;       // runs of each side of a duel
  static constexpr unsigned kRest = 512;          // runs between one search and the next
  static constexpr double kWorthMore = 1.05;      // of the smaller depth's rate
  static constexpr double kWorthNothing = 0.985;  // of the larger depth's rate

  explicit QueueTuner(Limits limits) : limits_(limits), depth_(limits.start) {}

  // For the next run.
  unsigned next();
  // A run at that depth, which next() gave, moved that many bytes with nothing else on the device. Only runs of as many
  // requests as the depth that stands are reported.
  void finished(unsigned depth, std::uint64_t bytes, std::uint64_t nanoseconds);
  // The one that stands.
  unsigned depth() const;

 private:
  enum class Search : std::uint8_t { kRest, kUp, kDown };

  bool fixed() const { return limits_.least == limits_.most; }
  void begin();              // a search, or a rest if there is nowhere to go
  void duel(Search search);  // sets up the challenger
  void decide();
  static double median(std::array<double, kRounds> rates);

  const Limits limits_;
  mutable std::mutex mutex_;
  unsigned depth_;
  Search search_ = Search::kRest;
  unsigned challenger_ = 0;
  bool went_up_ = false;  // in this search; then there is no need to look below
  bool challenger_next_ = false;
  unsigned rested_ = kRest;  // the first run starts the first search
  std::array<double, kRounds> own_{}, other_{};
  std::size_t own_runs_ = 0, other_runs_ = 0;
};

}  // namespace tardis
