// SPDX-License-Identifier: Apache-2.0
#include "store/byte_locks.h"

#include <unistd.h>

#include <cerrno>

namespace tardis {
namespace {

struct flock range_of(short type, std::uint32_t first, std::uint32_t count) {
  struct flock range {};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = first;
  range.l_len = count;
  return range;
}

}  // namespace

Result<bool> try_lock(int fd, short type, std::uint32_t first, std::uint32_t count, const std::string& file) {
  struct flock range = range_of(type, first, count);
  if (::fcntl(fd, F_OFD_SETLK, &range) == 0) return true;
  if (errno == EAGAIN || errno == EACCES) return false;
  return errno_error(errno, file + ": locking");
}

void unlock(int fd, std::uint32_t first, std::uint32_t count) {
  struct flock range = range_of(F_UNLCK, first, count);
  ::fcntl(fd, F_OFD_SETLK, &range);
}

bool held_by_another(int fd, std::uint32_t first, std::uint32_t count) {
  struct flock range = range_of(F_WRLCK, first, count);
  return ::fcntl(fd, F_OFD_GETLK, &range) == 0 && range.l_type != F_UNLCK;
}

}  // namespace tardis
