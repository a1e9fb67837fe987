// SPDX-License-Identifier: Apache-2.0
// NVMe status as errno and as text.
#pragma once

#include <string>

#include "nvme/spec.h"

namespace tardis::nvme {

int errno_of(CommandStatus status);          // 0 exactly if SC and SCT are both 0
std::string describe(CommandStatus status);  // "LBA out of range (SCT 0h, SC 80h, do not retry)"

}  // namespace tardis::nvme
