// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/status.h"
#include "nvme/vfio/pci_device.h"
#include "nvme/vfio/system_paths.h"

namespace tardis::nvme {

// Why the function must not be opened with VFIO, and how to change that. Looks only; touches nothing.
Status check_drive(const PciDevice& device, const SystemPaths& paths = {});

// Why a drive that the kernel's nvme driver has must not be taken away from it.
Status check_release(const PciDevice& device, const SystemPaths& paths = {});

}  // namespace tardis::nvme
