// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/vfio_open.h"

#include <fcntl.h>
#include <linux/vfio.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "nvme/vfio/type1_domain.h"
#include "nvme/vfio/vfio_nodes.h"

namespace tardis::nvme {
namespace {

constexpr const char* kNotBound =
    "expected it to appear once the device is bound to vfio-pci: load the module vfio-pci";

Result<UniqueFd> open_container(const SystemPaths& paths) {
  const std::string path = paths.dev + "/vfio/vfio";
  auto container = open_node(path, kNotBound);
  if (!container) return container;
  const int version = ::ioctl(container->get(), VFIO_GET_API_VERSION);
  if (version != VFIO_API_VERSION) {
    return Error{Code::kUnsupportedFormat, path + ": expected version " + std::to_string(VFIO_API_VERSION) +
                                               " of the VFIO interface, found " + std::to_string(version)};
  }
  return container;
}

Status join_group(const VfioFiles& files, const std::string& path) {
  vfio_group_status status{};
  status.argsz = sizeof status;
  if (::ioctl(files.group.get(), VFIO_GROUP_GET_STATUS, &status) != 0) {
    return errno_error(errno, path + ": VFIO_GROUP_GET_STATUS");
  }
  if ((status.flags & VFIO_GROUP_FLAGS_VIABLE) == 0) {
    return Error{Code::kPermission,
                 path +
                     ": expected every device of the group to be bound to vfio-pci or to no driver, found one that "
                     "is not; ls -l /sys/kernel/iommu_groups/*/devices shows them"};
  }
  const int container = files.container.get();
  if (::ioctl(files.group.get(), VFIO_GROUP_SET_CONTAINER, &container) != 0) {
    return errno_error(errno, path + ": VFIO_GROUP_SET_CONTAINER");
  }
  return {};
}

Status open_function(VfioFiles& files, const PciDevice& device) {
  const int fd = ::ioctl(files.group.get(), VFIO_GROUP_GET_DEVICE_FD, device.address.text().c_str());
  if (fd < 0) return errno_error(errno, "PCI device " + device.address.text() + ": VFIO_GROUP_GET_DEVICE_FD");
  files.device.reset(fd);
  (void)::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return {};
}

Error iommu_error(int error) {
  Error refused = errno_error(error, "VFIO_SET_IOMMU");
  if (error == EPERM) {
    refused.message +=
        "; the kernel sees no interrupt remapping: switch it on in the firmware (vfio_iommu_type1."
        "allow_unsafe_interrupts=1 does without, and trusts the drive not to send interrupts of its own making)";
  }
  return refused;
}

Result<VfioOpened> open_group(const PciDevice& device, const SystemPaths& paths) {
  auto files = std::make_shared<VfioFiles>();
  auto container = open_container(paths);
  if (!container) return container.error();
  files->container = std::move(*container);
  const int fd = files->container.get();
  // Version 2 unmaps exactly what was mapped; that is all that is asked of version 1 here, too.
  const bool version_2 = ::ioctl(fd, VFIO_CHECK_EXTENSION, VFIO_TYPE1v2_IOMMU) == 1;
  if (!version_2 && ::ioctl(fd, VFIO_CHECK_EXTENSION, VFIO_TYPE1_IOMMU) != 1) {
    return Error{Code::kUnsupportedFormat,
                 paths.dev +
                     "/vfio/vfio: expected the IOMMU interface type1, found none; load the module "
                     "vfio_iommu_type1"};
  }
  const std::string path = paths.dev + "/vfio/" + device.group;
  auto group = open_node(path, kNotBound);
  if (!group) return group.error();
  files->group = std::move(*group);
  if (auto joined = join_group(*files, path); !joined) return joined.error();
  if (::ioctl(fd, VFIO_SET_IOMMU, version_2 ? VFIO_TYPE1v2_IOMMU : VFIO_TYPE1_IOMMU) != 0) return iommu_error(errno);
  if (auto opened = open_function(*files, device); !opened) return opened.error();
  auto domain = Type1Domain::create(files, version_2);
  if (!domain) return domain.error();
  return VfioOpened{std::move(files), std::move(*domain)};
}

Result<VfioOpened> open_without_iommu(const PciDevice& device, const SystemPaths& paths) {
  const std::string path = paths.dev + "/vfio/noiommu-" + device.group;
  if (::access(path.c_str(), F_OK) != 0) {
    return Error{Code::kNotFound,
                 "PCI device " + device.address.text() + ": expected " + path +
                     ", found none: either the machine has an IOMMU, which is the way to go, or its kernel lacks "
                     "CONFIG_VFIO_NOIOMMU or vfio.enable_unsafe_noiommu_mode=1"};
  }
  auto files = std::make_shared<VfioFiles>();
  auto container = open_container(paths);
  if (!container) return container.error();
  files->container = std::move(*container);
  auto group = open_node(path, kNotBound);
  if (!group) return group.error();
  files->group = std::move(*group);
  if (auto joined = join_group(*files, path); !joined) return joined.error();
  if (::ioctl(files->container.get(), VFIO_SET_IOMMU, VFIO_NOIOMMU_IOMMU) != 0) return iommu_error(errno);
  if (auto opened = open_function(*files, device); !opened) return opened.error();
  return VfioOpened{std::move(files), nullptr};
}

}  // namespace

Result<VfioOpened> open_vfio(const PciDevice& device, VfioWay way, const SystemPaths& paths) {
  switch (way) {
    case VfioWay::kGroup:
      return open_group(device, paths);
    case VfioWay::kDeviceFile:
      return open_device_file(device, paths);
    case VfioWay::kWithoutIommu:
      return open_without_iommu(device, paths);
    case VfioWay::kAuto:
      break;
  }
  const VfioNodes nodes = VfioNodes::find(device, paths);
  if (nodes.only_without_iommu()) return no_iommu_error(device);
  return nodes.group.empty() && !nodes.device_file.empty() ? open_device_file(device, paths)
                                                           : open_group(device, paths);
}

}  // namespace tardis::nvme
