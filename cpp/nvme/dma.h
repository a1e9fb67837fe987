// SPDX-License-Identifier: Apache-2.0
// Memory that a controller may reach. The driver asks for an address for each range that it hands to a controller; who
// answers depends on the controller: the software controller's own table, VFIO's IOMMU mappings, a provider of GPU
// memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "base/status.h"

namespace tardis::nvme {

// Zeroed memory of whole pages.
struct DmaPages {
  std::unique_ptr<std::byte, std::function<void(std::byte*)>> memory;
  std::size_t bytes = 0;
};

class DmaMapper {
 public:
  virtual ~DmaMapper() = default;

  // The address under which a controller reaches [memory, memory + bytes): one contiguous range, page by page in the
  // order of the memory, with the same offset in a page of page_bytes(). Ranges of two calls must not overlap.
  virtual Result<std::uint64_t> map(void* memory, std::size_t bytes) = 0;
  // Of a range as it was given to map(). Nothing that a controller may still touch may be in it.
  virtual Status unmap(void* memory) = 0;
  virtual std::size_t page_bytes() const { return 4096; }

  // Memory for the driver itself, `bytes` (whole pages of 4096) that map() will take. Ordinary memory, unless not all
  // of that can be mapped.
  virtual Result<DmaPages> allocate(std::size_t bytes);
};

}  // namespace tardis::nvme
