// SPDX-License-Identifier: Apache-2.0
// Clients of a broker in processes of their own, one of which is killed in mid-I/O.
#include "nvme_broker_work.h"
#include "tests/store_support.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;

TEST(NvmeBrokerProcesses, AKilledClientIsNothingToTheOthers) {
  const TempFolder folder(memory_parent());
  const std::string socket = folder.file("nvmed");
  SharedValue<Progress> progress;
  new (progress.operator->()) Progress;
  ChildProcess stays([&] { work(socket, 0, *progress.operator->()); });
  ChildProcess killed([&] { work(socket, 1, *progress.operator->()); });
  BrokerRig rig(socket);
  progress->up.store(true);
  ASSERT_TRUE(eventually([&] { return progress->moved[0].load() > 64 && progress->moved[1].load() > 64; }));
  const std::uint64_t a = progress->moved[0].load(), b = progress->moved[1].load();
  const double both = rate(progress->moved[0], 400);
  const double of_a = static_cast<double>(progress->moved[0].load() - a);
  const double of_b = static_cast<double>(progress->moved[1].load() - b);
  std::printf("[ FAIRNESS ] two clients in the same time: %.0f and %.0f requests of 64 KiB\n", of_a, of_b);
  const std::size_t mapped = rig.space.mapped_ranges();
  killed.kill();
  ASSERT_TRUE(eventually([&] { return rig.counters().clients.load() == 1; }));
  const double alone = rate(progress->moved[0], 400);
  std::printf("[ FAIRNESS ] the other one: %.3f GB/s before the kill, %.3f GB/s after\n", both, alone);
  EXPECT_GT(alone, 0) << "the other one stands still";
  EXPECT_TRUE(eventually([&] { return rig.space.mapped_ranges() < mapped; }));
  EXPECT_EQ(rig.counters().ended.load(), 1u);
  EXPECT_EQ(rig.driver->counters().resets, 0u) << "its queues were to be deleted, not the controller reset";
  // Its blocks are another's now, and nothing of it comes late.
  auto third = join_broker(client_options(socket, "third"));
  auto space = take_range(third, {.first_block = kRangeBlocks, .blocks = kRangeBlocks, .name = "1"});
  ASSERT_NE(space, nullptr);
  std::vector<std::byte> memory(kPiece);
  for (std::uint64_t i = 0; i < 128; ++i) {
    mark(memory.data(), kPiece, i * kPiece, 9);
    ASSERT_EQ(move(*space, Op::kWrite, i * kPiece, memory.data(), kPiece), 0);
  }
  for (std::uint64_t i = 0; i < 128; ++i) {
    ASSERT_EQ(move(*space, Op::kRead, i * kPiece, memory.data(), kPiece), 0);
    ASSERT_TRUE(holds_mark(memory.data(), kPiece, i * kPiece, 9));
  }
  progress->stop.store(true);
  stays.join();
}

TEST(NvmeBrokerProcesses, KilledAtAnyMoment) {
  const TempFolder folder(memory_parent());
  const std::string socket = folder.file("nvmed");
  SharedValue<Progress> progress;
  new (progress.operator->()) Progress;
  // Forked before this process has threads; each waits for its turn.
  SharedValue<std::atomic<int>> turn;
  std::vector<std::unique_ptr<ChildProcess>> children;
  constexpr int kChildren = 8;
  for (int i = 0; i < kChildren; ++i) {
    children.push_back(std::make_unique<ChildProcess>([&, i] {
      ASSERT_TRUE(eventually([&] { return turn->load() > i; }, 60));
      work(socket, 1, *progress.operator->());
    }));
  }
  BrokerRig rig(socket);
  progress->up.store(true);
  for (int i = 0; i < kChildren; ++i) {
    const std::uint64_t accepted = rig.counters().accepted.load();
    turn->store(i + 1);
    ASSERT_TRUE(eventually([&] { return rig.counters().accepted.load() > accepted; }));
    ::usleep(static_cast<useconds_t>(i) * 4000);  // from its greeting to its I/O
    children[static_cast<std::size_t>(i)]->kill();
    ASSERT_TRUE(eventually([&] { return rig.counters().clients.load() == 0; }));
    EXPECT_EQ(rig.space.mapped_ranges(), rig.own_ranges) << i;
  }
  EXPECT_EQ(rig.driver->counters().resets, 0u);
}

TEST(NvmeBrokerProcesses, AKilledBrokerEndsAllRequests) {
  const TempFolder folder(memory_parent());
  const std::string socket = folder.file("nvmed");
  SharedValue<std::atomic<bool>> stop;
  ChildProcess process([&] {
    BrokerRig rig(socket);
    (void)eventually([&] { return stop->load(); }, 60);
  });
  ASSERT_TRUE(eventually([&] { return static_cast<bool>(broker::connect_to(socket)); }));
  auto client = join_broker(client_options(socket, "left"));
  auto space = take_range(client, {.name = "all"});
  ASSERT_NE(space, nullptr);
  const DmaPages pages = registered_pages(*client, kPiece);
  ASSERT_TRUE(pages.memory);
  std::atomic<std::uint64_t> moved{0};
  std::vector<std::thread> workers;
  std::array<int, 3> errors{};
  for (std::size_t i = 0; i < 3; ++i) {  // more than queues
    workers.emplace_back([&, i] {
      std::vector<std::byte> own(kPiece);
      while (errors[i] == 0) {
        errors[i] = move(*space, Op::kRead, 0, i == 0 ? pages.memory.get() : own.data(), kPiece);
        moved.fetch_add(1);
      }
    });
  }
  EXPECT_TRUE(eventually([&] { return moved.load() > 20; }));
  process.kill();
  for (auto& worker : workers) worker.join();
  EXPECT_EQ(errors, (std::array<int, 3>{ENXIO, ENXIO, ENXIO}));
  EXPECT_NE(client->why_closed().message.find("has gone"), std::string::npos) << client->why_closed().message;
}

}  // namespace
}  // namespace tardis::nvme::testing
