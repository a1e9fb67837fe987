// SPDX-License-Identifier: Apache-2.0
// Each fault of a controller alone: what the client sees, how long it takes, and that no memory is touched afterwards.
// The measured times are those of docs/nvme-faults.md.
#include <cctype>
#include <cstdio>
#include <functional>
#include <thread>

#include "base/clock.h"
#include "tests/nvme_driver_support.h"

namespace tardis::nvme {
namespace {

using testing::Rig;
using testing::RigOptions;
using Op = NamespaceRequest::Op;
using std::chrono::milliseconds;

constexpr std::uint32_t kIoMs = 200, kGraceMs = 100, kAdminMs = 300, kReadyMs = 200;
constexpr std::uint64_t kBlocks = 8;  // of the request
constexpr std::size_t kBytes = kBlocks * 4096;
constexpr int kSlackMs = 5000;  // of a loaded machine

struct Case {
  const char* name;
  std::function<void(RigOptions&)> prepare;
  std::function<void(Rig&)> inject;
  int error;              // of a read
  int least_ms, most_ms;  // most without what a loaded machine adds
  std::function<void(const DriverCounters&)> check;
  DriverState state = DriverState::kLive;
  int late_ms = 0;          // the controller wants to touch the memory so long after it got the command
  bool violations = false;  // it tries to, although that was taken away
};

FaultRule rule(FaultKind kind, std::optional<std::uint8_t> opcode = static_cast<std::uint8_t>(IoOpcode::kRead)) {
  FaultRule made;
  made.kind = kind;
  made.queue = 1;
  made.opcode = opcode;
  return made;
}
FaultRule admin_rule(FaultKind kind, AdminOpcode opcode) {
  FaultRule made;
  made.kind = kind;
  made.queue = 0;
  made.opcode = static_cast<std::uint8_t>(opcode);
  return made;
}
FaultRule delayed(FaultRule made, int ms, bool late_data = false) {
  made.delay = milliseconds(ms);
  made.late_data = late_data;
  return made;
}
FaultRule with_status(std::uint16_t status, std::uint64_t count) {
  FaultRule made = rule(FaultKind::kStatus);
  made.status = status;
  made.count = count;
  return made;
}

void no_abort(RigOptions& options) { options.soft.aborts = false; }
void impatient(RigOptions& options) {
  options.driver.admin_timeout_ms = kAdminMs;
  options.driver.ready_timeout_ms = kReadyMs;
}

std::vector<Case> cases() {
  const auto nothing = [](RigOptions&) {};
  std::vector<Case> all;
  const auto add = [&](Case made) { all.push_back(std::move(made)); };

  add({"completion lost", nothing, [](Rig& rig) { rig.faults->add(rule(FaultKind::kLostCompletion)); }, ETIMEDOUT,
       int(kIoMs), int(kIoMs),
       [](const DriverCounters& c) {
         EXPECT_EQ(c.timeouts, 1u);
         EXPECT_EQ(c.aborted, 1u);
         EXPECT_EQ(c.queue_deletions + c.resets, 0u);
       }});
  add({"completion lost, Abort refused", no_abort, [](Rig& rig) { rig.faults->add(rule(FaultKind::kLostCompletion)); },
       ETIMEDOUT, int(kIoMs + kGraceMs), int(kIoMs + kGraceMs),
       [](const DriverCounters& c) {
         EXPECT_EQ(c.aborts, 1u);
         EXPECT_EQ(c.aborted, 0u);
         EXPECT_EQ(c.queue_deletions, 1u);
         EXPECT_EQ(c.resets, 0u);
       }});
  add({"completion late, before its time is over", nothing,
       [](Rig& rig) { rig.faults->add(delayed(rule(FaultKind::kLateCompletion), 50)); }, 0, 50, 60,
       [](const DriverCounters& c) { EXPECT_EQ(c.timeouts, 0u); }});
  add({"completion late, Abort refused, within the grace", no_abort,
       [](Rig& rig) { rig.faults->add(delayed(rule(FaultKind::kLateCompletion), kIoMs + kGraceMs / 2)); }, 0,
       int(kIoMs), int(kIoMs + kGraceMs),
       [](const DriverCounters& c) {
         EXPECT_EQ(c.timeouts, 1u);
         EXPECT_EQ(c.queue_deletions + c.resets, 0u);
       }});
  add({"completion late, Abort refused, after the grace", no_abort,
       [](Rig& rig) { rig.faults->add(delayed(rule(FaultKind::kLateCompletion), 600)); }, 0, int(kIoMs + kGraceMs),
       int(kIoMs + kGraceMs), [](const DriverCounters& c) { EXPECT_EQ(c.queue_deletions, 1u); }});
  add({"data and completion late, aborted", nothing,
       [](Rig& rig) { rig.faults->add(delayed(rule(FaultKind::kLateCompletion), 500, true)); }, ETIMEDOUT, int(kIoMs),
       int(kIoMs), [](const DriverCounters& c) { EXPECT_EQ(c.aborted, 1u); }, DriverState::kLive, 500});
  add({"data late, completion lost, Abort refused", no_abort,
       [](Rig& rig) { rig.faults->add(delayed(rule(FaultKind::kLostCompletion), 500, true)); }, ETIMEDOUT,
       int(kIoMs + kGraceMs), int(kIoMs + kGraceMs), [](const DriverCounters& c) { EXPECT_EQ(c.queue_deletions, 1u); },
       DriverState::kLive, 500});
  add({"completion posted twice", nothing, [](Rig& rig) { rig.faults->add(rule(FaultKind::kDuplicate)); }, 0, 0,
       int(kGraceMs), [](const DriverCounters& c) { EXPECT_EQ(c.timeouts + c.resets, 0u); }});
  add({"completions in another order", nothing,
       [](Rig& rig) {
         FaultRule made = rule(FaultKind::kReorder);
         made.count = 0;
         rig.faults->add(made);
       },
       0, 0, 10, [](const DriverCounters& c) { EXPECT_EQ(c.timeouts + c.queue_faults, 0u); }});
  add({"completion under a wrong command id", nothing,
       [](Rig& rig) { rig.faults->add(rule(FaultKind::kWrongCommandId)); }, 0, int(kGraceMs), int(kGraceMs),
       [](const DriverCounters& c) {
         EXPECT_EQ(c.queue_faults, 1u);
         EXPECT_EQ(c.queue_deletions, 1u);
         EXPECT_GE(c.retries, 1u);
       }});
  add({"status SC=0, SCT=3, once", nothing, [](Rig& rig) { rig.faults->add(with_status(0x300, 1)); }, 0, 0, 10,
       [](const DriverCounters& c) { EXPECT_EQ(c.retries, 1u); }});
  add({"status SC=0, SCT=3, always", nothing, [](Rig& rig) { rig.faults->add(with_status(0x300, 0)); }, EREMOTEIO, 0,
       10, [](const DriverCounters& c) { EXPECT_EQ(c.retries % 4, 0u); }});
  add({"status that says: do not retry", nothing,
       [](Rig& rig) { rig.faults->add(with_status(kScInternal | 1 << 14, 1)); }, EREMOTEIO, 0, 10,
       [](const DriverCounters& c) { EXPECT_EQ(c.retries, 0u); }});
  add({"status that asks for 100 ms before the retry", nothing,
       [](Rig& rig) { rig.faults->add(with_status(kScNamespaceNotReady | 1 << 11, 1)); }, 0, 100, 110,
       [](const DriverCounters& c) { EXPECT_EQ(c.retries, 1u); }});
  add({"status that asks for longer than allowed", [](RigOptions& o) { o.driver.max_retry_delay_ms = 99; },
       [](Rig& rig) { rig.faults->add(with_status(kScNamespaceNotReady | 1 << 11, 1)); }, EBUSY, 0, 10,
       [](const DriverCounters& c) { EXPECT_EQ(c.retries, 0u); }});
  add({"media error on a block", nothing,
       [](Rig& rig) {
         FaultRule made = rule(FaultKind::kMediaError);
         made.first_block = made.last_block = 3;
         made.count = 0;
         rig.faults->add(made);
       },
       EIO, 0, 10, [](const DriverCounters& c) { EXPECT_EQ(c.retries, 4u); }});
  add({"submission queue head stuck", [](RigOptions& o) { o.driver.queue_entries = 4; },
       [](Rig& rig) { rig.faults->add(rule(FaultKind::kStuckSqHead)); }, 0, 0, int(kGraceMs),
       [](const DriverCounters& c) { EXPECT_GE(c.queue_deletions, 1u); }});
  add({"drive stalls for longer than the time", nothing,
       [](Rig& rig) { rig.faults->add(delayed(rule(FaultKind::kSlow), 600)); }, ETIMEDOUT, int(kIoMs),
       int(kIoMs + kGraceMs), [](const DriverCounters& c) { EXPECT_GE(c.timeouts, 1u); }});
  add({"completion lost, Abort not answered", impatient,
       [](Rig& rig) {
         rig.faults->add(rule(FaultKind::kLostCompletion));
         rig.faults->add(admin_rule(FaultKind::kLostCompletion, AdminOpcode::kAbort));
       },
       ETIMEDOUT, int(kIoMs + kAdminMs), int(kIoMs + 2 * kAdminMs),
       [](const DriverCounters& c) { EXPECT_EQ(c.resets, 1u); }});
  add({"data late, Abort refused, deletion not answered", [](RigOptions& o) { no_abort(o), impatient(o); },
       [](Rig& rig) {
         rig.faults->add(delayed(rule(FaultKind::kLostCompletion), 900, true));
         rig.faults->add(admin_rule(FaultKind::kLostCompletion, AdminOpcode::kDeleteSq));
       },
       ETIMEDOUT, int(kIoMs + kGraceMs + kAdminMs), int(kIoMs + kGraceMs + 2 * kAdminMs),
       [](const DriverCounters& c) { EXPECT_EQ(c.resets, 1u); }, DriverState::kLive, 900});
  add({"completion lost, deletion refused", no_abort,
       [](Rig& rig) {
         rig.faults->add(rule(FaultKind::kLostCompletion));
         FaultRule made = admin_rule(FaultKind::kStatus, AdminOpcode::kDeleteSq);
         made.status = kScInternal;
         rig.faults->add(made);
       },
       ETIMEDOUT, int(kIoMs + kGraceMs), int(kIoMs + kGraceMs),
       [](const DriverCounters& c) { EXPECT_EQ(c.resets, 1u); }});
  add({"fatal status (CFS)", nothing, [](Rig& rig) { rig.faults->add(rule(FaultKind::kFatal)); }, 0, 0, 20,
       [](const DriverCounters& c) {
         EXPECT_EQ(c.resets, 1u);
         EXPECT_EQ(c.timeouts, 0u);
       }});
  add({"fatal status that a reset does not clear", nothing,
       [](Rig& rig) {
         rig.faults->add(rule(FaultKind::kFatal));
         rig.faults->add(admin_rule(FaultKind::kFatal, AdminOpcode::kIdentify));
       },
       ENXIO, 0, 40, [](const DriverCounters& c) { EXPECT_EQ(c.resets, 1u); }, DriverState::kFailed});
  add({"power lost and back", nothing, [](Rig& rig) { rig.controller->cut_power(); }, 0, 0, 20,
       [](const DriverCounters& c) { EXPECT_EQ(c.resets, 1u); }});
  for (const bool zeros : {false, true}) {
    const FaultKind kind = zeros ? FaultKind::kRemovedZeros : FaultKind::kRemovedAllOnes;
    add({zeros ? "removed, reads as zeros" : "removed, reads as all ones", nothing,
         [kind](Rig& rig) { rig.faults->add(rule(kind)); }, ENODEV, 0, 20,
         [](const DriverCounters& c) { EXPECT_EQ(c.timeouts, 0u); }, DriverState::kGone});
  }
  add({"data late, controller cannot be reset", [](RigOptions& o) { no_abort(o), impatient(o); },
       [](Rig& rig) {
         rig.faults->add(delayed(rule(FaultKind::kLostCompletion), 1100, true));
         rig.faults->add(admin_rule(FaultKind::kLostCompletion, AdminOpcode::kDeleteSq));
         rig.controller->hold_ready(true);
       },
       ENXIO, int(kIoMs + kGraceMs + kAdminMs + kReadyMs), int(kIoMs + kGraceMs + 2 * kAdminMs + kReadyMs),
       [](const DriverCounters& c) { EXPECT_EQ(c.resets, 1u); }, DriverState::kFailed, 1100, true});
  return all;
}

std::vector<std::tuple<std::size_t, bool>> runs() {
  std::vector<std::tuple<std::size_t, bool>> all;
  const auto each = cases();
  for (std::size_t i = 0; i < each.size(); ++i) {
    all.emplace_back(i, true);
    if (each[i].late_ms > 0) all.emplace_back(i, false);
  }
  return all;
}

class NvmeDriverFault : public ::testing::TestWithParam<std::tuple<std::size_t, bool>> {};

// A read into registered or, where memory is touched late, into other memory while the fault is in force. Afterwards
// the memory gets a pattern, which must stay: for longer than the controller holds data back.
TEST_P(NvmeDriverFault, EndsInTimeAndTouchesNothingAfterwards) {
  const Case wrong = cases()[std::get<0>(GetParam())];
  const bool registered = std::get<1>(GetParam());
  RigOptions options;
  options.soft.mdts = 1;  // several commands
  options.driver.queues = 1;
  // Short only where that is waited for, since a machine that is loaded must not add time-outs of its own. CSTS shows
  // that a controller failed or is gone long before.
  options.driver.io_timeout_ms = wrong.least_ms >= int(kIoMs) ? kIoMs : 20'000;
  options.driver.abort_grace_ms = kGraceMs;
  wrong.prepare(options);
  Rig rig(options);
  ASSERT_NE(rig.disk, nullptr);
  if (wrong.violations) rig.excused = {ViolationKind::kDma, ViolationKind::kDmaAfterUnmap};
  AlignedBuffer source(kBytes), memory(kBytes);
  for (std::size_t i = 0; i < kBytes; ++i) source.data()[i] = static_cast<std::byte>(i * 7 + i / 4096);
  std::memcpy(rig.medium->data(), source.data(), kBytes);
  ASSERT_TRUE(!registered || rig.disk->register_memory(memory.data(), kBytes));

  wrong.inject(rig);
  const std::uint64_t start = monotonic_ns();
  const int error = rig.read(0, memory.data(), kBytes);
  const double took_ms = static_cast<double>(monotonic_ns() - start) / 1e6;
  EXPECT_TRUE(error != 0 || std::memcmp(memory.data(), source.data(), kBytes) == 0) << "wrong bytes";
  std::memset(memory.data(), 0x5a, kBytes);
  std::printf("[ FAULT    ] %-52s | %-10s | %7.1f ms%s\n", wrong.name, error == 0 ? "success" : std::strerror(error),
              took_ms, registered ? "" : " (bounced)");
  EXPECT_EQ(error, wrong.error) << std::strerror(error);
  EXPECT_GE(took_ms, wrong.least_ms);
  EXPECT_LE(took_ms, wrong.most_ms + kSlackMs);
  EXPECT_EQ(rig.driver->state(), wrong.state);
  DriverCounters counters = rig.driver->counters();
  wrong.check(counters);
  EXPECT_EQ(counters.quarantined, 0u);

  rig.faults->clear();
  rig.controller->hold_ready(false);
  if (wrong.state == DriverState::kLive) {
    // All of the queue is usable again.
    AlignedBuffer other(kBytes);
    for (std::uint32_t i = 0; i < 2 * rig.driver->queue_depth() && i < 64; ++i) {
      int again = ETIMEDOUT;
      for (int attempt = 0; attempt < 20 && again == ETIMEDOUT; ++attempt) {
        again = rig.read(0, other.data(), kBytes);
      }
      ASSERT_EQ(again, 0);
      ASSERT_EQ(std::memcmp(other.data(), source.data(), kBytes), 0);
    }
  } else {
    AlignedBuffer other(kBytes);
    EXPECT_EQ(rig.read(0, other.data(), kBytes), wrong.error);
    EXPECT_EQ(rig.space->mapped_ranges(), 0u);
  }
  while (monotonic_ns() < start + static_cast<std::uint64_t>(wrong.late_ms + 50) * 1'000'000) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  for (std::size_t i = 0; i < kBytes; ++i) ASSERT_EQ(memory.data()[i], std::byte{0x5a}) << "byte " << i;
}

// A queue is about to be deleted, and commands of it are still at work: those that complete in time are not sent again.
TEST(NvmeDriverFaultOfOne, WhatCompletesBeforeTheDeletionIsNotSentAgain) {
  RigOptions options;
  options.soft.mdts = 1;  // several commands
  options.driver.queues = 1;
  options.driver.abort_grace_ms = 500;
  Rig rig(options);
  ASSERT_NE(rig.disk, nullptr);
  rig.faults->add(rule(FaultKind::kWrongCommandId));
  FaultRule late = delayed(rule(FaultKind::kLateCompletion), 50);
  late.count = 3;
  rig.faults->add(late);
  AlignedBuffer memory(kBytes);
  EXPECT_EQ(rig.read(0, memory.data(), kBytes), 0);
  const DriverCounters counters = rig.driver->counters();
  EXPECT_EQ(counters.queue_deletions, 1u);
  EXPECT_EQ(counters.retries, 1u);
}

INSTANTIATE_TEST_SUITE_P(Faults, NvmeDriverFault, ::testing::ValuesIn(runs()), [](const auto& info) {
  std::string name = cases()[std::get<0>(info.param)].name;
  std::string plain;
  for (const char c : name) plain += std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return plain + (std::get<1>(info.param) ? "_registered" : "_bounced");
});

}  // namespace
}  // namespace tardis::nvme
