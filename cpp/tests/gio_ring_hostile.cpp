// SPDX-License-Identifier: Apache-2.0
// A ring against completions made up at random: whatever a controller writes, the ring touches nothing but its own,
// lands only what a completion names, and ends. One thread: the controller has its turn whenever the ring looks at the
// clock, so that a case is its seed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/checksum.h"
#include "gio/host_mover.h"
#include "gio/lanes.h"
#include "gio/ring.h"
#include "tests/nvme_queue_support.h"

namespace tardis::gio {
namespace {

using namespace nvme;
using nvme::testing::campaign;

constexpr std::uint32_t kSlotBytes = 4096;
constexpr std::uint16_t kQueue = 3;
constexpr std::uint64_t kDeadlineNs = 400'000, kTickNs = 1'000;

class Controller {
 public:
  Controller(GrantedQueue& queue, std::uint32_t* doorbells, std::uint64_t seed, std::uint32_t malice)
      : queue_(queue), doorbells_(doorbells), random_(seed), malice_(malice) {}

  void step() {
    ++ticks_;
    for (std::uint64_t n = random_() % 6; n > 0; --n) {
      if (head_ != doorbells_[0] && doorbells_[0] < queue_.entries) {
        fetched_.push_back(queue_.sq[head_]);
        ids_of_[{fetched_.back().start_block(), fetched_.back().command_id}] = true;
        head_ = (head_ + 1) % queue_.entries;
      }
      if (random_() % 100 < malice_) post(invented());
      if (!fetched_.empty() && random_() % 3 != 0) serve();
    }
  }
  std::uint64_t now() const { return ticks_ * kTickNs; }
  // Whether any completion said that the command of this block went well.
  bool named(std::uint64_t block) const {
    return std::any_of(ids_of_.lower_bound({block, 0}), ids_of_.upper_bound({block, 0xffff}),
                       [&](const auto& each) { return named_.contains(each.first.second); });
  }
  std::uint64_t invented_count() const { return invented_; }

 private:
  void serve() {
    const std::size_t which = random_() % fetched_.size();
    const SubmissionEntry entry = fetched_[which];
    fetched_.erase(fetched_.begin() + static_cast<std::ptrdiff_t>(which));
    EXPECT_EQ(entry.data_pointer(), DataPointer::kSgl);
    EXPECT_EQ(entry.sgl.length, kSlotBytes);
    std::memset(reinterpret_cast<void*>(entry.sgl.address), static_cast<int>(entry.start_block() & 0x7f), kSlotBytes);
    post({0, 0, static_cast<std::uint16_t>(head_), kQueue, entry.command_id, 0});
  }
  CompletionEntry invented() {
    ++invented_;
    const auto any = [&] { return static_cast<std::uint16_t>(random_()); };
    const auto small = [&](std::uint32_t below) { return static_cast<std::uint16_t>(random_() % below); };
    CompletionEntry entry{
        static_cast<std::uint32_t>(random_()), 0, static_cast<std::uint16_t>(head_), kQueue, small(queue_.commands), 0};
    switch (random_() % 10) {
      case 0:
        entry.sq_id = any();
        break;
      case 1:
        entry.sq_head = any();
        break;
      case 2:
        entry.sq_head = small(queue_.entries);
        break;
      case 3:
        entry.command_id = any();
        break;
      case 4:
        entry.status = static_cast<std::uint16_t>(any() & ~1u);
        break;
      default:  // that it has read what it has not
        if (!fetched_.empty()) entry.command_id = fetched_[random_() % fetched_.size()].command_id;
    }
    return entry;
  }
  void post(CompletionEntry entry) {
    if (CommandStatus::of(entry).ok()) named_[entry.command_id] = true;
    // It may claim to have read, and done, what it has not.
    for (std::uint32_t at = head_; at != doorbells_[0] && doorbells_[0] < queue_.entries;
         at = (at + 1) % queue_.entries) {
      ids_of_[{queue_.sq[at].start_block(), queue_.sq[at].command_id}] = true;
    }
    entry.status = static_cast<std::uint16_t>((entry.status & ~1u) | phase_);
    queue_.cq[tail_] = entry;
    if (++tail_ == queue_.entries) tail_ = 0, phase_ ^= 1;
  }

  GrantedQueue& queue_;
  std::uint32_t* const doorbells_;
  std::mt19937_64 random_;
  const std::uint32_t malice_;
  std::uint64_t ticks_ = 0, invented_ = 0;
  std::uint32_t head_ = 0, tail_ = 0, phase_ = 1;
  std::vector<SubmissionEntry> fetched_;
  std::map<std::pair<std::uint64_t, std::uint16_t>, bool> ids_of_;  // of commands that were fetched
  std::map<std::uint16_t, bool> named_;
};

template <std::uint32_t kWidth>
class SteppedLanes : public HostLanes<kWidth> {
 public:
  explicit SteppedLanes(Controller& controller) : controller_(&controller) {}
  std::uint64_t now() const {
    controller_->step();
    return controller_->now();
  }
  void relax() const {}

 private:
  Controller* controller_;
};

// Counts of what came of the cases.
struct Tally {
  std::uint64_t invented = 0, faults = 0, deadlines = 0, done = 0, damaged = 0;
};

template <std::uint32_t kWidth>
void run_case(std::uint64_t seed, Tally& tally) {
  SCOPED_TRACE("width " + std::to_string(kWidth) + ", seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto entries = static_cast<std::uint32_t>(2 + random() % (random() % 4 == 0 ? 70 : 9));
  const auto commands = static_cast<std::uint32_t>(1 + random() % (entries - 1));
  // Memory of its own size each, so that a sanitizer sees what goes beyond it.
  std::vector<SubmissionEntry> sq(entries);
  std::vector<CompletionEntry> cq(entries);
  AlignedBuffer bounce(std::size_t{commands} * kSlotBytes);
  std::vector<std::uint32_t> doorbells(2);
  std::vector<SglDescriptor> table(1);
  RingState state{};
  std::vector<std::uint16_t> uses(commands);
  GrantedQueue queue{};
  queue.sq = sq.data();
  queue.cq = cq.data();
  queue.sq_tail = doorbells.data();
  queue.cq_head = doorbells.data() + 1;
  queue.entries = entries;
  queue.commands = commands;
  queue.id = kQueue;
  queue.namespace_id = 1;
  queue.block_shift = 12;
  queue.blocks = 1 << 20;
  queue.most_bytes = queue.slot_bytes = kSlotBytes;
  queue.bounce = bounce.data();
  queue.pointers.use_sgl = true;
  ASSERT_EQ(SglTable::make({false, 1}, bounce.size(), std::uint64_t{1} << 30, table.data(), 0, sizeof(SglDescriptor),
                           queue.pointers.sgl),
            SglStatus::kOk);
  ASSERT_EQ(queue.pointers.sgl.fill_contiguous(reinterpret_cast<std::uintptr_t>(bounce.data())), SglStatus::kOk);
  queue.state = &state;
  queue.uses = uses.data();
  start_queue(queue);

  Controller controller(queue, doorbells.data(), seed,
                        random() % 3 == 0 ? 0 : static_cast<std::uint32_t>(random() % 8));
  const auto count = static_cast<std::uint32_t>(random() % 60);
  std::vector<std::byte> pages(std::size_t{count} * kSlotBytes + 64, std::byte{0xa5});
  const std::size_t skew = (16 - reinterpret_cast<std::uintptr_t>(pages.data()) % 16) % 16;
  std::vector<IoContext> contexts(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    contexts[i].op = IoOp::kRead;
    contexts[i].block = 1000 + i;
    contexts[i].memory[0] = reinterpret_cast<std::uintptr_t>(pages.data() + skew + std::size_t{i} * kSlotBytes);
    contexts[i].bytes[0] = kSlotBytes;
  }
  // Digests of what each page must be: what an invented completion claims to have read is then known to be damaged.
  const bool digested = random() % 2 == 0;
  std::vector<std::uint64_t> digests(count);
  for (std::uint32_t i = 0; i < count && digested; ++i) {
    const std::vector<std::byte> right(kSlotBytes, static_cast<std::byte>(contexts[i].block & 0x7f));
    digests[i] = xxh3_64(right.data(), kSlotBytes);
    contexts[i].digests = reinterpret_cast<std::uintptr_t>(&digests[i]);
  }
  std::vector<std::uint32_t> statuses(count);
  RingReport report{};
  std::uint32_t ended = 0, flag = kIoPending;
  const IoControlBlock iocb{contexts.data(), &count,      statuses.data(), &report, &ended,
                            &flag,           kDeadlineNs, nullptr,         digested};
  std::vector<std::byte> memory(RingWork::bytes(commands, kWidth) + 64);
  const RingWork work =
      RingWork::in(memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64, commands, kWidth);
  HostMover mover(queue, work);
  Ring<SteppedLanes<kWidth>, HostMover>(SteppedLanes<kWidth>(controller), mover, queue, work).run(iocb, 0, 1);

  EXPECT_LE(controller.now(), kDeadlineNs + 100 * kTickNs);
  EXPECT_EQ(flag, report.error == RingError::kNone ? kIoDone : kIoError);
  std::uint32_t done = 0, damaged = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    const IoEnd end = IoStatus{statuses[i]}.end();
    EXPECT_NE(end, IoEnd::kNone) << i;
    const std::byte* const page = pages.data() + skew + std::size_t{i} * kSlotBytes;
    const auto holds = [&](std::byte value) {
      return std::all_of(page, page + kSlotBytes, [value](std::byte byte) { return byte == value; });
    };
    if (end == IoEnd::kDone) {
      ++done;
      EXPECT_TRUE(controller.named(1000 + i)) << i;
      EXPECT_TRUE(!digested || holds(static_cast<std::byte>((1000 + i) & 0x7f))) << i;
    } else if (end == IoEnd::kDamaged) {
      EXPECT_TRUE(digested && controller.named(1000 + i) && !holds(static_cast<std::byte>((1000 + i) & 0x7f))) << i;
      ++damaged;
    } else {
      EXPECT_TRUE(holds(std::byte{0xa5})) << i;
    }
    if (controller.invented_count() == 0) {
      EXPECT_EQ(end, IoEnd::kDone) << i;
      EXPECT_EQ(page[0], static_cast<std::byte>((1000 + i) & 0x7f));
      EXPECT_EQ(page[kSlotBytes - 1], page[0]);
    }
  }
  EXPECT_EQ(done, report.done);
  EXPECT_EQ(damaged, report.damaged);
  EXPECT_EQ(done + damaged + report.failed + report.timed_out + report.not_sent + report.refused, count);
  EXPECT_EQ(state.down != 0, ends_queue(report.error));
  tally.invented += controller.invented_count();
  tally.faults += report.error == RingError::kQueueFault;
  tally.deadlines += report.error == RingError::kDeadline;
  tally.done += done;
  tally.damaged += damaged;
}

TEST(GioRingHostile, TouchesNothingButItsOwnAndEnds) {
  Tally tally;
  const std::uint64_t cases = campaign(2000);
  for (std::uint64_t seed = 1; seed <= cases && !::testing::Test::HasFailure(); ++seed) {
    run_case<1>(seed, tally);
    run_case<7>(seed, tally);
    run_case<32>(seed, tally);
  }
  EXPECT_GT(tally.faults, cases / 10);
  EXPECT_GT(tally.done, cases);
  EXPECT_GT(tally.damaged, 0u);
  std::printf("%llu made-up completions, %llu faults found, %llu deadlines, %llu commands done, %llu damaged\n",
              static_cast<unsigned long long>(tally.invented), static_cast<unsigned long long>(tally.faults),
              static_cast<unsigned long long>(tally.deadlines), static_cast<unsigned long long>(tally.done),
              static_cast<unsigned long long>(tally.damaged));
}

}  // namespace
}  // namespace tardis::gio
