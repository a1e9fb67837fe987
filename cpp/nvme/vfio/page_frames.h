// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace tardis::nvme {

// Where huge pages of this process are in the memory of the machine. Only root is told. An error if the pages are not
// side by side, not there yet (touch them first), or not huge: the kernel moves others as it likes.
Result<std::uint64_t> physical_address(const void* memory, std::size_t bytes, const std::string& proc = "/proc");

}  // namespace tardis::nvme
