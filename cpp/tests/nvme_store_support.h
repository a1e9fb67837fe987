// SPDX-License-Identifier: Apache-2.0
// Stores whose segments are on a raw namespace.
#pragma once

#include "nvme/nvme_device.h"
#include "nvme_support_memory_namespace.h"
#include "store_support.h"

namespace tardis::nvme::testing {

using tardis::testing::TempFolder;

inline DeviceFactory on(std::shared_ptr<RawNamespace> device, NvmeDeviceOptions options = {}) {
  return [device = std::move(device), options](const std::string& folder, const BlockDeviceOptions&, int) {
    return NvmeDevice::open(device, folder, options);
  };
}

}  // namespace tardis::nvme::testing
