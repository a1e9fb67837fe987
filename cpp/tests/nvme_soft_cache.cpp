// SPDX-License-Identifier: Apache-2.0
// A volatile cache over a medium of the software controller, and what power cuts leave of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "block_support.h"
#include "nvme/soft/cached_medium.h"
#include "nvme/soft/paced_medium.h"
#include "nvme_soft_media.h"

namespace tardis::nvme::testing {
namespace {

using tardis::testing::random_bytes;

TEST(NvmeSoftCache, ACacheKeepsWhatWasWrittenApart) {
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

TEST(NvmeSoftCache, AFullCacheIsWrittenBack) {
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
TEST(NvmeSoftCache, PowerCutsLoseSomeUnflushedWrites) {
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

TEST(NvmeSoftCache, AControllerLosesItsPower) {
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

// What the cache asks of its medium keeps to the medium's rules, after a torn write too.
class StrictMedium final : public Medium {
 public:
  explicit StrictMedium(std::uint64_t bytes) : memory_(memory(bytes)) {}
  std::uint64_t bytes() const override { return memory_->bytes(); }
  std::uint32_t granularity() const override { return 4096; }
  bool immediate() const override { return true; }
  bool needs_flush() const override { return false; }
  void run(std::span<MediumRequest> requests, const Completion& on_complete) override {
    for (MediumRequest& request : requests) {
      if ((request.offset | request.bytes) % granularity() == 0) {
        memory_->run({&request, 1}, on_complete);
      } else {
        request.error = EINVAL;
        on_complete(request);
      }
    }
  }

 private:
  const std::shared_ptr<MemoryMedium> memory_;
};

TEST(NvmeSoftCache, WritesAreTornAtTheGranularityOfTheMedium) {
  std::mt19937_64 random(5);
  std::uint64_t torn = 0;
  for (int round = 0; round < 20; ++round) {
    CachedMedium cached(std::make_shared<StrictMedium>(1 << 20));
    for (std::uint64_t at = 0; at < 16; ++at) write(cached, at * 65536, std::vector<std::uint8_t>(16384, 1));
    const CachedMedium::Cut cut = cached.power_cut(random);
    torn += cut.torn;
    std::uint64_t whole = 0;
    for (std::uint64_t at = 0; at < 16; ++at) {
      whole += read(cached, at * 65536, 16384) == std::vector<std::uint8_t>(16384, 1) ? 1 : 0;
    }
    EXPECT_GE(whole, cut.kept);
  }
  EXPECT_GT(torn, 0u);
}

TEST(NvmeSoftCache, ThePaceOfTheMediumBelowIsKept) {
  DriveModel model;
  model.read_ns = model.write_ns = model.flush_ns = 1'000'000'000;
  const auto cached = std::make_shared<CachedMedium>(std::make_shared<PacedMedium>(memory(1 << 20), model));
  std::vector<std::uint8_t> data(4096);
  const auto later = [&](Op op, bool durable) {
    const iovec part{data.data(), data.size()};
    MediumRequest request;
    request.op = op;
    request.durable = durable;
    if (op != Op::kFlush) {
      request.bytes = data.size();
      request.memory = {&part, 1};
    }
    const std::uint64_t start = monotonic_ns();
    cached->run({&request, 1}, [](MediumRequest&) {});
    return request.not_before >= start + 1'000'000'000;
  };
  EXPECT_TRUE(later(Op::kRead, false));
  EXPECT_FALSE(later(Op::kWrite, false));  // the cache has it
  EXPECT_TRUE(later(Op::kWrite, true));
  EXPECT_TRUE(later(Op::kFlush, false));
}

// Where the cache is off a client flushes nothing, so nothing that was completed may be undone.
TEST(NvmeSoftCache, ADeallocationIsDurableWithoutTheCache) {
  SoftControllerOptions options;
  const auto cached = std::make_shared<CachedMedium>(memory(1 << 20));
  options.namespaces.push_back({cached, 12, 0, 0});
  HandClient client(std::move(options));
  ASSERT_TRUE(client.enable());
  ASSERT_EQ(client.admin().status(admin_command(AdminOpcode::kSetFeatures, kFeatureVolatileCache, 0)), 0);
  const auto queue = client.queue(1, 16);
  SharedMemory data(client.space(), 4096);
  data.fill(1);
  EXPECT_EQ(queue->status(io_command(IoOpcode::kWrite, 1, 3, 1, data.address())), 0);
  data.at<DeallocateRange>(0) = {0, 1, 3};
  SubmissionEntry deallocate = io_command(IoOpcode::kDatasetManagement, 2, 0, 1, data.address());
  deallocate.cdw11 = kDeallocate;
  EXPECT_EQ(queue->status(deallocate), 0);
  EXPECT_EQ(cached->unflushed_bytes(), 0u);
}

// What is left of three writes, two of which overlap: each of them or not, the later one on top, and nothing else.
TEST(NvmeSoftCache, APowerCutMayLeaveEachSubsetOfWholeWrites) {
  std::mt19937_64 random(3);
  std::map<std::string, int> found;
  CacheOptions options;
  options.atomic_bytes = 1024;
  for (int round = 0; round < 300; ++round) {
    const auto base = memory(4096);
    CachedMedium cached(base, options);
    write(cached, 0, std::vector<std::uint8_t>(1024, 'a'));
    write(cached, 512, std::vector<std::uint8_t>(1024, 'b'));
    write(cached, 2048, std::vector<std::uint8_t>(512, 'c'));
    cached.power_cut(random);
    std::string left;
    for (const std::uint64_t at : {0u, 512u, 1024u, 2048u}) {
      const std::uint8_t byte = read(*base, at, 512).front();
      left += byte == 0 ? '-' : static_cast<char>(byte);
    }
    ++found[left];
  }
  std::string all;
  for (const auto& [left, times] : found) all += left + ' ';
  EXPECT_EQ(all, "---- ---c -bb- -bbc aa-- aa-c abb- abbc ");
}

}  // namespace
}  // namespace tardis::nvme::testing
