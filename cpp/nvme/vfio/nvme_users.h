// SPDX-License-Identifier: Apache-2.0
// Who uses the namespaces of a controller that the kernel's nvme driver has.
#pragma once

#include <string>
#include <vector>

#include "nvme/vfio/pci_address.h"
#include "nvme/vfio/system_paths.h"

namespace tardis::nvme {

// The block devices of its namespaces, "nvme0n1".
std::vector<std::string> namespaces_of(const PciAddress& address, const SystemPaths& paths);

// One text for each use: a mounted file system, swap, device mapper or RAID above it, a loop device, an export, a
// process that has it open. Empty: none. Mounts of other mount namespaces are seen as exclusive openers. What cannot be
// found out is a use as well.
std::vector<std::string> users_of(const PciAddress& address, const SystemPaths& paths);

// The same without opening anything, and so without what only an opener finds out.
std::vector<std::string> known_users_of(const PciAddress& address, const SystemPaths& paths);

}  // namespace tardis::nvme
