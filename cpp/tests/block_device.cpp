// SPDX-License-Identifier: Apache-2.0
// Both engines, direct and buffered, through the public interface.
#include "block/block_device.h"
#include "block/worker_pool.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

#include "tests/block_support.h"

namespace tardis {
namespace {

using testing::file_contents;
using testing::OffsetMemory;
using testing::random_bytes;
using testing::TempFolder;
using Engine = BlockDeviceOptions::Engine;
using Direct = BlockDeviceOptions::Direct;
using Op = IoRequest::Op;

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMiB = 1024 * kKiB;

struct Path {
  Engine engine;
  Direct direct;
};

class BlockDeviceTest : public ::testing::TestWithParam<Path> {
 protected:
  BlockDeviceOptions options() const {
    BlockDeviceOptions options;
    options.engine = GetParam().engine;
    options.direct = GetParam().direct;
    options.workers = 3;
    return options;
  }

  // Null, with the test skipped, where this machine cannot serve the path.
  std::unique_ptr<BlockDevice> open(const BlockDeviceOptions& options) {
    auto device = open_block_device(folder_.path(), options, -1);
    if (!device) {
      EXPECT_EQ(device.error().code, Code::kInvalidArgument) << device.error().message;
      why_skipped_ = device.error().message;
      return nullptr;
    }
    return std::move(*device);
  }

  FileId create(BlockDevice& device, const std::string& name, std::uint64_t bytes) {
    auto file = device.open_file(folder_.file(name), true, true);
    EXPECT_TRUE(file) << (file ? "" : file.error().message);
    if (!file) return 0;
    const Status reserved = device.preallocate(*file, bytes);
    EXPECT_TRUE(reserved) << (reserved ? "" : reserved.error().message);
    return *file;
  }

  TempFolder folder_;
  std::string why_skipped_;
};

#define OPEN_OR_SKIP(device, ...)  \
  auto device = open(__VA_ARGS__); \
  if (device == nullptr) GTEST_SKIP() << why_skipped_

int run_one(BlockDevice& device, Op op, FileId file, std::uint64_t offset, std::span<const iovec> memory) {
  IoRequest request{.op = op, .file = file, .offset = offset, .memory = memory, .error = -1};
  device.run({&request, 1}, nullptr);
  return request.error;
}

TEST_P(BlockDeviceTest, ReportsWhatWasAskedFor) {
  OPEN_OR_SKIP(device, options());
  const PathReport& report = device->report();
  EXPECT_EQ(report.engine, GetParam().engine == Engine::kSync ? "sync" : "io_uring");
  EXPECT_EQ(report.direct, GetParam().direct == Direct::kOn);
  EXPECT_EQ(report.direct, device->geometry().direct);
  EXPECT_EQ(report.offset_align, device->geometry().offset_align);
  EXPECT_FALSE(report.filesystem.empty());
  EXPECT_FALSE(report.reason.empty());
  EXPECT_EQ(report.reason.find('\n'), std::string::npos);
  // The self-test leaves nothing behind.
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

TEST(BlockDeviceAtOnce, FilesInMemoryAreReadByTheCallerAlone) {
  const TempFolder memory("/dev/shm");
  const auto device = open_block_device(memory.path(), {}, -1);
  ASSERT_TRUE(device) << device.error().message;
  ASSERT_TRUE((*device)->report().in_memory);
  ASSERT_TRUE((*device)->reads_at_once());
  const auto file = (*device)->open_file(memory.file("data"), true, true);
  ASSERT_TRUE(file);
  const auto bytes = random_bytes(1 * kMiB, 5);
  iovec whole{const_cast<std::uint8_t*>(bytes.data()), bytes.size()};
  ASSERT_EQ(run_one(**device, Op::kWrite, *file, 0, {&whole, 1}), 0);
  const auto before = (*device)->counters();
  std::vector<std::uint8_t> found(300'000);
  const std::vector<iovec> pieces{{found.data(), 1}, {found.data() + 1, 99'999}, {found.data() + 100'000, 200'000}};
  EXPECT_EQ((*device)->read_at_once(*file, 12'345, pieces), 0);
  EXPECT_TRUE(std::equal(found.begin(), found.end(), bytes.begin() + 12'345));
  EXPECT_EQ((*device)->read_at_once(*file, 1 * kMiB - 299'999, pieces), ENODATA);
  EXPECT_EQ((*device)->read_at_once(*file + 1, 0, pieces), EBADF);
  const auto after = (*device)->counters();
  EXPECT_EQ(after.reads - before.reads, 3u);
  EXPECT_EQ(after.read_bytes - before.read_bytes, found.size());
  EXPECT_EQ(after.errors - before.errors, 2u);
  EXPECT_EQ(after.read_batches, before.read_batches) << "it takes no turn";
}

TEST(BlockDeviceAtOnce, OnlyWhereAllFoldersAreInMemory) {
  const TempFolder memory("/dev/shm"), disk;
  BlockDeviceOptions options;
  options.direct = Direct::kOff;
  options.more_folders = {disk.path()};
  const auto both = open_block_device(memory.path(), options, -1);
  ASSERT_TRUE(both) << both.error().message;
  if ((*open_block_device(disk.path(), {}, -1))->report().in_memory) GTEST_SKIP() << "no disk here";
  EXPECT_FALSE((*both)->reads_at_once());
  options.more_folders.clear();
  const auto alone = open_block_device(disk.path(), options, -1);
  ASSERT_TRUE(alone);
  EXPECT_FALSE((*alone)->reads_at_once());
  EXPECT_EQ((*alone)->report().in_memory, false);
}

TEST_P(BlockDeviceTest, WritesAndReadsAtEveryMemoryAlignment) {
  OPEN_OR_SKIP(device, options());
  constexpr std::size_t kBytes = 256 * kKiB;
  const FileId file = create(*device, "data", 4 * kMiB);
  std::uint64_t seed = 1;
  for (const std::size_t distance : {0u, 1u, 2u, 4u, 64u, 511u, 512u, 2048u, 4095u}) {
    OffsetMemory out(kBytes, distance);
    OffsetMemory in(kBytes, distance == 4095 ? 0 : distance + 1);
    out.fill(random_bytes(kBytes, seed));
    const std::uint64_t offset = 4096 * seed++;
    const iovec write{out.data(), out.size()};
    const iovec read{in.data(), in.size()};
    ASSERT_EQ(run_one(*device, Op::kWrite, file, offset, {&write, 1}), 0) << distance;
    ASSERT_EQ(run_one(*device, Op::kRead, file, offset, {&read, 1}), 0) << distance;
    ASSERT_EQ(in.copy(), out.copy()) << distance;
    ASSERT_TRUE(device->flush(file));
    ASSERT_EQ(file_contents(folder_.file("data"), offset, kBytes), out.copy()) << distance;
  }
  const auto counters = device->counters();
  EXPECT_EQ(counters.reads, 9u);
  EXPECT_EQ(counters.writes, 9u);
  EXPECT_EQ(counters.read_bytes, 9 * kBytes);
  EXPECT_EQ(counters.written_bytes, 9 * kBytes);
  EXPECT_EQ(counters.errors, 0u);
  if (device->geometry().direct) {
    EXPECT_GE(counters.bounced_requests, 9u);  // one of each pair at least is at an odd address
    EXPECT_EQ(counters.bounced_bytes, counters.bounced_requests * kBytes);
  } else {
    EXPECT_EQ(counters.bounced_requests, 0u);
  }
}

TEST_P(BlockDeviceTest, AlignedRequestsDoNotBounce) {
  OPEN_OR_SKIP(device, options());
  const FileId file = create(*device, "data", kMiB);
  OffsetMemory memory(64 * kKiB, 0);
  const iovec pieces[] = {
      {memory.data() + 16 * kKiB, 16 * kKiB}, {memory.data(), 4 * kKiB}, {memory.data() + 4 * kKiB, 12 * kKiB}};
  ASSERT_EQ(run_one(*device, Op::kWrite, file, 8 * kKiB, pieces), 0);
  ASSERT_EQ(run_one(*device, Op::kRead, file, 8 * kKiB, pieces), 0);
  EXPECT_EQ(device->counters().bounced_requests, 0u);
}

TEST_P(BlockDeviceTest, ThreeThousandIovecs) {
  OPEN_OR_SKIP(device, options());
  constexpr std::size_t kCount = 3000;
  const FileId file = create(*device, "data", 32 * kMiB);
  // Aligned pieces in scattered order (direct I/O takes them as they are), then odd pieces whose sum is whole blocks.
  for (const bool aligned : {true, false}) {
    std::vector<std::size_t> lengths(kCount, 4096);
    if (!aligned) {
      std::mt19937 random(7);
      for (auto& length : lengths) length = random() % 5000;  // some are empty
      const std::size_t sum = std::accumulate(lengths.begin(), lengths.end(), std::size_t{0});
      lengths.back() += (4096 - sum % 4096) % 4096;
    }
    const std::size_t bytes = std::accumulate(lengths.begin(), lengths.end(), std::size_t{0});
    const auto expected = random_bytes(bytes, 11);
    OffsetMemory out(bytes, aligned ? 0 : 3);
    OffsetMemory in(bytes, aligned ? 0 : 5);
    out.fill(expected);
    std::vector<iovec> write(kCount);
    std::vector<iovec> read(kCount);
    std::size_t at = 0;
    for (std::size_t i = 0; i < kCount; ++i) {
      write[i] = {out.data() + at, lengths[i]};
      read[i] = {in.data() + at, lengths[i]};
      at += lengths[i];
    }
    // A fixed permutation of the pieces, so that the order of iovecs and of addresses differ.
    std::reverse(write.begin(), write.begin() + kCount / 2);
    std::reverse(read.begin(), read.begin() + kCount / 2);
    ASSERT_EQ(run_one(*device, Op::kWrite, file, 4096, write), 0) << aligned;
    ASSERT_EQ(run_one(*device, Op::kRead, file, 4096, read), 0) << aligned;
    ASSERT_EQ(in.copy(), expected) << aligned;
    std::vector<std::uint8_t> in_file_order;
    for (const iovec& piece : write) {
      const auto* bytes_of_piece = static_cast<const std::uint8_t*>(piece.iov_base);
      in_file_order.insert(in_file_order.end(), bytes_of_piece, bytes_of_piece + piece.iov_len);
    }
    ASSERT_EQ(file_contents(folder_.file("data"), 4096, bytes), in_file_order) << aligned;
    EXPECT_EQ(device->counters().bounced_requests, aligned || !device->geometry().direct ? 0u : 2u);
  }
}

TEST_P(BlockDeviceTest, FileThatEndsInsideTheRange) {
  OPEN_OR_SKIP(device, options());
  const std::string path = folder_.file("short");
  auto file = device->open_file(path, true, true);
  ASSERT_TRUE(file);
  OffsetMemory memory(64 * kKiB, 0);
  OffsetMemory odd(64 * kKiB, 1);
  for (const std::uint64_t size : {std::uint64_t{0}, std::uint64_t{100}, 4 * kKiB, 20 * kKiB, 20 * kKiB + 7}) {
    ASSERT_EQ(::truncate(path.c_str(), static_cast<off_t>(size)), 0);
    auto bytes = device->file_bytes(*file);
    ASSERT_TRUE(bytes);
    EXPECT_EQ(*bytes, size);
    for (auto* target : {&memory, &odd}) {
      const iovec whole{target->data(), target->size()};
      EXPECT_EQ(run_one(*device, Op::kRead, *file, 0, {&whole, 1}), ENODATA) << size;
      EXPECT_EQ(run_one(*device, Op::kRead, *file, 1 * kMiB, {&whole, 1}), ENODATA) << size;
      const iovec inside{target->data(), static_cast<std::size_t>(size / 4096 * 4096)};
      EXPECT_EQ(run_one(*device, Op::kRead, *file, 0, {&inside, 1}), 0) << size;
    }
  }
  EXPECT_EQ(device->counters().errors, 20u);
}

TEST_P(BlockDeviceTest, MisalignedFileRangeIsInvalidWhenDirect) {
  OPEN_OR_SKIP(device, options());
  const FileId file = create(*device, "data", kMiB);
  OffsetMemory memory(64 * kKiB, 0);
  const iovec whole{memory.data(), 8192};
  const iovec part{memory.data(), 8192 - 100};
  const int expected = device->geometry().direct ? EINVAL : 0;
  for (const Op op : {Op::kWrite, Op::kRead}) {
    EXPECT_EQ(run_one(*device, op, file, 100, {&whole, 1}), expected);
    EXPECT_EQ(run_one(*device, op, file, 4096, {&part, 1}), expected);
  }
}

TEST_P(BlockDeviceTest, UnknownFileAndReadOnlyFile) {
  OPEN_OR_SKIP(device, options());
  create(*device, "data", kMiB);
  auto reader = device->open_file(folder_.file("data"), false, false);
  ASSERT_TRUE(reader);
  OffsetMemory memory(4096, 0);
  const iovec piece{memory.data(), memory.size()};
  EXPECT_EQ(run_one(*device, Op::kRead, 77, 0, {&piece, 1}), EBADF);
  EXPECT_EQ(run_one(*device, Op::kWrite, *reader, 0, {&piece, 1}), EBADF);
  EXPECT_EQ(run_one(*device, Op::kRead, *reader, 0, {&piece, 1}), 0);
  EXPECT_FALSE(device->flush(77));
  auto missing = device->open_file(folder_.file("missing"), false, true);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, Code::kNotFound);
  EXPECT_NE(missing.error().message.find("missing"), std::string::npos);
  auto folder = device->open_file(folder_.path(), false, false);
  ASSERT_FALSE(folder);
  EXPECT_EQ(folder.error().code, Code::kInvalidArgument);
}

TEST_P(BlockDeviceTest, DescriptorsCloseOnExec) {
  OPEN_OR_SKIP(device, options());
  create(*device, "data", kMiB);
  std::size_t checked = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const auto target = std::filesystem::read_symlink(entry.path(), error).string();
    if (error || (target.find(folder_.path()) == std::string::npos && target.find("io_uring") == std::string::npos))
      continue;
    EXPECT_TRUE(::fcntl(std::stoi(entry.path().filename()), F_GETFD) & FD_CLOEXEC) << target;
    ++checked;
  }
  EXPECT_GE(checked, 1u);
}

// Requests over several files, most well, some failing: each has its own outcome and one completion, in which the
// memory is final.
TEST_P(BlockDeviceTest, EveryRequestCompletesOnceWithItsOwnOutcome) {
  auto settings = options();
  settings.queue_depth = 8;
  OPEN_OR_SKIP(device, settings);
  constexpr std::size_t kCount = 300;
  constexpr std::size_t kBytes = 16 * kKiB;
  const FileId files[] = {create(*device, "a", kCount * kBytes), create(*device, "b", kCount * kBytes),
                          create(*device, "c", kCount * kBytes)};
  const auto data = random_bytes(kCount * kBytes, 5);
  OffsetMemory out(kCount * kBytes, 0);
  out.fill(data);
  OffsetMemory in(kCount * kBytes + 8, 0);

  for (const Op op : {Op::kWrite, Op::kRead}) {
    std::vector<iovec> memory(kCount);
    std::vector<IoRequest> requests(kCount);
    for (std::size_t i = 0; i < kCount; ++i) {
      std::uint8_t* base = op == Op::kWrite ? out.data() : in.data() + (i % 5 == 1 ? 1 : 0);
      memory[i] = {base + i * kBytes, i % 50 == 49 ? 0 : kBytes - (i % 5 == 1 ? 512 : 0)};
      requests[i] = {op, i % 50 == 7 ? FileId{99} : files[i % 3], i * kBytes, {&memory[i], 1}, -1};
    }
    std::vector<std::atomic<int>> completed(kCount);
    std::atomic<int> wrong{0};
    device->run(requests, [&](IoRequest& request) {
      const std::size_t i = static_cast<std::size_t>(&request - requests.data());
      completed[i].fetch_add(1);
      if (op == Op::kRead && request.error == 0 &&
          !std::equal(data.begin() + static_cast<std::ptrdiff_t>(i * kBytes),
                      data.begin() + static_cast<std::ptrdiff_t>(i * kBytes + memory[i].iov_len),
                      static_cast<const std::uint8_t*>(memory[i].iov_base))) {
        wrong.fetch_add(1);
      }
    });
    EXPECT_EQ(wrong.load(), 0);
    for (std::size_t i = 0; i < kCount; ++i) {
      ASSERT_EQ(completed[i].load(), 1) << i;
      ASSERT_EQ(requests[i].error, i % 50 == 7 ? EBADF : 0) << i;
    }
  }
  EXPECT_EQ(device->counters().reads, kCount);
  EXPECT_EQ(device->counters().errors, 2 * kCount / 50);
  EXPECT_LE(device->counters().peak_in_flight, 8u);
  // Buffered transfers may be over before the next one starts.
  EXPECT_GE(device->counters().peak_in_flight, GetParam().direct == Direct::kOn ? 2u : 1u);
}

TEST_P(BlockDeviceTest, EmptyRunAndEmptyRequest) {
  OPEN_OR_SKIP(device, options());
  device->run({}, nullptr);
  const FileId file = create(*device, "data", kMiB);
  EXPECT_EQ(run_one(*device, Op::kRead, file, 0, {}), 0);
  int completions = 0;
  IoRequest request{.op = Op::kWrite, .file = file, .offset = 4096, .memory = {}, .error = -1};
  device->run({&request, 1}, [&](IoRequest&) { ++completions; });
  EXPECT_EQ(completions, 1);
  EXPECT_EQ(request.error, 0);
}

// One megabyte of unaligned memory a request, one buffer of 8 KiB for all of them, from several threads.
TEST_P(BlockDeviceTest, TinyBouncePoolManyLargeUnalignedRequestsManyThreads) {
  auto settings = options();
  settings.bounce_buffers = 2;
  settings.bounce_bytes = 8192;
  OPEN_OR_SKIP(device, settings);
  constexpr std::size_t kThreads = 4;
  constexpr std::size_t kCount = 12;
  const FileId file = create(*device, "data", kThreads * kCount * kMiB);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const auto data = random_bytes(kCount * kMiB, t);
      OffsetMemory out(kCount * kMiB, 9);
      OffsetMemory in(kCount * kMiB, 13);
      out.fill(data);
      for (auto* memory : {&out, &in}) {
        std::vector<iovec> pieces(2 * kCount);
        std::vector<IoRequest> requests(kCount);
        for (std::size_t i = 0; i < kCount; ++i) {
          pieces[2 * i] = {memory->data() + i * kMiB, 123457};
          pieces[2 * i + 1] = {memory->data() + i * kMiB + 123457, kMiB - 123457};
          requests[i] = {
              memory == &out ? Op::kWrite : Op::kRead, file, (t * kCount + i) * kMiB, {&pieces[2 * i], 2}, -1};
        }
        std::atomic<std::size_t> completions{0};
        device->run(requests, [&](IoRequest&) { completions.fetch_add(1); });
        EXPECT_EQ(completions.load(), kCount);
        for (const IoRequest& request : requests) EXPECT_EQ(request.error, 0);
      }
      EXPECT_EQ(in.copy(), data) << t;
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST_P(BlockDeviceTest, FourThreadsRunAtOnceWhileFilesComeAndGo) {
  OPEN_OR_SKIP(device, options());
  constexpr std::size_t kThreads = 4;
  constexpr std::size_t kRounds = 12;
  constexpr std::size_t kCount = 24;
  constexpr std::size_t kBytes = 32 * kKiB;
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      OffsetMemory out(kCount * kBytes, 0);
      OffsetMemory in(kCount * kBytes, t % 2 == 0 ? 0 : 1);
      for (std::size_t round = 0; round < kRounds; ++round) {
        const std::string name = std::to_string(t) + "-" + std::to_string(round);
        const FileId file = create(*device, name, kCount * kBytes);
        out.fill(random_bytes(kCount * kBytes, t * 100 + round));
        for (auto* memory : {&out, &in}) {
          std::vector<iovec> pieces(kCount);
          std::vector<IoRequest> requests(kCount);
          for (std::size_t i = 0; i < kCount; ++i) {
            pieces[i] = {memory->data() + i * kBytes, kBytes};
            requests[i] = {memory == &out ? Op::kWrite : Op::kRead, file, i * kBytes, {&pieces[i], 1}, -1};
          }
          std::atomic<std::size_t> good{0};
          device->run(requests, [&](IoRequest& request) { good.fetch_add(request.error == 0 ? 1 : 0); });
          ASSERT_EQ(good.load(), kCount);
        }
        ASSERT_EQ(in.copy(), out.copy()) << t << ' ' << round;
        device->close_file(file);  // the id and its registered slot go to another file next
        ASSERT_EQ(::unlink(folder_.file(name).c_str()), 0);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(device->counters().errors, 0u);
}

std::uint64_t open_deleted_files(const std::string& folder) {
  std::uint64_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    count += std::filesystem::read_symlink(entry.path(), error).string().find(folder) != std::string::npos;
  }
  return count;
}

TEST_P(BlockDeviceTest, ClosedFilesGiveTheirBlocksBack) {
  OPEN_OR_SKIP(device, options());
  const auto free_bytes = [&] {
    struct statfs found;
    EXPECT_EQ(::statfs(folder_.path().c_str(), &found), 0);
    return found.f_bfree * static_cast<std::uint64_t>(found.f_bsize);
  };
  constexpr std::uint64_t kBytes = 512 * kMiB;
  const std::uint64_t before = free_bytes();
  if (before < 4 * kBytes) GTEST_SKIP() << "too little free space to tell";
  const FileId file = create(*device, "big", kBytes);
  OffsetMemory memory(4096, 0);
  const iovec piece{memory.data(), memory.size()};
  ASSERT_EQ(run_one(*device, Op::kWrite, file, 0, {&piece, 1}), 0);
  EXPECT_EQ(open_deleted_files(folder_.path()), 1u);
  ASSERT_EQ(::unlink(folder_.file("big").c_str()), 0);
  device->close_file(file);
  EXPECT_EQ(open_deleted_files(folder_.path()), 0u);
  // Others use this disk too, and file systems free in the background: wait for half of it.
  std::uint64_t lowest_use = kBytes;
  for (int i = 0; i < 100 && lowest_use >= kBytes / 2; ++i) {
    const std::uint64_t now = free_bytes();
    lowest_use = std::min(lowest_use, before > now ? before - now : 0);
    ::usleep(100'000);
  }
  EXPECT_LT(lowest_use, kBytes / 2);
}

TEST(WorkerPoolTest, ParallelForRunsEveryIndexOnceAndNests) {
  auto created = WorkerPool::create(4);
  ASSERT_TRUE(created) << created.error().message;
  WorkerPool& pool = **created;
  std::vector<std::atomic<int>> seen(10007);
  pool.parallel_for(seen.size(), 5, [&](std::size_t i) { seen[i].fetch_add(1); });
  for (const auto& count : seen) ASSERT_EQ(count.load(), 1);
  std::atomic<int> inner{0};
  pool.parallel_for(16, 5, [&](std::size_t) { pool.parallel_for(16, 5, [&](std::size_t) { inner.fetch_add(1); }); });
  EXPECT_EQ(inner.load(), 256);
  pool.parallel_for(0, 5, [](std::size_t) { FAIL(); });
}

// In a child: the size limit holds for the whole process.
TEST_P(BlockDeviceTest, FileSizeLimitIsAnErrorOfTheRequest) {
  OPEN_OR_SKIP(device, options());
  device.reset();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{64 * kKiB, 64 * kKiB};
    int wrong = ::setrlimit(RLIMIT_FSIZE, &limit) == 0 ? 0 : 1;
    auto limited = open_block_device(folder_.path(), options(), -1);
    if (!limited) ::_exit(100);
    auto file = (*limited)->open_file(folder_.file("limited"), true, true);
    if (!file) ::_exit(101);
    OffsetMemory memory(128 * kKiB, 0);
    const iovec large{memory.data(), 128 * kKiB};
    const iovec small{memory.data(), 32 * kKiB};
    wrong += run_one(**limited, Op::kWrite, *file, 0, {&large, 1}) == EFBIG ? 0 : 2;
    wrong += run_one(**limited, Op::kWrite, *file, 0, {&small, 1}) == 0 ? 0 : 4;
    wrong += run_one(**limited, Op::kWrite, *file, 64 * kKiB, {&small, 1}) == EFBIG ? 0 : 8;
    const Status reserved = (*limited)->preallocate(*file, kMiB);
    wrong += !reserved && reserved.error().code == Code::kNoSpace ? 0 : 16;
    limited->reset();
    ::_exit(wrong);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

INSTANTIATE_TEST_SUITE_P(Paths, BlockDeviceTest,
                         ::testing::Values(Path{Engine::kIoUring, Direct::kOn}, Path{Engine::kIoUring, Direct::kOff},
                                           Path{Engine::kSync, Direct::kOn}, Path{Engine::kSync, Direct::kOff}),
                         [](const auto& info) {
                           return std::string(info.param.engine == Engine::kSync ? "Sync" : "IoUring") +
                                  (info.param.direct == Direct::kOn ? "Direct" : "Buffered");
                         });

}  // namespace
}  // namespace tardis
