// SPDX-License-Identifier: Apache-2.0
// The ways in which a drive could reach GPU memory, and how far each of them is there.
#pragma once

#include <string>
#include <vector>

#include "nvme/vfio/system_paths.h"

namespace tardis::nvme {

struct GpuMemoryProbe {
  std::string way;    // "nvidia-peermem"
  bool here = false;  // what it needs was found; that alone makes no provider
  std::string found;  // what was looked at, and why it gives no bus addresses to this process
};

// Reads sysfs and procfs only; asks no GPU, and no VFIO device.
std::vector<GpuMemoryProbe> probe_gpu_memory(const SystemPaths& paths = {});

}  // namespace tardis::nvme
