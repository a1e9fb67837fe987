// SPDX-License-Identifier: Apache-2.0
// Who has a block device of the kernel open, where neither mounts nor swaps nor holders show it.
#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "nvme/vfio/system_paths.h"

namespace tardis::nvme {

// A disk or a partition; or the character device of a namespace, "ng0n1".
struct DeviceNode {
  std::string name;    // "nvme0n1p2"
  std::string number;  // "259:2"; empty: not known
  std::filesystem::path sysfs;
};

// Loop devices, exports of the kernel's NVMe target, and processes, of which only root sees those of other users. None
// of them need have it exclusively.
std::vector<std::string> openers_of(std::span<const DeviceNode> nodes, const SystemPaths& paths);

// Why a disk cannot be had exclusively, or why that is not known. The kernel refuses a second exclusive opener of a
// disk or its partitions, whoever the first is and wherever it is mounted.
std::optional<std::string> exclusive_opener_of(const DeviceNode& disk, const SystemPaths& paths);

}  // namespace tardis::nvme
