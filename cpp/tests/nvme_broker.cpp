// SPDX-License-Identifier: Apache-2.0
// Clients of a broker on a software controller: what they get, what they are refused, and what is taken back.
#include "nvme/nvme_namespace.h"
#include "nvme_broker_support.h"
#include "tests/nvme_store_support.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;
using broker::Answer;

class NvmeBroker : public ::testing::Test {
 protected:
  std::string socket() const { return folder.file("nvmed"); }
  TempFolder folder{memory_parent()};
};

constexpr std::size_t kBytes = 96 << 10;

// The code of the error.
template <class T>
Code refused(const Result<T>& result, const std::string& with) {
  EXPECT_FALSE(result);
  if (result) return Code::kOk;
  EXPECT_NE(result.error().message.find(with), std::string::npos) << result.error().message;
  return result.error().code;
}

TEST_F(NvmeBroker, RangesOfOneNamespaceAreBytesOfTheirOwn) {
  for (const std::uint32_t shift : {9u, 12u}) {
    auto options = small_broker();
    options.block_shift = shift;
    BrokerRig rig(socket(), options);
    const std::uint64_t blocks = rig.medium->bytes() >> shift;
    auto a = join_broker(client_options(socket(), "a")), b = join_broker(client_options(socket(), "b"));
    const auto spaces = a->namespaces();
    ASSERT_TRUE(spaces);
    ASSERT_EQ(spaces->size(), 1u);
    EXPECT_EQ(spaces->front().blocks, blocks);
    auto left = take_range(a, {.blocks = blocks / 4, .name = "left"});
    auto right = take_range(b, {.first_block = blocks / 2, .name = "right"});
    ASSERT_TRUE(left && right);
    EXPECT_EQ(left->bytes(), rig.medium->bytes() / 4);
    EXPECT_EQ(right->bytes(), rig.medium->bytes() / 2);
    std::vector<std::byte> memory(kBytes);
    for (std::uint64_t offset = 0; offset < 4 * kBytes; offset += kBytes) {
      mark(memory.data(), kBytes, offset, 1);
      ASSERT_EQ(move(*left, Op::kWrite, offset, memory.data(), kBytes), 0);
      mark(memory.data(), kBytes, offset, 2);
      ASSERT_EQ(move(*right, Op::kWrite, offset, memory.data(), kBytes), 0);
    }
    EXPECT_TRUE(left->flush());
    for (std::uint64_t offset = 0; offset < 4 * kBytes; offset += kBytes) {
      ASSERT_EQ(move(*left, Op::kRead, offset, memory.data(), kBytes), 0);
      EXPECT_TRUE(holds_mark(memory.data(), kBytes, offset, 1));
      ASSERT_EQ(move(*right, Op::kRead, offset, memory.data(), kBytes), 0);
      EXPECT_TRUE(holds_mark(memory.data(), kBytes, offset, 2));
    }
    EXPECT_EQ(move(*left, Op::kRead, left->bytes(), memory.data(), kBytes), EINVAL);
    EXPECT_EQ(move(*left, Op::kRead, left->bytes() - 4096, memory.data(), kBytes), EINVAL);
    // As the driver sees the whole.
    std::shared_ptr<Driver> driver(rig.driver.get(), [](Driver*) {});
    auto whole = NvmeNamespace::open(driver, 1);
    ASSERT_TRUE(whole);
    ASSERT_EQ(move(**whole, Op::kRead, rig.medium->bytes() / 2 + kBytes, memory.data(), kBytes), 0);
    EXPECT_TRUE(holds_mark(memory.data(), kBytes, kBytes, 2));
  }
}

TEST_F(NvmeBroker, RegisteredMemoryIsNamedToTheController) {
  BrokerRig rig(socket());
  auto client = join_broker(client_options(socket(), "a"));
  auto space = take_range(client, {.name = "all"});
  auto pages = client->allocate(1 << 20);
  ASSERT_TRUE(pages);
  std::byte* const memory = pages->memory.get();
  ASSERT_TRUE(space->register_memory(memory, pages->bytes));
  const std::size_t mapped = rig.space.mapped_bytes();
  mark(memory, 1 << 20, 0, 3);
  ASSERT_EQ(move(*space, Op::kWrite, 0, memory, 1 << 20), 0);
  std::memset(memory, 0, 1 << 20);
  ASSERT_EQ(move(*space, Op::kRead, 0, memory, 1 << 20), 0);
  EXPECT_TRUE(holds_mark(memory, 1 << 20, 0, 3));
  // Not at the beginning of a page.
  ASSERT_EQ(move(*space, Op::kRead, 0, memory + 512, 512 << 10), 0);
  EXPECT_TRUE(holds_mark(memory + 512, 512 << 10, 0, 3));
  EXPECT_EQ(client->count().bounced_bytes.load(), 0u);
  std::vector<std::byte> other(8192);
  EXPECT_EQ(refused(space->register_memory(other.data(), other.size()), "allocate()"), Code::kUnsupportedFormat);
  ASSERT_EQ(move(*space, Op::kRead, 0, other.data(), other.size()), 0);
  EXPECT_EQ(client->count().bounced_bytes.load(), other.size());
  space->unregister_memory(memory);
  EXPECT_LT(rig.space.mapped_bytes(), mapped);
  ASSERT_EQ(move(*space, Op::kRead, 0, memory, 64 << 10), 0);
  EXPECT_GT(client->count().bounced_bytes.load(), other.size());
}

TEST_F(NvmeBroker, RangesNeverOverlap) {
  BrokerRig rig(socket());
  auto a = join_broker(client_options(socket(), "first")), b = join_broker(client_options(socket(), "second"));
  auto held = take_range(a, {.first_block = 100, .blocks = 100, .name = "held"});
  const auto open = [&](std::uint64_t first, std::uint64_t blocks, const char* name, std::uint32_t id = 1) {
    return BrokerNamespace::open(b, {.namespace_id = id, .first_block = first, .blocks = blocks, .name = name});
  };
  for (const auto& [first, blocks] : std::vector<std::pair<std::uint64_t, std::uint64_t>>{
           {100, 100}, {0, 101}, {199, 1}, {150, 10}, {0, 0}, {50, 1000}}) {
    EXPECT_EQ(refused(open(first, blocks, "mine"), "'first'"), Code::kBusy) << first << " " << blocks;
  }
  EXPECT_EQ(refused(open(300, 1, "held"), "under this name"), Code::kBusy);
  EXPECT_EQ(refused(open(0, 1, ""), "a name"), Code::kInvalidArgument);
  EXPECT_EQ(refused(open(0, 1, "x", 2), "namespace 2"), Code::kNotFound);
  for (const auto& [first, blocks] : std::vector<std::pair<std::uint64_t, std::uint64_t>>{
           {0, 9000}, {8192, 0}, {8191, 2}, {~std::uint64_t{0}, 2}, {1, ~std::uint64_t{0}}}) {
    EXPECT_EQ(refused(open(first, blocks, "beyond"), "within"), Code::kInvalidArgument) << first << " " << blocks;
  }
  EXPECT_TRUE(open(0, 100, "before"));
  EXPECT_TRUE(open(200, 0, "behind"));
  held.reset();
  EXPECT_TRUE(open(100, 100, "held"));
  a.reset();
  EXPECT_TRUE(open(0, 0, "all")) << "what objects had is free when they go";
}

TEST_F(NvmeBroker, LimitsOfAClient) {
  auto options = small_broker();
  options.broker.clients = 2;
  options.broker.limits = {.queues = 2, .ranges = 2, .regions = 3, .bytes = 4 << 20};
  BrokerRig rig(socket(), options);
  auto wanting = client_options(socket(), "a");
  wanting.queues = 8;
  auto a = join_broker(wanting);
  EXPECT_EQ(a->queue_pairs(), 2u) << "as many as the broker has for one";
  auto greedy = client_options(socket(), "greedy");
  greedy.bounce_buffers = 31;
  greedy.bounce_bytes = 1 << 20;
  EXPECT_EQ(refused(BrokerClient::connect(greedy), "bytes"), Code::kNoSpace);
  auto one = take_range(a, {.blocks = 1, .name = "1"}),
       two = take_range(a, {.first_block = 1, .blocks = 1, .name = "2"});
  EXPECT_EQ(refused(BrokerNamespace::open(a, {.first_block = 2, .blocks = 1, .name = "3"}), "ranges"), Code::kNoSpace);
  auto big = a->allocate(8 << 20);
  ASSERT_TRUE(big);
  EXPECT_EQ(refused(a->register_memory(big->memory.get(), 8 << 20), "bytes"), Code::kNoSpace);
  EXPECT_TRUE(a->register_memory(big->memory.get(), 64 << 10));  // and its table
  EXPECT_EQ(refused(a->register_memory(big->memory.get() + (64 << 10), 64 << 10), "mapped ranges"), Code::kNoSpace);
  auto b = join_broker(client_options(socket(), "b"));
  EXPECT_EQ(refused(BrokerClient::connect(client_options(socket(), "c")), "2 clients"), Code::kBusy);
  b.reset();
  EXPECT_TRUE(eventually([&] { return rig.counters().clients.load() == 1; }));
  EXPECT_TRUE(BrokerClient::connect(client_options(socket(), "c")));
}

TEST_F(NvmeBroker, AResetOfTheControllerIsSurvived) {
  BrokerRig rig(socket());
  rig.excused = {ViolationKind::kDoorbellRange};  // of queues that have ended, before their owner knows
  auto client = join_broker(client_options(socket(), "a")), other = join_broker(client_options(socket(), "b"));
  auto space = take_range(client, {.blocks = 1024, .name = "a"}),
       second = take_range(other, {.first_block = 1024, .name = "b"});
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> done{0};
  const auto work = [&](BrokerNamespace& on, std::uint64_t seed) {
    std::vector<std::byte> memory(kBytes);
    for (std::uint64_t i = 0; !stop.load(); ++i) {
      const std::uint64_t offset = i % 16 * kBytes;
      mark(memory.data(), kBytes, offset, seed + i);
      ASSERT_EQ(move(on, Op::kWrite, offset, memory.data(), kBytes), 0);
      std::memset(memory.data(), 0, kBytes);
      ASSERT_EQ(move(on, Op::kRead, offset, memory.data(), kBytes), 0);
      ASSERT_TRUE(holds_mark(memory.data(), kBytes, offset, seed + i));
      done.fetch_add(1);
    }
  };
  std::thread a([&] { work(*space, 1'000'000); }), b([&] { work(*second, 2'000'000); });
  for (int round = 0; round < 6; ++round) {
    const std::uint64_t before = done.load();
    // In turns by somebody in the broker's process, and by a failure that nobody but the broker looks for.
    if (round % 2 == 0) {
      EXPECT_TRUE(rig.driver->reset());
    } else {
      rig.controller->fail();
    }
    EXPECT_TRUE(eventually([&] { return done.load() >= before + 10; })) << "round " << round;
  }
  stop.store(true);
  a.join();
  b.join();
  EXPECT_GE(rig.driver->counters().resets, 6u);
  EXPECT_FALSE(client->closed());
}

TEST_F(NvmeBroker, AFailureThatMayHaveLostACacheFailsLaterFlushes) {
  auto options = small_broker();
  options.soft.volatile_cache = true;
  BrokerRig rig(socket(), options);
  rig.excused = {ViolationKind::kDoorbellRange};
  auto client = join_broker(client_options(socket(), "a"));
  auto space = take_range(client, {.name = "all"});
  std::vector<std::byte> memory(4096);
  ASSERT_EQ(move(*space, Op::kWrite, 0, memory.data(), memory.size()), 0);
  EXPECT_TRUE(space->flush());
  EXPECT_TRUE(rig.driver->reset());  // of one that works keeps its cache
  ASSERT_EQ(move(*space, Op::kWrite, 0, memory.data(), memory.size()), 0);
  EXPECT_TRUE(space->flush());
  rig.controller->fail();
  // Whether it hears of the failure before or with this.
  const auto flushed = space->flush();
  EXPECT_EQ(refused(flushed, "may be lost"), Code::kIo);
  EXPECT_EQ(flushed ? 0 : flushed.error().os_error, EIO);
  EXPECT_FALSE(space->flush()) << "once and for all";
  space.reset();
  client.reset();
  auto next = join_broker(client_options(socket(), "next"));
  auto again = take_range(next, {.name = "all"});
  ASSERT_EQ(move(*again, Op::kWrite, 0, memory.data(), memory.size()), 0);
  EXPECT_TRUE(again->flush()) << "nothing of this client was lost";
}

TEST_F(NvmeBroker, ACommandThatNeverCompletesEndsInTimeAndCostsOnlyItsQueue) {
  BrokerRig rig(socket());
  auto options = client_options(socket(), "a");
  options.queues = 1;
  options.io_timeout_ms = 200;
  options.grace_ms = 50;
  auto client = join_broker(options);
  auto space = take_range(client, {.name = "all"});
  std::vector<std::byte> memory(4096);
  FaultRule lost;
  lost.kind = FaultKind::kLostCompletion;
  lost.opcode = static_cast<std::uint8_t>(IoOpcode::kRead);
  rig.faults->add(lost);
  const std::uint64_t begin = monotonic_ns();
  EXPECT_EQ(move(*space, Op::kRead, 0, memory.data(), memory.size()), ETIMEDOUT);
  EXPECT_GE(monotonic_ns() - begin, 200'000'000u);
  EXPECT_LT(monotonic_ns() - begin, 5'000'000'000u);
  EXPECT_EQ(move(*space, Op::kRead, 0, memory.data(), memory.size()), 0) << "on the queue as it was made again";
  EXPECT_EQ(rig.driver->counters().resets, 0u);
  EXPECT_EQ(client->count().timeouts.load(), 1u);
  EXPECT_EQ(client->count().queue_deletions.load(), 1u);
}

TEST_F(NvmeBroker, RequestsEndWhenTheBrokerStopsOrTheControllerGoes) {
  for (const bool gone : {false, true}) {
    BrokerRig rig(socket());
    auto client = join_broker(client_options(socket(), "a"));
    auto space = take_range(client, {.name = "all"});
    const DmaPages pages = registered_pages(*client, kBytes);
    ASSERT_TRUE(pages.memory);
    std::atomic<std::uint64_t> done{0};
    int error = 0;
    std::thread worker([&] {
      while (error == 0) {
        error = move(*space, Op::kRead, 0, pages.memory.get(), kBytes);
        done.fetch_add(1);
      }
    });
    EXPECT_TRUE(eventually([&] { return done.load() > 10; }));
    if (gone) {
      rig.controller->remove(false);
    } else {
      rig.served->stop();
    }
    worker.join();
    EXPECT_EQ(error, gone ? ENODEV : ESHUTDOWN);
    EXPECT_TRUE(client->closed());
    EXPECT_FALSE(client->why_closed().message.empty());
    EXPECT_FALSE(space->flush());
    EXPECT_EQ(move(*space, Op::kWrite, 0, pages.memory.get(), kBytes), error);
    rig.thread.join();
    EXPECT_EQ(static_cast<bool>(rig.result), !gone);
  }
}

TEST_F(NvmeBroker, AStoreOnARange) {
  BrokerRig rig(socket());
  rig.excused = {ViolationKind::kDoorbellRange};
  const Layout layout{4, {16 << 10, 16 << 10}};
  const std::string home = folder.file("home");
  std::filesystem::create_directory(home);
  for (const bool first : {true, false}) {
    auto client = join_broker(client_options(socket(), "store"));
    std::shared_ptr<RawNamespace> space = take_range(client, {.first_block = 512, .name = "store"});
    ASSERT_NE(space, nullptr);
    auto store = open_store(home, small_store(4), first, on(space));
    ASSERT_NE(store, nullptr);
    Space pages(*store, 1, layout);
    if (first) {
      EXPECT_EQ(pages.put(1, 0, 60), 60u);
      EXPECT_TRUE(rig.driver->reset());
      EXPECT_EQ(pages.put(2, 0, 20), 20u);
      EXPECT_TRUE(store->flush());
    }
    EXPECT_EQ(pages.fetch(1, 0, 60), 60u);
    EXPECT_EQ(pages.fetch(2, 0, 20), 20u);
    EXPECT_TRUE(store->close());
  }
}

TEST_F(NvmeBroker, OneBrokerAtASocket) {
  BrokerRig rig(socket());
  EXPECT_EQ(refused(broker::listen_at(socket()), "a broker"), Code::kBusy);
  EXPECT_EQ(refused(broker::listen_at(folder.file(std::string(200, 'x'))), "bytes"), Code::kInvalidArgument);
  const std::string file = folder.file("file");
  UniqueFd(::open(file.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  EXPECT_EQ(refused(broker::listen_at(file), "a file"), Code::kInvalidArgument);
  EXPECT_FALSE(broker::connect_to(folder.file("nowhere")));
  { const auto left = broker::listen_at(folder.file("left")); }
  EXPECT_TRUE(broker::listen_at(folder.file("left"))) << "one that a killed broker left";
}

}  // namespace
}  // namespace tardis::nvme::testing
