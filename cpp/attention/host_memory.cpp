// SPDX-License-Identifier: Apache-2.0
#include "attention/host_memory.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>
#include <system_error>
#include <thread>
#include <utility>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace tardis::attention {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kSmallPage = 4096;
constexpr std::size_t kTouched = std::size_t{256} << 20;  // by a thread at a time
constexpr int kReservedFlags = MAP_HUGETLB | (21 << MAP_HUGE_SHIFT);

void* map_pages(std::size_t bytes, int flags) {
  return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

// Of a mapping that is one huge page longer, what begins at a huge page; the rest is given back.
void* aligned(void* mapping, std::size_t bytes) {
  const auto at = reinterpret_cast<std::uintptr_t>(mapping);
  const std::uintptr_t begin = (at + kHugePage - 1) / kHugePage * kHugePage;
  if (begin > at) (void)::munmap(mapping, begin - at);
  const std::uintptr_t end = at + bytes + kHugePage;
  if (end > begin + bytes) (void)::munmap(reinterpret_cast<void*>(begin + bytes), end - begin - bytes);
  return reinterpret_cast<void*>(begin);
}

// Not MPOL_BIND: a node that is full would end the process.
bool prefer_node(void* memory, std::size_t bytes, int node) {
  constexpr int kBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> mask(static_cast<std::size_t>(node) / kBits + 1);
  mask[static_cast<std::size_t>(node) / kBits] = 1UL << (node % kBits);
  // The kernel reads one bit less than it is told.
  return ::syscall(SYS_mbind, memory, bytes, MPOL_PREFERRED, mask.data(), mask.size() * kBits + 1, 0) == 0;
}

// 0, or the errno of a page that could not be had. Kernels before 5.14 are not asked: there a page is touched.
int populate(std::byte* memory, std::size_t bytes) {
  while (::madvise(memory, bytes, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) return errno;
    for (std::size_t at = 0; at < bytes; at += kSmallPage) {
      *reinterpret_cast<volatile std::byte*>(memory + at) = std::byte{0};
    }
    return 0;
  }
  return 0;
}

}  // namespace

Result<HostMemory> HostMemory::create(std::size_t bytes, const HostMemoryOptions& options, const Pinner& pinner) {
  if (bytes == 0 || bytes > std::numeric_limits<std::size_t>::max() / 2 || options.step_bytes < kHugePage) {
    return Error{Code::kInvalidArgument, "host memory: expected some bytes, pinned in steps of 2 MiB or more, found " +
                                             std::to_string(bytes) + " in steps of " +
                                             std::to_string(options.step_bytes)};
  }
  HostMemory memory(pinner);
  Status status = memory.map((bytes + kHugePage - 1) / kHugePage * kHugePage, options);
  if (status) status = memory.touch(options.threads);
  if (status) status = memory.pin(options.step_bytes / kHugePage * kHugePage);
  if (!status) return status.error();
  return memory;
}

HostMemory::HostMemory(HostMemory&& other) noexcept
    : pinner_(other.pinner_),
      memory_(std::exchange(other.memory_, nullptr)),
      size_(other.size_),
      pages_(other.pages_),
      on_node_(other.on_node_),
      pinned_(std::move(other.pinned_)) {
  other.pinned_.clear();
}

HostMemory::~HostMemory() { (void)release(); }

bool HostMemory::release() {
  if (memory_ == nullptr) return true;
  bool unpinned = true;
  for (void* piece : pinned_) unpinned = pinner_.unpin(pinner_.context, piece) == 0 && unpinned;
  if (unpinned) (void)::munmap(memory_, size_);  // what is still pinned may still be written
  abandon();
  return unpinned;
}

void HostMemory::abandon() {
  memory_ = nullptr;
  pinned_.clear();
}

Status HostMemory::map(std::size_t bytes, const HostMemoryOptions& options) {
  const auto limits = memory_limits();
  void* mapping = MAP_FAILED;
  // These were set aside, and are in no other number.
  if (options.reserved_huge_pages && limits && limits->free_huge >= bytes) mapping = map_pages(bytes, kReservedFlags);
  if (mapping != MAP_FAILED) {
    memory_ = mapping;
    pages_ = Pages::kReserved;
  } else {
    if (options.check_limits) {
      if (!limits) return limits.error();
      if (const Status status = attention::check_limits(*limits, bytes); !status) return status;
    }
    mapping = map_pages(bytes + kHugePage, MAP_NORESERVE);
    if (mapping == MAP_FAILED) {
      return errno_error(errno, "host memory: cannot map " + size_text(bytes) + "; make the pool smaller");
    }
    memory_ = aligned(mapping, bytes);
  }
  size_ = bytes;
  // A copy on write after a fork would move pages under the GPU.
  if (::madvise(memory_, size_, MADV_DONTFORK) != 0) return errno_error(errno, "host memory: madvise(MADV_DONTFORK)");
  if (pages_ == Pages::kSmall && ::madvise(memory_, size_, MADV_HUGEPAGE) == 0) pages_ = Pages::kTransparent;
  if (options.node) on_node_ = prefer_node(memory_, size_, *options.node);
  return {};
}

Status HostMemory::touch(unsigned threads) {
  // Before it is pinned, and by several: the driver alone would take many times longer.
  const std::size_t steps = (size_ + kTouched - 1) / kTouched;
  std::atomic<std::size_t> next{0};
  std::atomic<int> failed{0};
  const auto work = [&] {
    for (std::size_t step; failed.load() == 0 && (step = next.fetch_add(1)) < steps;) {
      const std::size_t at = step * kTouched;
      const int error = populate(static_cast<std::byte*>(memory_) + at, std::min(kTouched, size_ - at));
      if (error != 0) failed = error;
    }
  };
  const std::size_t wanted = std::min<std::size_t>({threads, std::thread::hardware_concurrency(), steps});
  std::vector<std::thread> helpers;
  try {
    while (helpers.size() + 1 < wanted) helpers.emplace_back(work);
  } catch (const std::system_error&) {  // fewer do as well
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  if (failed != 0) {
    return errno_error(failed, "host memory: expected " + size_text(size_) + ", found less; make the pool smaller");
  }
  return {};
}

Status HostMemory::pin(std::size_t step) {
  pinned_.reserve((size_ + step - 1) / step);
  for (std::size_t at = 0; at < size_; at += step) {
    void* const piece = static_cast<std::byte*>(memory_) + at;
    const std::size_t bytes = std::min(step, size_ - at);
    const int error = pinner_.pin(pinner_.context, piece, bytes);
    if (error != 0) {
      const auto limits = memory_limits();
      const std::string locked = limits && limits->locked ? size_text(*limits->locked) : "unlimited";
      return Error{Code::kNoSpace, "host memory: expected to pin " + size_text(size_) + ", found " +
                                       pinner_.text(error) + " at byte " + std::to_string(at) +
                                       " (limit of locked memory, ulimit -l: " + locked +
                                       "); make the pool smaller, or raise what this machine lets processes pin"};
    }
    pinned_.push_back(piece);
  }
  return {};
}

}  // namespace tardis::attention
