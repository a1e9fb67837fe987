// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace tardis {

// Plain reads of a file that may be in use by a server, whose direct writes invalidate the cached pages they touch.
// Code::kCorrupt: the file ends inside the range. `path` is for messages.
Status read_exactly(int fd, const std::string& path, std::uint64_t offset, void* memory, std::size_t bytes);

}  // namespace tardis
