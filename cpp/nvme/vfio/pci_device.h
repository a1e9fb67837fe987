// SPDX-License-Identifier: Apache-2.0
// What sysfs says of a PCI function.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "nvme/vfio/pci_address.h"
#include "nvme/vfio/pci_config.h"
#include "nvme/vfio/system_paths.h"

namespace tardis::nvme {

inline constexpr std::uint32_t kClassNvme = 0x010802;      // mass storage, non-volatile memory, NVM Express I/O
inline constexpr std::uint32_t kClassNvmeMask = 0xffff00;  // any programming interface of it
inline constexpr const char* kVfioPciDriver = "vfio-pci";

struct PciDevice {
  PciAddress address;
  std::uint32_t class_code = 0;
  std::uint16_t vendor = 0, device = 0;
  std::string driver;  // empty: none
  std::string group;   // number of its IOMMU group; empty: it is in none
  std::vector<PciAddress> group_others;
  std::array<std::uint64_t, 6> bar_bytes{};
  int numa_node = -1;
  PciCapabilities capabilities;  // without rights to read more than 64 bytes of the space: none

  bool is_nvme() const { return (class_code & kClassNvmeMask) == (kClassNvme & kClassNvmeMask); }

  // Code::kNotFound: there is no such function.
  static Result<PciDevice> read(const PciAddress& address, const SystemPaths& paths = {});
  // Every NVMe controller of the machine, by address.
  static Result<std::vector<PciDevice>> list_nvme(const SystemPaths& paths = {});
};

}  // namespace tardis::nvme
