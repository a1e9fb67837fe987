// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/drive_refusal.h"

#include <cstdio>
#include <filesystem>

#include "nvme/vfio/nvme_users.h"

namespace tardis::nvme {
namespace {

constexpr std::uint32_t kClassBridge = 0x060400, kClassBridgeMask = 0xffff00;

std::string class_text(std::uint32_t class_code) {
  char text[8];
  std::snprintf(text, sizeof text, "%06x", class_code);
  return text;
}

std::string how_to_bind(const PciAddress& address, bool bound) {
  const std::string at = "/sys/bus/pci/devices/" + address.text();
  return "as root: modprobe vfio-pci; echo vfio-pci > " + at + "/driver_override; " +
         (bound ? "echo " + address.text() + " > " + at + "/driver/unbind; " : "") + "echo " + address.text() +
         " > /sys/bus/pci/drivers_probe";
}

}  // namespace

Status check_release(const PciDevice& device, const SystemPaths& paths) {
  const auto users = users_of(device.address, paths);
  if (users.empty()) return {};
  std::string all;
  for (const std::string& user : users) all += (all.empty() ? "" : ", ") + user;
  return Error{Code::kBusy, "PCI device " + device.address.text() +
                                ": expected a drive that nothing uses, found that " + all +
                                "; it stays with the kernel's driver until that ends"};
}

Status check_drive(const PciDevice& device, const SystemPaths& paths) {
  const std::string who = "PCI device " + device.address.text() + ": ";
  if (!device.is_nvme()) {
    return Error{Code::kInvalidArgument,
                 who + "expected an NVMe controller (class 0108xx), found class " + class_text(device.class_code)};
  }
  if (device.driver == "nvme") {
    if (auto free = check_release(device, paths); !free) return free;
    return Error{Code::kBusy, who +
                                  "expected the driver vfio-pci, found nvme: the kernel's driver has the drive. All "
                                  "that is on it may be lost once it is released; to do so, " +
                                  how_to_bind(device.address, true)};
  }
  if (device.driver != kVfioPciDriver) {
    return Error{Code::kNotFound, who + "expected the driver vfio-pci, found " +
                                      (device.driver.empty() ? std::string("none") : device.driver) + "; " +
                                      how_to_bind(device.address, !device.driver.empty())};
  }
  if (device.group.empty()) {
    return Error{Code::kNotFound,
                 who +
                     "expected an IOMMU group, found none: the IOMMU is off. Switch VT-d or AMD-Vi on in the "
                     "firmware, and with intel_iommu=on on the kernel's command line"};
  }
  for (const PciAddress& address : device.group_others) {
    const auto other = PciDevice::read(address, paths);
    if (!other) continue;  // it has gone
    const bool bridge = (other->class_code & kClassBridgeMask) == kClassBridge;
    if (bridge || other->driver == kVfioPciDriver) continue;
    return Error{
        Code::kPermission,
        who + "expected to be alone in IOMMU group " + device.group + ", or with devices of vfio-pci, found " +
            address.text() + " (class " + class_text(other->class_code) + ", driver " +
            (other->driver.empty() ? "none" : other->driver) +
            "): the two can reach each other's memory. Put the drive into a slot with a group of its own (ACS), "
            "or give that device to vfio-pci as well"};
  }
  return {};
}

}  // namespace tardis::nvme
