// SPDX-License-Identifier: Apache-2.0
// Offline tools over a store's folder.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "block/block_device.h"
#include "tardis/tardis.h"

namespace tardis {

// Reads every header and payload; see tardis_verify. `progress(done, total)` returns false to stop.
struct VerifyResult {
  tardis_verify_report report{};
  std::vector<std::string> problems;
};
Result<VerifyResult> verify_store(const std::string& folder, bool repair,
                                  const std::function<bool(std::uint64_t, std::uint64_t)>& progress,
                                  const DeviceFactory& make_device = open_block_device);

// What the files say, read without the lock; see tardis_inspect. With a device: read through it, of a closed store.
Result<std::string> inspect_store(const std::string& folder, const DeviceFactory& make_device = {});

}  // namespace tardis
