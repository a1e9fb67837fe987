// SPDX-License-Identifier: Apache-2.0
// A controller that fails, is reset or is stopped in the middle of its work.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "base/clock.h"
#include "guest_support.h"
#include "raw_queue.h"

namespace tardis::nvme::testing {
namespace {

using Op = NamespaceRequest::Op;
constexpr std::uint64_t kSecond = 1'000'000'000;

class GuestRecovery : public Guest {
 protected:
  static int move(NvmeNamespace& space, Op op, std::uint64_t offset, std::vector<std::byte>& data) {
    const iovec range{data.data(), data.size()};
    NamespaceRequest request{.op = op, .offset = offset, .memory = {&range, 1}, .error = -1};
    space.run({&request, 1}, nullptr);
    return request.error;
  }
  static void expect_works(NvmeNamespace& space) {
    std::vector<std::byte> sent(64 << 10, std::byte{0x42}), found(sent.size());
    EXPECT_EQ(move(space, Op::kWrite, 4 << 20, sent), 0);
    EXPECT_EQ(move(space, Op::kRead, 4 << 20, found), 0);
    EXPECT_TRUE(sent == found);
  }
};

TEST_F(GuestRecovery, ResetWithCommandsInFlight) {
  auto controller = open();
  ASSERT_NE(controller, nullptr);
  auto space = space_of(controller, 1);
  std::atomic<bool> over{false};
  std::atomic<int> rounds{0};
  std::vector<std::thread> users;
  for (std::uint64_t t = 0; t < 2; ++t) {
    users.emplace_back([&, t] {
      std::vector<std::byte> sent(256 << 10), found(sent.size());
      for (int round = 0; !over.load(); ++round) {
        std::memset(sent.data(), round, sent.size());
        ASSERT_EQ(move(*space, Op::kWrite, t << 21, sent), 0);
        ASSERT_EQ(move(*space, Op::kRead, t << 21, found), 0);
        ASSERT_TRUE(sent == found);
        ++rounds;
      }
    });
  }
  for (int i = 0; i < 10; ++i) {
    const int before = rounds.load();
    while (rounds.load() == before && !HasFailure()) std::this_thread::yield();
    const auto reset = controller->driver()->reset();
    EXPECT_TRUE(reset) << reset.error().message;
  }
  over = true;
  for (std::thread& user : users) user.join();
  EXPECT_EQ(controller->driver()->counters().resets, 10u);
  EXPECT_EQ(controller->driver()->counters().errors, 0u);
  EXPECT_TRUE(space->flush()) << "a reset of a controller that works costs no cached write";
}

// A doorbell of a queue that the controller cannot read: it gives up (CSTS.CFS).
TEST_F(GuestRecovery, FatalStatusEndsInAReset) {
  if (guest_way() == VfioWay::kWithoutIommu) GTEST_SKIP() << "without an IOMMU nothing is unmapped";
  VfioOptions options = guest_options();
  options.driver.external_queues = 1;
  auto controller = open(options);
  ASSERT_NE(controller, nullptr);
  auto space = space_of(controller, 1);
  expect_works(*space);
  {
    RawQueue queue(*controller->driver(), 16);
    ASSERT_TRUE(queue.ready());
    ASSERT_TRUE(controller->mapper().unmap(queue.memory()));
    queue.pair().submit(guest_io(IoOpcode::kRead, 1, 0, 1), 0);
    queue.pair().ring();
    const std::uint64_t start = monotonic_ns();
    while ((controller->window().read32(kRegCsts) & kCstsFatal) == 0 && monotonic_ns() - start < 5 * kSecond) {
      std::this_thread::yield();
    }
    ASSERT_NE(controller->window().read32(kRegCsts) & kCstsFatal, 0u);
    EXPECT_FALSE(controller->driver()->healthy());
    // QEMU serves the other queues even so; whoever waits for longer than a moment, or gives a queue back, finds it
    // out.
  }
  EXPECT_EQ(controller->driver()->counters().resets, 1u);
  expect_works(*space);
  EXPECT_EQ(controller->driver()->state(), DriverState::kLive);
  if (controller->driver()->controller().volatile_cache) {
    EXPECT_FALSE(space->flush()) << "nobody knows what was in the cache";
  }
}

TEST_F(GuestRecovery, FunctionLevelReset) {
  auto controller = open();
  ASSERT_NE(controller, nullptr);
  auto space = space_of(controller, 1);
  const auto reset = controller->device().reset();
  ASSERT_TRUE(reset) << reset.error().message;
  // The function is new: its queues are gone, which the driver finds out by itself.
  EXPECT_EQ(controller->window().read32(kRegCsts) & kCstsReady, 0u);
  EXPECT_NE(controller->window().read32(kRegVs), 0u) << "the window is still there";
  expect_works(*space);
  EXPECT_EQ(controller->driver()->counters().resets, 1u);
}

TEST_F(GuestRecovery, ShutdownUnderLoad) {
  auto controller = open();
  ASSERT_NE(controller, nullptr);
  auto space = space_of(controller, 1);
  std::atomic<int> started{0};
  std::vector<std::thread> users;
  for (std::uint64_t t = 0; t < 3; ++t) {
    users.emplace_back([&, t] {
      std::vector<std::byte> data(128 << 10);
      int error = 0;
      for (int turn = 0; error == 0; ++turn) {
        if (turn == 2) ++started;
        error = move(*space, turn % 2 == 0 ? Op::kWrite : Op::kRead, t << 21, data);
      }
      EXPECT_EQ(error, ESHUTDOWN);
    });
  }
  while (started.load() < 3) std::this_thread::yield();
  const auto shut = controller->driver()->shut_down();
  EXPECT_TRUE(shut) << shut.error().message;
  for (std::thread& user : users) user.join();
  EXPECT_EQ(controller->window().read32(kRegCsts) & kCstsReady, 0u);
}

// The kernel resets the function of a process that was killed, and takes its memory away from it.
TEST_F(GuestRecovery, ProcessIsKilledInTheMiddleOfItsWork) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const UniqueFd here(ends[0]), there(ends[1]);
  const pid_t child = ::fork();
  if (child == 0) {
    auto controller = VfioController::open(address, guest_options());
    if (!controller) ::_exit(1);
    auto space = (*controller)->open_namespace(1);
    std::vector<std::byte> data(256 << 10, std::byte{0x99});
    for (int round = 0; space && move(**space, Op::kWrite, 2 << 20, data) == 0; ++round) {
      if (round == 3 && ::write(there.get(), "x", 1) != 1) break;
    }
    ::_exit(2);
  }
  char byte = 0;
  EXPECT_EQ(::read(here.get(), &byte, 1), 1) << "the other process did not come to work";
  EXPECT_EQ(::kill(child, SIGKILL), 0);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status)) << "it ended by itself: " << status;
  auto controller = open();
  ASSERT_NE(controller, nullptr);
  auto space = space_of(controller, 1);
  std::vector<std::byte> found(256 << 10);
  EXPECT_EQ(move(*space, Op::kRead, 2 << 20, found), 0);
  EXPECT_EQ(found, std::vector<std::byte>(256 << 10, std::byte{0x99}));
  expect_works(*space);
}

// Each command of the controller that TARDIS_GUEST_SLOW names takes seconds.
TEST(GuestSlow, CommandsThatTakeTooLongEndInTime) {
  const char* const address = std::getenv("TARDIS_GUEST_SLOW");
  if (address == nullptr) GTEST_SKIP() << "TARDIS_GUEST_SLOW names no controller of slow commands";
  VfioOptions options = guest_options();
  options.driver.queues = 1;
  options.driver.io_timeout_ms = 200;
  options.driver.abort_grace_ms = 100;
  auto opened = VfioController::open(address, options);
  ASSERT_TRUE(opened) << opened.error().message;
  auto controller = *opened;
  auto space = *controller->open_namespace(1);
  const bool registered = controller->driver()->options().zero_copy;
  AlignedBuffer memory(64 << 10);
  if (registered) {
    ASSERT_TRUE(space->register_memory(memory.data(), memory.size()));
  }
  std::memset(memory.data(), 0x77, memory.size());
  const iovec range{memory.data(), memory.size()};
  NamespaceRequest request{.op = Op::kRead, .offset = 0, .memory = {&range, 1}, .error = -1};
  const std::uint64_t start = monotonic_ns();
  space->run({&request, 1}, nullptr);
  const double took = static_cast<double>(monotonic_ns() - start) / 1e9;
  std::printf("a command that takes too long ended after %.2f s with %s\n", took, std::strerror(request.error));
  // QEMU deletes a queue only when its commands have ended: what they brought is then known.
  EXPECT_TRUE(request.error == ETIMEDOUT || request.error == 0);
  EXPECT_LT(took, 20);
  // The memory is ours again: nothing comes late.
  std::memset(memory.data(), 0x77, memory.size());
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_EQ(std::count(memory.data(), memory.data() + memory.size(), std::byte{0x77}),
            static_cast<std::ptrdiff_t>(memory.size()));
  const DriverCounters counters = controller->driver()->counters();
  EXPECT_EQ(counters.timeouts, 1u);
  EXPECT_EQ(counters.aborted, 0u);
  EXPECT_EQ(counters.queue_deletions + counters.resets, 1u);
  EXPECT_EQ(counters.quarantined, 0u);
  EXPECT_EQ(controller->driver()->state(), DriverState::kLive);
  if (registered) space->unregister_memory(memory.data());
}

}  // namespace
}  // namespace tardis::nvme::testing
