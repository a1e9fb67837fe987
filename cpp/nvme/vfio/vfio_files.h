// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

#include "base/unique_fd.h"

namespace tardis::nvme {

// The open files behind one device. The kernel resets the function when the last of them is closed, and waits for it up
// to a minute if it does not come back; whoever gives this up waits for kCloseWait at most, and a thread is left
// behind.
class VfioFiles {
 public:
  VfioFiles() = default;
  VfioFiles(const VfioFiles&) = delete;
  VfioFiles& operator=(const VfioFiles&) = delete;
  ~VfioFiles();

  static constexpr std::chrono::milliseconds kCloseWait{3000}, kGoneWait{100};

  UniqueFd device;
  UniqueFd group;      // none with the character device of a function
  UniqueFd container;  // or the IOMMU of iommufd
  bool gone = false;   // unplugged
};

}  // namespace tardis::nvme
