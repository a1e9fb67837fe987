// SPDX-License-Identifier: Apache-2.0
// The ways in which a kernel gives a PCI function to a process.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "nvme/vfio/iommu_domain.h"
#include "nvme/vfio/pci_device.h"
#include "nvme/vfio/system_paths.h"
#include "nvme/vfio/vfio_files.h"

namespace tardis::nvme {

enum class VfioWay : std::uint8_t {
  kAuto,          // the group, or the character device where the kernel has no groups; never without an IOMMU
  kGroup,         // /dev/vfio/<group>
  kDeviceFile,    // /dev/vfio/devices/vfio<n> with iommufd
  kWithoutIommu,  // /dev/vfio/noiommu-<group>: the drive reaches all memory of the machine. For tests
};

struct VfioOpened {
  std::shared_ptr<VfioFiles> files;
  std::unique_ptr<IommuDomain> domain;  // null: there is no IOMMU
};

// Code::kBusy: another process has it. kPermission: this process may not. The function has passed check_drive().
Result<VfioOpened> open_vfio(const PciDevice& device, VfioWay way, const SystemPaths& paths = {});

// The character device way (device_file_domain.cpp), which needs linux/iommufd.h of Linux 6.6 when this is compiled.
Result<VfioOpened> open_device_file(const PciDevice& device, const SystemPaths& paths);

}  // namespace tardis::nvme
