// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/vfio_files.h"

#include <utility>

#include "nvme/vfio/detached_call.h"

namespace tardis::nvme {

VfioFiles::~VfioFiles() {
  if (!device) return;
  (void)call_within(gone ? kGoneWait : kCloseWait, [device = std::move(device), group = std::move(group),
                                                    container = std::move(container)]() mutable {
    device.reset();  // before its group, and that before the container, so that nothing is taken from under a device
    group.reset();
    container.reset();
    return true;
  });
}

}  // namespace tardis::nvme
