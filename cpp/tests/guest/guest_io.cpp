// SPDX-License-Identifier: Apache-2.0
// Bytes to a controller and back, in every way in which the driver names memory.
#include <algorithm>
#include <cstring>
#include <random>
#include <thread>

#include "guest_support.h"
#include "raw_queue.h"
#include "tests/nvme_driver_support.h"

namespace tardis::nvme::testing {
namespace {

using Op = NamespaceRequest::Op;

int move(NvmeNamespace& space, Op op, std::uint64_t offset, std::span<const iovec> memory) {
  NamespaceRequest request{.op = op, .offset = offset, .memory = memory, .error = -1};
  space.run({&request, 1}, nullptr);
  return request.error;
}
int move(NvmeNamespace& space, Op op, std::uint64_t offset, void* memory, std::size_t bytes) {
  const iovec range{memory, bytes};
  return move(space, op, offset, {&range, 1});
}

// Random requests over the first blocks, in random memory, half of it registered.
void churn(NvmeNamespace& space, bool registered, int requests, std::uint64_t seed) {
  constexpr std::uint64_t kBlocks = 2048;
  std::mt19937_64 random(seed);
  const std::uint32_t block = space.block_bytes();
  BlockModel model(0, kBlocks, block);
  std::vector<std::byte> zeros(kBlocks * block);
  ASSERT_EQ(move(space, Op::kWrite, 0, zeros.data(), zeros.size()), 0);
  Arena arena(4 << 20, 4 * (random() % 1024));
  if (registered) {
    ASSERT_TRUE(space.register_memory(arena.data(), arena.size() / 2));
  }
  std::vector<std::byte> flat;
  for (int i = 0; i < requests; ++i) {
    const std::uint64_t blocks = 1 + random() % std::min<std::uint64_t>(512, (1u << 20) / block);
    const std::uint64_t first = random() % (kBlocks - blocks);
    flat.resize(blocks * block);
    const std::size_t aligns[] = {1, 4, 4, 512, 4096, 4096};
    const auto memory = random_pieces(random, arena.data(), arena.data() + arena.size(), flat.size(), 1 + random() % 6,
                                      aligns[random() % std::size(aligns)]);
    if (random() % 2 == 0) {
      const std::uint64_t version = model.next_version();
      for (std::uint64_t b = 0; b < blocks; ++b) {
        model.fill(first + b, version, flat.data() + b * block);
        model.wrote(first + b, version, true);
      }
      IovecCursor at;
      scatter(flat.data(), memory, at, flat.size());
      ASSERT_EQ(move(space, Op::kWrite, first * block, memory), 0);
    } else {
      for (const iovec& piece : memory) std::memset(piece.iov_base, 0x5a, piece.iov_len);
      ASSERT_EQ(move(space, Op::kRead, first * block, memory), 0);
      IovecCursor at;
      gather(memory, at, flat.data(), flat.size());
      for (std::uint64_t b = 0; b < blocks; ++b) {
        ASSERT_EQ(model.judge(first + b, flat.data() + b * block), "") << "request " << i;
      }
    }
  }
  if (registered) space.unregister_memory(arena.data());
}

using GuestIo = Guest;

TEST_F(GuestIo, EveryWayOfNamingMemory) {
  for (const bool sgl : {false, true}) {
    for (const bool registered : {false, true}) {
      VfioOptions options = guest_options();
      options.driver.use_sgl = sgl;
      auto controller = open(options);
      ASSERT_NE(controller, nullptr);
      if (registered && !controller->driver()->options().zero_copy) continue;  // no IOMMU
      for (const NamespaceInfo& info : controller->driver()->namespaces()) {
        SCOPED_TRACE("blocks of " + std::to_string(info.block_bytes));
        churn(*space_of(controller, info.id), registered, 80, info.id);
      }
      const DriverCounters counters = controller->driver()->counters();
      EXPECT_EQ(counters.errors + counters.retries + counters.timeouts + counters.queue_faults + counters.resets, 0u);
      if (!registered) {
        EXPECT_EQ(counters.bounced_commands, counters.commands);
      }
      if (registered) {
        EXPECT_GT(counters.bounced_commands, 0u);
        EXPECT_LT(counters.bounced_commands, counters.commands * 9 / 10);
      }
    }
  }
}

class GuestDoorbells : public Guest, public ::testing::WithParamInterface<bool> {};

TEST_P(GuestDoorbells, QueuesOfAllLengthsWrap) {
  for (const std::uint32_t entries : {2u, 3u, 5u, 64u, 1024u, 2048u}) {
    SCOPED_TRACE(std::to_string(entries) + " entries");
    VfioOptions options = guest_options();
    options.driver.queues = 1;
    options.driver.queue_entries = entries;
    options.driver.shadow_doorbells = GetParam();
    if (guest_way() == VfioWay::kWithoutIommu && entries > 64) continue;  // no huge page holds its lists
    auto controller = open(options);
    ASSERT_NE(controller, nullptr);
    EXPECT_EQ(controller->driver()->queue_depth(), entries - 1);
    EXPECT_EQ(controller->driver()->report().find("doorbells in memory") != std::string::npos,
              GetParam() && controller->driver()->controller().shadow_doorbells);
    auto space = space_of(controller, 1);
    const std::uint32_t block = space->block_bytes();
    const std::uint64_t blocks = std::max<std::uint64_t>(500, entries + entries / 2);
    AlignedBuffer memory(blocks * block);
    for (std::uint64_t i = 0; i < blocks * block / 8; ++i) {
      const std::uint64_t word = i * 0x9e3779b97f4a7c15 + entries;
      std::memcpy(memory.data() + i * 8, &word, 8);
    }
    // One request each, so one command each.
    std::vector<iovec> ranges(blocks);
    std::vector<NamespaceRequest> requests(blocks);
    AlignedBuffer found(blocks * block);
    for (const Op op : {Op::kWrite, Op::kRead}) {
      for (std::uint64_t i = 0; i < blocks; ++i) {
        ranges[i] = {(op == Op::kWrite ? memory : found).data() + i * block, block};
        requests[i] = {.op = op, .offset = i * block, .memory = {&ranges[i], 1}, .error = -1};
      }
      space->run(requests, nullptr);
      EXPECT_TRUE(std::all_of(requests.begin(), requests.end(), [](const auto& r) { return r.error == 0; }));
    }
    EXPECT_EQ(std::memcmp(memory.data(), found.data(), memory.size()), 0);
    EXPECT_EQ(controller->driver()->counters().commands, 2 * blocks);
  }
}

TEST_P(GuestDoorbells, SurviveAReset) {
  VfioOptions options = guest_options();
  options.driver.shadow_doorbells = GetParam();
  auto controller = open(options);
  ASSERT_NE(controller, nullptr);
  auto space = space_of(controller, 1);
  std::vector<std::byte> data(64 << 10);
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < 7; ++i) EXPECT_EQ(move(*space, Op::kRead, 0, data.data(), data.size()), 0);
    EXPECT_TRUE(controller->driver()->reset());
  }
  EXPECT_EQ(controller->driver()->counters().timeouts, 0u);
}

TEST_P(GuestDoorbells, SeveralThreadsShareTheQueues) {
  VfioOptions options = guest_options();
  options.driver.shadow_doorbells = GetParam();
  auto controller = open(options);
  ASSERT_NE(controller, nullptr);
  auto space = space_of(controller, 1);
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 5; ++t) {
    threads.emplace_back([&, t] {
      constexpr std::size_t kBytes = 64 << 10;
      std::vector<std::byte> sent(kBytes), found(kBytes);
      for (std::uint64_t round = 0; round < 30; ++round) {
        std::memset(sent.data(), static_cast<int>(t * 40 + round), kBytes);
        EXPECT_EQ(move(*space, Op::kWrite, t << 20, sent.data(), kBytes), 0);
        EXPECT_EQ(move(*space, Op::kRead, t << 20, found.data(), kBytes), 0);
        EXPECT_TRUE(sent == found);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

INSTANTIATE_TEST_SUITE_P(, GuestDoorbells, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "InMemory" : "InRegisters"; });

TEST_F(GuestIo, LargeRequestsAreCutWhereTheControllerSays) {
  VfioOptions options = guest_options();
  options.driver.external_queues = 1;
  options.driver.max_command_bytes = 1u << 30;
  auto controller = open(options);
  ASSERT_NE(controller, nullptr);
  const std::uint64_t most = controller->driver()->controller().max_transfer_bytes;
  constexpr std::size_t kBytes = 4 << 20;
  if (!controller->driver()->options().zero_copy) GTEST_SKIP() << "without an IOMMU bounce buffers cut first";
  if (most > kBytes) GTEST_SKIP() << "the controller takes any length";
  AlignedBuffer memory(kBytes), found(kBytes);
  for (std::size_t i = 0; i < kBytes; i += 4096) std::memcpy(memory.data() + i, &i, sizeof i);
  ASSERT_TRUE(controller->driver()->register_memory(memory.data(), kBytes));
  ASSERT_TRUE(controller->driver()->register_memory(found.data(), kBytes));
  auto space = space_of(controller, 1);
  EXPECT_EQ(move(*space, Op::kWrite, 0, memory.data(), kBytes), 0);
  const std::uint64_t commands = controller->driver()->counters().commands;
  EXPECT_GE(commands, kBytes / most);
  EXPECT_LE(commands, 2 * kBytes / most);
  EXPECT_EQ(move(*space, Op::kRead, 0, found.data(), kBytes), 0);
  EXPECT_EQ(std::memcmp(memory.data(), found.data(), kBytes), 0);
  EXPECT_EQ(controller->driver()->counters().bounced_commands, 0u);
  // The controller means what it says.
  RawQueue queue(*controller->driver(), 8);
  ASSERT_TRUE(queue.ready());
  const auto table = controller->driver()->regions();
  const auto address = table->find(reinterpret_cast<std::uintptr_t>(memory.data()))->address;
  SubmissionEntry entry = guest_io(IoOpcode::kRead, 1, 0, most / space->block_bytes() + 1);
  entry.prp = {address, address + 4096};
  EXPECT_EQ(queue.run(entry), kScInvalidField);
}

TEST_F(GuestIo, WhatIsWrongIsRefusedByTheController) {
  if (guest_way() == VfioWay::kWithoutIommu) GTEST_SKIP() << "without an IOMMU rings need huge pages";
  VfioOptions options = guest_options();
  options.driver.external_queues = 1;
  auto controller = open(options);
  ASSERT_NE(controller, nullptr);
  RawQueue queue(*controller->driver(), 8);
  ASSERT_TRUE(queue.ready());
  const NamespaceInfo& info = controller->driver()->namespaces().front();
  EXPECT_EQ(queue.run(guest_io(IoOpcode::kRead, info.id, info.blocks, 1)), kScLbaOutOfRange);
  EXPECT_EQ(queue.run(guest_io(IoOpcode::kRead, info.id, info.blocks - 1, 2)), kScLbaOutOfRange);
  EXPECT_EQ(queue.run(guest_io(IoOpcode::kRead, 0xfffffffe, 0, 1)), kScInvalidNamespace);
  EXPECT_EQ(queue.run(guest_io(static_cast<IoOpcode>(0x7f), info.id, 0, 1)), kScInvalidOpcode);
  // Here before anything is sent.
  auto space = space_of(controller, info.id);
  std::vector<std::byte> block(info.block_bytes);
  EXPECT_EQ(move(*space, Op::kRead, info.blocks * info.block_bytes, block.data(), block.size()), EINVAL);
}

TEST_F(GuestIo, VolatileCacheIsFlushed) {
  auto controller = open();
  ASSERT_NE(controller, nullptr);
  if (!controller->driver()->controller().volatile_cache) GTEST_SKIP() << "the controller has no volatile cache";
  auto space = space_of(controller, 1);
  std::vector<std::byte> data(64 << 10, std::byte{0x3c}), found(data.size());
  for (const bool enabled : {false, true}) {
    ASSERT_TRUE(controller->driver()->set_volatile_cache(enabled));
    auto is = controller->driver()->volatile_cache_enabled();
    ASSERT_TRUE(is);
    EXPECT_EQ(*is, enabled);
    EXPECT_EQ(move(*space, Op::kWrite, 0, data.data(), data.size()), 0);
    EXPECT_TRUE(space->flush());
  }
  const iovec range{data.data(), data.size()};
  NamespaceRequest request{.op = Op::kWrite, .offset = 1 << 20, .memory = {&range, 1}, .error = -1};
  space->run_durably({&request, 1}, nullptr);
  EXPECT_EQ(request.error, 0);
  EXPECT_EQ(move(*space, Op::kRead, 1 << 20, found.data(), found.size()), 0);
  EXPECT_TRUE(found == data);
}

TEST_F(GuestIo, BytesStayAcrossAShutdown) {
  std::vector<std::byte> data(256 << 10), found(data.size());
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 7 + i / 4096);
  {
    auto space = open_vfio_namespace(address, 1, guest_options());
    ASSERT_TRUE(space) << space.error().message;
    const iovec range{data.data(), data.size()};
    NamespaceRequest request{.op = Op::kWrite, .offset = 8 << 20, .memory = {&range, 1}, .error = -1};
    (*space)->run({&request, 1}, nullptr);
    EXPECT_EQ(request.error, 0);
    EXPECT_TRUE((*space)->flush());
  }
  auto controller = open();
  ASSERT_NE(controller, nullptr);
  EXPECT_EQ(move(*space_of(controller, 1), Op::kRead, 8 << 20, found.data(), found.size()), 0);
  EXPECT_TRUE(found == data);
}

}  // namespace
}  // namespace tardis::nvme::testing
