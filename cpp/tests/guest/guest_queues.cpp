// SPDX-License-Identifier: Apache-2.0
// Queue pairs whose owners are not the driver, beside its own.
#include <cstring>
#include <thread>

#include "guest_support.h"
#include "raw_queue.h"

namespace tardis::nvme::testing {
namespace {

using Op = NamespaceRequest::Op;

class GuestQueues : public Guest {
 protected:
  static VfioOptions with_external(std::uint32_t queues) {
    VfioOptions options = guest_options();
    options.driver.external_queues = queues;
    return options;
  }
};

// Each owner writes and reads pages of its own through many turns of its rings, several commands at a time.
TEST_F(GuestQueues, OwnersOutsideWorkBesideTheDriver) {
  if (guest_way() == VfioWay::kWithoutIommu) GTEST_SKIP() << "without an IOMMU these pages are not to be had";
  auto controller = open(with_external(3));
  ASSERT_NE(controller, nullptr);
  EXPECT_EQ(controller->driver()->external_queues(), 3u);
  EXPECT_EQ(controller->driver()->report().find("doorbells in memory"), std::string::npos);
  auto space = space_of(controller, 1);
  const std::uint64_t page_blocks = 4096 / space->block_bytes();
  std::vector<std::thread> owners;
  for (std::uint64_t owner = 0; owner < 3; ++owner) {
    owners.emplace_back([&, owner] {
      constexpr std::size_t kPages = 5;
      RawQueue queue(*controller->driver(), owner == 0 ? 2u : owner == 1 ? 7u : 64u);
      ASSERT_TRUE(queue.ready());
      AlignedBuffer memory(kPages * 4096);
      const auto address = controller->mapper().map(memory.data(), memory.size());
      ASSERT_TRUE(address);
      for (std::uint64_t round = 0; round < 60; ++round) {
        for (const IoOpcode opcode : {IoOpcode::kWrite, IoOpcode::kRead}) {
          for (std::uint64_t page = 0; page < kPages; ++page) {
            std::byte* const at = memory.data() + page * 4096;
            const std::uint64_t mark = owner << 32 | round << 16 | page;
            std::memset(at, 0, 4096);
            if (opcode == IoOpcode::kWrite) std::memcpy(at + 4088, &mark, sizeof mark);
          }
          std::size_t sent = 0, ended = 0;
          const std::uint64_t deadline = monotonic_ns() + 20'000'000'000;
          while (ended < kPages && monotonic_ns() < deadline) {
            while (sent < kPages && queue.pair().can_submit()) {
              SubmissionEntry entry = guest_io(opcode, 1, (512 + owner * kPages + sent) * page_blocks, page_blocks);
              entry.prp = {*address + sent * 4096, 0};
              queue.pair().submit(entry, sent++);
            }
            queue.pair().ring();
            Completion done{};
            while (queue.pair().poll(done) == PollResult::kCompletion) {
              EXPECT_TRUE(done.status.ok());
              ++ended;
            }
            queue.pair().acknowledge();
          }
          ASSERT_EQ(ended, kPages);
        }
        for (std::uint64_t page = 0; page < kPages; ++page) {
          std::uint64_t mark = 0;
          std::memcpy(&mark, memory.data() + page * 4096 + 4088, sizeof mark);
          EXPECT_EQ(mark, owner << 32 | round << 16 | page);
        }
      }
      EXPECT_TRUE(controller->mapper().unmap(memory.data()));
    });
  }
  std::vector<std::byte> data(64 << 10);
  const iovec range{data.data(), data.size()};
  for (int i = 0; i < 50; ++i) {
    NamespaceRequest request{.op = Op::kRead, .offset = 0, .memory = {&range, 1}, .error = -1};
    space->run({&request, 1}, nullptr);
    EXPECT_EQ(request.error, 0);
  }
  for (std::thread& owner : owners) owner.join();
}

TEST_F(GuestQueues, TheyAreGrantedClosedAndEndedByAReset) {
  if (guest_way() == VfioWay::kWithoutIommu) GTEST_SKIP() << "without an IOMMU their rings are not to be had";
  auto controller = open(with_external(2));
  ASSERT_NE(controller, nullptr);
  for (int round = 0; round < 10; ++round) {
    RawQueue first(*controller->driver(), 16), second(*controller->driver(), 16);
    ASSERT_TRUE(first.ready() && second.ready());
    EXPECT_NE(first.id(), second.id());
    AlignedBuffer rings(ExternalRings::bytes(16));
    const auto third = controller->driver()->open_external({rings.data(), 16});
    ASSERT_FALSE(third);
    EXPECT_EQ(third.error().code, Code::kBusy);
    if (round == 9) {
      EXPECT_TRUE(controller->driver()->reset());
      EXPECT_FALSE(controller->driver()->external_alive(first.id()));
      EXPECT_FALSE(controller->driver()->external_alive(second.id()));
    } else {
      EXPECT_TRUE(controller->driver()->external_alive(first.id()));
    }
  }
  const DriverCounters counters = controller->driver()->counters();
  EXPECT_EQ(counters.queue_deletions, 18u);
  EXPECT_EQ(counters.resets, 1u);
}

}  // namespace
}  // namespace tardis::nvme::testing
