// SPDX-License-Identifier: Apache-2.0
// Media of the software controller that wait: files, the pace of a drive, and what fails.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <random>
#include <thread>
#include <vector>

#include "block/block_device.h"
#include "block_support.h"
#include "nvme/soft/file_medium.h"
#include "nvme/soft/paced_medium.h"
#include "nvme_soft_media.h"
#include "store_support.h"

namespace tardis::nvme::testing {
namespace {

using tardis::testing::random_bytes;
using tardis::testing::TempFolder;

// Two files of different sizes, as the store's data files may be.
struct Files {
  Files() {
    Result<std::unique_ptr<BlockDevice>> opened = open_block_device(folder.path(), {}, -1);
    EXPECT_TRUE(opened);
    device = std::move(*opened);
    for (const auto& [name, bytes] : {std::pair{"a", kFirst}, std::pair{"b", kSecond}}) {
      Result<FileId> file = device->open_file(folder.file(name), true, true);
      EXPECT_TRUE(file);
      EXPECT_TRUE(device->preallocate(*file, bytes));
      parts.push_back({*file, bytes});
    }
  }
  std::shared_ptr<FileMedium> medium() {
    Result<std::unique_ptr<FileMedium>> made = FileMedium::create(*device, parts);
    EXPECT_TRUE(made) << (made ? "" : made.error().message);
    return std::shared_ptr<FileMedium>(std::move(*made));
  }

  static constexpr std::uint64_t kFirst = 1 << 20, kSecond = 8 << 20;
  TempFolder folder;
  std::unique_ptr<BlockDevice> device;
  std::vector<FileMedium::Part> parts;
};

TEST(NvmeSoftMedia, FilesLieEndToEnd) {
  Files files;
  const auto medium = files.medium();
  EXPECT_EQ(medium->bytes(), files.kFirst + files.kSecond);
  const std::vector<std::uint8_t> data = random_bytes(64 << 10, 1);
  write(*medium, files.kFirst - (16 << 10), data);
  EXPECT_EQ(read(*medium, files.kFirst - (16 << 10), data.size()), data);
  EXPECT_EQ(run(*medium, Op::kFlush, 0, nullptr), 0);
  // The second file begins with what is behind the first 16 KiB.
  std::vector<std::uint8_t> second(48 << 10);
  const iovec part{second.data(), second.size()};
  IoRequest io;
  io.file = files.parts[1].file;
  io.memory = {&part, 1};
  files.device->run({&io, 1}, [](IoRequest&) {});
  EXPECT_EQ(io.error, 0);
  EXPECT_TRUE(std::equal(second.begin(), second.end(), data.begin() + (16 << 10)));
  EXPECT_EQ(run(*medium, Op::kWriteZeroes, files.kFirst - 4096, nullptr, 300 << 10), 0);
  EXPECT_EQ(read(*medium, files.kFirst - 4096, 300 << 10), std::vector<std::uint8_t>(300 << 10));
  EXPECT_EQ(read(*medium, files.kFirst - (16 << 10), 12 << 10),
            std::vector<std::uint8_t>(data.begin(), data.begin() + (12 << 10)));
  EXPECT_EQ(run(*medium, Op::kDeallocate, 0, nullptr, 4096), 0);
  write(*medium, 8192, random_bytes(4096, 2), true);
  EXPECT_EQ(read(*medium, 8192, 4096), random_bytes(4096, 2));
}

TEST(NvmeSoftMedia, FilesThatDoNotFitAreRefused) {
  Files files;
  EXPECT_FALSE(FileMedium::create(*files.device, {}));
  EXPECT_FALSE(FileMedium::create(*files.device, {{files.parts[0].file, 1000}}));
  EXPECT_FALSE(FileMedium::create(*files.device, {{files.parts[0].file, files.kFirst + 4096}}));
  EXPECT_FALSE(FileMedium::create(*files.device, {{1000, 4096}}));
}

// Many commands at once through the controller, in random order and of several sizes, against a copy in memory.
TEST(NvmeSoftMedia, FilesBehindAController) {
  Files files;
  SoftControllerOptions options;
  options.namespaces.push_back({files.medium(), 12, 0, 0});
  options.namespaces.push_back({memory(1 << 20), 12, 0, 0});
  options.faults = std::make_shared<FaultPlan>();
  options.threads = 2;
  HandClient client(std::move(options));
  ASSERT_TRUE(client.enable());
  const auto queue = client.queue(1, 65);
  const std::uint64_t blocks = (files.kFirst + files.kSecond) / 4096;
  constexpr std::uint32_t kBlocks = 4;
  SharedMemory data(client.space(), 64 * kBlocks * 4096);
  std::vector<std::uint32_t> content(blocks);  // what each block was filled with last
  std::mt19937 random(3);
  for (int round = 0; round < 30; ++round) {
    std::vector<std::uint64_t> starts;
    const bool writes = round % 2 == 0;
    for (std::uint16_t id = 0; id < 64; ++id) {
      // Each command in a stretch of its own.
      const std::uint64_t start = blocks / 64 * id + random() % (blocks / 64 - kBlocks);
      starts.push_back(start);
      const std::size_t at = id * std::size_t{kBlocks} * 4096;
      for (std::uint32_t i = 0; i < kBlocks && writes; ++i) {
        content[start + i] = static_cast<std::uint32_t>(random());
        std::fill_n(&data.at<std::uint32_t>(at + i * 4096), 1024, content[start + i]);
      }
      SubmissionEntry entry = io_command(writes ? IoOpcode::kWrite : IoOpcode::kRead, id, start, kBlocks);
      entry.set_data_pointer(DataPointer::kSgl);
      entry.sgl = SglDescriptor::of(SglType::kDataBlock, data.address(at), kBlocks * 4096);
      if (id % 16 == 0 && writes) entry.cdw12 |= kForceUnitAccess;
      queue->put(entry);
    }
    queue->ring();
    for (int i = 0; i < 64; ++i) {
      const auto done = queue->wait();
      ASSERT_TRUE(done);
      ASSERT_TRUE(CommandStatus::of(*done).ok());
      for (std::uint32_t block = 0; block < kBlocks && !writes; ++block) {
        const auto* found = &data.at<std::uint32_t>((done->command_id * std::size_t{kBlocks} + block) * 4096);
        ASSERT_TRUE(std::all_of(found, found + 1024,
                                [&](std::uint32_t word) { return word == content[starts[done->command_id] + block]; }));
      }
    }
    // Of all namespaces: one waits for a drive, the other does not.
    EXPECT_EQ(queue->status(io_command(IoOpcode::kFlush, 0, 0, 1, 0, 0, kAllNamespaces)), 0);
  }
  // A reset waits for commands that are with the drive; then the memory may go.
  for (std::uint16_t id = 0; id < 64; ++id) {
    queue->put(io_command(IoOpcode::kWrite, id, id, 1, data.address(id * std::size_t{4096})));
  }
  queue->ring();
  ASSERT_TRUE(client.disable());
  data.unmap();
  client.window().write32(kRegCc, kCcShnNormal);
  EXPECT_TRUE(client.wait_status(kCstsShstMask, kCstsShstComplete));
  EXPECT_EQ(client.complaints(), "");
}

TEST(NvmeSoftMedia, MemoryIsNotUnmappedUnderADrive) {
  Files files;
  SoftControllerOptions options;
  options.namespaces.push_back({files.medium(), 12, 0, 0});
  HandClient client(std::move(options));
  ASSERT_TRUE(client.enable());
  const auto queue = client.queue(1, 64);
  for (int round = 0; round < 20; ++round) {
    SharedMemory data(client.space(), 32 * 4096);
    for (std::uint16_t id = 0; id < 32; ++id) {
      queue->put(io_command(IoOpcode::kRead, id, id, 1, data.address(id * std::size_t{4096})));
    }
    queue->ring();
    data.unmap();
    std::memset(data.data(), 0xa5, data.size());
    // Those that came too late were refused; none has written to the memory since.
    for (int i = 0; i < 32; ++i) {
      const auto done = queue->wait();
      ASSERT_TRUE(done);
    }
    EXPECT_EQ(data.text(0, data.size()), std::string(data.size(), '\xa5'));
  }
}

TEST(NvmeSoftMedia, ThePaceOfADrive) {
  DriveModel model;
  model.read_bytes_per_ns = 0.5;
  model.write_bytes_per_ns = 0.025;
  model.read_ns = 20'000'000;
  model.write_ns = 200'000;
  model.flush_ns = 3'000'000;
  model.read_slowdown = 3;
  SoftControllerOptions options;
  options.namespaces.push_back({std::make_shared<PacedMedium>(memory(16 << 20), model), 12, 0, 0});
  HandClient client(std::move(options));
  ASSERT_TRUE(client.enable());
  const auto queue = client.queue(1, 64);
  SharedMemory data(client.space(), 64 * 4096);
  const auto timed = [&](IoOpcode opcode, int count) {
    const std::uint64_t start = monotonic_ns();
    for (int id = 0; id < count; ++id) {
      queue->put(io_command(opcode, static_cast<std::uint16_t>(id), static_cast<std::uint64_t>(id), 1, data.address()));
    }
    queue->ring();
    for (int i = 0; i < count; ++i) EXPECT_TRUE(queue->wait());
    return static_cast<double>(monotonic_ns() - start) / 1e6;
  };
  // The upper bounds leave room for a machine with other work.
  const double one = timed(IoOpcode::kRead, 1), many = timed(IoOpcode::kRead, 50);
  EXPECT_GE(one, 20);
  EXPECT_GE(many, 20 + 50 * 4096 / 0.5e6);
  EXPECT_LT(many, 500);  // side by side, not one after the other
  EXPECT_GE(timed(IoOpcode::kWrite, 50), 0.2 + 50 * 4096 / 0.025e6);
  EXPECT_GE(timed(IoOpcode::kFlush, 1), 3.0);
  // A read while a write is under way, which takes 10 ms.
  SubmissionEntry large = io_command(IoOpcode::kWrite, 1, 0, 64);
  large.set_data_pointer(DataPointer::kSgl);
  large.sgl = SglDescriptor::of(SglType::kDataBlock, data.address(), 64 * 4096);
  queue->put(large);
  queue->put(io_command(IoOpcode::kRead, 50, 1, 1, data.address()));
  const std::uint64_t start = monotonic_ns();
  queue->ring();
  for (int i = 0; i < 2; ++i) {
    const auto done = queue->wait();
    ASSERT_TRUE(done);
    if (done->command_id == 50) {
      EXPECT_GE(monotonic_ns() - start, 60'000'000u);
    }
  }
  EXPECT_EQ(client.complaints(), "");
}

// A queue is deleted, a controller reset or without power, and memory unmapped only when no drive moves data for it any
// more.
TEST(NvmeSoftMedia, CommandsInTheDriveAreWaitedFor) {
  enum class Way { kDelete, kReset, kPower, kUnmap };
  for (const Way way : {Way::kDelete, Way::kReset, Way::kPower, Way::kUnmap}) {
    const auto gate = std::make_shared<GatedMedium>();
    SoftControllerOptions options;
    options.namespaces.push_back({gate, 12, 0, 0});
    options.threads = 2;
    HandClient client(options);
    ASSERT_TRUE(client.enable());
    const auto queue = client.queue(2, 8);
    SharedMemory data(client.space(), 4096);
    queue->submit(io_command(IoOpcode::kRead, 1, 0, 1, data.address()));
    gate->wait_for(1);
    EXPECT_EQ(client.controller().counters().outstanding, 1u);
    std::atomic<bool> over{false};
    std::thread other([&] {
      switch (way) {
        case Way::kDelete:
          EXPECT_EQ(client.delete_sq(2), 0);
          break;
        case Way::kReset:
          EXPECT_TRUE(client.disable());
          break;
        case Way::kPower:
          client.controller().cut_power();
          break;
        case Way::kUnmap:
          data.unmap();
          break;
      }
      over = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    EXPECT_FALSE(over);
    gate->open();
    other.join();
    EXPECT_EQ(data.text(0, 4096), std::string(4096, '\x5a'));
    EXPECT_EQ(queue->wait(way == Way::kDelete || way == Way::kUnmap ? kPatienceNs : 20'000'000).has_value(),
              way == Way::kDelete || way == Way::kUnmap);
    EXPECT_EQ(client.complaints(), "");
  }
}

// Errors of a medium become statuses.
class FailingMedium final : public Medium {
 public:
  explicit FailingMedium(int error) : error_(error) {}
  std::uint64_t bytes() const override { return 1 << 20; }
  bool immediate() const override { return false; }
  bool needs_flush() const override { return true; }
  void run(std::span<MediumRequest> requests, const Completion& on_complete) override {
    for (MediumRequest& request : requests) {
      request.error = error_;
      on_complete(request);
    }
  }

 private:
  const int error_;
};

TEST(NvmeSoftMedia, ErrorsBecomeStatuses) {
  SoftControllerOptions options;
  options.namespaces.push_back({std::make_shared<FailingMedium>(EIO), 12, 0, 0});
  options.namespaces.push_back({std::make_shared<FailingMedium>(ENOSPC), 12, 0, 0});
  options.namespaces.push_back({std::make_shared<FailingMedium>(ENXIO), 12, 0, 0});
  options.namespaces.push_back({std::make_shared<FailingMedium>(ETIMEDOUT), 12, 0, 0});
  options.namespaces.push_back({std::make_shared<FailingMedium>(ENODATA), 12, 0, 0});
  HandClient client(std::move(options));
  ASSERT_TRUE(client.enable());
  const auto queue = client.queue(1, 8);
  SharedMemory data(client.space(), 4096);
  const auto status = [&](IoOpcode opcode, std::uint32_t space) {
    return queue->status(io_command(opcode, 1, 0, 1, data.address(), 0, space));
  };
  EXPECT_EQ(status(IoOpcode::kRead, 1), kScUnrecoveredRead);
  EXPECT_EQ(status(IoOpcode::kWrite, 1), kScWriteFault);
  EXPECT_EQ(status(IoOpcode::kWriteZeroes, 1), kScWriteFault);
  EXPECT_EQ(status(IoOpcode::kFlush, 1), kScInternal);
  EXPECT_EQ(status(IoOpcode::kWrite, 2), kScCapacityExceeded);
  EXPECT_EQ(status(IoOpcode::kRead, 3), kScUnwrittenBlock);
  // No media error, which a client would take for the end of those blocks.
  EXPECT_EQ(status(IoOpcode::kRead, 4), kScInternal);
  EXPECT_EQ(status(IoOpcode::kWrite, 4), kScInternal);
  EXPECT_EQ(status(IoOpcode::kRead, 5), kScUnrecoveredRead);
  EXPECT_EQ(client.complaints(), "");
  client.window().write32(kRegCc, kUsualCc | kCcShnNormal);
  EXPECT_TRUE(client.wait_status(kCstsFatal, kCstsFatal));
}

// After a failed fdatasync the kernel takes the pages for clean: the next one succeeds, and the data is lost.
TEST(NvmeSoftMedia, AFlushThatFailedIsNotMadeGoodByAnother) {
  Files files;
  const auto faults = std::make_shared<tardis::testing::Faults>();
  int failures = 1;
  faults->before_flush = [&](FileId) { return failures-- > 0 ? EIO : 0; };
  tardis::testing::FaultDevice device(std::move(files.device), faults);
  Result<std::unique_ptr<FileMedium>> medium = FileMedium::create(device, files.parts);
  ASSERT_TRUE(medium);
  write(**medium, 0, random_bytes(4096, 1));
  EXPECT_EQ(run(**medium, Op::kFlush, 0, nullptr), EIO);
  EXPECT_EQ(run(**medium, Op::kFlush, 0, nullptr), EIO);
  std::vector<std::uint8_t> data = random_bytes(4096, 2);
  EXPECT_EQ(run(**medium, Op::kWrite, 4096, &data, 0, true), EIO);
  write(**medium, 8192, data);
  EXPECT_EQ(read(**medium, 8192, 4096), data);
}

// The completion of a command that was with the drive finds the ring gone, and perhaps used for something else.
TEST(NvmeSoftMedia, ARingThatWasUnmappedIsNotWrittenByTheDrivesCompletions) {
  for (int round = 0; round < 5; ++round) {
    const auto gate = std::make_shared<GatedMedium>();
    SoftControllerOptions options;
    options.namespaces.push_back({gate, 12, 0, 0});
    options.least_sleep = options.most_sleep = std::chrono::milliseconds(500);
    HandClient client(options);
    ASSERT_TRUE(client.enable());
    const auto queue = client.queue(1, 8);
    SharedMemory data(client.space(), 4096);
    queue->submit(io_command(IoOpcode::kRead, 1, 0, 1, data.address()));
    gate->wait_for(1);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the controller is asleep
    queue->cq().unmap();
    std::memset(queue->cq().data(), 0x11, queue->cq().size());
    gate->open();
    EXPECT_TRUE(client.wait_status(kCstsFatal, kCstsFatal));
    EXPECT_EQ(queue->cq().text(0, queue->cq().size()), std::string(queue->cq().size(), '\x11'));
    EXPECT_EQ(client.kinds(), "DMA after unmap");
  }
}

// The thread that serves the admin queue is told when another's last command is back from the drive.
TEST(NvmeSoftMedia, ADeletedQueueIsNotWaitedForAsleep) {
  const auto gate = std::make_shared<GatedMedium>();
  SoftControllerOptions options;
  options.namespaces.push_back({gate, 12, 0, 0});
  options.threads = 2;
  options.least_sleep = options.most_sleep = std::chrono::seconds(3);
  HandClient client(options);
  ASSERT_TRUE(client.enable());
  const auto queue = client.queue(2, 8);  // of the second thread
  SharedMemory data(client.space(), 4096);
  queue->submit(io_command(IoOpcode::kRead, 1, 0, 1, data.address()));
  gate->wait_for(1);
  client.admin().submit(admin_command(AdminOpcode::kDeleteSq, 2));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const std::uint64_t start = monotonic_ns();
  gate->open();
  EXPECT_TRUE(client.admin().wait());
  EXPECT_LT(monotonic_ns() - start, 2'000'000'000u);
}

TEST(NvmeSoftMedia, OnlyForcedWritesAndFlushesReachTheDrive) {
  Files files;
  const auto faults = std::make_shared<tardis::testing::Faults>();
  tardis::testing::FaultDevice device(std::move(files.device), faults);
  Result<std::unique_ptr<FileMedium>> made = FileMedium::create(device, files.parts);
  ASSERT_TRUE(made);
  const std::shared_ptr<FileMedium> medium(std::move(*made));
  SoftControllerOptions options;
  options.namespaces.push_back({medium, 12, 0, 0});
  HandClient client(options);
  ASSERT_TRUE(client.enable());
  const auto queue = client.queue(1, 8);
  SharedMemory data(client.space(), 4096);
  const auto flushes_of = [&](IoOpcode opcode, std::uint32_t flags = 0) {
    const std::uint64_t before = faults->flushes;
    SubmissionEntry entry = io_command(opcode, 1, 0, 1, opcode == IoOpcode::kWriteZeroes ? 0 : data.address());
    entry.cdw12 |= flags;
    EXPECT_EQ(queue->status(entry), 0);
    return faults->flushes - before;
  };
  EXPECT_EQ(flushes_of(IoOpcode::kWrite), 0u);
  EXPECT_EQ(flushes_of(IoOpcode::kWriteZeroes), 0u);
  EXPECT_EQ(flushes_of(IoOpcode::kRead, kForceUnitAccess), 0u);
  EXPECT_EQ(flushes_of(IoOpcode::kFlush), 2u);
  EXPECT_EQ(flushes_of(IoOpcode::kWrite, kForceUnitAccess), 2u);
  EXPECT_EQ(flushes_of(IoOpcode::kWriteZeroes, kForceUnitAccess), 2u);
  // Without the cache the client need not flush, so every write does.
  EXPECT_EQ(client.admin().status(admin_command(AdminOpcode::kSetFeatures, kFeatureVolatileCache, 0)), 0);
  EXPECT_EQ(flushes_of(IoOpcode::kWrite), 2u);
  EXPECT_EQ(flushes_of(IoOpcode::kWriteZeroes), 2u);
  EXPECT_EQ(client.complaints(), "");
}

TEST(NvmeSoftMedia, AFileThatWasCutShortIsAMediaError) {
  Files files;
  const auto medium = files.medium();
  ASSERT_EQ(::truncate(files.folder.file("b").c_str(), 1 << 20), 0);
  std::vector<std::uint8_t> data(8192);
  EXPECT_EQ(run(*medium, Op::kRead, files.kFirst, &data), 0);
  EXPECT_EQ(run(*medium, Op::kRead, files.kFirst + (1 << 20) - 4096, &data), ENODATA);
  EXPECT_EQ(run(*medium, Op::kRead, files.kFirst + (2 << 20), &data), ENODATA);
}

// A namespace may be larger than the memory of the machine, as long as little of it is written.
TEST(NvmeSoftMedia, ZeroesTakeNoMemory) {
  constexpr std::uint64_t kBytes = std::uint64_t{2} << 30;
  const auto resident = [] {
    std::ifstream statm("/proc/self/statm");
    std::uint64_t size = 0, pages = 0;
    statm >> size >> pages;
    return pages * 4096;
  };
  const auto medium = memory(kBytes);
  write(*medium, 512, random_bytes(4 << 20, 1));
  const std::uint64_t before = resident();
  EXPECT_EQ(run(*medium, Op::kDeallocate, 1024, nullptr, kBytes - 2048), 0);
  EXPECT_LT(resident(), before + (256 << 20));
  std::vector<std::uint8_t> expected(4 << 20);
  const std::vector<std::uint8_t> written = random_bytes(4 << 20, 1);
  std::copy_n(written.begin(), 512, expected.begin());
  EXPECT_EQ(read(*medium, 512, 4 << 20), expected);
}

}  // namespace
}  // namespace tardis::nvme::testing
