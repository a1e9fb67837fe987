// SPDX-License-Identifier: Apache-2.0
// Host memory of KV pools: what is found before, what is left behind by a failure, what the messages say.
#include "attention/host_memory.h"

#include <sys/mman.h>

#include <cstring>
#include <fstream>
#include <map>

#include "tests/block_support.h"

namespace tardis::attention {
namespace {

namespace fs = std::filesystem;
using ::tardis::testing::TempFolder;

constexpr std::size_t kMiB = 1 << 20;

// Pins nothing; the call number `fails` fails.
struct FakePinner {
  int fails = -1;
  int calls = 0;
  bool unpin_fails = false;
  std::map<void*, std::size_t> pinned;
  std::size_t most = 0;

  Pinner table() {
    return {[](void* context, void* memory, std::size_t bytes) {
              auto& self = *static_cast<FakePinner*>(context);
              if (self.calls++ == self.fails) return 2;
              self.pinned[memory] = bytes;
              self.most = std::max(self.most, self.pinned.size());
              return 0;
            },
            [](void* context, void* memory) {
              auto& self = *static_cast<FakePinner*>(context);
              if (self.unpin_fails) return 4;
              return self.pinned.erase(memory) == 1 ? 0 : 1;
            },
            [](int error) { return "error " + std::to_string(error) + " of the driver"; }, this};
  }
};

bool mapped(void* memory) {
  unsigned char in_core = 0;
  return ::mincore(memory, 4096, &in_core) == 0;
}

TEST(AttentionHostMemory, IsZeroAlignedTouchedAndPinnedInSteps) {
  FakePinner pinner;
  HostMemoryOptions options;
  options.step_bytes = 4 * kMiB;
  options.threads = 3;
  void* data = nullptr;
  {
    auto memory = HostMemory::create(9 * kMiB + 1, options, pinner.table());
    ASSERT_TRUE(memory) << memory.error().message;
    EXPECT_EQ(memory->size(), 10 * kMiB);
    data = memory->data();
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % (2 * kMiB), 0U);
    std::vector<unsigned char> zeros(memory->size());
    EXPECT_EQ(std::memcmp(data, zeros.data(), memory->size()), 0);
    std::vector<unsigned char> in_core(memory->size() / 4096);
    ASSERT_EQ(::mincore(data, memory->size(), in_core.data()), 0);
    for (const unsigned char page : in_core) ASSERT_EQ(page & 1, 1);
    std::vector<std::pair<std::size_t, std::size_t>> pieces;
    for (const auto& [at, bytes] : pinner.pinned) {
      pieces.emplace_back(static_cast<char*>(at) - static_cast<char*>(data), bytes);
    }
    const std::vector<std::pair<std::size_t, std::size_t>> expected{
        {0, 4 * kMiB}, {4 * kMiB, 4 * kMiB}, {8 * kMiB, 2 * kMiB}};
    EXPECT_EQ(pieces, expected);
    const HostMemory moved = std::move(*memory);
    EXPECT_EQ(moved.data(), data);
  }
  EXPECT_TRUE(pinner.pinned.empty());
  EXPECT_FALSE(mapped(data));
}

TEST(AttentionHostMemory, AFailureInTheMiddleLeavesNothing) {
  FakePinner pinner;
  pinner.fails = 2;
  HostMemoryOptions options;
  options.step_bytes = 2 * kMiB;
  const auto memory = HostMemory::create(8 * kMiB, options, pinner.table());
  ASSERT_FALSE(memory);
  EXPECT_EQ(memory.error().code, Code::kNoSpace);
  for (const char* part : {"expected to pin 0.01 GiB (8388608 bytes)", "error 2 of the driver at byte 4194304",
                           "ulimit -l", "make the pool smaller"}) {
    EXPECT_NE(memory.error().message.find(part), std::string::npos) << part << ": " << memory.error().message;
  }
  EXPECT_EQ(pinner.most, 2U);
  EXPECT_TRUE(pinner.pinned.empty());
}

TEST(AttentionHostMemory, WhatCannotBeUnpinnedStays) {
  FakePinner pinner;
  pinner.unpin_fails = true;
  void* data = nullptr;
  {
    auto memory = HostMemory::create(2 * kMiB, {}, pinner.table());
    ASSERT_TRUE(memory) << memory.error().message;
    data = memory->data();
    EXPECT_FALSE(memory->release()) << "whoever counts memory that is kept asks";
    EXPECT_TRUE(memory->release()) << "there is nothing more to give back";
  }
  EXPECT_TRUE(mapped(data)) << "a device may write there";
  ::munmap(data, 2 * kMiB);
}

TEST(AttentionHostMemory, AbandonedMemoryStaysPinned) {
  FakePinner pinner;
  auto memory = HostMemory::create(2 * kMiB, {}, pinner.table());
  ASSERT_TRUE(memory) << memory.error().message;
  void* const data = memory->data();
  memory->abandon();
  EXPECT_EQ(pinner.pinned.size(), 1U);
  EXPECT_TRUE(mapped(data));
  ::munmap(data, 2 * kMiB);
}

TEST(AttentionHostMemory, MoreThanThereIsIsRefusedBeforeAnythingIsTaken) {
  FakePinner pinner;
  const auto memory = HostMemory::create(std::size_t{1} << 50, {}, pinner.table());
  ASSERT_FALSE(memory);
  EXPECT_EQ(memory.error().code, Code::kNoSpace);
  EXPECT_NE(memory.error().message.find("expected 1048576.00 GiB"), std::string::npos) << memory.error().message;
  EXPECT_EQ(pinner.calls, 0);
  EXPECT_FALSE(HostMemory::create(0, {}, pinner.table()));
}

class AttentionMemoryLimits : public ::testing::Test {
 protected:
  void SetUp() override {
    put("proc/meminfo",
        "MemTotal:       65536 kB\nMemFree:        1 kB\nMemAvailable:   32768 kB\nHugePages_Total:      8\n"
        "HugePages_Free:       5\nHugePages_Rsvd:       2\nHugepagesize:       2048 kB\n");
  }
  void put(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(root_ + "/" + path).parent_path());
    std::ofstream(root_ + "/" + path) << text;
  }
  MemoryLimits limits() {
    auto found = memory_limits(root_ + "/proc", root_ + "/cgroup");
    EXPECT_TRUE(found);
    return found ? *found : MemoryLimits{};
  }

  TempFolder folder_;
  std::string root_ = folder_.path();
};

TEST_F(AttentionMemoryLimits, OfTheMachine) {
  const MemoryLimits found = limits();
  EXPECT_EQ(found.total, 64 * kMiB);
  EXPECT_EQ(found.available, 32 * kMiB);
  EXPECT_EQ(found.free_huge, 6 * kMiB);
  EXPECT_FALSE(found.group_left);
  EXPECT_TRUE(check_limits(found, 32 * kMiB));
  const Status refused = check_limits(found, 32 * kMiB + 1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(
      refused.error().message,
      "expected 0.03 GiB (33554433 bytes) of host memory for a KV pool, found 0.03 GiB (33554432 bytes) available "
      "of 0.06 GiB (67108864 bytes); make the pool smaller, or free memory");
  put("proc/meminfo", "MemTotal: 1 kB\n");
  EXPECT_FALSE(memory_limits(root_ + "/proc", root_ + "/cgroup"));
}

TEST_F(AttentionMemoryLimits, TheTightestGroupAbove) {
  put("proc/self/cgroup", "0::/a/b\n");
  put("cgroup/a/memory.max", "16777216\n");
  put("cgroup/a/memory.current", "8388608\n");
  put("cgroup/a/memory.stat", "anon 1\ninactive_file 1048576\n");
  put("cgroup/a/b/memory.max", "max\n");
  put("cgroup/a/b/memory.current", "1\n");
  const MemoryLimits found = limits();
  ASSERT_TRUE(found.group_left);
  EXPECT_EQ(*found.group_left, 9 * kMiB) << "page cache that it can drop counts as left";
  EXPECT_TRUE(check_limits(found, 9 * kMiB));
  const Status refused = check_limits(found, 10 * kMiB);
  ASSERT_FALSE(refused);
  EXPECT_NE(
      refused.error().message.find("left in the control group of this process (" + root_ + "/cgroup/a/memory.max"),
      std::string::npos)
      << refused.error().message;
}

TEST_F(AttentionMemoryLimits, GroupsOfVersionOne) {
  put("proc/self/cgroup", "5:cpu,memory:/c\n4:cpuset:/\n");
  put("cgroup/memory/c/memory.limit_in_bytes", "9223372036854771712\n");
  put("cgroup/memory/c/memory.usage_in_bytes", "5\n");
  EXPECT_FALSE(limits().group_left) << "no limit";
  put("cgroup/memory/memory.limit_in_bytes", "4194304\n");
  put("cgroup/memory/memory.usage_in_bytes", "9999999\n");
  EXPECT_EQ(limits().group_left, std::uint64_t{0}) << "it may hold more than it is let";
}

}  // namespace
}  // namespace tardis::attention
