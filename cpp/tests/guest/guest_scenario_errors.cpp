// SPDX-License-Identifier: Apache-2.0
// A controller that grants one pair of queues, and whose namespaces report errors: 1 on each read of its sector 16
// (blocks of 512 bytes), 2 on the first write (4096), 3 on each write of sector 16, 4 on each flush, 5 on each read of
// sector 6161, which lies in a store's pages.
#include "guest_scenario.h"
#include "tests/nvme_store_support.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;

constexpr std::size_t kBytes = 4096;
constexpr std::uint64_t kBadOffset = 16 * 512;

class ScenarioErrors : public Guest {
 protected:
  void SetUp() override {
    Guest::SetUp();
    if (IsSkipped() || HasFailure()) return;
    controller = open();
    ASSERT_NE(controller, nullptr);
  }
  std::shared_ptr<NvmeNamespace> space(std::uint32_t id) { return space_of(controller, id); }
  DriverCounters counters() { return controller->driver()->counters(); }

  std::shared_ptr<VfioController> controller;
  AlignedBuffer memory{32 * kBytes};
};

TEST_F(ScenarioErrors, AReadThatFailsCostsThatRequestAlone) {
  const auto disk = space(1);
  ASSERT_NE(disk, nullptr);
  std::vector<iovec> ranges(32);
  std::vector<NamespaceRequest> requests(32);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    ranges[i] = {memory.data() + i * kBytes, kBytes};
    requests[i] = {.op = Op::kRead, .offset = i * kBytes, .memory = {&ranges[i], 1}, .error = -1};
  }
  std::memset(memory.data(), 0x5a, memory.size());
  const Timed all = timed("media error on a block", [&] {
    disk->run(requests, nullptr);
    return requests[kBadOffset / kBytes].error;
  });
  EXPECT_EQ(all.error, EIO);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (i == kBadOffset / kBytes) continue;
    EXPECT_EQ(requests[i].error, 0) << i;
    EXPECT_TRUE(std::all_of(memory.data() + i * kBytes, memory.data() + (i + 1) * kBytes,
                            [](std::byte b) { return b == std::byte{0}; }));
  }
  EXPECT_EQ(counters().retries, controller->driver()->options().retries);
  EXPECT_EQ(counters().errors, 1u);
  EXPECT_EQ(counters().queue_deletions + counters().resets, 0u);
  // Its neighbours are not bad.
  EXPECT_EQ(move(*disk, Op::kRead, kBadOffset - 512, memory.data(), 512), 0);
  EXPECT_EQ(move(*disk, Op::kRead, kBadOffset, memory.data(), 512), EIO);
  EXPECT_EQ(move(*disk, Op::kRead, kBadOffset + 512, memory.data(), 512), 0);
}

TEST_F(ScenarioErrors, AWriteThatFailsOnceIsSentAgain) {
  const auto disk = space(2);
  ASSERT_NE(disk, nullptr);
  mark(memory.data(), kBytes, 0);
  EXPECT_EQ(timed("error of a write, once", [&] { return move(*disk, Op::kWrite, 0, memory.data(), kBytes); }).error,
            0);
  EXPECT_EQ(counters().retries, 1u);
  std::memset(memory.data(), 0, kBytes);
  EXPECT_EQ(move(*disk, Op::kRead, 0, memory.data(), kBytes), 0);
  EXPECT_TRUE(holds_mark(memory.data(), kBytes, 0));
}

TEST_F(ScenarioErrors, AWriteThatFailsAlwaysEndsInTheError) {
  const auto disk = space(3);
  ASSERT_NE(disk, nullptr);
  mark(memory.data(), kBytes, 0);
  const Timed write =
      timed("error of a write, always", [&] { return move(*disk, Op::kWrite, kBadOffset, memory.data(), kBytes); });
  EXPECT_EQ(write.error, EIO);
  EXPECT_EQ(move(*disk, Op::kWrite, 0, memory.data(), kBytes), 0);
}

TEST_F(ScenarioErrors, AFlushThatFailsSaysSo) {
  const auto disk = space(4);
  ASSERT_NE(disk, nullptr);
  EXPECT_EQ(move(*disk, Op::kWrite, 0, memory.data(), kBytes), 0);
  Status flushed;
  timed("error of a flush, always", [&] {
    flushed = disk->flush();
    return flushed ? 0 : flushed.error().os_error;
  });
  EXPECT_FALSE(flushed) << "a flush that the drive refused is reported as done";
  EXPECT_EQ(controller->driver()->state(), DriverState::kLive);
}

TEST_F(ScenarioErrors, AnAddressThatDoesNotExistIsNotSent) {
  const auto disk = space(1);
  ASSERT_NE(disk, nullptr);
  const std::uint64_t before = counters().commands;
  EXPECT_EQ(timed("LBA out of range", [&] { return move(*disk, Op::kRead, disk->bytes(), memory.data(), 512); }).error,
            EINVAL);
  EXPECT_EQ(move(*disk, Op::kWrite, disk->bytes() - 512, memory.data(), 1024), EINVAL);
  EXPECT_EQ(counters().commands, before);
}

TEST_F(ScenarioErrors, FewerQueuesThanAskedFor) {
  EXPECT_EQ(controller->driver()->options().queues, 2u);
  EXPECT_EQ(controller->driver()->queue_pairs(), 1u);
  EXPECT_NE(controller->driver()->report().find("(2 asked for)"), std::string::npos) << controller->driver()->report();
}

// A page that the medium lost is given up; no other is, and nothing wrong is served.
TEST_F(ScenarioErrors, AStoreGivesUpThePageAlone) {
  const std::string home = setting("TARDIS_GUEST_FOLDER") + "/errors";
  std::filesystem::create_directories(home);
  constexpr std::size_t kPages = 96;
  std::size_t bad = kPages;
  for (const bool first : {true, false}) {
    const auto disk = space(5);
    ASSERT_NE(disk, nullptr);
    auto store = open_store(home, small_store(8), first, on(disk));
    ASSERT_NE(store, nullptr);
    Space pages(*store, 1, {});
    if (first) {
      ASSERT_EQ(pages.put(1, 0, kPages), kPages);
      ASSERT_TRUE(store->flush());
    }
    if (first) {
      const auto found = pages.get(1, 0, kPages);
      bad = static_cast<std::size_t>(std::find(found.begin(), found.end(), 0) - found.begin());
      ASSERT_LT(bad, kPages) << "the sector is in no page";
      EXPECT_EQ(std::count(found.begin(), found.end(), 0), 1);
    }
    EXPECT_EQ(pages.run(1, 0, kPages), bad) << "it is offered no more";
    EXPECT_EQ(pages.fetch(1, 0, bad), bad);
    EXPECT_EQ(pages.fetch(1, bad + 1, kPages - bad - 1), kPages - bad - 1);
    EXPECT_EQ(pages.put(first ? 2 : 3, 0, 8), 8u);
    EXPECT_TRUE(store->close());
  }
}

}  // namespace
}  // namespace tardis::nvme::testing
