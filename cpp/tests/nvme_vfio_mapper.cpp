// SPDX-License-Identifier: Apache-2.0
// Addresses of controllers and the memory behind them, over an IOMMU that a test can look into.
#include "nvme/vfio/vfio_mapper.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "nvme/memory.h"
#include "nvme/vfio/bar_window.h"
#include "nvme/vfio/detached_call.h"
#include "nvme/vfio/memlock.h"
#include "nvme/vfio/page_frames.h"
#include "nvme/vfio/physical_mapper.h"
#include "store_support.h"

namespace tardis::nvme {
namespace {

TEST(NvmeVfioIova, RangesAreTakenAndGivenBack) {
  std::mt19937_64 random(3);
  const std::vector<IovaRange> usable = {{0, 0x3fffffff}, {0x50000000, 0x5fffffff}};
  IovaSpace space(usable);
  const std::uint64_t all = space.free_bytes();
  EXPECT_EQ(all, 0x40000000u - IovaSpace::kLeastAddress + 0x10000000u);
  std::map<std::uint64_t, std::uint64_t> taken;
  std::uint64_t used = 0, refused = 0;
  for (int i = 0; i < 20000; ++i) {
    if (taken.empty() || random() % 5 < 3) {
      const std::uint64_t bytes = (random() % 4096 + 1) << (random() % 8 == 0 ? 16 : 12);
      const std::uint64_t align = std::uint64_t{1} << (12 + random() % 12), phase = random() << 12;
      const auto at = space.take(bytes, align, phase);
      if (!at) {
        ++refused;
        continue;
      }
      EXPECT_EQ((*at - phase) % align, 0u);
      EXPECT_GE(*at, IovaSpace::kLeastAddress);
      const bool inside = *at + bytes - 1 <= 0x3fffffff || (*at >= 0x50000000 && *at + bytes - 1 <= 0x5fffffff);
      EXPECT_TRUE(inside);
      const auto next = taken.lower_bound(*at);
      ASSERT_TRUE(next == taken.end() || next->first >= *at + bytes);
      ASSERT_TRUE(next == taken.begin() || std::prev(next)->first + std::prev(next)->second <= *at);
      taken.emplace(*at, bytes);
      used += bytes;
    } else {
      auto one = taken.begin();
      std::advance(one, static_cast<std::ptrdiff_t>(random() % taken.size()));
      space.give_back(one->first, one->second);
      used -= one->second;
      taken.erase(one);
    }
    ASSERT_EQ(space.free_bytes(), all - used);
  }
  EXPECT_GT(refused, 0u);
  for (const auto& [at, bytes] : taken) space.give_back(at, bytes);
  EXPECT_EQ(space.free_bytes(), all);
  EXPECT_EQ(space.largest(), 0x40000000u - IovaSpace::kLeastAddress) << "what is free is joined again";
}

TEST(NvmeVfioIova, AddressesComeBackLate) {
  IovaSpace space({{0, 0xffffff}});
  std::vector<std::uint64_t> seen;
  for (int i = 0; i < 64; ++i) {
    const auto at = space.take(4096, 4096, 0);
    ASSERT_TRUE(at);
    EXPECT_EQ(std::count(seen.begin(), seen.end(), *at), 0);
    seen.push_back(*at);
    space.give_back(*at, 4096);
  }
  EXPECT_FALSE(space.take(1u << 24, 4096, 0));
  EXPECT_FALSE(space.take(0, 4096, 0));
  EXPECT_TRUE(space.take((1u << 24) - (1u << 20), 4096, 0)) << "all of it, once it is free";
}

TEST(NvmeVfioIova, EveryAddressOf64Bits) {
  IovaSpace space({{0, ~std::uint64_t{0}}});
  EXPECT_FALSE(space.take(~std::uint64_t{0}, 4096, 0));
  const auto at = space.take(std::uint64_t{1} << 63, std::uint64_t{1} << 30, 0);
  ASSERT_TRUE(at);
  EXPECT_EQ(*at % (1u << 30), 0u);
  EXPECT_FALSE(space.take(std::uint64_t{1} << 63, 4096, 0));
}

struct Table {
  std::map<std::uint64_t, std::pair<std::byte*, std::size_t>> entries;
  std::size_t most_bytes = ~std::size_t{0}, most_entries = ~std::size_t{0};
  bool may_unmap = true;
  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const auto& [at, range] : entries) sum += range.second;
    return sum;
  }
};

// As a type1 container: pages, no overlaps, a limit of bytes and of entries, unmaps exactly what was mapped.
class TableDomain final : public IommuDomain {
 public:
  explicit TableDomain(std::shared_ptr<Table> table) : table_(std::move(table)) {}
  std::string name() const override { return "a table"; }
  std::vector<IovaRange> ranges() const override { return {{0, 0xfedfffff}, {0xfef00000, 0x7fffffffff}}; }
  std::size_t page_bytes() const override { return 4096; }
  std::optional<std::uint64_t> entries_left() override { return table_->most_entries - table_->entries.size(); }
  int map(std::uint64_t address, void* memory, std::size_t bytes) override {
    const auto pages = [](std::uint64_t value) { return value % 4096 == 0; };
    if (!pages(address) || !pages(reinterpret_cast<std::uintptr_t>(memory)) || !pages(bytes) || bytes == 0)
      return EINVAL;
    const auto next = table_->entries.lower_bound(address);
    if (next != table_->entries.end() && next->first < address + bytes) return EEXIST;
    if (next != table_->entries.begin() && std::prev(next)->first + std::prev(next)->second.second > address) {
      return EEXIST;
    }
    if (table_->entries.size() >= table_->most_entries) return ENOSPC;
    if (table_->bytes() + bytes > table_->most_bytes) return ENOMEM;
    table_->entries.emplace(address, std::pair{static_cast<std::byte*>(memory), bytes});
    return 0;
  }
  int unmap(std::uint64_t address, std::size_t bytes) override {
    if (!table_->may_unmap) return EIO;
    const auto at = table_->entries.find(address);
    if (at == table_->entries.end() || at->second.second != bytes) return EINVAL;
    table_->entries.erase(at);
    return 0;
  }

 private:
  const std::shared_ptr<Table> table_;
};

struct Mapped {
  std::shared_ptr<Table> table = std::make_shared<Table>();
  VfioMapper mapper{std::make_unique<TableDomain>(table)};
};

// Nobody touches the memory: any address will do.
void* memory_at(std::uint64_t address) { return reinterpret_cast<void*>(address); }

TEST(NvmeVfioMapper, RangesKeepTheirPlaceInTheirPages) {
  Mapped m;
  std::mt19937_64 random(5);
  std::map<void*, std::size_t> ranges;
  for (int i = 0; i < 500; ++i) {
    void* const memory = memory_at((std::uint64_t{i + 1u} << 32) + random() % (1u << 22));
    const std::size_t bytes = random() % (random() % 4 == 0 ? 3u << 30 : 1u << 20) + 1;
    const auto address = m.mapper.map(memory, bytes);
    ASSERT_TRUE(address) << address.error().message;
    EXPECT_EQ(*address % 4096, reinterpret_cast<std::uintptr_t>(memory) % 4096);
    // Every byte is where it should be.
    for (const std::size_t byte : {std::size_t{0}, bytes / 2, bytes - 1}) {
      const auto entry = std::prev(m.table->entries.upper_bound(*address + byte));
      ASSERT_LT(*address + byte - entry->first, entry->second.second);
      EXPECT_EQ(entry->second.first + (*address + byte - entry->first), static_cast<std::byte*>(memory) + byte);
    }
    ranges.emplace(memory, bytes);
    if (random() % 2 == 0) {
      ASSERT_TRUE(m.mapper.unmap(ranges.begin()->first));
      ranges.erase(ranges.begin());
    }
  }
  EXPECT_EQ(m.mapper.mapped_ranges(), ranges.size());
  EXPECT_EQ(m.mapper.pinned_bytes(), m.table->bytes());
  for (const auto& [memory, bytes] : ranges) EXPECT_TRUE(m.mapper.unmap(memory));
  EXPECT_TRUE(m.table->entries.empty());
  EXPECT_EQ(m.mapper.pinned_bytes(), 0u);
}

TEST(NvmeVfioMapper, LargeMemoryIsAlignedForLargePages) {
  Mapped m;
  void* const memory = memory_at((std::uint64_t{5} << 40) + (3u << 20) + 4096);
  const auto large = m.mapper.map(memory, std::size_t{5} << 30);
  ASSERT_TRUE(large);
  EXPECT_EQ(*large % (1u << 30), reinterpret_cast<std::uintptr_t>(memory) % (1u << 30));
  EXPECT_EQ(m.table->entries.size(), 5u) << "large pieces";
}

TEST(NvmeVfioMapper, MemlockLimitIsNamed) {
  Mapped m;
  m.table->most_bytes = std::size_t{3} << 30;
  ASSERT_TRUE(m.mapper.map(memory_at(1u << 30), std::size_t{1} << 30));
  const auto refused = m.mapper.map(memory_at(std::uint64_t{1} << 40), std::size_t{4} << 30);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kNoSpace);
  EXPECT_EQ(refused.error().os_error, ENOMEM);
  // 1 GiB is this drive's, as far as it can be seen; the limit is that of whoever runs this.
  for (const char* part : {"RLIMIT_MEMLOCK", "mapping of 4194304 KiB", "(1048576 KiB of it for this drive)"}) {
    EXPECT_NE(refused.error().message.find(part), std::string::npos) << refused.error().message;
  }
  EXPECT_EQ(m.table->bytes(), std::size_t{1} << 30) << "half of a range is left";
  ASSERT_TRUE(m.mapper.map(memory_at(std::uint64_t{1} << 40), std::size_t{2} << 30));
}

TEST(NvmeVfioMapper, MemlockIsReadAndNotBlamedWhereItIsNoLimit) {
  tardis::testing::TempFolder folder;
  std::filesystem::create_directories(folder.file("self"));
  const auto status = [&](const std::string& text) {
    std::ofstream(folder.file("self") + "/status") << text;
    return Memlock::read(folder.path());
  };
  const Memlock plain = status("Name:\tx\nVmLck:\t    2048 kB\nVmPin:\t    1024 kB\nCapEff:\t0000000000000400\n");
  EXPECT_EQ(plain.locked, 3u << 20);
  EXPECT_FALSE(plain.exempt);
  EXPECT_TRUE(status("CapEff:\t000001ffffffffff\n").exempt);
  const auto says = [](const Memlock& memlock, bool of_user, std::initializer_list<const char*> parts) {
    const std::string text = memlock_text(memlock, 1u << 20, of_user);
    for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
    return text;
  };
  const Memlock limited{8u << 20, 3u << 20, false};
  const std::string alone = says(limited, false, {"is 8192 KiB", "has 3072 KiB locked", "(1024 KiB", "ulimit -l"});
  EXPECT_EQ(alone.find("other processes"), std::string::npos);
  says(limited, true, {"other processes", "LimitMEMLOCK"});
  for (const Memlock& free : {Memlock{std::nullopt, 3u << 20, false}, Memlock{8u << 20, 3u << 20, true}}) {
    EXPECT_EQ(says(free, false, {"short of it", "RLIMIT_MEMLOCK"}).find("ulimit"), std::string::npos)
        << "more of what is no limit does not help";
  }
}

// A controller's BAR may have a memory buffer of many GiB behind the doorbells.
TEST(NvmeVfioMapper, OnlyTheFrontOfALargeBarIsMapped) {
  const UniqueFd bar(::memfd_create("bar", MFD_CLOEXEC));
  ASSERT_TRUE(bar);
  ASSERT_EQ(::ftruncate(bar.get(), off_t{16} << 30), 0);
  auto window = BarWindow::map(bar.get(), 0, std::size_t{16} << 30);
  ASSERT_TRUE(window) << window.error().message;
  EXPECT_EQ((*window)->bytes(), BarWindow::kMostBytes);
  (*window)->write32(kRegCc, 5);
  EXPECT_EQ((*window)->read32(kRegCc), 5u);
  const auto small = BarWindow::map(bar.get(), 0, kRegDoorbells);
  ASSERT_FALSE(small);
  EXPECT_EQ(small.error().code, Code::kUnsupportedFormat);
}

TEST(NvmeVfioMapper, LimitOfEntriesIsNamed) {
  Mapped m;
  m.table->most_entries = 3;
  for (std::uint64_t i = 1; i <= 3; ++i) ASSERT_TRUE(m.mapper.map(memory_at(i << 20), 4096));
  const auto refused = m.mapper.map(memory_at(9u << 20), 4096);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().os_error, ENOSPC);
  EXPECT_NE(refused.error().message.find("dma_entry_limit"), std::string::npos) << refused.error().message;
}

TEST(NvmeVfioMapper, WhatIsWrongIsRefused) {
  Mapped m;
  EXPECT_FALSE(m.mapper.map(memory_at(4096), 0));
  EXPECT_FALSE(m.mapper.map(memory_at(~std::uint64_t{0} - 10), 4096));
  ASSERT_TRUE(m.mapper.map(memory_at(4096), 1));
  EXPECT_FALSE(m.mapper.map(memory_at(4096), 1));
  EXPECT_FALSE(m.mapper.unmap(memory_at(8192)));
  EXPECT_FALSE(m.mapper.map(memory_at(std::uint64_t{1} << 40), std::size_t{1} << 40))
      << "no IOMMU has as many addresses";
  // Memory that stays mapped stays taken.
  m.table->may_unmap = false;
  EXPECT_FALSE(m.mapper.unmap(memory_at(4096)));
  EXPECT_EQ(m.mapper.mapped_ranges(), 1u);
  m.table->may_unmap = true;
  EXPECT_TRUE(m.mapper.unmap(memory_at(4096)));
  EXPECT_FALSE(m.mapper.unmap(memory_at(4096)));
}

TEST(NvmeVfioMapper, DriverMemoryIsMapped) {
  Mapped m;
  auto memory = DmaMemory::allocate(m.mapper, 100'000);
  ASSERT_TRUE(memory);
  EXPECT_EQ(m.table->entries.begin()->second.first, memory->data());
  memory->reset();
  EXPECT_TRUE(m.table->entries.empty());
}

TEST(NvmeVfioMapper, PhysicalAddressesAreToldOrTheReasonIs) {
  std::vector<std::byte> memory(64);
  const auto address = physical_address(memory.data(), memory.size());
  ASSERT_FALSE(address) << "memory that the kernel may move";
  EXPECT_TRUE(address.error().message.find("huge pages") != std::string::npos ||
              address.error().message.find("root") != std::string::npos)
      << address.error().message;
  PhysicalMapper mapper;
  auto pages = mapper.allocate(4096);
  if (!pages) {
    EXPECT_NE(pages.error().message.find("huge pages"), std::string::npos) << pages.error().message;
  }
  EXPECT_FALSE(mapper.unmap(memory.data()));
}

TEST(NvmeVfioDetached, CallerDoesNotWaitLongerThanItSays) {
  EXPECT_EQ(call_within(std::chrono::seconds(10), [] { return 7; }), std::optional<int>(7));
  const auto start = std::chrono::steady_clock::now();
  auto held = std::make_shared<int>(5);
  std::weak_ptr<int> watched = held;
  const auto late = call_within(std::chrono::milliseconds(20), [held = std::move(held)] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    return *held;
  });
  EXPECT_FALSE(late.has_value());
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(290));
  EXPECT_FALSE(watched.expired()) << "the thread that is left behind owns what it uses";
  for (int i = 0; i < 1000 && !watched.expired(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_TRUE(watched.expired());
}

}  // namespace
}  // namespace tardis::nvme
