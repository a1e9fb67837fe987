// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace tardis::nvme {

// Where a machine's facts are read; a test has a machine of its own.
struct SystemPaths {
  std::string sys = "/sys", proc = "/proc", dev = "/dev";
};

}  // namespace tardis::nvme
