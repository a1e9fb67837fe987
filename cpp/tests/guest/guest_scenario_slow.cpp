// SPDX-License-Identifier: Apache-2.0
// Namespaces that take their time: 1 needs 50 ms for each command, 2 250 ms, 3 600 ms, 4 1 s, 6 2 s; those read as
// zeros. 5 has a medium whose speed the host changes. Times as in docs/nvme-faults.md. QEMU's controller aborts
// nothing, and stands still (so does who reads its registers) from the deletion of a queue, or CC.EN = 0, until the
// commands have ended: none of its answers is ever missing, only late.
#include "guest_scenario.h"

namespace tardis::nvme::testing {
namespace {

constexpr std::size_t kBytes = 32 << 10;
constexpr int kSlackMs = 5000;  // of an emulated machine on a loaded one

VfioOptions impatient() {
  VfioOptions options = guest_options();
  options.driver.queues = 1;
  options.driver.io_timeout_ms = 200;
  options.driver.abort_grace_ms = 100;
  options.driver.admin_timeout_ms = 5000;
  options.driver.retries = 4;
  return options;
}

class ScenarioSlow : public Guest {
 protected:
  // Reads 32 KiB. Whatever comes of it, nothing moves into the memory once the request has its end.
  Timed read(const char* fault, std::uint32_t id, VfioOptions options, bool registered) {
    controller.reset();
    controller = open(std::move(options));
    if (controller == nullptr) return {EBADF, 0};
    const auto disk = space_of(controller, id);
    if (disk == nullptr) return {EBADF, 0};
    AlignedBuffer memory(kBytes);
    EXPECT_TRUE(!registered || disk->register_memory(memory.data(), memory.size()));
    std::memset(memory.data(), 0xa5, kBytes);
    const Timed result = timed(fault, [&] { return move(*disk, Op::kRead, 0, memory.data(), kBytes); });
    if (result.error == 0) {
      EXPECT_TRUE(std::all_of(memory.data(), memory.data() + kBytes, [](std::byte b) { return b == std::byte{0}; }));
    }
    std::memset(memory.data(), 0x5a, kBytes);
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    EXPECT_TRUE(std::all_of(memory.data(), memory.data() + kBytes, [](std::byte b) { return b == std::byte{0x5a}; }))
        << "memory was written to after its request had ended";
    counters = controller->driver()->counters();
    EXPECT_EQ(counters.quarantined, 0u);
    if (registered) disk->unregister_memory(memory.data());
    return result;
  }

  std::shared_ptr<VfioController> controller;
  DriverCounters counters;
};

TEST_F(ScenarioSlow, CompletionInTime) {
  const Timed read = this->read("completion late, before T", 1, impatient(), true);
  EXPECT_EQ(read.error, 0);
  EXPECT_GE(read.ms, 50);
  EXPECT_EQ(counters.timeouts, 0u);
}

TEST_F(ScenarioSlow, CompletionAfterItsTimeAndWithinTheGrace) {
  for (const bool registered : {true, false}) {
    const Timed read = this->read("completion late, between T and T + G, Abort refused", 2, impatient(), registered);
    EXPECT_EQ(read.error, 0);
    EXPECT_GE(read.ms, 250);
    EXPECT_EQ(counters.timeouts, 1u);
    EXPECT_EQ(counters.aborts, 1u);
    EXPECT_EQ(counters.aborted, 0u) << "QEMU's controller aborts nothing";
    EXPECT_EQ(counters.queue_deletions + counters.resets, 0u);
  }
}

// QEMU answers the deletion of the queue once the command has ended, and posts its completion then.
TEST_F(ScenarioSlow, CompletionAfterTheGrace) {
  for (const bool registered : {true, false}) {
    const Timed read = this->read("completion later than T + G, Abort refused", 3, impatient(), registered);
    EXPECT_EQ(read.error, 0);
    EXPECT_GE(read.ms, 300);
    EXPECT_LE(read.ms, 600 + kSlackMs);
    EXPECT_EQ(counters.queue_deletions, 1u);
    EXPECT_EQ(counters.resets, 0u);
    EXPECT_EQ(controller->driver()->state(), DriverState::kLive);
  }
}

TEST_F(ScenarioSlow, DeletionIsAnsweredLate) {
  VfioOptions options = impatient();
  options.driver.admin_timeout_ms = 300;
  const Timed read = this->read("later than T + G + A, Abort refused", 4, options, true);
  EXPECT_EQ(read.error, 0);
  EXPECT_GE(read.ms, 600);
  EXPECT_LE(read.ms, 1000 + kSlackMs);
  EXPECT_EQ(counters.queue_deletions + counters.resets, 1u);
  EXPECT_EQ(controller->driver()->state(), DriverState::kLive);
}

// Real data that is late: what was read may arrive after the request's time is over, but not after its end.
TEST_F(ScenarioSlow, LateDataOfARealMedium) {
  AlignedBuffer memory(4 * kBytes);
  {
    const auto fast = open();
    ASSERT_NE(fast, nullptr);
    const auto disk = space_of(fast, 5);
    ASSERT_NE(disk, nullptr);
    mark(memory.data(), memory.size(), 0);
    ASSERT_EQ(move(*disk, Op::kWrite, 0, memory.data(), memory.size()), 0);
  }
  ask_host("limit nvme0-5 65536");
  controller = open(impatient());
  ASSERT_NE(controller, nullptr);
  const auto disk = space_of(controller, 5);
  ASSERT_NE(disk, nullptr);
  ASSERT_TRUE(disk->register_memory(memory.data(), memory.size()));
  // The bucket of the limit lets the first through; each further one waits for half a second.
  std::size_t late = 0;
  for (int i = 0; i < 6; ++i) {
    std::byte* const to = memory.data() + static_cast<std::size_t>(i % 4) * kBytes;
    std::memset(to, 0xa5, kBytes);
    const std::uint64_t offset = static_cast<std::uint64_t>(i % 4) * kBytes;
    const Timed read =
        timed("data and completion late, Abort refused", [&] { return move(*disk, Op::kRead, offset, to, kBytes); });
    EXPECT_TRUE(read.error == 0 || read.error == ETIMEDOUT) << std::strerror(read.error);
    EXPECT_TRUE(read.error != 0 || holds_mark(to, kBytes, offset)) << "wrong bytes";
    std::memset(to, 0x5a, kBytes);
    late += read.ms > 200;
  }
  EXPECT_GE(late, 2u);
  ask_host("limit nvme0-5 0");
  std::this_thread::sleep_for(std::chrono::seconds(1));
  EXPECT_TRUE(std::all_of(memory.data(), memory.data() + 2 * kBytes, [](std::byte b) { return b == std::byte{0x5a}; }))
      << "memory was written to after its request had ended";
  disk->unregister_memory(memory.data());
}

TEST_F(ScenarioSlow, ResetWithACommandInFlight) {
  controller = open(impatient());
  ASSERT_NE(controller, nullptr);
  const auto disk = space_of(controller, 6);
  ASSERT_NE(disk, nullptr);
  AlignedBuffer memory(kBytes);
  std::thread resetting([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_TRUE(controller->driver()->reset());
  });
  // Sent again by the reset, so it takes the drive's time twice.
  const Timed read =
      timed("reset with a command in flight", [&] { return move(*disk, Op::kRead, 0, memory.data(), kBytes); });
  resetting.join();
  EXPECT_TRUE(read.error == 0 || read.error == ETIMEDOUT) << std::strerror(read.error);
  EXPECT_LE(read.ms, 2 * 2000 + kSlackMs);
  EXPECT_EQ(controller->driver()->counters().resets, 1u);
  EXPECT_EQ(controller->driver()->state(), DriverState::kLive);
}

}  // namespace
}  // namespace tardis::nvme::testing
