// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "nvme/dma.h"

namespace tardis::nvme {

// A drive without an IOMMU: addresses are those of the machine's memory, and nothing keeps the drive from any other.
// Memory must be of huge pages, which the kernel does not move. unmap() forgets, and ends no access: whoever uses this
// has other means to stop the drive (bus mastering). Thread-safe.
class PhysicalMapper final : public DmaMapper {
 public:
  Result<std::uint64_t> map(void* memory, std::size_t bytes) override;
  Status unmap(void* memory) override;
  Result<DmaPages> allocate(std::size_t bytes) override;

 private:
  std::mutex mutex_;
  std::map<void*, std::size_t> ranges_;
};

}  // namespace tardis::nvme
