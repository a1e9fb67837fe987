// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/medium.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace tardis::nvme {

Result<std::unique_ptr<MemoryMedium>> MemoryMedium::create(std::uint64_t bytes) {
  if (bytes == 0) return Error{Code::kInvalidArgument, "memory of a namespace: expected some bytes, found 0"};
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return errno_error(errno, "mmap of a namespace of " + std::to_string(bytes) + " bytes");
  return std::unique_ptr<MemoryMedium>(new MemoryMedium(static_cast<std::byte*>(memory), bytes));
}

MemoryMedium::~MemoryMedium() { ::munmap(data_, bytes_); }

void MemoryMedium::zero(std::byte* at, std::uint64_t bytes) const {
  constexpr std::uint64_t kPage = 4096, kGiveBack = 1 << 20;
  // Of a large range the memory itself goes back, as a namespace may be larger than the machine; it reads as zeros.
  const std::uint64_t head = -reinterpret_cast<std::uintptr_t>(at) % kPage;
  const bool give_back = bytes >= kGiveBack && !in_place_.load(std::memory_order_relaxed);
  const std::uint64_t pages = !give_back ? 0 : (bytes - head) / kPage * kPage;
  if (pages == 0 || ::madvise(at + head, pages, MADV_DONTNEED) != 0) {
    std::memset(at, 0, bytes);
    return;
  }
  std::memset(at, 0, head);
  std::memset(at + head + pages, 0, bytes - head - pages);
}

void MemoryMedium::run(std::span<MediumRequest> requests, const Completion& on_complete) {
  for (MediumRequest& request : requests) {
    std::byte* at = data_ + request.offset;
    switch (request.op) {
      case MediumRequest::Op::kRead:
        for (const iovec& part : request.memory) {
          std::memcpy(part.iov_base, at, part.iov_len);
          at += part.iov_len;
        }
        break;
      case MediumRequest::Op::kWrite:
        for (const iovec& part : request.memory) {
          std::memcpy(at, part.iov_base, part.iov_len);
          at += part.iov_len;
        }
        break;
      case MediumRequest::Op::kWriteZeroes:
      case MediumRequest::Op::kDeallocate:
        zero(at, request.bytes);
        break;
      case MediumRequest::Op::kFlush:
        break;
    }
    request.error = 0;
    on_complete(request);
  }
}

}  // namespace tardis::nvme
