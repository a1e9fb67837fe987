// SPDX-License-Identifier: Apache-2.0
#include "base/read_exactly.h"

#include <unistd.h>

#include <cerrno>

namespace tardis {

Status read_exactly(int fd, const std::string& path, std::uint64_t offset, void* memory, std::size_t bytes) {
  auto* to = static_cast<char*>(memory);
  while (bytes > 0) {
    const ssize_t got = ::pread(fd, to, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_error(errno, path);
    if (got == 0) return Error{Code::kCorrupt, path + ": ends at byte " + std::to_string(offset)};
    to += got;
    offset += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::size_t>(got);
  }
  return {};
}

}  // namespace tardis
