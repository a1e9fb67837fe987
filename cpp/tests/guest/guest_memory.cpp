// SPDX-License-Identifier: Apache-2.0
// Memory for the controller, and its limits.
#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

#include "base/aligned_buffer.h"
#include "guest_support.h"
#include "nvme/self_test.h"
#include "nvme/vfio/vfio_mapper.h"

namespace tardis::nvme::testing {
namespace {

using Op = NamespaceRequest::Op;

// Root without the right to pin what it likes, and with a limit.
class MemlockLimit {
 public:
  explicit MemlockLimit(std::uint64_t bytes) {
    const rlimit limit{bytes, bytes};
    EXPECT_EQ(::getrlimit(RLIMIT_MEMLOCK, &before_), 0);
    EXPECT_EQ(::setrlimit(RLIMIT_MEMLOCK, &limit), 0);
    set_right(false);
  }
  ~MemlockLimit() {
    set_right(true);
    EXPECT_EQ(::setrlimit(RLIMIT_MEMLOCK, &before_), 0);
  }
  MemlockLimit(const MemlockLimit&) = delete;
  MemlockLimit& operator=(const MemlockLimit&) = delete;

 private:
  static void set_right(bool has) {
    __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    __user_cap_data_struct data[2]{};
    ASSERT_EQ(::syscall(SYS_capget, &header, data), 0);
    const std::uint32_t bit = 1u << CAP_IPC_LOCK;
    data[0].effective = has ? data[0].effective | bit : data[0].effective & ~bit;
    ASSERT_EQ(::syscall(SYS_capset, &header, data), 0);
  }
  rlimit before_{};
};

class GuestMemory : public Guest {
 protected:
  void SetUp() override {
    Guest::SetUp();
    if (!IsSkipped() && guest_way() == VfioWay::kWithoutIommu) GTEST_SKIP() << "without an IOMMU nothing is pinned";
  }
};

TEST_F(GuestMemory, MemlockLimitIsReachedAndNamed) {
  constexpr std::size_t kMiB = 1 << 20, kLimit = 24 * kMiB;
  const MemlockLimit limited(kLimit);
  auto controller = open();
  ASSERT_NE(controller, nullptr);
  auto& mapper = dynamic_cast<VfioMapper&>(controller->mapper());
  const std::size_t used = mapper.pinned_bytes();
  EXPECT_LT(used, 16 * kMiB);
  AlignedBuffer memory(kLimit + kMiB);
  // With the table of a region (0.25 % of it) and the driver's own memory there is not room for all of it.
  auto refused = controller->driver()->register_memory(memory.data(), kLimit);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().os_error, ENOMEM);
  for (const char* part : {"RLIMIT_MEMLOCK", "24576 KiB", "ulimit -l"}) {
    EXPECT_NE(refused.error().message.find(part), std::string::npos) << refused.error().message;
  }
  EXPECT_EQ(mapper.pinned_bytes(), used) << "half of it stayed";
  // To the page.
  const std::size_t room = kLimit - used;
  auto exactly = mapper.map(memory.data(), room);
  EXPECT_TRUE(exactly) << exactly.error().message;
  EXPECT_FALSE(mapper.map(memory.data() + room, 4096));
  EXPECT_TRUE(mapper.unmap(memory.data()));
  const std::size_t fits = room * 99 / 100 / 4096 * 4096;
  auto registered = controller->driver()->register_memory(memory.data(), fits);
  EXPECT_TRUE(registered) << registered.error().message;
  // It is of use.
  auto space = space_of(controller, 1);
  for (const Op op : {Op::kWrite, Op::kRead}) {
    const iovec range{memory.data() + fits - kMiB, kMiB};
    NamespaceRequest request{.op = op, .offset = 0, .memory = {&range, 1}, .error = -1};
    space->run({&request, 1}, nullptr);
    EXPECT_EQ(request.error, 0);
  }
  EXPECT_EQ(controller->driver()->counters().bounced_commands, 0u);
  controller->driver()->unregister_memory(memory.data());
  EXPECT_EQ(mapper.pinned_bytes(), used);
}

TEST_F(GuestMemory, TooLowALimitForTheQueuesIsSaidBeforeAnythingRuns) {
  const MemlockLimit limited(64 << 10);
  auto refused = VfioController::open(address, guest_options());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kNoSpace) << refused.error().message;
  EXPECT_NE(refused.error().message.find("RLIMIT_MEMLOCK"), std::string::npos) << refused.error().message;
}

TEST_F(GuestMemory, MoreThanAnIommuPageTable) {
  auto controller = open();
  ASSERT_NE(controller, nullptr);
  // 2 MiB pages and their edges; many ranges.
  std::vector<AlignedBuffer> ranges;
  for (std::size_t i = 0; i < 40; ++i) {
    ranges.emplace_back((i % 4 == 0 ? 3u << 20 : 12288u) + 4096 * i);
    const auto registered = controller->driver()->register_memory(ranges.back().data() + i, ranges.back().size() - i);
    ASSERT_TRUE(registered) << registered.error().message;
  }
  const auto left = dynamic_cast<VfioMapper&>(controller->mapper()).domain().entries_left();
  if (left) std::printf("%llu mappings of the kernel are left\n", static_cast<unsigned long long>(*left));
  for (std::size_t i = 0; i < ranges.size(); ++i) controller->driver()->unregister_memory(ranges[i].data() + i);
}

TEST_F(GuestMemory, SelfTestOfHostMemory) {
  auto controller = open();
  ASSERT_NE(controller, nullptr);
  HostMemory host(controller->mapper());
  auto space = space_of(controller, 1);
  const auto works = self_test(host, *space, 1 << 20);
  EXPECT_TRUE(works) << works.error().message;
}

}  // namespace
}  // namespace tardis::nvme::testing
