// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "base/status.h"
#include "nvme/vfio/iommu_domain.h"
#include "nvme/vfio/vfio_files.h"

namespace tardis::nvme {

// A VFIO container with the type1 IOMMU, of either version.
class Type1Domain final : public IommuDomain {
 public:
  // Of a container that has its IOMMU set.
  static Result<std::unique_ptr<Type1Domain>> create(std::shared_ptr<VfioFiles> files, bool version_2);

  std::string name() const override { return version_2_ ? "VFIO type1v2" : "VFIO type1"; }
  std::vector<IovaRange> ranges() const override { return ranges_; }
  std::size_t page_bytes() const override { return page_bytes_; }
  std::optional<std::uint64_t> entries_left() override;
  int map(std::uint64_t address, void* memory, std::size_t bytes) override;
  int unmap(std::uint64_t address, std::size_t bytes) override;

 private:
  struct Info;
  Type1Domain(std::shared_ptr<VfioFiles> files, bool version_2) : files_(std::move(files)), version_2_(version_2) {}
  Result<Info> read_info() const;

  const std::shared_ptr<VfioFiles> files_;
  const bool version_2_;
  std::vector<IovaRange> ranges_;
  std::size_t page_bytes_ = 0;
};

}  // namespace tardis::nvme
