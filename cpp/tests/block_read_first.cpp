// SPDX-License-Identifier: Apache-2.0
// Reads before writes on devices: real files under nine writes to a read, and a drive whose flushes are slow and fail.
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "block/sync_device.h"
#include "block/uring_probe.h"
#include "tests/block_support.h"

namespace tardis {
namespace {

using namespace std::chrono_literals;
using testing::OffsetMemory;
using testing::random_bytes;
using testing::TempFolder;
using Op = IoRequest::Op;

constexpr std::size_t kBytes = 64 << 10;
constexpr std::size_t kBatch = 18;

struct Load {
  std::uint64_t read_batches = 0, write_batches = 0, flushes = 0, wrong = 0, failed = 0, flush_errors = 0;
};

// Two readers and two writers on one file for `time`; a flush after each write batch, and nine bytes written to one
// read by the sizes of their batches.
Load mixed_load(BlockDevice& device, FileId file, std::chrono::milliseconds time) {
  const auto data = random_bytes(kBytes, 1);
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> read_batches{0}, write_batches{0}, flushes{0}, wrong{0}, failed{0}, flush_errors{0};
  const auto batch = [&](Op op, std::size_t count, std::uint64_t first, std::uint8_t* memory) {
    std::vector<iovec> pieces(count);
    std::vector<IoRequest> requests(count);
    for (std::size_t i = 0; i < count; ++i) {
      pieces[i] = {memory + i * kBytes, kBytes};
      requests[i] = {op, file, (first + i) * kBytes, {&pieces[i], 1}, -1};
    }
    device.run(requests, nullptr);
    for (const IoRequest& request : requests) failed += request.error != 0;
  };
  {
    OffsetMemory memory(2 * kBatch * kBytes, 0);
    for (std::size_t i = 0; i < 2 * kBatch; ++i) std::memcpy(memory.data() + i * kBytes, data.data(), kBytes);
    batch(Op::kWrite, 2 * kBatch, 0, memory.data());
  }
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      OffsetMemory memory(kBatch * kBytes, 0);
      const bool reads = t < 2;
      const std::size_t count = reads ? kBatch / 9 : kBatch;
      for (std::size_t i = 0; i < kBatch; ++i) std::memcpy(memory.data() + i * kBytes, data.data(), kBytes);
      while (!stop) {
        if (reads) std::memset(memory.data(), 0, count * kBytes);
        batch(reads ? Op::kRead : Op::kWrite, count, t % 2 * kBatch, memory.data());
        if (reads) {
          ++read_batches;
          for (std::size_t i = 0; i < count; ++i) {
            wrong += std::memcmp(memory.data() + i * kBytes, data.data(), kBytes) != 0;
          }
          std::this_thread::sleep_for(200us);
        } else {
          ++write_batches;
          ++flushes;
          if (!device.flush(file)) ++flush_errors;
        }
      }
    });
  }
  std::this_thread::sleep_for(time);
  stop = true;
  for (auto& thread : threads) thread.join();
  return {read_batches, write_batches, flushes, wrong, failed, flush_errors};
}

void expect_reads_first(const BlockDevice& device, const Load& load) {
  EXPECT_EQ(load.wrong, 0u);
  EXPECT_EQ(load.failed, 0u);
  const auto counters = device.counters();
  EXPECT_EQ(counters.read_batches, load.read_batches);
  EXPECT_LE(counters.max_flushes_per_read_batch, 1u);
  EXPECT_EQ(counters.read_batches_delayed_again, 0u);
  EXPECT_GT(load.read_batches, 10u);
  EXPECT_GT(load.write_batches, 1u);
}

class ReadFirst : public ::testing::TestWithParam<bool> {};  // io_uring?

TEST_P(ReadFirst, OnARealFile) {
  TempFolder folder;
  BlockDeviceOptions options;
  options.engine = GetParam() ? BlockDeviceOptions::Engine::kIoUring : BlockDeviceOptions::Engine::kSync;
  auto device = open_block_device(folder.path(), options, -1);
  if (!device) GTEST_SKIP() << device.error().message;
  auto file = (*device)->open_file(folder.file("data"), true, true);
  ASSERT_TRUE(file);
  ASSERT_TRUE((*device)->preallocate(*file, 2 * kBatch * kBytes));
  const Load load = mixed_load(**device, *file, 1500ms);
  expect_reads_first(**device, load);
  EXPECT_EQ(load.flush_errors, 0u);
}

TEST_P(ReadFirst, OnADriveWithSlowFlushesSomeOfWhichFail) {
  TempFolder folder;
  if (GetParam() && why_no_io_uring(8, -1, -1, nullptr, 0)) GTEST_SKIP() << "no io_uring";
  auto workers = WorkerPool::create(4);
  ASSERT_TRUE(workers);
  std::atomic<int> running{0}, together{0}, done{0};
  DeviceSetup setup;
  setup.depth = {16, 16, 16};
  setup.sync_file = [&](int) {
    if (running.fetch_add(1) > 0) ++together;
    std::this_thread::sleep_for(20ms);
    --running;
    return ++done % 5 == 0 ? EIO : 0;
  };
  std::unique_ptr<BlockDevice> device;
#if TARDIS_HAS_IO_URING
  if (GetParam()) device = make_uring_device(std::move(setup), std::move(*workers));
#endif
  if (device == nullptr) device = std::make_unique<SyncDevice>(std::move(setup), std::move(*workers));
  auto file = device->open_file(folder.file("data"), true, true);
  ASSERT_TRUE(file);
  const Load load = mixed_load(*device, *file, 1000ms);
  expect_reads_first(*device, load);
  EXPECT_EQ(together.load(), 0);
  EXPECT_EQ(load.flushes, static_cast<std::uint64_t>(done.load()));
  EXPECT_EQ(load.flush_errors, load.flushes / 5);
  // Reads went on beside the flushes, which held nearly all of the second.
  EXPECT_GT(device->counters().read_batches_delayed, 10u);
}

// Files flushed together are one flush to reads, go side by side, and each has its own result.
TEST_P(ReadFirst, SeveralFilesAreOneFlush) {
  TempFolder folder;
  if (GetParam() && why_no_io_uring(8, -1, -1, nullptr, 0)) GTEST_SKIP() << "no io_uring";
  auto workers = WorkerPool::create(8);
  ASSERT_TRUE(workers);
  constexpr std::size_t kFiles = 9, kBad = 5;
  std::atomic<int> running{0}, most{0};
  std::atomic<int> turn{0};
  DeviceSetup setup;
  setup.depth = {16, 16, 16};
  setup.sync_file = [&](int fd) {
    const int now = ++running;
    for (int before = most; before < now && !most.compare_exchange_weak(before, now);) {
    }
    std::this_thread::sleep_for(20ms);
    --running;
    ++turn;
    struct stat found;
    return ::fstat(fd, &found) == 0 && found.st_size == kBad ? EIO : 0;
  };
  std::unique_ptr<BlockDevice> device;
#if TARDIS_HAS_IO_URING
  if (GetParam()) device = make_uring_device(std::move(setup), std::move(*workers));
#endif
  if (device == nullptr) device = std::make_unique<SyncDevice>(std::move(setup), std::move(*workers));
  std::vector<FileId> files;
  for (std::size_t i = 0; i < kFiles; ++i) {
    auto file = device->open_file(folder.file(std::to_string(i)), true, true);
    ASSERT_TRUE(file);
    ASSERT_TRUE(i == 0 || device->preallocate(*file, i));
    files.push_back(*file);
  }
  files.push_back(77);
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    std::uint8_t byte = 0;
    const iovec memory{&byte, 1};
    while (!stop) {
      IoRequest read{Op::kRead, files[kFiles - 1], 0, {&memory, 1}, -1};
      device->run({&read, 1}, nullptr);
    }
  });
  const std::vector<Status> results = device->flush_files(files);
  stop = true;
  reader.join();
  ASSERT_EQ(results.size(), kFiles + 1);
  for (std::size_t i = 0; i <= kFiles; ++i) EXPECT_EQ(static_cast<bool>(results[i]), i != kBad && i != kFiles) << i;
  EXPECT_EQ(results[kBad].error().code, Code::kIo);
  EXPECT_EQ(turn, static_cast<int>(kFiles));
  EXPECT_GT(most, 1);
  EXPECT_EQ(device->counters().max_flushes_per_read_batch, 1u);
  EXPECT_EQ(device->counters().flushes_postponed, 0u);
}

// A write batch that is under way when reads come keeps little in flight, and goes on when they are gone.
TEST_P(ReadFirst, AWriteBatchYields) {
  TempFolder folder;
  BlockDeviceOptions options;
  options.engine = GetParam() ? BlockDeviceOptions::Engine::kIoUring : BlockDeviceOptions::Engine::kSync;
  options.queue_depth = 64;
  options.workers = 8;
  auto device = open_block_device(folder.path(), options, -1);
  if (!device) GTEST_SKIP() << device.error().message;
  auto file = (*device)->open_file(folder.file("data"), true, true);
  ASSERT_TRUE(file);
  constexpr std::size_t kCount = 512;
  OffsetMemory memory(kCount * kBytes, 0), target(kBytes, 0);
  memory.fill(random_bytes(kCount * kBytes, 2));
  const iovec small{target.data(), kBytes};
  std::vector<iovec> pieces(kCount);
  std::vector<IoRequest> requests(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    pieces[i] = {memory.data() + i * kBytes, kBytes};
    requests[i] = {Op::kWrite, *file, (i + 1) * kBytes, {&pieces[i], 1}, -1};
  }
  IoRequest first{Op::kWrite, *file, 0, {&small, 1}, -1};
  (*device)->run({&first, 1}, nullptr);
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop) {
      IoRequest read{Op::kRead, *file, 0, {&small, 1}, -1};
      (*device)->run({&read, 1}, nullptr);
    }
  });
  for (int round = 0; round < 20 && (*device)->counters().writes_yielded == 0; ++round) {
    (*device)->run(requests, nullptr);
    for (const IoRequest& request : requests) ASSERT_EQ(request.error, 0);
  }
  stop = true;
  reader.join();
  EXPECT_GT((*device)->counters().writes_yielded, 0u);
  ASSERT_TRUE((*device)->flush(*file));
  EXPECT_EQ(testing::file_contents(folder.file("data"), kBytes, kCount * kBytes), memory.copy());
}

INSTANTIATE_TEST_SUITE_P(Engines, ReadFirst, ::testing::Values(false, true),
                         [](const auto& info) { return std::string(info.param ? "IoUring" : "Sync"); });

}  // namespace
}  // namespace tardis
