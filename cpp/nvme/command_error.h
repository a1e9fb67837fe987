// SPDX-License-Identifier: Apache-2.0
// NVMe status as errno and as text.
#pragma once

#include <string>

#include "nvme/spec.h"

namespace tardis::nvme {

// 0 exactly if SC and SCT are both 0; EIO exactly if the medium lost the blocks, which is what a store takes it for. A
// controller that failed in another way (EREMOTEIO, unless something better fits) says nothing about them.
int errno_of(CommandStatus status);
std::string describe(CommandStatus status);  // "LBA out of range (SCT 0h, SC 80h, do not retry)"

}  // namespace tardis::nvme
