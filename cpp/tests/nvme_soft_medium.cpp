// SPDX-License-Identifier: Apache-2.0
// Memory of a namespace that a copy engine has pinned: the pages themselves stay, whatever is deallocated. Others in
// their place would be seen by threads, and not by the engine.
#include "nvme/soft/medium.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace tardis::nvme {
namespace {

constexpr std::uint64_t kBytes = 4 << 20;

std::ptrdiff_t resident(std::byte* memory) {
  std::vector<unsigned char> pages(kBytes / 4096);
  EXPECT_EQ(::mincore(memory, kBytes, pages.data()), 0);
  return std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return (page & 1) != 0; });
}

void zero(MemoryMedium& medium, MediumRequest::Op op) {
  std::memset(medium.data(), 0x3c, kBytes);
  MediumRequest request{};
  request.op = op;
  request.bytes = kBytes;
  medium.run({&request, 1}, [](MediumRequest&) {});
  EXPECT_EQ(request.error, 0);
}
bool is_zero(const std::byte* memory) {
  return std::all_of(memory, memory + kBytes, [](std::byte byte) { return byte == std::byte{0}; });
}

TEST(NvmeSoftMedium, PagesThatAreCopiedFromStayInPlace) {
  auto made = MemoryMedium::create(kBytes);
  ASSERT_TRUE(made);
  MemoryMedium& medium = **made;
  zero(medium, MediumRequest::Op::kDeallocate);
  EXPECT_EQ(resident(medium.data()), 0);
  EXPECT_TRUE(is_zero(medium.data()));
  ASSERT_EQ(medium.in_memory(), medium.data());
  for (const auto op : {MediumRequest::Op::kDeallocate, MediumRequest::Op::kWriteZeroes}) {
    zero(medium, op);
    EXPECT_EQ(resident(medium.data()), static_cast<std::ptrdiff_t>(kBytes / 4096));
    EXPECT_TRUE(is_zero(medium.data()));
  }
}

}  // namespace
}  // namespace tardis::nvme
