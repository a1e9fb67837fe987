// SPDX-License-Identifier: Apache-2.0
// What can be known of the machine's NVMe controllers without opening any of them, and without root.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "nvme/vfio/pci_device.h"
#include "nvme/vfio/system_paths.h"

namespace tardis::nvme {

// A block device of the kernel's driver. Nothing: the kernel does not say.
struct DriveNamespace {
  std::string name;  // "nvme0n1"
  std::optional<std::uint64_t> bytes, block_bytes, metadata_bytes;
  std::optional<std::uint64_t> max_transfer_bytes;  // of the kernel's commands: MDTS, or the kernel's own bound
  std::optional<std::uint64_t> power_fail_bytes;    // the kernel's atomic writes
  std::optional<bool> volatile_cache;
};

struct DriveNeighbour {
  PciAddress address;
  std::uint32_t class_code = 0;
  std::string driver;  // empty: none
};

struct DriveFacts {
  PciDevice pci;
  PcieLink link;                             // from sysfs, which everybody may read; else as the function says
  std::vector<DriveNeighbour> group_others;  // of its IOMMU group
  // Of the kernel's driver, if that has it.
  std::string controller;  // "nvme0"
  std::string model, serial, firmware;
  std::optional<std::uint64_t> queues;  // I/O queues that it was granted
  std::vector<DriveNamespace> namespaces;
  std::vector<std::string> users;  // what the namespaces are used for, as far as can be known
  // Of vfio-pci, if that has it.
  std::string vfio_file;
  bool vfio_file_usable = false;  // by this process, as the file's permissions are
  std::string refusal;            // why VFIO cannot open it now; empty: nothing is known against it

  static DriveFacts read(const PciDevice& pci, const SystemPaths& paths = {});
};

void write_drive(JsonWriter& json, const DriveFacts& drive);  // an object

}  // namespace tardis::nvme
