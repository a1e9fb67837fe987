// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "block/file_device.h"

namespace tardis {

// Why io_uring cannot be used here, as a readable clause; empty if it can. Sets up a ring as the engine does and,
// unless `fd` is -1, reads `bytes` bytes at offset 0 of it into `memory`.
std::optional<std::string> why_no_io_uring(unsigned queue_depth, int keep_open_fd, int fd, void* memory,
                                           unsigned bytes);

// Call only where the function above answers empty. Defined only in builds with io_uring (TARDIS_HAS_IO_URING).
std::unique_ptr<BlockDevice> make_uring_device(DeviceSetup setup, std::unique_ptr<WorkerPool> workers);

}  // namespace tardis
