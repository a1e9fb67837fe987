// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/physical_mapper.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "nvme/vfio/page_frames.h"

namespace tardis::nvme {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

}  // namespace

Result<std::uint64_t> PhysicalMapper::map(void* memory, std::size_t bytes) {
  auto address = physical_address(memory, bytes);
  if (!address) return address;
  const std::lock_guard lock(mutex_);
  if (!ranges_.emplace(memory, bytes).second) {
    return Error{Code::kInvalidArgument, "memory to map: expected a range that is not mapped, found one that is"};
  }
  return address;
}

Status PhysicalMapper::unmap(void* memory) {
  const std::lock_guard lock(mutex_);
  if (ranges_.erase(memory) != 0) return {};
  return Error{Code::kInvalidArgument, "memory to unmap: expected the beginning of a range that is mapped"};
}

Result<DmaPages> PhysicalMapper::allocate(std::size_t bytes) {
  const std::size_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  // Shared: private memory would lie elsewhere once the process has forked and writes to it.
  void* const memory =
      ::mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_HUGETLB | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) {
    Error refused = errno_error(errno, "mmap of " + std::to_string(whole >> 20) + " MiB of huge pages");
    refused.message += "; a drive without an IOMMU needs them: raise vm.nr_hugepages";
    return refused;
  }
  std::memset(memory, 0, whole);  // MAP_POPULATE does not say whether it could
  DmaPages pages{{static_cast<std::byte*>(memory), [whole](std::byte* m) { (void)::munmap(m, whole); }}, bytes};
  auto contiguous = physical_address(memory, bytes);
  if (!contiguous) {
    Error refused = contiguous.error();
    refused.message += "; ask for queues of which each fits in 2 MiB (fewer bounce buffers, shorter queues)";
    return refused;
  }
  return pages;
}

}  // namespace tardis::nvme
