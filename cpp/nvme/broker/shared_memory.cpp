// SPDX-License-Identifier: Apache-2.0
#include "nvme/broker/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>

#include "nvme/spec.h"

namespace tardis::nvme::broker {

Result<Mapping> Mapping::map(int fd, std::uint64_t offset, std::size_t bytes, const std::string& what) {
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (memory == MAP_FAILED) return errno_error(errno, "mmap of " + std::to_string(bytes) + " bytes of " + what);
  Mapping mapping;
  mapping.memory_ = static_cast<std::byte*>(memory);
  mapping.bytes_ = bytes;
  // A fork would otherwise share what a controller writes to.
  (void)::madvise(memory, bytes, MADV_DONTFORK);
  return mapping;
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    reset();
    memory_ = std::exchange(other.memory_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

void Mapping::reset() {
  if (memory_ != nullptr) (void)::munmap(memory_, bytes_);
  memory_ = nullptr;
  bytes_ = 0;
}

Result<UniqueFd> make_shared_memory(const std::string& name, std::uint64_t bytes) {
  UniqueFd fd(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return errno_error(errno, "memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return errno_error(errno, "memory of " + std::to_string(bytes) + " bytes to share");
  }
  // Now rather than when it is touched or pinned, by whoever that is: this process pays for it.
  if (::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) != 0) {
    return errno_error(errno, "memory of " + std::to_string(bytes) + " bytes to share");
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return errno_error(errno, "F_ADD_SEALS");
  }
  return fd;
}

Status check_shared_memory(int fd, std::uint64_t offset, std::uint64_t bytes) {
  if (offset % kPageBytes != 0 || bytes % kPageBytes != 0 || bytes == 0 || offset + bytes < offset) {
    return Error{Code::kInvalidArgument, "shared memory: expected whole pages of " + std::to_string(kPageBytes) +
                                             " bytes, found " + std::to_string(bytes) + " from " +
                                             std::to_string(offset)};
  }
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return Error{Code::kInvalidArgument,
                 "shared memory: expected a memfd that is sealed against shrinking "
                 "(F_SEAL_SHRINK), found another file"};
  }
  if ((seals & F_SEAL_WRITE) != 0) {
    return Error{Code::kInvalidArgument, "shared memory: expected a memfd that can be written to, found it sealed"};
  }
  struct stat file {};
  if (::fstat(fd, &file) != 0) return errno_error(errno, "fstat of shared memory");
  const auto size = static_cast<std::uint64_t>(file.st_size);
  if (offset + bytes > size) {
    return Error{Code::kInvalidArgument, "shared memory: expected a range within its " + std::to_string(size) +
                                             " bytes, found " + std::to_string(bytes) + " from " +
                                             std::to_string(offset)};
  }
  return {};
}

}  // namespace tardis::nvme::broker
