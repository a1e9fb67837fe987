// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "base/aligned_buffer.h"
#include "base/status.h"
#include "base/unique_fd.h"

namespace tardis {
namespace {

TEST(ErrnoError, CodesAndMessage) {
  const std::pair<int, Code> table[] = {
      {EACCES, Code::kPermission}, {EPERM, Code::kPermission}, {EROFS, Code::kPermission}, {ENOENT, Code::kNotFound},
      {ENOSPC, Code::kNoSpace},    {EDQUOT, Code::kNoSpace},   {EFBIG, Code::kNoSpace},    {EBUSY, Code::kBusy},
      {EAGAIN, Code::kBusy},       {EWOULDBLOCK, Code::kBusy}, {EIO, Code::kIo},           {EINVAL, Code::kIo},
  };
  for (const auto& [value, code] : table) EXPECT_EQ(errno_error(value, "x").code, code) << value;
  EXPECT_EQ(errno_error(ENOENT, "open /a").message, "open /a: No such file or directory");
}

TEST(AlignedBuffer, AlignedZeroedMovable) {
  auto made = AlignedBuffer::allocate(10000, 8192);
  ASSERT_TRUE(made);
  AlignedBuffer buffer = std::move(*made);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 8192, 0u);
  EXPECT_EQ(buffer.size(), 10000u);
  for (std::size_t i = 0; i < buffer.size(); ++i) ASSERT_EQ(buffer.data()[i], std::byte{0});
  EXPECT_FALSE(AlignedBuffer::allocate(10, 48));
}

TEST(UniqueFd, ClosesOnceAndMoves) {
  const int raw = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  ASSERT_GE(raw, 0);
  {
    UniqueFd first(raw);
    UniqueFd second(std::move(first));
    EXPECT_FALSE(first);
    EXPECT_EQ(second.get(), raw);
    EXPECT_NE(::fcntl(raw, F_GETFD), -1);
  }
  EXPECT_EQ(::fcntl(raw, F_GETFD), -1);
  EXPECT_EQ(errno, EBADF);
}

}  // namespace
}  // namespace tardis
