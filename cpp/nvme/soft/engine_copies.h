// SPDX-License-Identifier: Apache-2.0
// A worker's copies by one engine: gathered over a pass, started as batches, and found to have ended.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "nvme/soft/command.h"
#include "nvme/soft/copy_engine.h"
#include "nvme/soft/staging.h"

namespace tardis::nvme {

// By one thread at a time.
class EngineCopies {
 public:
  static Result<std::unique_ptr<EngineCopies>> open(CopyEngine& engine, std::size_t staging_bytes);
  ~EngineCopies();

  CopyEngine& engine() const { return engine_; }
  StagingRing& staging() { return staging_; }
  void add(SoftCommand& command, CopyDirection direction, const tardis_copy& copy);
  // Starts what was added, as far as not too much runs; called until running() is false.
  void submit();
  // Appends the commands whose last batch has ended. True if a batch has.
  bool take_ended(std::vector<SoftCommand*>& commands);
  bool running() const { return busy_ != 0; }

 private:
  // What is started at once is found to have ended together: small enough that what comes next is on its way by then.
  static constexpr std::size_t kMostCopies = 32;
  static constexpr std::uint64_t kMostBytes = 2 << 20;
  // Of a direction. An engine is busy with so many, and batches grow meanwhile; and what a driver of it needs is
  // bounded, who might wait for the engine to get more.
  static constexpr std::uint32_t kMostRunning = 4;

  struct Batch {
    CopyDirection direction;
    std::vector<tardis_copy> copies;
    std::vector<SoftCommand*> commands;  // each once
    std::uint64_t bytes = 0;
  };
  static constexpr std::size_t kNone = ~std::size_t{0};
  struct Side {  // of a direction
    std::size_t open = kNone;
    std::deque<std::size_t> full;
    std::uint32_t running = 0;  // started
  };

  EngineCopies(CopyEngine& engine, PinnedBuffer memory, std::unique_ptr<CopyLane> lane)
      : engine_(engine),
        memory_(std::move(memory)),
        staging_(memory_.data(), memory_.bytes()),
        lane_(std::move(lane)) {}
  Side& side_of(CopyDirection direction) { return sides_[static_cast<std::size_t>(direction)]; }
  std::size_t take_batch(CopyDirection direction);
  void submit(Side& side);
  void end(std::size_t batch, bool failed, std::vector<SoftCommand*>& commands);

  CopyEngine& engine_;
  PinnedBuffer memory_;
  StagingRing staging_;
  std::vector<std::unique_ptr<Batch>> batches_;
  std::vector<std::size_t> free_;
  std::array<Side, 2> sides_;
  std::vector<std::size_t> refused_;      // by the lane
  std::size_t busy_ = 0;                  // batches with copies that have not ended
  const std::unique_ptr<CopyLane> lane_;  // the last to be made: it goes first, and no copy runs any more
};

}  // namespace tardis::nvme
