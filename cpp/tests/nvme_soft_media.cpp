// SPDX-License-Identifier: Apache-2.0
// Media of the software controller: files, a volatile cache with power cuts, and the pace of a drive.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "block/block_device.h"
#include "block_support.h"
#include "nvme/soft/cached_medium.h"
#include "nvme/soft/file_medium.h"
#include "nvme/soft/paced_medium.h"
#include "nvme_soft_client.h"

namespace tardis::nvme::testing {
namespace {

using tardis::testing::random_bytes;
using tardis::testing::TempFolder;
using Op = MediumRequest::Op;

// One request, run to its end.
int run(Medium& medium, Op op, std::uint64_t offset, std::vector<std::uint8_t>* data, std::uint64_t bytes = 0,
        bool durable = false) {
  MediumRequest request;
  request.op = op;
  request.offset = offset;
  request.bytes = data != nullptr ? data->size() : bytes;
  request.durable = durable;
  iovec memory[2]{};
  if (data != nullptr) {
    // In two parts, neither of which is aligned.
    memory[0] = {data->data(), data->size() / 3};
    memory[1] = {data->data() + data->size() / 3, data->size() - data->size() / 3};
    request.memory = memory;
  }
  int completions = 0;
  medium.run({&request, 1}, [&](MediumRequest&) { ++completions; });
  EXPECT_EQ(completions, 1);
  return request.error;
}

std::vector<std::uint8_t> read(Medium& medium, std::uint64_t offset, std::uint64_t bytes) {
  std::vector<std::uint8_t> data(bytes);
  EXPECT_EQ(run(medium, Op::kRead, offset, &data), 0);
  return data;
}

void write(Medium& medium, std::uint64_t offset, std::vector<std::uint8_t> data, bool durable = false) {
  EXPECT_EQ(run(medium, Op::kWrite, offset, &data, 0, durable), 0);
}

std::shared_ptr<MemoryMedium> memory(std::uint64_t bytes) {
  Result<std::unique_ptr<MemoryMedium>> made = MemoryMedium::create(bytes);
  EXPECT_TRUE(made);
  return std::shared_ptr<MemoryMedium>(std::move(*made));
}

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

TEST(NvmeSoftMedia, ACacheKeepsWhatWasWrittenApart) {
  const auto base = memory(1 << 20);
  CachedMedium cached(base);
  write(cached, 512, random_bytes(2048, 1));
  write(cached, 1024, random_bytes(512, 2));
  std::vector<std::uint8_t> expected = random_bytes(2048, 1);
  const std::vector<std::uint8_t> middle = random_bytes(512, 2);
  std::copy(middle.begin(), middle.end(), expected.begin() + 512);
  EXPECT_EQ(read(cached, 512, 2048), expected);
  EXPECT_EQ(read(*base, 512, 2048), std::vector<std::uint8_t>(2048));
  EXPECT_EQ(cached.unflushed_bytes(), 2048u);
  // A durable write goes to the medium, and what it covers does not come back later.
  write(cached, 1536, random_bytes(512, 3), true);
  EXPECT_EQ(read(*base, 1536, 512), random_bytes(512, 3));
  EXPECT_EQ(cached.unflushed_bytes(), 1536u);
  EXPECT_EQ(run(cached, Op::kWriteZeroes, 512, nullptr, 512), 0);
  std::fill_n(expected.begin(), 512, 0);
  const std::vector<std::uint8_t> durable = random_bytes(512, 3);
  std::copy(durable.begin(), durable.end(), expected.begin() + 1024);
  EXPECT_EQ(read(cached, 512, 2048), expected);
  EXPECT_EQ(run(cached, Op::kFlush, 0, nullptr), 0);
  EXPECT_EQ(read(*base, 512, 2048), expected);
  EXPECT_EQ(cached.unflushed_bytes(), 0u);
  std::mt19937_64 random(1);
  EXPECT_EQ(cached.power_cut(random).kept, 0u);
  EXPECT_EQ(read(cached, 512, 2048), expected);
}

TEST(NvmeSoftMedia, AFullCacheIsWrittenBack) {
  const auto base = memory(1 << 20);
  CacheOptions options;
  options.most_bytes = 64 << 10;
  CachedMedium cached(base, options);
  const std::vector<std::uint8_t> data = random_bytes(68 << 10, 1);
  for (std::size_t at = 0; at < data.size(); at += 4096) {
    write(cached, at,
          {data.begin() + static_cast<std::ptrdiff_t>(at), data.begin() + static_cast<std::ptrdiff_t>(at + 4096)});
  }
  EXPECT_EQ(cached.unflushed_bytes(), 0u);
  EXPECT_EQ(read(*base, 0, data.size()), data);
}

// Blocks are filled with the number of the write. After a power cut each sector has what was flushed or one of the
// later writes; small writes are whole, large ones are sometimes torn, and later ones sometimes survive earlier ones.
TEST(NvmeSoftMedia, PowerCutsLoseSomeUnflushedWrites) {
  constexpr std::uint32_t kBlock = 4096, kBlocks = 64, kLarge = 4;
  std::mt19937_64 random(11);
  bool torn = false, overtaken = false, all_lost = false;
  for (int round = 0; round < 200; ++round) {
    const auto base = memory(kBlock * kBlocks);
    CacheOptions options;
    options.atomic_bytes = kBlock;
    CachedMedium cached(base, options);
    std::vector<std::uint32_t> flushed(kBlocks);
    std::map<std::uint32_t, std::pair<std::uint32_t, std::uint32_t>> unflushed;  // number: first block, blocks
    const auto fill = [&](std::uint32_t number, std::uint32_t first, std::uint32_t blocks, bool durable) {
      std::vector<std::uint8_t> data(blocks * std::size_t{kBlock});
      for (std::size_t i = 0; i < data.size(); i += 4) std::memcpy(&data[i], &number, 4);
      write(cached, first * std::uint64_t{kBlock}, data, durable);
    };
    for (std::uint32_t number = 1; number <= 30; ++number) {
      const std::uint32_t blocks = number % 3 == 0 ? kLarge : 1;
      const auto first = static_cast<std::uint32_t>(random() % (kBlocks - kLarge));
      const bool durable = number % 10 == 5;
      fill(number, first, blocks, durable);
      if (durable) {
        for (std::uint32_t i = 0; i < blocks; ++i) flushed[first + i] = number;
      } else {
        unflushed[number] = {first, blocks};
      }
      if (number == 12) {
        EXPECT_EQ(run(cached, Op::kFlush, 0, nullptr), 0);
        for (const auto& [earlier, range] : unflushed) {
          for (std::uint32_t i = 0; i < range.second; ++i) {
            flushed[range.first + i] = std::max(flushed[range.first + i], earlier);
          }
        }
        unflushed.clear();
      }
    }
    const CachedMedium::Cut cut = cached.power_cut(random);
    all_lost |= cut.kept == 0;
    std::map<std::uint32_t, std::uint32_t> sectors;  // found, by the number of the write
    for (std::uint32_t block = 0; block < kBlocks; ++block) {
      const std::vector<std::uint8_t> found = read(*base, block * std::uint64_t{kBlock}, kBlock);
      ASSERT_EQ(read(cached, block * std::uint64_t{kBlock}, kBlock), found);
      for (std::uint32_t sector = 0; sector < kBlock / 512; ++sector) {
        std::uint32_t number;
        std::memcpy(&number, &found[sector * std::size_t{512}], 4);
        for (std::size_t i = 0; i < 512; i += 4) ASSERT_EQ(std::memcmp(&found[sector * 512 + i], &number, 4), 0);
        ++sectors[number];
        if (number == flushed[block]) continue;
        const auto write_of = unflushed.find(number);
        ASSERT_NE(write_of, unflushed.end()) << number << " in block " << block;
        ASSERT_GT(number, flushed[block]);
        ASSERT_GE(block, write_of->second.first);
        ASSERT_LT(block, write_of->second.first + write_of->second.second);
      }
      // One block was written by one write, or torn between large ones.
      for (const auto& [number, range] : unflushed) {
        if (block < range.first || block >= range.first + range.second) continue;
        overtaken |= std::memcmp(found.data(), &number, 4) == 0 &&
                     std::any_of(unflushed.upper_bound(number), unflushed.end(), [&](const auto& later) {
                       return block >= later.second.first && block < later.second.first + later.second.second;
                     });
      }
    }
    for (const auto& [number, range] : unflushed) {
      if (range.second == 1) {
        // Small writes are whole, but for later ones above them.
        const auto block = read(*base, range.first * std::uint64_t{kBlock}, kBlock);
        std::vector<std::uint32_t> numbers;
        for (std::size_t at = 0; at < kBlock; at += 512) std::memcpy(&numbers.emplace_back(), &block[at], 4);
        if (std::find(numbers.begin(), numbers.end(), number) != numbers.end()) {
          ASSERT_GE(*std::min_element(numbers.begin(), numbers.end()), number);
        }
      }
      const auto found = sectors.find(number);
      if (found == sectors.end()) continue;
      if (range.second == kLarge && found->second % 8 != 0) torn = true;
    }
  }
  EXPECT_TRUE(torn);
  EXPECT_TRUE(overtaken);
  EXPECT_FALSE(all_lost);
}

TEST(NvmeSoftMedia, AControllerLosesItsPower) {
  SoftControllerOptions options;
  const auto cached = std::make_shared<CachedMedium>(memory(1 << 20));
  options.namespaces.push_back({cached, 12, 0, 0});
  options.faults = std::make_shared<FaultPlan>();
  HandClient client(std::move(options));
  ASSERT_TRUE(client.enable());
  SharedMemory data(client.space(), 4096);
  data.fill(1);
  auto queue = client.queue(1, 16);
  const std::string written = data.text(0, 4096);
  EXPECT_EQ(queue->status(io_command(IoOpcode::kWrite, 1, 1, 1, data.address())), 0);
  EXPECT_EQ(queue->status(io_command(IoOpcode::kFlush, 2)), 0);
  SubmissionEntry forced = io_command(IoOpcode::kWrite, 3, 2, 1, data.address());
  forced.cdw12 |= kForceUnitAccess;
  EXPECT_EQ(queue->status(forced), 0);
  EXPECT_EQ(cached->unflushed_bytes(), 0u);
  EXPECT_EQ(queue->status(io_command(IoOpcode::kWrite, 4, 3, 1, data.address())), 0);
  EXPECT_EQ(cached->unflushed_bytes(), 4096u);
  // Without the cache every write is durable.
  std::uint32_t result = 9;
  EXPECT_EQ(client.admin().status(admin_command(AdminOpcode::kSetFeatures, kFeatureVolatileCache, 0)), 0);
  EXPECT_EQ(client.admin().status(admin_command(AdminOpcode::kGetFeatures, kFeatureVolatileCache), &result), 0);
  EXPECT_EQ(result, 0u);
  EXPECT_EQ(queue->status(io_command(IoOpcode::kWrite, 5, 4, 1, data.address())), 0);
  EXPECT_EQ(cached->unflushed_bytes(), 4096u);
  FaultRule late;
  late.kind = FaultKind::kLateCompletion;
  late.queue = 1;
  late.late_data = true;
  late.delay = std::chrono::milliseconds(20);
  client.faults().add(late);
  queue->submit(io_command(IoOpcode::kRead, 6, 1, 1, data.address()));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  client.controller().cut_power();
  std::mt19937_64 random(1);
  cached->power_cut(random);
  EXPECT_EQ(client.window().read32(kRegCsts), 0u);
  EXPECT_EQ(client.window().read32(kRegCc), 0u);
  EXPECT_NE(client.window().read64(kRegCap), 0u);
  std::memset(data.data(), 0, 4096);
  std::this_thread::sleep_for(std::chrono::milliseconds(40));
  EXPECT_EQ(data.text(0, 4096), std::string(4096, '\0'));  // nothing moves any more
  ASSERT_TRUE(client.enable());
  queue = client.queue(1, 16);
  for (const std::uint64_t block : {1u, 2u, 4u}) {
    EXPECT_EQ(queue->status(io_command(IoOpcode::kRead, 1, block, 1, data.address())), 0);
    EXPECT_EQ(data.text(0, 4096), written) << block;
  }
  EXPECT_EQ(client.admin().status(admin_command(AdminOpcode::kGetFeatures, kFeatureVolatileCache), &result), 0);
  EXPECT_EQ(result, 1u);
  EXPECT_EQ(client.complaints(), "");
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

// A medium whose requests finish when they are let go.
class GatedMedium final : public Medium {
 public:
  std::uint64_t bytes() const override { return 1 << 20; }
  bool immediate() const override { return false; }
  bool needs_flush() const override { return true; }
  void run(std::span<MediumRequest> requests, const Completion& on_complete) override {
    {
      std::unique_lock lock(mutex_);
      inside_ += requests.size();
      changed_.notify_all();
      changed_.wait(lock, [&] { return open_; });
    }
    for (MediumRequest& request : requests) {
      for (const iovec& part : request.memory) {
        if (request.op == Op::kRead) std::memset(part.iov_base, 0x5a, part.iov_len);
      }
      on_complete(request);
    }
  }
  void wait_for(std::size_t requests) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::nanoseconds(kPatienceNs), [&] { return inside_ >= requests; }));
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t inside_ = 0;
  bool open_ = false;
};

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
  EXPECT_EQ(client.complaints(), "");
  client.window().write32(kRegCc, kUsualCc | kCcShnNormal);
  EXPECT_TRUE(client.wait_status(kCstsFatal, kCstsFatal));
}

}  // namespace
}  // namespace tardis::nvme::testing
