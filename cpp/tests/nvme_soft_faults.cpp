// SPDX-License-Identifier: Apache-2.0
// What the software controller breaks on purpose: every kind of fault, seen by a client that watches closely.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <set>
#include <thread>
#include <vector>

#include "nvme_soft_client.h"

namespace tardis::nvme::testing {
namespace {

using std::chrono::milliseconds;

constexpr std::uint64_t kSoonNs = 30'000'000;  // long enough for what must not come

struct Faulty : HandClient {
  explicit Faulty(SoftControllerOptions options = memory_options())
      : HandClient(std::move(options)), data(space(), 64 * 4096) {
    EXPECT_TRUE(enable());
    io = queue(1, 64);
  }
  FaultRule rule(FaultKind kind) {
    FaultRule made;
    made.kind = kind;
    made.queue = 1;
    return made;
  }
  std::uint16_t read(std::uint16_t id, std::uint64_t block = 0) {
    return io->status(io_command(IoOpcode::kRead, id, block, 1, data.address()));
  }
  // CID of the next completion, or -1 if none comes.
  int next(std::uint64_t patience_ns = kPatienceNs) {
    const auto done = io->wait(patience_ns);
    return done ? done->command_id : -1;
  }
  // DW0 of Abort: 0 if the command was aborted.
  std::uint32_t abort(std::uint16_t id, std::uint16_t from = 1) {
    std::uint32_t result = 9;
    EXPECT_EQ(admin().status(admin_command(AdminOpcode::kAbort, from | std::uint32_t{id} << 16), &result), 0);
    return result;
  }

  // Reads block 0 to the first page, whose data arrives `delay` later. What it will be.
  std::string read_late(FaultKind kind, std::chrono::nanoseconds delay) {
    data.fill(8);
    EXPECT_EQ(io->status(io_command(IoOpcode::kWrite, 1, 0, 1, data.address())), 0);
    std::string content = data.text(0, 4096);
    std::memset(data.data(), 0, 4096);
    FaultRule late = rule(kind);
    late.delay = delay;
    late.late_data = true;
    faults().add(late);
    io->submit(io_command(IoOpcode::kRead, 3, 0, 1, data.address()));
    io->submit(io_command(IoOpcode::kFlush, 4));
    EXPECT_EQ(next(), 4);
    return content;
  }

  SharedMemory data;
  std::unique_ptr<HandQueue> io;
};

TEST(NvmeSoftFaults, LostAndAborted) {
  Faulty client;
  client.faults().add(client.rule(FaultKind::kLostCompletion));
  client.io->submit(io_command(IoOpcode::kRead, 3, 0, 1, client.data.address()));
  EXPECT_EQ(client.next(kSoonNs), -1);
  EXPECT_EQ(client.read(4), 0);
  EXPECT_EQ(client.controller().counters().outstanding, 1u);
  EXPECT_EQ(client.abort(3), 0u);
  const auto done = client.io->wait();
  ASSERT_TRUE(done);
  EXPECT_EQ(done->command_id, 3);
  EXPECT_EQ(CommandStatus::of(*done).raw, kScAbortRequested);
  EXPECT_EQ(client.abort(3), 1u);
  EXPECT_EQ(client.abort(4), 1u);
  EXPECT_EQ(client.controller().counters().outstanding, 0u);
  EXPECT_EQ(client.faults().injected(FaultKind::kLostCompletion), 1u);
  EXPECT_EQ(client.complaints(), "");
}

TEST(NvmeSoftFaults, AbortsMayBeRefused) {
  SoftControllerOptions options = memory_options();
  options.aborts = false;
  Faulty client(std::move(options));
  client.faults().add(client.rule(FaultKind::kLostCompletion));
  client.io->submit(io_command(IoOpcode::kFlush, 3));
  EXPECT_EQ(client.abort(3), 1u);
  EXPECT_EQ(client.next(kSoonNs), -1);
  // What remains is to delete the queue: the command ends with it.
  EXPECT_EQ(client.delete_sq(1), 0);
  EXPECT_EQ(client.controller().counters().outstanding, 0u);
}

TEST(NvmeSoftFaults, LateCompletion) {
  Faulty client;
  FaultRule late = client.rule(FaultKind::kLateCompletion);
  late.delay = milliseconds(60);
  client.faults().add(late);
  const std::uint64_t start = monotonic_ns();
  client.io->put(io_command(IoOpcode::kRead, 3, 0, 1, client.data.address()));
  client.io->put(io_command(IoOpcode::kRead, 4, 0, 1, client.data.address()));
  client.io->ring();
  EXPECT_EQ(client.next(), 4);
  EXPECT_EQ(client.next(), 3);
  EXPECT_GE(monotonic_ns() - start, 60'000'000u);
  EXPECT_EQ(client.complaints(), "");
}

// The data of a read arrives after the client has given up: it must not have given the memory away.
TEST(NvmeSoftFaults, LateDataIsWrittenToTheMemoryThatTheCommandNamed) {
  for (const FaultKind kind : {FaultKind::kLateCompletion, FaultKind::kLostCompletion}) {
    Faulty client;
    const std::string content = client.read_late(kind, milliseconds(300));
    EXPECT_EQ(client.data.text(0, 4096), std::string(4096, '\0'));
    const bool completes = kind == FaultKind::kLateCompletion;
    EXPECT_EQ(client.next(completes ? kPatienceNs : 600'000'000), completes ? 3 : -1);
    // Unmapping waits for the controller: from here on it writes no more.
    client.data.unmap();
    EXPECT_EQ(client.data.text(0, 4096), content);
    EXPECT_EQ(client.complaints(), "");
  }
}

TEST(NvmeSoftFaults, LateDataFindsMemoryThatWasTakenAway) {
  Faulty client;
  client.read_late(FaultKind::kLostCompletion, milliseconds(300));
  client.data.unmap();  // though command 3 is outstanding
  const std::uint64_t end = monotonic_ns() + kPatienceNs;
  while (client.controller().violations().empty() && monotonic_ns() < end) std::this_thread::yield();
  EXPECT_EQ(client.kinds(), "DMA after unmap");
}

// What a command names is read when it comes: errors are found then, and a list may be used for others afterwards.
TEST(NvmeSoftFaults, OnlyTheDataIsLate) {
  Faulty client;
  FaultRule late = client.rule(FaultKind::kLateCompletion);
  late.delay = std::chrono::hours(1);
  late.late_data = true;
  late.count = 2;
  client.faults().add(late);
  EXPECT_EQ(client.io->status(io_command(IoOpcode::kRead, 3, 0, 1, 0x7000)), kScDataTransferError);
  EXPECT_EQ(client.kinds(), "DMA address");
  SharedMemory list(client.space(), 4096);
  for (std::size_t i = 0; i < 2; ++i) list.at<std::uint64_t>(i * 8) = client.data.address((i + 1) * 4096);
  std::memset(client.data.data(), 1, 4 * 4096);
  client.io->submit(io_command(IoOpcode::kRead, 4, 0, 3, client.data.address(), list.address()));
  client.io->submit(io_command(IoOpcode::kFlush, 5));
  EXPECT_EQ(client.next(), 5);
  list.unmap();
  EXPECT_EQ(client.delete_sq(1), 0);
  EXPECT_EQ(client.data.text(0, 4 * 4096), std::string(3 * 4096, '\0') + std::string(4096, '\1'));
  EXPECT_EQ(client.complaints(), "");
}

// Deleting a queue and resetting the controller end what is under way, and the data moves before that is reported.
TEST(NvmeSoftFaults, LateDataMovesBeforeAQueueIsDeletedOrAControllerReset) {
  for (const bool reset : {false, true}) {
    Faulty client;
    const std::string content = client.read_late(FaultKind::kLostCompletion, std::chrono::hours(1));
    if (reset) {
      ASSERT_TRUE(client.disable());
    } else {
      ASSERT_EQ(client.delete_sq(1), 0);
    }
    EXPECT_EQ(client.data.text(0, 4096), content);
    client.data.unmap();
    EXPECT_EQ(client.complaints(), "");
  }
}

TEST(NvmeSoftFaults, AnAbortedCommandMovesNoData) {
  Faulty client;
  client.read_late(FaultKind::kLateCompletion, std::chrono::hours(1));
  EXPECT_EQ(client.abort(3), 0u);
  EXPECT_EQ(client.next(), 3);
  client.data.unmap();
  EXPECT_EQ(client.delete_sq(1), 0);
  EXPECT_EQ(client.complaints(), "");
}

TEST(NvmeSoftFaults, DuplicateCompletion) {
  Faulty client;
  FaultRule twice = client.rule(FaultKind::kDuplicate);
  client.faults().add(twice);
  EXPECT_EQ(client.read(3), 0);
  EXPECT_EQ(client.next(), 3);
  EXPECT_EQ(client.next(kSoonNs), -1);
  twice.delay = milliseconds(300);
  client.faults().add(twice);
  EXPECT_EQ(client.read(5), 0);
  EXPECT_EQ(client.read(6), 0);
  EXPECT_EQ(client.next(), 5);
  EXPECT_EQ(client.complaints(), "");
}

TEST(NvmeSoftFaults, ReorderedCompletions) {
  Faulty client;
  FaultRule mixed = client.rule(FaultKind::kReorder);
  mixed.count = 0;
  mixed.group = 8;
  mixed.delay = milliseconds(40);
  client.faults().add(mixed);
  bool ever_mixed = false;
  for (int round = 0; round < 4; ++round) {
    for (std::uint16_t i = 0; i < 8; ++i) client.io->put(io_command(IoOpcode::kFlush, i));
    client.io->ring();
    std::vector<int> order;
    for (int i = 0; i < 8; ++i) order.push_back(client.next());
    ever_mixed |= !std::is_sorted(order.begin(), order.end());
    EXPECT_EQ(std::set<int>(order.begin(), order.end()), (std::set<int>{0, 1, 2, 3, 4, 5, 6, 7}));
  }
  EXPECT_TRUE(ever_mixed);
  // Fewer than a group come when the delay is over.
  for (std::uint16_t i = 0; i < 3; ++i) client.io->put(io_command(IoOpcode::kFlush, i));
  client.io->ring();
  std::set<int> rest;
  for (int i = 0; i < 3; ++i) rest.insert(client.next());
  EXPECT_EQ(rest, (std::set<int>{0, 1, 2}));
  EXPECT_EQ(client.complaints(), "");
}

TEST(NvmeSoftFaults, WrongCommandId) {
  Faulty client;
  FaultRule wrong = client.rule(FaultKind::kWrongCommandId);
  wrong.count = 20;
  client.faults().add(wrong);
  bool in_use = false, far = false;
  for (std::uint16_t i = 0; i < 20; ++i) {
    client.io->submit(io_command(IoOpcode::kFlush, i));
    const int id = client.next();
    ASSERT_NE(id, -1);
    EXPECT_GT(id, static_cast<int>(i));  // those below are outstanding
    (id < 64 ? in_use : far) = true;
    EXPECT_EQ(client.controller().counters().outstanding, i + 1u);
  }
  EXPECT_TRUE(in_use && far);
  EXPECT_EQ(client.abort(0), 0u);
  EXPECT_EQ(client.next(), 0);
}

TEST(NvmeSoftFaults, StatusesAndMediaErrors) {
  Faulty client;
  FaultRule status = client.rule(FaultKind::kStatus);
  status.status = 0x100;  // SC 0, but SCT 1
  client.faults().add(status);
  EXPECT_EQ(client.read(1), 0x100);
  FaultRule media = client.rule(FaultKind::kMediaError);
  media.first_block = 10;
  media.last_block = 12;
  media.count = 0;
  const std::uint64_t id = client.faults().add(media);
  EXPECT_EQ(client.read(1, 9), 0);
  EXPECT_EQ(client.read(2, 10), kScUnrecoveredRead);
  EXPECT_EQ(client.read(3, 12), kScUnrecoveredRead);
  EXPECT_EQ(client.read(4, 13), 0);
  client.data.fill(5);
  const std::string before = client.data.text(0, 4096);
  EXPECT_EQ(client.io->status(io_command(IoOpcode::kWrite, 5, 12, 1, client.data.address())), kScWriteFault);
  EXPECT_EQ(client.io->status(io_command(IoOpcode::kWrite, 5, 9, 2, client.data.address(), client.data.address(4096))),
            kScWriteFault);
  EXPECT_EQ(client.io->status(io_command(IoOpcode::kFlush, 6)), 0);
  client.faults().remove(id);
  EXPECT_EQ(client.read(7, 12), 0);
  EXPECT_EQ(client.data.text(0, 4096), std::string(4096, '\0'));  // was not written
  EXPECT_EQ(client.complaints(), "");
}

TEST(NvmeSoftFaults, StuckSubmissionQueueHead) {
  Faulty client;
  EXPECT_EQ(client.read(1), 0);
  client.faults().add(client.rule(FaultKind::kStuckSqHead));
  for (std::uint16_t i = 0; i < 5; ++i) {
    client.io->submit(io_command(IoOpcode::kFlush, i));
    const auto done = client.io->wait();
    ASSERT_TRUE(done);
    EXPECT_EQ(done->sq_head, 1);
  }
  ASSERT_TRUE(client.disable());
  ASSERT_TRUE(client.enable());
  client.io = client.queue(1, 64);
  client.io->submit(io_command(IoOpcode::kFlush, 1));
  EXPECT_EQ(client.io->wait()->sq_head, 1);
  client.io->submit(io_command(IoOpcode::kFlush, 1));
  EXPECT_EQ(client.io->wait()->sq_head, 2);
}

TEST(NvmeSoftFaults, SlowCommandsHoldUpTheirQueueOnly) {
  Faulty client;
  const auto other = client.queue(2, 8);
  FaultRule slow = client.rule(FaultKind::kSlow);
  slow.delay = milliseconds(300);
  client.faults().add(slow);
  const std::uint64_t start = monotonic_ns();
  client.io->submit(io_command(IoOpcode::kFlush, 1));
  client.io->submit(io_command(IoOpcode::kFlush, 2));
  EXPECT_EQ(other->status(io_command(IoOpcode::kFlush, 1)), 0);
  EXPECT_LT(monotonic_ns() - start, 2300'000'000u);
  EXPECT_EQ(client.next(), 1);
  EXPECT_GE(monotonic_ns() - start, 300'000'000u);
  EXPECT_EQ(client.next(), 2);
}

TEST(NvmeSoftFaults, FatalStatusEndsWithAReset) {
  Faulty client;
  FaultRule fatal = client.rule(FaultKind::kFatal);
  fatal.skip = 2;
  client.faults().add(fatal);
  EXPECT_EQ(client.read(1), 0);
  EXPECT_EQ(client.read(2), 0);
  client.io->submit(io_command(IoOpcode::kFlush, 3));
  EXPECT_TRUE(client.wait_status(kCstsFatal | kCstsReady, kCstsFatal | kCstsReady));
  client.io->submit(io_command(IoOpcode::kFlush, 4));
  EXPECT_EQ(client.next(kSoonNs), -1);
  ASSERT_TRUE(client.disable());
  EXPECT_EQ(client.window().read32(kRegCsts), 0u);
  ASSERT_TRUE(client.enable());
  client.io = client.queue(1, 64);
  EXPECT_EQ(client.read(1), 0);
  client.controller().fail();
  EXPECT_TRUE(client.wait_status(kCstsFatal, kCstsFatal));
  ASSERT_TRUE(client.disable());
  EXPECT_EQ(client.complaints(), "");
}

TEST(NvmeSoftFaults, RemovalReadsAsOnesOrZeros) {
  for (const bool zeros : {false, true}) {
    Faulty client;
    client.faults().add(client.rule(zeros ? FaultKind::kRemovedZeros : FaultKind::kRemovedAllOnes));
    client.io->submit(io_command(IoOpcode::kFlush, 1));
    const std::uint32_t gone = zeros ? 0 : kRegisterGone;
    EXPECT_TRUE(client.wait_status(~0u, gone));
    EXPECT_EQ(client.window().read32(kRegVs), gone);
    EXPECT_EQ(client.window().read64(kRegCap), gone | std::uint64_t{gone} << 32);
    EXPECT_EQ(client.window().read32(kRegDoorbells), gone);
    client.window().write32(kRegCc, 0);
    client.io->submit(io_command(IoOpcode::kFlush, 2));
    EXPECT_EQ(client.next(kSoonNs), -1);
    EXPECT_EQ(client.window().read32(kRegCc), gone);
    client.controller().insert();
    EXPECT_EQ(client.window().read32(kRegCsts), 0u);
    ASSERT_TRUE(client.enable());
    client.io = client.queue(1, 64);
    EXPECT_EQ(client.read(1), 0);
    client.controller().remove(zeros);
    EXPECT_EQ(client.window().read32(kRegCsts), gone);
    EXPECT_EQ(client.complaints(), "");
  }
}

TEST(NvmeSoftFaults, AdminCommandsToo) {
  Faulty client;
  FaultRule lose;
  lose.queue = 0;
  lose.opcode = static_cast<std::uint8_t>(AdminOpcode::kDeleteSq);
  client.faults().add(lose);
  EXPECT_EQ(client.admin().status(admin_command(AdminOpcode::kGetFeatures, kFeatureQueues)), 0);
  client.admin().submit(admin_command(AdminOpcode::kDeleteSq, 1));
  EXPECT_FALSE(client.admin().wait(30'000'000));
  FaultRule aborts;
  aborts.queue = 0;
  aborts.opcode = static_cast<std::uint8_t>(AdminOpcode::kAbort);
  aborts.count = 4;
  client.faults().add(aborts);
  for (int i = 0; i < 4; ++i) client.admin().submit(admin_command(AdminOpcode::kAbort, 1));
  EXPECT_EQ(client.admin().status(admin_command(AdminOpcode::kAbort, 1)), kScAbortLimit);
  EXPECT_EQ(client.kinds(), "admin");
  ASSERT_TRUE(client.disable());
  EXPECT_EQ(client.controller().counters().outstanding, 0u);
  ASSERT_TRUE(client.enable());
}

TEST(NvmeSoftFaults, ProbabilityAndCount) {
  Faulty client;
  FaultRule some = client.rule(FaultKind::kStatus);
  some.probability = 0.25;
  some.count = 0;
  const std::uint64_t id = client.faults().add(some);
  int hit = 0;
  for (std::uint16_t i = 0; i < 1000; ++i) hit += client.io->status(io_command(IoOpcode::kFlush, i)) != 0;
  EXPECT_GT(hit, 180);
  EXPECT_LT(hit, 330);
  EXPECT_EQ(client.faults().injected(), static_cast<std::uint64_t>(hit));
  client.faults().remove(id);
  some.probability = 1;
  some.count = 3;
  client.faults().add(some);
  hit = 0;
  for (std::uint16_t i = 0; i < 10; ++i) hit += client.io->status(io_command(IoOpcode::kFlush, i)) != 0;
  EXPECT_EQ(hit, 3);
}

// Faults of all kinds that leave the controller alive, many of them, while queues come and go: every command ends in a
// completion, an abort or with its queue, and the controller keeps nothing of them.
TEST(NvmeSoftFaults, NothingIsLeftOverOfManyFaults) {
  SoftControllerOptions options = memory_options();
  options.threads = 2;
  Faulty client(std::move(options));
  for (const FaultKind kind :
       {FaultKind::kLostCompletion, FaultKind::kLateCompletion, FaultKind::kDuplicate, FaultKind::kReorder,
        FaultKind::kWrongCommandId, FaultKind::kStatus, FaultKind::kMediaError, FaultKind::kSlow}) {
    for (const bool late_data : {false, true}) {
      FaultRule rule = client.rule(kind);
      rule.count = 0;
      rule.probability = 0.02;
      rule.late_data = late_data;
      rule.delay = std::chrono::microseconds(late_data ? 300 : 50);
      client.faults().add(rule);
    }
  }
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    std::set<int> outstanding;
    for (std::uint16_t i = 0; i < 60; ++i) {
      const bool writes = random() % 2 == 0;
      client.io->put(io_command(writes ? IoOpcode::kWrite : IoOpcode::kRead, i, random() % 4096, 1,
                                client.data.address(i * std::size_t{4096})));
      outstanding.insert(i);
    }
    client.io->ring();
    for (int id; (id = client.next(3'000'000)) != -1;) outstanding.erase(id);
    for (const int id : outstanding) {
      if (random() % 2 == 0) (void)client.abort(static_cast<std::uint16_t>(id));
    }
    while (client.next(1'000'000) != -1) {
    }
    if (round % 10 == 9) {
      ASSERT_TRUE(client.disable());
      EXPECT_EQ(client.controller().counters().outstanding, 0u);
      ASSERT_TRUE(client.enable());
    } else {
      ASSERT_EQ(client.delete_sq(1), 0);
      ASSERT_EQ(client.delete_cq(1), 0);
      EXPECT_EQ(client.controller().counters().outstanding, 0u);
    }
    client.io = client.queue(1, 64);
  }
  EXPECT_GT(client.faults().injected(), 500u);
  EXPECT_EQ(client.complaints(), "");
}

// An identifier that is not outstanding is looked for, and there may be none.
TEST(NvmeSoftFaults, AWrongCommandIdWhereAllAreInUse) {
  SoftControllerOptions options = memory_options();
  options.max_queue_entries = 65536;
  HandClient client(std::move(options));
  ASSERT_TRUE(client.enable());
  const auto queue = client.queue(1, 65536, 8);
  FaultRule rule;
  rule.queue = 1;
  rule.count = 65534;
  client.faults().add(rule);
  rule.kind = FaultKind::kWrongCommandId;
  client.faults().add(rule);
  for (std::uint32_t id = 0; id < 65535; ++id) {
    queue->put(io_command(IoOpcode::kFlush, static_cast<std::uint16_t>(id)));
  }
  queue->ring();
  const auto done = queue->wait(20'000'000'000);
  ASSERT_TRUE(done);
  EXPECT_EQ(done->command_id, kNoCommandId);
  EXPECT_EQ(client.controller().counters().outstanding, 65535u);
}

// A queue that was told to stall keeps nobody awake once it fetches nothing more.
TEST(NvmeSoftFaults, AStalledQueueThatIsDeletedLetsTheControllerRest) {
  Faulty client;
  FaultRule slow = client.rule(FaultKind::kSlow);
  slow.delay = milliseconds(5);
  client.faults().add(slow);
  client.io->put(io_command(IoOpcode::kFlush, 1));
  client.io->put(io_command(IoOpcode::kFlush, 2));
  client.io->ring();
  while (client.faults().injected() == 0) std::this_thread::yield();
  client.controller().hold_ready(true);
  client.window().write32(kRegCc, 0);
  std::this_thread::sleep_for(milliseconds(50));
  const std::uint64_t cpu = client.controller().counters().cpu_ns, start = monotonic_ns();
  std::this_thread::sleep_for(milliseconds(300));
  const std::uint64_t used = client.controller().counters().cpu_ns - cpu;
  EXPECT_LT(used, 100'000'000u) << "of " << monotonic_ns() - start;
  client.controller().hold_ready(false);
  EXPECT_TRUE(client.wait_status(kCstsReady, 0));
}

TEST(NvmeSoftFaults, EveryPostedCompletionIsCounted) {
  Faulty client;
  const SoftControllerCounters before = client.controller().counters();
  client.faults().add(client.rule(FaultKind::kDuplicate));
  EXPECT_EQ(client.read(1), 0);
  EXPECT_EQ(client.next(), 1);
  client.faults().add(client.rule(FaultKind::kWrongCommandId));
  client.io->submit(io_command(IoOpcode::kFlush, 2));
  EXPECT_NE(client.next(), -1);
  client.io->submit(io_command(IoOpcode::kFlush, 2));  // in use
  EXPECT_EQ(client.next(), 2);
  EXPECT_EQ(client.controller().counters().completions - before.completions, 4u);
}

}  // namespace
}  // namespace tardis::nvme::testing
