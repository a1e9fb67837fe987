// SPDX-License-Identifier: Apache-2.0
// A store that nobody uses, for tools that need it for themselves.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "base/status.h"
#include "block/striped_device.h"
#include "store/folder.h"
#include "store/list.h"

namespace tardis {

class ClosedStore {
  struct Passkey {
    explicit Passkey() = default;
  };

 public:
  // Code::kBusy while a process uses it.
  static Result<std::unique_ptr<ClosedStore>> open(const std::string& path, const DeviceFactory& make_device);

  ClosedStore(Passkey, StoreFolder folder, std::unique_ptr<BlockDevice> device);

  const StoreFolder& folder() const { return folder_; }
  StripedDevice& device() { return device_; }
  // As read_header_table(), through the device.
  Result<HeaderTable> header_table(SegmentName name);

 private:
  StoreFolder folder_;
  StripedDevice device_;
};

}  // namespace tardis
