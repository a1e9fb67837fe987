// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/vfio_nodes.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "nvme/vfio/text_file.h"

namespace tardis::nvme {

VfioNodes VfioNodes::names(const PciDevice& device, const SystemPaths& paths) {
  VfioNodes nodes;
  if (!device.group.empty()) {
    nodes.group = paths.dev + "/vfio/" + device.group;
    nodes.without_iommu = paths.dev + "/vfio/noiommu-" + device.group;
  }
  const auto folder = std::filesystem::path(paths.sys) / "bus/pci/devices" / device.address.text() / "vfio-dev";
  const auto devices = names_in(folder);
  if (!devices.empty()) nodes.device_file = paths.dev + "/vfio/devices/" + devices.front();
  return nodes;
}

VfioNodes VfioNodes::find(const PciDevice& device, const SystemPaths& paths) {
  VfioNodes nodes = names(device, paths);
  for (std::string* const file : {&nodes.group, &nodes.device_file, &nodes.without_iommu}) {
    if (::access(file->c_str(), F_OK) != 0) file->clear();
  }
  return nodes;
}

std::vector<std::string> VfioNodes::all() const {
  std::vector<std::string> files;
  for (const std::string& file : {group, device_file, without_iommu}) {
    if (!file.empty()) files.push_back(file);
  }
  return files;
}

Result<UniqueFd> open_node(const std::string& path, const char* missing) {
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (fd) return fd;
  Error refused = errno_error(errno, "opening " + path);
  if (refused.os_error == EBUSY) {
    refused.message += "; another process has the drive";
  } else if (refused.os_error == EACCES || refused.os_error == EPERM) {
    refused.message += "; give the file to the user of this process, or run it as root";
  } else if (refused.os_error == ENOENT) {
    refused.message += std::string("; ") + missing;
  }
  return refused;
}

Error no_iommu_error(const PciDevice& device) {
  return Error{Code::kPermission,
               "PCI device " + device.address.text() + ": expected an IOMMU, found none (/dev/vfio/noiommu-" +
                   device.group +
                   "): the drive would reach all memory of the machine. Switch VT-d or AMD-Vi on in the firmware, and "
                   "with intel_iommu=on on the kernel's command line"};
}

}  // namespace tardis::nvme
