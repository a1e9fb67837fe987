// SPDX-License-Identifier: Apache-2.0
// Memory of this process for a controller behind an IOMMU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "nvme/dma.h"
#include "nvme/vfio/iommu_domain.h"

namespace tardis::nvme {

// Thread-safe. A range is pinned when it is mapped, and counts against the memlock limit. unmap() ends the controller's
// access, whatever it does.
class VfioMapper final : public DmaMapper {
 public:
  explicit VfioMapper(std::unique_ptr<IommuDomain> domain);
  ~VfioMapper() override;

  // One mapping of the kernel. It holds no lock that a signal could end while it pins, so that many small ones are
  // better than one of a terabyte; and IOMMUs have no larger pages.
  static constexpr std::uint64_t kPieceBytes = std::uint64_t{1} << 30;

  Result<std::uint64_t> map(void* memory, std::size_t bytes) override;
  Status unmap(void* memory) override;
  std::size_t page_bytes() const override { return page_bytes_; }

  std::size_t mapped_ranges() const;
  std::uint64_t pinned_bytes() const;
  IommuDomain& domain() { return *domain_; }

 private:
  struct Range {
    std::uint64_t address = 0, bytes = 0;  // whole pages
  };
  int unmap_pieces(std::uint64_t address, std::uint64_t bytes);
  Error refused(int error, std::size_t asked);

  const std::unique_ptr<IommuDomain> domain_;
  const std::size_t page_bytes_;
  mutable std::mutex mutex_;
  IovaSpace free_;
  std::map<void*, Range> ranges_;  // by the beginning of the memory that was given
  std::uint64_t pinned_ = 0;
};

}  // namespace tardis::nvme
