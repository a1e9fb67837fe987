// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace tardis::nvme {

// Where the pages of this process are in the memory of the machine. Only root is told. An error if they are not side by
// side, or not there yet: touch them first.
Result<std::uint64_t> physical_address(const void* memory, std::size_t bytes,
                                       const std::string& pagemap = "/proc/self/pagemap");

}  // namespace tardis::nvme
