// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/type1_domain.h"

#include <linux/vfio.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

namespace tardis::nvme {
namespace {

// Kernels before 5.4 do not tell: what every IOMMU translates, but for the x86 interrupt range.
const std::vector<IovaRange> kUntold = {{0, 0xfedfffff}, {0xfef00000, (std::uint64_t{1} << 39) - 1}};
constexpr std::size_t kMostInfoBytes = 1u << 20;

}  // namespace

struct Type1Domain::Info {
  std::vector<IovaRange> ranges;
  std::uint64_t page_sizes = 0;
  std::optional<std::uint64_t> entries_left;
};

Result<Type1Domain::Info> Type1Domain::read_info() const {
  std::vector<std::byte> memory(sizeof(vfio_iommu_type1_info));
  for (;;) {
    vfio_iommu_type1_info head{};
    head.argsz = static_cast<__u32>(memory.size());
    std::memcpy(memory.data(), &head, sizeof head);
    if (::ioctl(files_->container.get(), VFIO_IOMMU_GET_INFO, memory.data()) != 0) {
      return errno_error(errno, "VFIO_IOMMU_GET_INFO");
    }
    std::memcpy(&head, memory.data(), sizeof head);
    if (head.argsz <= memory.size()) break;
    if (head.argsz > kMostInfoBytes) {
      return Error{Code::kInternal, "VFIO_IOMMU_GET_INFO: expected at most 1 MiB, found " + std::to_string(head.argsz)};
    }
    memory.assign(head.argsz, {});
  }
  vfio_iommu_type1_info head{};
  std::memcpy(&head, memory.data(), sizeof head);
  Info info;
  if ((head.flags & VFIO_IOMMU_INFO_PGSIZES) != 0) info.page_sizes = head.iova_pgsizes;
  if ((head.flags & VFIO_IOMMU_INFO_CAPS) == 0) return info;
  for (std::size_t at = head.cap_offset; at != 0;) {
    vfio_info_cap_header header{};
    if (at + sizeof header > memory.size()) break;
    std::memcpy(&header, memory.data() + at, sizeof header);
    if (header.id == VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE) {
      vfio_iommu_type1_info_cap_iova_range list{};
      if (at + sizeof list > memory.size()) break;
      std::memcpy(&list, memory.data() + at, sizeof list);
      for (std::size_t i = 0; i < list.nr_iovas; ++i) {
        vfio_iova_range range{};
        const std::size_t entry = at + sizeof list + i * sizeof range;
        if (entry + sizeof range > memory.size()) break;
        std::memcpy(&range, memory.data() + entry, sizeof range);
        info.ranges.push_back({range.start, range.end});
      }
    } else if (header.id == VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL) {
      vfio_iommu_type1_info_dma_avail left{};
      if (at + sizeof left > memory.size()) break;
      std::memcpy(&left, memory.data() + at, sizeof left);
      info.entries_left = left.avail;
    }
    if (header.next <= at) break;  // the list ends, or goes in a circle
    at = header.next;
  }
  return info;
}

Result<std::unique_ptr<Type1Domain>> Type1Domain::create(std::shared_ptr<VfioFiles> files, bool version_2) {
  std::unique_ptr<Type1Domain> domain(new Type1Domain(std::move(files), version_2));
  auto info = domain->read_info();
  if (!info) return info.error();
  const auto system = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t smallest = info->page_sizes == 0 ? system : std::size_t{1} << std::countr_zero(info->page_sizes);
  domain->page_bytes_ = std::max(smallest, system);
  domain->ranges_ = info->ranges.empty() ? kUntold : std::move(info->ranges);
  return domain;
}

std::optional<std::uint64_t> Type1Domain::entries_left() {
  auto info = read_info();
  return info ? info->entries_left : std::nullopt;
}

int Type1Domain::map(std::uint64_t address, void* memory, std::size_t bytes) {
  vfio_iommu_type1_dma_map request{};
  request.argsz = sizeof request;
  request.flags = VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE;
  request.vaddr = reinterpret_cast<std::uintptr_t>(memory);
  request.iova = address;
  request.size = bytes;
  return ::ioctl(files_->container.get(), VFIO_IOMMU_MAP_DMA, &request) == 0 ? 0 : errno;
}

int Type1Domain::unmap(std::uint64_t address, std::size_t bytes) {
  vfio_iommu_type1_dma_unmap request{};
  request.argsz = sizeof request;
  request.iova = address;
  request.size = bytes;
  if (::ioctl(files_->container.get(), VFIO_IOMMU_UNMAP_DMA, &request) != 0) return errno;
  return request.size == bytes ? 0 : EIO;  // the kernel says how much it found
}

}  // namespace tardis::nvme
