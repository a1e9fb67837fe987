// SPDX-License-Identifier: Apache-2.0
// The files of /dev by which a function of vfio-pci is opened.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "nvme/vfio/pci_device.h"
#include "nvme/vfio/system_paths.h"

namespace tardis::nvme {

// Empty: there is none.
struct VfioNodes {
  std::string group;          // /dev/vfio/<group>
  std::string device_file;    // /dev/vfio/devices/vfio<n>
  std::string without_iommu;  // /dev/vfio/noiommu-<group>

  // As the kernel calls them, whether this /dev has them or not: a container has another.
  static VfioNodes names(const PciDevice& device, const SystemPaths& paths);
  // Those that are there.
  static VfioNodes find(const PciDevice& device, const SystemPaths& paths);

  std::vector<std::string> all() const;
  // vfio-pci has the function only because the kernel was told to do without an IOMMU.
  bool only_without_iommu() const { return !without_iommu.empty() && group.empty() && device_file.empty(); }
};

// Opens one of them, or of what is needed with them. `missing`: how to get it, if it is not there.
Result<UniqueFd> open_node(const std::string& path, const char* missing);

// Why nothing uses such a function unless it is told to.
Error no_iommu_error(const PciDevice& device);

}  // namespace tardis::nvme
