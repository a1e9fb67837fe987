// SPDX-License-Identifier: Apache-2.0
// The software controller's data path: what is written is read, by many queues and clients, fast, and at rest it rests.
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>

#include "nvme_soft_client.h"

namespace tardis::nvme::testing {
namespace {

TEST(NvmeSoftIo, WhatIsWrittenIsReadAtBothBlockSizes) {
  for (const std::uint32_t shift : {9u, 12u}) {
    HandClient client(memory_options(1 << 20, shift));
    ASSERT_TRUE(client.enable());
    const auto queue = client.queue(1);
    SharedMemory data(client.space(), 3 * 4096);
    data.fill(shift);
    const std::uint32_t blocks = 8192 >> shift;
    const std::string written = data.text(0x100, 8192);
    const std::uint64_t page = data.address();
    // 8192 bytes at an offset lie in three pages: a list.
    SharedMemory list(client.space(), 4096);
    list.at<std::uint64_t>(0) = page + 4096;
    list.at<std::uint64_t>(8) = page + 8192;
    const auto command = [&](IoOpcode opcode, std::uint16_t id) {
      return io_command(opcode, id, 5, blocks, page + 0x100, list.address());
    };
    EXPECT_EQ(queue->status(command(IoOpcode::kWrite, 1)), 0);
    data.fill(99);
    EXPECT_EQ(queue->status(command(IoOpcode::kRead, 2)), 0);
    EXPECT_EQ(data.text(0x100, 8192), written);
    EXPECT_EQ(queue->status(io_command(IoOpcode::kFlush, 3)), 0);
    // Zeroes replace all but the first and the last block.
    EXPECT_EQ(queue->status(io_command(IoOpcode::kWriteZeroes, 4, 5, blocks / 2)), 0);
    EXPECT_EQ(queue->status(command(IoOpcode::kRead, 5)), 0);
    EXPECT_EQ(data.text(0x100, 8192), std::string(4096, '\0') + written.substr(4096));
    data.at<DeallocateRange>(0) = {0, 1, 5};
    data.at<DeallocateRange>(16) = {0, blocks - 1, 6};
    SubmissionEntry deallocate = io_command(IoOpcode::kDatasetManagement, 6, 0, 1, page);
    deallocate.cdw10 = 1;
    deallocate.cdw11 = kDeallocate;
    EXPECT_EQ(queue->status(deallocate), 0);
    EXPECT_EQ(queue->status(command(IoOpcode::kRead, 7)), 0);
    EXPECT_EQ(data.text(0x100, 8192), std::string(8192, '\0'));
    EXPECT_EQ(client.complaints(), "");
    const SoftControllerCounters counters = client.controller().counters();
    EXPECT_EQ(counters.read_bytes, 3u * 8192);
    EXPECT_EQ(counters.written_bytes, 8192u);
    EXPECT_EQ(counters.outstanding, 0u);
  }
}

TEST(NvmeSoftIo, PagesOf64KiB) {
  constexpr std::size_t kPage = 65536;
  DmaSpaceOptions addresses = translated();
  addresses.page_bytes = kPage;
  HandClient client(memory_options(), addresses);
  ASSERT_TRUE(client.enable(kUsualCc | 4u << kCcMpsShift));
  const auto queue = client.queue(1, 16);
  SharedMemory data(client.space(), 8 * kPage);
  data.fill(1);
  const auto command = [&](IoOpcode opcode, std::uint64_t prp1, std::uint64_t prp2) {
    return io_command(opcode, 1, 0, 32, prp1, prp2);  // 128 KiB
  };
  const std::uint64_t page = data.address();
  const std::string written = data.text(4096, 2 * kPage);
  data.at<std::uint64_t>(7 * kPage) = page + kPage;
  data.at<std::uint64_t>(7 * kPage + 8) = page + 2 * kPage;
  EXPECT_EQ(queue->status(command(IoOpcode::kWrite, page + 4096, page + 7 * kPage)), 0);
  EXPECT_EQ(queue->status(command(IoOpcode::kRead, page + 4 * kPage, page + 3 * kPage)), 0);
  EXPECT_EQ(data.text(4 * kPage, kPage) + data.text(3 * kPage, kPage), written);
  EXPECT_EQ(client.complaints(), "");
  EXPECT_EQ(queue->status(command(IoOpcode::kRead, page, page + 4096)), kScPrpOffsetInvalid);
  const SubmissionEntry create =
      admin_command(AdminOpcode::kCreateCq, queue_identity(16, 2), kQueueContiguous, page + 4096);
  EXPECT_EQ(client.admin().status(create), kScPrpOffsetInvalid);
}

TEST(NvmeSoftIo, BusAddressesMayBePointers) {
  HandClient client(memory_options(), DmaSpaceOptions{});
  ASSERT_TRUE(client.enable());
  const auto queue = client.queue(1);
  AlignedBuffer memory(3 * 4096);
  // Neighbours on the bus, mapped one by one: a transfer may lie in both.
  ASSERT_TRUE(client.space().map(memory.data(), 4096));
  ASSERT_TRUE(client.space().map(memory.data() + 4096, 8192));
  SubmissionEntry entry = io_command(IoOpcode::kWrite, 1, 0, 2);
  entry.set_data_pointer(DataPointer::kSgl);
  entry.sgl = SglDescriptor::of(SglType::kDataBlock, reinterpret_cast<std::uintptr_t>(memory.data()) + 100, 8192);
  EXPECT_EQ(queue->status(entry), 0);
  EXPECT_EQ(client.complaints(), "");
  entry.sgl.address += 4096;
  EXPECT_EQ(queue->status(entry), kScDataTransferError);
  ASSERT_TRUE(client.space().unmap(memory.data()));
  ASSERT_TRUE(client.space().unmap(memory.data() + 4096));
}

TEST(NvmeSoftIo, DmaSpaceKeepsItsTable) {
  DmaSpace space(translated());
  AlignedBuffer memory(8 * 4096);
  const auto first = space.map(memory.data(), 4096), second = space.map(memory.data() + 4096, 4096 + 8);
  ASSERT_TRUE(first && second);
  EXPECT_GE(*second - *first, std::uint64_t{1} << 20);
  EXPECT_EQ(*first % 4096, 0u);
  EXPECT_FALSE(space.map(memory.data() + 2048, 4096));
  EXPECT_FALSE(space.map(memory.data() + 8192, 4096));
  EXPECT_FALSE(space.map(nullptr, 4096));
  EXPECT_FALSE(space.map(memory.data() + 16384, 0));
  EXPECT_FALSE(space.unmap(memory.data() + 8));
  const auto third = space.map(memory.data() + 5 * 4096 + 24, 100);
  ASSERT_TRUE(third);
  EXPECT_EQ(*third % 4096, 24u);
  EXPECT_EQ(space.mapped_ranges(), 3u);
  EXPECT_EQ(space.mapped_bytes(), 4096u + 4096 + 8 + 100);
  DmaSpace::Reader reader(space);
  {
    const std::lock_guard lock(reader);
    EXPECT_EQ(reader.translate(*second + 8, 4096), memory.data() + 4096 + 8);
    EXPECT_EQ(reader.translate(*second + 9, 4096), nullptr);
    EXPECT_EQ(reader.translate(*first - 1, 1), nullptr);
    EXPECT_EQ(reader.translate(*first + 4096, 1), nullptr);
    EXPECT_FALSE(reader.was_mapped(*first));
  }
  ASSERT_TRUE(space.unmap(memory.data()));
  const std::lock_guard lock(reader);
  EXPECT_EQ(reader.translate(*first, 1), nullptr);
  EXPECT_TRUE(reader.was_mapped(*first + 4095));
}

// A mover stands for the copy engine of memory that the controller's threads cannot touch.
class CountingMover : public MemoryMover {
 public:
  bool to_host(void* to, const void* from, std::size_t bytes) override { return move(to, from, bytes); }
  bool from_host(void* to, const void* from, std::size_t bytes) override { return move(to, from, bytes); }
  std::atomic<int> moves{0};
  std::atomic<bool> broken{false};

 private:
  bool move(void* to, const void* from, std::size_t bytes) {
    std::memcpy(to, from, bytes);
    ++moves;
    return !broken;
  }
};

TEST(NvmeSoftIo, MemoryThatOthersMove) {
  HandClient client;
  ASSERT_TRUE(client.enable());
  const auto queue = client.queue(1);
  CountingMover mover;
  AlignedBuffer memory(4 * 4096);
  const auto address = client.space().map(memory.data(), memory.size(), &mover);
  ASSERT_TRUE(address);
  SharedMemory plain(client.space(), 4096);
  plain.fill(1);
  std::memset(memory.data() + 4096, 7, 4096);
  // Half of the transfer is in plain memory.
  const auto command = [&](IoOpcode opcode) { return io_command(opcode, 1, 3, 2, plain.address(), *address + 4096); };
  const std::string first = plain.text(0, 4096);
  EXPECT_EQ(queue->status(command(IoOpcode::kWrite)), 0);
  plain.fill(2);
  std::memset(memory.data(), 0, memory.size());
  EXPECT_EQ(queue->status(command(IoOpcode::kRead)), 0);
  EXPECT_EQ(plain.text(0, 4096), first);
  EXPECT_EQ(memory.data()[4096], std::byte{7});
  EXPECT_EQ(memory.data()[8191], std::byte{7});
  EXPECT_EQ(memory.data()[8192], std::byte{0});
  EXPECT_EQ(mover.moves, 2);
  // PRP lists may lie there, too.
  auto* list = reinterpret_cast<std::uint64_t*>(memory.data());
  list[0] = list[1] = plain.address();
  EXPECT_EQ(queue->status(io_command(IoOpcode::kWrite, 2, 0, 3, plain.address(), *address)), 0);
  EXPECT_EQ(client.complaints(), "");
  mover.broken = true;
  EXPECT_EQ(queue->status(command(IoOpcode::kRead)), kScDataTransferError);
  EXPECT_EQ(queue->status(command(IoOpcode::kWrite)), kScDataTransferError);
  ASSERT_TRUE(client.space().unmap(memory.data()));
}

// Commands of one queue as fast as it goes, `total` of them at `depth`, each to a page of its own. How many came back
// well.
std::uint64_t stream(HandQueue& queue, std::uint64_t total, std::uint32_t depth, std::uint64_t address, bool quietly) {
  std::uint64_t sent = 0, good = 0, done = 0;
  std::uint64_t last = monotonic_ns();
  std::vector<bool> used(depth);
  while (done < total) {
    bool some = false;
    for (std::uint16_t id = 0; sent < total && id < depth && sent - done < depth; ++id) {
      if (used[id]) continue;
      used[id] = true;
      queue.put(io_command(sent % 4 == 0 ? IoOpcode::kWrite : IoOpcode::kRead, id, id, 1, address + id * 4096u));
      ++sent;
      some = true;
    }
    if (some) quietly ? queue.ring_quietly() : queue.ring();
    bool came = false;
    while (const auto entry = queue.poll(true)) {
      if (entry->command_id >= depth || !used[entry->command_id]) return good;
      used[entry->command_id] = false;
      ++done;
      came = true;
      if (CommandStatus::of(*entry).ok()) ++good;
    }
    if (came) {
      quietly ? queue.acknowledge_quietly() : queue.acknowledge();
      last = monotonic_ns();
    } else {
      if (monotonic_ns() - last > kPatienceNs) return good;
      std::this_thread::yield();
    }
  }
  return good;
}

TEST(NvmeSoftIo, CommandsPerSecond) {
  HandClient client;
  ASSERT_TRUE(client.enable());
  const auto queue = client.queue(1, 257);
  SharedMemory data(client.space(), 256 * 4096);
  const std::uint64_t cpu = client.controller().counters().cpu_ns, start = monotonic_ns();
#if defined(__SANITIZE_THREAD__)
  constexpr std::uint64_t kTotal = 20'000;
#else
  constexpr std::uint64_t kTotal = 200'000;
#endif
  EXPECT_EQ(stream(*queue, kTotal, 256, data.address(), false), kTotal);
  const double seconds = static_cast<double>(monotonic_ns() - start) / 1e9;
  const double used = static_cast<double>(client.controller().counters().cpu_ns - cpu) / 1e9;
  std::printf("%.0f commands/s, %.0f per second of the controller's processor time\n", kTotal / seconds, kTotal / used);
  EXPECT_EQ(client.complaints(), "");
#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // Of processor time, so that other work on the machine does not count.
  EXPECT_GE(kTotal / used, 500'000);
#endif
}

TEST(NvmeSoftIo, QueuesOfAllDepthsWrap) {
  HandClient client;
  ASSERT_TRUE(client.enable());
  SharedMemory data(client.space(), 1024 * std::size_t{4096});
  for (const std::uint32_t entries : {2u, 3u, 7u, 64u, 1023u, 1024u}) {
    const auto queue = client.queue(1, entries);
    EXPECT_EQ(stream(*queue, 3 * entries + 1, entries - 1, data.address(), false), 3 * entries + 1) << entries;
    ASSERT_EQ(client.delete_sq(1), 0);
    ASSERT_EQ(client.delete_cq(1), 0);
  }
  EXPECT_EQ(client.complaints(), "");
}

TEST(NvmeSoftIo, SeveralClientsAtOnce) {
  for (const std::uint32_t threads : {1u, 2u, 4u}) {
    SoftControllerOptions options = memory_options();
    options.threads = threads;
    HandClient client(std::move(options));
    ASSERT_TRUE(client.enable());
    std::vector<std::unique_ptr<HandQueue>> queues;
    std::vector<std::unique_ptr<SharedMemory>> memory;
    for (std::uint16_t i = 0; i < 4; ++i) {
      queues.push_back(client.queue(static_cast<std::uint16_t>(i + 1), 33));
      memory.push_back(std::make_unique<SharedMemory>(client.space(), 32 * 4096));
    }
    // Reads only touch what no other client writes: each has blocks of its own.
    std::vector<std::thread> clients;
    std::vector<std::uint64_t> good(4);
    for (std::size_t i = 0; i < 4; ++i) {
      clients.emplace_back([&, i] {
        for (int round = 0; round < 20; ++round) {
          for (std::uint16_t id = 0; id < 32; ++id) {
            const std::uint64_t block = i * 32 + id;
            queues[i]->put(io_command(round % 2 == 0 ? IoOpcode::kWrite : IoOpcode::kRead, id, block, 1,
                                      memory[i]->address(id * std::size_t{4096})));
            if (round % 2 == 0) {
              memory[i]->at<std::uint64_t>(id * std::size_t{4096}) = block * 1000 + static_cast<unsigned>(round);
            } else {
              memory[i]->at<std::uint64_t>(id * std::size_t{4096}) = 0;
            }
          }
          queues[i]->ring();
          for (int n = 0; n < 32; ++n) {
            const auto done = queues[i]->wait();
            if (!done || !CommandStatus::of(*done).ok()) return;
            const std::uint64_t block = i * 32 + done->command_id;
            const auto expected = block * 1000 + static_cast<unsigned>(round / 2 * 2);
            if (memory[i]->at<std::uint64_t>(done->command_id * std::size_t{4096}) == expected) ++good[i];
          }
        }
      });
    }
    for (auto& thread : clients) thread.join();
    for (const std::uint64_t count : good) EXPECT_EQ(count, 640u);
    EXPECT_EQ(client.complaints(), "");
  }
}

// Two controllers share a medium and the memory of their clients.
TEST(NvmeSoftIo, SeveralControllersOfOneMedium) {
  SoftControllerOptions options = memory_options();
  HandClient first(options), second(options);
  ASSERT_TRUE(first.enable() && second.enable());
  const auto one = first.queue(1), two = second.queue(1);
  SharedMemory from(first.space(), 4096), to(second.space(), 4096);
  from.fill(4);
  EXPECT_EQ(one->status(io_command(IoOpcode::kWrite, 1, 9, 1, from.address())), 0);
  EXPECT_EQ(two->status(io_command(IoOpcode::kRead, 1, 9, 1, to.address())), 0);
  EXPECT_EQ(from.text(0, 4096), to.text(0, 4096));
}

// Memory comes and goes while commands run; nothing of one client's is disturbed by another's.
TEST(NvmeSoftIo, MappingsChangeWhileCommandsRun) {
  HandClient client;
  ASSERT_TRUE(client.enable());
  const auto queue = client.queue(1, 33);
  SharedMemory data(client.space(), 32 * 4096);
  std::atomic<bool> stop{false};
  std::thread mapper([&] {
    AlignedBuffer memory(64 * 4096);
    while (!stop) {
      for (std::size_t i = 0; i < 64; ++i) EXPECT_TRUE(client.space().map(memory.data() + i * 4096, 4096));
      for (std::size_t i = 0; i < 64; ++i) EXPECT_TRUE(client.space().unmap(memory.data() + i * 4096));
    }
  });
  EXPECT_EQ(stream(*queue, 20'000, 32, data.address(), false), 20'000u);
  stop = true;
  mapper.join();
  EXPECT_EQ(client.complaints(), "");
}

TEST(NvmeSoftIo, DoorbellsThatNobodyTellsOfAreFound) {
  SoftControllerOptions options = memory_options();
  options.threads = 2;
  HandClient client(std::move(options));
  ASSERT_TRUE(client.enable());
  const auto first = client.queue(1, 33), second = client.queue(2, 33);
  SharedMemory data(client.space(), 32 * 4096);
  for (const auto* queue : {&first, &second}) {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    EXPECT_EQ(stream(**queue, 200, 1, data.address(), true), 200u);
    EXPECT_EQ(stream(**queue, 1000, 32, data.address(), true), 1000u);
  }
  EXPECT_EQ(client.complaints(), "");
}

TEST(NvmeSoftIo, AnArmedControllerDoesNotSleep) {
  SoftControllerOptions options = memory_options();
  options.threads = 2;
  options.least_sleep = options.most_sleep = std::chrono::seconds(1);
  HandClient client(std::move(options));
  ASSERT_TRUE(client.enable());
  const auto first = client.queue(1, 33), second = client.queue(2, 33);
  SharedMemory data(client.space(), 32 * 4096);
  const SoftController::Armed armed(client.controller());
  for (const auto* queue : {&first, &second}) {
    const std::uint64_t start = monotonic_ns();
    for (int i = 0; i < 10; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      EXPECT_EQ(stream(**queue, 1, 1, data.address(), true), 1u);
    }
    EXPECT_LT(monotonic_ns() - start, 5'000'000'000u);  // asleep it finds one a second
  }
}

TEST(NvmeSoftIo, AnArmedControllerRestsIfItIsTold) {
  SoftControllerOptions options = memory_options();
  options.threads = 2;
  HandClient client(std::move(options));
  ASSERT_TRUE(client.enable());
  const auto first = client.queue(1, 33), second = client.queue(2, 33);
  SharedMemory data(client.space(), 32 * 4096);
  const SoftController::Armed armed(client.controller());
  const auto share = [&](std::chrono::milliseconds time) {  // of a processor, by both
    const std::uint64_t cpu = client.controller().counters().cpu_ns, start = monotonic_ns();
    std::this_thread::sleep_for(time);
    return static_cast<double>(client.controller().counters().cpu_ns - cpu) /
           static_cast<double>(monotonic_ns() - start);
  };
  client.controller().rest_while_armed(std::chrono::milliseconds(1), std::chrono::microseconds(200));
  double idle = share(std::chrono::milliseconds(500));
  for (int i = 0; i < 4 && idle > 0.2; ++i) idle = std::min(idle, share(std::chrono::milliseconds(500)));
  std::printf("%.1f %% of a processor by two that rest\n", 100 * idle);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LE(idle, 0.2);
#endif
  // Doorbells that nobody tells them of, after a pause and in a row.
  std::uint64_t quickest = ~std::uint64_t{0};
  for (int i = 0; i < 20; ++i) {
    for (const auto* queue : {&first, &second}) {
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
      const std::uint64_t start = monotonic_ns();
      EXPECT_EQ(stream(**queue, 1, 1, data.address(), true), 1u);
      quickest = std::min(quickest, monotonic_ns() - start);
      EXPECT_EQ(stream(**queue, 100, 32, data.address(), true), 100u);
    }
  }
  EXPECT_LT(quickest, 2'000'000u);
  // What is due is on time.
  FaultRule late;
  late.queue = 1;
  late.kind = FaultKind::kLateCompletion;
  late.delay = std::chrono::milliseconds(5);
  client.faults().add(late);
  const std::uint64_t start = monotonic_ns();
  EXPECT_EQ(first->status(io_command(IoOpcode::kFlush, 9)), 0);
  EXPECT_GE(monotonic_ns() - start, 5'000'000u);
  client.controller().rest_while_armed({}, {});
  double most = 0;
  for (int i = 0; i < 50 && most < 0.25; ++i) most = std::max(most, share(std::chrono::milliseconds(100)));
  EXPECT_GE(most, 0.25);
  EXPECT_EQ(client.complaints(), "");
}

TEST(NvmeSoftIo, AnIdleControllerRests) {
  SoftControllerOptions options = memory_options();
  options.threads = 4;
  HandClient client(std::move(options));
  ASSERT_TRUE(client.enable());
  const auto queue = client.queue(1);
  const auto share = [&](std::chrono::milliseconds time) {
    const std::uint64_t cpu = client.controller().counters().cpu_ns, start = monotonic_ns();
    std::this_thread::sleep_for(time);
    return static_cast<double>(client.controller().counters().cpu_ns - cpu) /
           static_cast<double>(monotonic_ns() - start);
  };
  // Of a few attempts, as other work on the machine makes it dear to wake up.
  const auto least = [&](std::chrono::milliseconds time, double enough) {
    double found = share(time);
    for (int i = 0; i < 4 && found > enough; ++i) found = std::min(found, share(time));
    return found;
  };
  EXPECT_EQ(queue->status(io_command(IoOpcode::kFlush, 1)), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const double idle = least(std::chrono::milliseconds(2000), 0.01);
  std::printf("%.2f %% of a processor while idle\n", 100 * idle);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LE(idle, 0.01);
#endif
  // A lost command keeps nobody awake, nor does one that is due when the controller has failed.
  FaultRule lose;
  lose.queue = 1;
  client.faults().add(lose);
  queue->submit(io_command(IoOpcode::kFlush, 2));
  EXPECT_LE(least(std::chrono::milliseconds(200), 0.1), 0.1);
  lose.kind = FaultKind::kLateCompletion;
  lose.delay = std::chrono::milliseconds(100);
  client.faults().add(lose);
  queue->submit(io_command(IoOpcode::kFlush, 3));
  while (client.faults().injected() != 2) std::this_thread::yield();
  client.controller().fail();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_LE(least(std::chrono::milliseconds(200), 0.1), 0.1);
  const SoftController::Armed armed(client.controller());
  double most = 0;
  for (int i = 0; i < 50 && most < 0.05; ++i) most = std::max(most, share(std::chrono::milliseconds(100)));
  EXPECT_GE(most, 0.05);
}

TEST(NvmeSoftIo, ThreadsRunWhereTheyAreTold) {
  cpu_set_t allowed;
  ASSERT_EQ(sched_getaffinity(0, sizeof allowed, &allowed), 0);
  if (CPU_COUNT(&allowed) < 2) GTEST_SKIP() << "one processor";
  int cpu = 0;
  while (!CPU_ISSET(static_cast<unsigned>(cpu), &allowed)) ++cpu;
  const auto bound = [&] {
    int count = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      cpu_set_t set;
      if (sched_getaffinity(std::stoi(task.path().filename()), sizeof set, &set) != 0) continue;
      count += CPU_COUNT(&set) == 1 && CPU_ISSET(static_cast<unsigned>(cpu), &set) ? 1 : 0;
    }
    return count;
  };
  const int before = bound();
  SoftControllerOptions options = memory_options();
  options.threads = 3;
  options.cpus = {cpu};
  HandClient client(std::move(options));
  EXPECT_EQ(bound() - before, 3);
  ASSERT_TRUE(client.enable());
  EXPECT_EQ(client.queue(3, 8)->status(io_command(IoOpcode::kFlush, 1)), 0);
}

}  // namespace
}  // namespace tardis::nvme::testing
