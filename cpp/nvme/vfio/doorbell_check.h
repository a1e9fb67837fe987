// SPDX-License-Identifier: Apache-2.0
// Whether somebody else, a GPU, reaches a controller's registers through this process's mapping of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "base/status.h"
#include "nvme/register_window.h"

namespace tardis::nvme {

// Maps `bytes` bytes of I/O memory at `memory` for itself, loads `count` words of 32 bits at these offsets, and unmaps
// it. 0, or an error of its own.
using IoMemoryReader = std::function<int(void* memory, std::size_t bytes, const std::uint32_t* offsets,
                                         std::uint32_t* values, std::uint32_t count)>;

struct IoMemoryVerdict {
  bool reached = false;
  int reader_error = 0;  // what the reader returned
  std::string found;     // what was read, or what was not
};

// Reads CAP and VS, which do not change, and compares them with what this process reads; then a doorbell, whose value
// means nothing. Writes to no register. `window`: of registers in memory, one page before the doorbells (BarWindow).
Result<IoMemoryVerdict> check_doorbells(RegisterWindow& window, const IoMemoryReader& reader);

}  // namespace tardis::nvme
