// SPDX-License-Identifier: Apache-2.0
// Namespaces of a driver on a software controller: what is read is what was written, on every kind of controller.
#include "nvme/nvme_namespace.h"

#include <atomic>
#include <numeric>
#include <thread>

#include "block/iovec_range.h"
#include "tests/nvme_driver_support.h"

namespace tardis::nvme {
namespace {

using testing::Arena;
using testing::BlockModel;
using testing::random_pieces;
using testing::Rig;
using testing::RigOptions;
using Op = NamespaceRequest::Op;
using Addresses = DmaSpaceOptions::Addresses;

struct Controller {
  const char* name;
  std::uint32_t block_shift = 12;
  SglSupport sgl = kSglAnyAlignment;
  std::uint8_t sgl_blocks = 0;
  std::uint32_t max_queue_entries = 1024;
  std::uint8_t mdts = 8;
  std::uint32_t stride = 0;
  std::uint32_t queues = 4;
  std::uint16_t boundary = 0;
};

void PrintTo(const Controller& controller, std::ostream* out) { *out << controller.name; }

RigOptions rig_options(const Controller& kind, Addresses addresses) {
  RigOptions options;
  options.addresses = addresses;
  options.block_shift = kind.block_shift;
  options.soft.sgl = kind.sgl;
  options.soft.sgl_blocks = kind.sgl_blocks;
  options.soft.max_queue_entries = kind.max_queue_entries;
  options.soft.mdts = kind.mdts;
  options.soft.doorbell_stride = kind.stride;
  options.soft.queue_pairs = kind.queues;
  SoftNamespace space;
  space.optimal_boundary = kind.boundary;
  options.soft.namespaces.push_back(space);
  return options;
}

// Random batches on blocks that are this thread's own, checked against the model.
void exercise(NvmeNamespace& disk, BlockModel& model, std::byte* registered, std::size_t registered_bytes,
              std::uint64_t seed, int batches) {
  std::mt19937_64 random(seed);
  Arena arena(2 << 20, random() % 4096);
  const std::uint32_t block = model.block_bytes();
  const std::size_t aligns[] = {1, 4, 8, 512, 4096};
  for (int batch = 0; batch < batches; ++batch) {
    struct Work {
      std::uint64_t first, blocks, version;
      std::vector<iovec> memory;
      std::vector<std::byte> bytes;
    };
    const std::size_t count = 1 + random() % 6;
    std::vector<Work> work(count);
    std::vector<NamespaceRequest> requests(count);
    // Requests of a batch do not overlap, in the namespace or in memory.
    const std::uint64_t share = model.blocks() / count;
    const std::size_t own = arena.size() / count, shared = registered_bytes / count;
    for (std::size_t i = 0; i < count; ++i) {
      Work& w = work[i];
      const std::uint64_t most =
          std::max<std::uint64_t>(1, std::min<std::uint64_t>(share, (256u << 10) / block / count));
      w.blocks = 1 + random() % most;
      w.first = i * share + random() % (share - w.blocks + 1);
      w.bytes.resize(w.blocks * block);
      const std::size_t pieces = 1 + random() % 5;
      const std::size_t align = aligns[random() % 5];
      const bool use_registered = random() % 3 != 0;
      std::byte* const base = use_registered ? registered + i * shared : arena.data() + i * own;
      w.memory = random_pieces(random, base, base + (use_registered ? shared : own), w.bytes.size(), pieces, align);
      if (random() % 4 == 0 && !w.memory.empty()) {
        // Half registered and half not: its first piece lies in the other kind of memory.
        std::byte* const other = use_registered ? arena.data() + i * own : registered + i * shared;
        w.memory.front().iov_base = other + random() % 64;
      }
      requests[i].op = random() % 2 == 0 ? Op::kRead : Op::kWrite;
      requests[i].offset = (model.first() + w.first) * block;
      requests[i].memory = w.memory;
      requests[i].error = -1;
      IovecCursor at;
      if (requests[i].op == Op::kWrite) {
        w.version = model.next_version();
        for (std::uint64_t b = 0; b < w.blocks; ++b) model.fill(w.first + b, w.version, w.bytes.data() + b * block);
        scatter(w.bytes.data(), w.memory, at, w.bytes.size());
      } else {
        std::memset(w.bytes.data(), 0xee, w.bytes.size());
        scatter(w.bytes.data(), w.memory, at, w.bytes.size());
      }
    }
    std::atomic<std::size_t> completions{0};
    disk.run(requests, [&](NamespaceRequest&) { ++completions; });
    ASSERT_EQ(completions.load(), count);
    for (std::size_t i = 0; i < count; ++i) {
      Work& w = work[i];
      ASSERT_EQ(requests[i].error, 0);
      if (requests[i].op == Op::kWrite) {
        for (std::uint64_t b = 0; b < w.blocks; ++b) model.wrote(w.first + b, w.version, true);
        continue;
      }
      IovecCursor at;
      gather(w.memory, at, w.bytes.data(), w.bytes.size());
      for (std::uint64_t b = 0; b < w.blocks; ++b) {
        ASSERT_EQ(model.judge(w.first + b, w.bytes.data() + b * block), "") << "batch " << batch;
      }
    }
  }
}

class NvmeNamespaceOn : public ::testing::TestWithParam<std::tuple<Controller, Addresses>> {};

TEST_P(NvmeNamespaceOn, ReadsWhatWasWritten) {
  const auto& [kind, addresses] = GetParam();
  Rig rig(rig_options(kind, addresses));
  ASSERT_NE(rig.disk, nullptr);
  EXPECT_EQ(rig.driver->queue_pairs(), std::min(kind.queues, 4u));
  EXPECT_EQ(rig.disk->block_bytes(), 1u << kind.block_shift);

  constexpr std::size_t kThreads = 3, kRegistered = 2 << 20;
  Arena registered(kThreads * kRegistered, 12);  // registered memory need not begin on a page
  ASSERT_TRUE(rig.disk->register_memory(registered.data(), registered.size()));
  const std::uint64_t share = (8u << 20 >> kind.block_shift) / kThreads;
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      BlockModel model(i * share, share, 1u << kind.block_shift);
      exercise(*rig.disk, model, registered.data() + i * kRegistered, kRegistered, 17 * i + 1, 60);
    });
  }
  for (std::thread& thread : threads) thread.join();
  rig.disk->unregister_memory(registered.data());

  const DriverCounters counters = rig.driver->counters();
  EXPECT_EQ(counters.errors + counters.timeouts + counters.resets + counters.queue_faults, 0u);
  EXPECT_GT(counters.bounced_commands, 0u);
  EXPECT_GT(counters.commands, counters.bounced_commands) << "nothing went without copies";
}

INSTANTIATE_TEST_SUITE_P(
    Controllers, NvmeNamespaceOn,
    ::testing::Combine(
        ::testing::Values(Controller{.name = "Default"}, Controller{.name = "Blocks512", .block_shift = 9},
                          Controller{.name = "NoSgl", .sgl = kSglNone},
                          Controller{.name = "NoSgl512", .block_shift = 9, .sgl = kSglNone},
                          Controller{.name = "DwordSgl512", .block_shift = 9, .sgl = kSglDword},
                          Controller{.name = "FewSglBlocks", .sgl_blocks = 2},
                          Controller{.name = "TwoEntries", .max_queue_entries = 2},
                          Controller{.name = "ThreeEntries512", .block_shift = 9, .max_queue_entries = 3},
                          Controller{.name = "SmallMdts", .sgl = kSglNone, .mdts = 1},
                          Controller{.name = "NoMdts", .mdts = 0}, Controller{.name = "Stride", .stride = 3},
                          Controller{.name = "OneQueue", .queues = 1}, Controller{.name = "Boundary", .boundary = 5}),
        ::testing::Values(Addresses::kIdentity, Addresses::kTranslated)),
    [](const auto& info) {
      return std::string(std::get<0>(info.param).name) +
             (std::get<1>(info.param) == Addresses::kIdentity ? "Identity" : "Translated");
    });

TEST(NvmeNamespace, WrongRequestsFailAlone) {
  Rig rig({});
  ASSERT_NE(rig.disk, nullptr);
  AlignedBuffer buffer(64 << 10);
  const iovec page{buffer.data(), 4096}, odd{buffer.data(), 4095};
  const std::uint64_t end = rig.disk->bytes();
  std::vector<NamespaceRequest> requests = {
      {.op = Op::kRead, .offset = 0, .memory = {&page, 1}, .error = -1},
      {.op = Op::kRead, .offset = 1, .memory = {&page, 1}, .error = -1},
      {.op = Op::kRead, .offset = 0, .memory = {&odd, 1}, .error = -1},
      {.op = Op::kWrite, .offset = end, .memory = {&page, 1}, .error = -1},
      {.op = Op::kWrite, .offset = end - 4096, .memory = {&page, 1}, .error = -1},
      {.op = Op::kRead, .offset = ~std::uint64_t{4095}, .memory = {&page, 1}, .error = -1},
      {.op = Op::kRead, .offset = end, .memory = {}, .error = -1},
  };
  int completions = 0;
  rig.disk->run(requests, [&](NamespaceRequest&) { ++completions; });
  std::vector<int> errors;
  for (const auto& request : requests) errors.push_back(request.error);
  EXPECT_EQ(errors, (std::vector<int>{0, EINVAL, EINVAL, EINVAL, 0, EINVAL, 0}));
  EXPECT_EQ(completions, 7);
  EXPECT_EQ(rig.driver->counters().commands, 2u);
  rig.disk->run({}, [](NamespaceRequest&) { FAIL(); });
}

TEST(NvmeNamespace, UnknownNamespaceIsNamed) {
  Rig rig({});
  ASSERT_NE(rig.driver, nullptr);
  auto opened = NvmeNamespace::open(rig.driver, 7);
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code, Code::kNotFound);
  EXPECT_NE(opened.error().message.find("expected namespace 7, found 1"), std::string::npos) << opened.error().message;
}

TEST(NvmeNamespace, RegisteredMemoryMovesWithoutCopies) {
  for (const SglSupport sgl : {kSglNone, kSglAnyAlignment, kSglDword}) {
    RigOptions options;
    options.soft.sgl = sgl;
    Rig rig(options);
    ASSERT_NE(rig.disk, nullptr);
    AlignedBuffer memory(4 << 20);
    ASSERT_TRUE(rig.disk->register_memory(memory.data(), memory.size()));
    for (const std::size_t offset : {std::size_t{0}, std::size_t{4}, std::size_t{2048}, std::size_t{1} << 20}) {
      ASSERT_EQ(rig.write(0, memory.data() + offset, 1 << 20), 0);
      ASSERT_EQ(rig.read(1 << 20, memory.data() + offset, 1 << 20), 0);
    }
    EXPECT_EQ(rig.driver->counters().bounced_commands, 0u);
    // Not on a dword: a PRP cannot name it, and an SGL only where the controller has no rule.
    ASSERT_EQ(rig.write(0, memory.data() + 2, 64 << 10), 0);
    EXPECT_EQ(rig.driver->counters().bounced_commands == 0, sgl == kSglAnyAlignment);
    rig.disk->unregister_memory(memory.data());
    const auto before = rig.driver->counters().bounced_commands;
    ASSERT_EQ(rig.write(0, memory.data(), 4096), 0);
    EXPECT_EQ(rig.driver->counters().bounced_commands, before + 1);
  }
}

TEST(NvmeNamespace, RegisteringTwiceFails) {
  Rig rig({});
  ASSERT_NE(rig.disk, nullptr);
  AlignedBuffer memory(64 << 10);
  ASSERT_TRUE(rig.disk->register_memory(memory.data(), 32 << 10));
  EXPECT_FALSE(rig.disk->register_memory(memory.data() + (16 << 10), 32 << 10));
  EXPECT_FALSE(rig.disk->register_memory(memory.data(), 0));
  EXPECT_TRUE(rig.disk->register_memory(memory.data() + (32 << 10), 32 << 10));
  rig.disk->unregister_memory(memory.data());
  EXPECT_TRUE(rig.disk->register_memory(memory.data(), 32 << 10));
}

TEST(NvmeNamespace, MemoryIsNotRegisteredWithoutZeroCopy) {
  RigOptions options;
  options.driver.zero_copy = false;
  Rig rig(options);
  ASSERT_NE(rig.disk, nullptr);
  AlignedBuffer memory(64 << 10);
  const auto registered = rig.disk->register_memory(memory.data(), memory.size());
  ASSERT_FALSE(registered);
  EXPECT_NE(registered.error().code, Code::kInvalidArgument) << "only a hint was not taken";
  EXPECT_EQ(rig.write(0, memory.data(), memory.size()), 0);
  EXPECT_EQ(rig.driver->counters().bounced_bytes, memory.size());
  rig.disk->unregister_memory(memory.data());
}

// Several threads with one queue pair: every one gets its turn.
TEST(NvmeNamespace, ManyThreadsShareFewQueues) {
  RigOptions options;
  options.soft.queue_pairs = 1;
  Rig rig(options);
  ASSERT_NE(rig.disk, nullptr);
  std::vector<std::thread> threads;
  for (std::uint64_t i = 0; i < 6; ++i) {
    threads.emplace_back([&, i] {
      AlignedBuffer page(4096);
      for (int round = 0; round < 100; ++round) {
        std::memset(page.data(), static_cast<int>(i + 1), 4096);
        ASSERT_EQ(rig.write(i * 4096, page.data(), 4096), 0);
        std::memset(page.data(), 0, 4096);
        ASSERT_EQ(rig.read(i * 4096, page.data(), 4096), 0);
        ASSERT_EQ(page.data()[4095], static_cast<std::byte>(i + 1));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(NvmeNamespace, FlushAsksOnlyAVolatileCache) {
  for (const bool cache : {false, true}) {
    RigOptions options;
    options.soft.volatile_cache = cache;
    Rig rig(options);
    ASSERT_NE(rig.disk, nullptr);
    const auto before = rig.controller->counters().commands;
    EXPECT_TRUE(rig.disk->flush());
    EXPECT_EQ(rig.controller->counters().commands - before, cache ? 1u : 0u);
  }
}

}  // namespace
}  // namespace tardis::nvme
