// SPDX-License-Identifier: Apache-2.0
// Giving a drive to vfio-pci, and back to the kernel's driver, by files of sysfs.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "nvme/vfio/pci_device.h"
#include "nvme/vfio/system_paths.h"

namespace tardis::nvme {

class DriveRelease {
 public:
  // `to`: "vfio-pci" or "nvme". Looks only. An error if the drive must stay where it is: it is in use, or a driver has
  // it that is neither, or there is no IOMMU.
  static Result<DriveRelease> plan(const PciAddress& address, const std::string& to, const SystemPaths& paths = {});

  const PciDevice& device() const { return device_; }
  const std::string& to() const { return to_; }
  bool needed() const { return !steps_.empty(); }
  bool module_missing() const { return module_missing_; }  // no driver of that name is registered
  // The same by hand, as root.
  std::vector<std::string> commands() const;

  // Needs root. Where nothing took the drive, the error says so and the kernel was asked to take it back.
  Status carry_out();
  // What stands between the drive and its use afterwards; empty: nothing.
  std::string remaining() const;

 private:
  struct Step {
    std::string file, text;
  };
  DriveRelease(PciDevice device, std::string to, SystemPaths paths)
      : device_(std::move(device)), to_(std::move(to)), paths_(std::move(paths)) {}
  std::string folder() const;
  Status take(const std::vector<Step>& steps) const;
  std::string driver_now() const;

  PciDevice device_;
  std::string to_;
  SystemPaths paths_;
  bool module_missing_ = false;
  std::vector<Step> steps_;
};

}  // namespace tardis::nvme
