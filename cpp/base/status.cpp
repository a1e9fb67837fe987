// SPDX-License-Identifier: Apache-2.0
#include "base/status.h"

#include <cerrno>
#include <system_error>

namespace tardis {
namespace {

Code code_of(int errno_value) {
  switch (errno_value) {
    case EACCES:
    case EPERM:
    case EROFS:
      return Code::kPermission;
    case ENOENT:
      return Code::kNotFound;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return Code::kNoSpace;
    case EBUSY:
    case EAGAIN:  // the same number as EWOULDBLOCK on Linux
      return Code::kBusy;
    default:
      return Code::kIo;
  }
}

}  // namespace

Error errno_error(int errno_value, std::string context) {
  // generic_category().message() is thread-safe where strerror() need not be.
  context += ": ";
  context += std::generic_category().message(errno_value);
  return Error{code_of(errno_value), std::move(context), errno_value};
}

}  // namespace tardis
