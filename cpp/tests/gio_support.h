// SPDX-License-Identifier: Apache-2.0
// Helpers of the gio tests: a grant of queue pairs on a software controller, and rings on host threads.
#pragma once

#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "gio/grant.h"
#include "gio/host_mover.h"
#include "gio/lanes.h"
#include "gio/ring.h"
#include "tests/nvme_driver_support.h"

namespace tardis::gio::testing {

using nvme::testing::Rig;
using nvme::testing::RigOptions;

inline IoContext context_of(IoOp op, std::uint64_t block, const std::byte* first, std::size_t first_bytes,
                            const std::byte* second = nullptr, std::size_t second_bytes = 0) {
  IoContext context{};
  context.op = op;
  context.block = block;
  context.memory[0] = reinterpret_cast<std::uintptr_t>(first);
  context.memory[1] = reinterpret_cast<std::uintptr_t>(second);
  context.bytes[0] = static_cast<std::uint32_t>(first_bytes);
  context.bytes[1] = static_cast<std::uint32_t>(second_bytes);
  return context;
}

// Jobs take a while and end in any order, so that slots wait for them.
class SlowMover {
 public:
  SlowMover(const GrantedQueue& queue, const RingWork& work, std::uint64_t seed)
      : queue_(queue), work_(work), random_(seed) {}

  static std::uint32_t shares(std::uint32_t, bool) { return 1; }
  void publish(std::uint32_t jobs) {
    for (; jobs != 0; --jobs) waiting_.push_back(work_.jobs[next_++ % queue_.commands]);
  }
  bool finished(std::uint32_t slot) {
    if (!waiting_.empty() && random_() % 3 == 0) {
      std::swap(waiting_.back(), waiting_[random_() % waiting_.size()]);
      move_on_host(queue_, work_, waiting_.back());
      work_.slots[waiting_.back()].movers_left = 0;
      waiting_.pop_back();
    }
    return work_.slots[slot].movers_left == 0;
  }

 private:
  const GrantedQueue& queue_;
  const RingWork work_;
  std::mt19937_64 random_;
  std::vector<std::uint32_t> waiting_;
  std::uint32_t next_ = 0;
};

// An owner of granted queue pairs: a thread for each of them runs its ring.
class HostOwner {
 public:
  explicit HostOwner(const Grant& grant) { start(grant); }

  // After renew(), too.
  void start(const Grant& grant) {
    queues_ = grant.queues();
    states_.resize(queues_.size());
    uses_.assign(queues_.size(), std::vector<std::uint16_t>(queues_.front().commands));
    for (std::size_t i = 0; i < queues_.size(); ++i) {
      queues_[i].state = &states_[i];
      queues_[i].uses = uses_[i].data();
      start_queue(queues_[i]);
    }
  }

  struct Outcome {
    std::uint32_t flag = 0;
    std::vector<IoStatus> statuses;
    std::vector<RingReport> reports;
    std::uint64_t ns = 0;

    std::uint32_t count(IoEnd end) const {
      return static_cast<std::uint32_t>(
          std::count_if(statuses.begin(), statuses.end(), [end](IoStatus status) { return status.end() == end; }));
    }
    RingError error() const {
      for (const RingReport& report : reports) {
        if (report.error != RingError::kNone) return report.error;
      }
      return RingError::kNone;
    }
  };

  template <std::uint32_t kWidth>
  Outcome run(const std::vector<IoContext>& contexts, std::uint64_t deadline_ns = 20'000'000'000,
              bool digested = false) {
    Outcome outcome;
    const auto rings = static_cast<std::uint32_t>(queues_.size());
    const auto count = static_cast<std::uint32_t>(contexts.size());
    std::vector<std::uint32_t> statuses(contexts.size());
    outcome.reports.resize(rings);
    std::uint32_t ended = 0;
    const IoControlBlock iocb{contexts.data(), &count,  statuses.data(), outcome.reports.data(), &ended, &outcome.flag,
                              deadline_ns,     nullptr, digested};
    const std::uint64_t begin = monotonic_ns();
    const auto ring = [&](std::uint32_t i) {
      AlignedBuffer memory(RingWork::bytes(queues_[i].commands, kWidth), 64);
      const RingWork work = RingWork::in(memory.data(), queues_[i].commands, kWidth);
      SlowMover mover(queues_[i], work, ++seed_);
      Ring<HostLanes<kWidth>, SlowMover>(HostLanes<kWidth>(), mover, queues_[i], work).run(iocb, i, rings);
    };
    std::vector<std::thread> threads;
    for (std::uint32_t i = 1; i < rings; ++i) threads.emplace_back(ring, i);
    ring(0);
    for (std::thread& thread : threads) thread.join();
    outcome.ns = monotonic_ns() - begin;
    EXPECT_EQ(ended, 0u);
    for (const std::uint32_t status : statuses) outcome.statuses.push_back({status});
    return outcome;
  }

  std::vector<GrantedQueue>& queues() { return queues_; }

 private:
  std::vector<GrantedQueue> queues_;
  std::vector<RingState> states_;
  std::vector<std::vector<std::uint16_t>> uses_;
  std::atomic<std::uint64_t> seed_{1};
};

// A controller in memory, its driver, and a grant of it.
struct GrantRig {
  GrantRig(RigOptions rig_options, GrantOptions grant_options)
      : rig([&] {
          rig_options.driver.external_queues = grant_options.queues;
          return std::move(rig_options);
        }()),
        options(grant_options),
        rings(options.ring_bytes()),
        bounce(options.bounce_bytes()) {
    armed = std::make_unique<nvme::SoftController::Armed>(*rig.controller);
    auto opened = Grant::open(rig.driver, {rings.data(), bounce.data()}, options);
    EXPECT_TRUE(opened) << (opened ? "" : opened.error().message);
    if (opened) grant = std::move(*opened);
    if (grant) owner = std::make_unique<HostOwner>(*grant);
  }

  // The memory of the namespace.
  std::byte* media(std::uint64_t block) {
    return rig.medium->data() + block * rig.driver->find_namespace(1)->block_bytes;
  }
  void fill_media(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (std::uint64_t i = 0; i + 8 <= rig.medium->bytes(); i += 8) {
      const std::uint64_t value = random();
      std::memcpy(rig.medium->data() + i, &value, 8);
    }
  }

  Rig rig;
  GrantOptions options;
  AlignedBuffer rings, bounce;
  std::unique_ptr<nvme::SoftController::Armed> armed;
  std::unique_ptr<Grant> grant;
  std::unique_ptr<HostOwner> owner;
};

}  // namespace tardis::gio::testing
