// SPDX-License-Identifier: Apache-2.0
// How much memory this process may still take, and why not more: found before, since afterwards there is only a signal.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/status.h"

namespace tardis::attention {

struct MemoryLimits {
  std::uint64_t available = 0;  // of the machine: MemAvailable
  std::uint64_t total = 0;      // MemTotal
  std::uint64_t free_huge = 0;  // bytes of reserved huge pages that nobody has
  // What the tightest control group of this process has left, page cache that it can drop included, and which it is.
  std::optional<std::uint64_t> group_left;
  std::string group;
  // RLIMIT_MEMLOCK. NVIDIA's driver does not count what it pins against it; another one may.
  std::optional<std::uint64_t> locked;
};

// `proc`, `cgroup`: "/proc" and "/sys/fs/cgroup", or copies of them in tests. An error if /proc/meminfo cannot be read;
// a control group that cannot be read is none.
Result<MemoryLimits> memory_limits(const std::string& proc = "/proc", const std::string& cgroup = "/sys/fs/cgroup");

// An error that says what was asked for, what there is and what to do, if `bytes` are more than there is.
Status check_limits(const MemoryLimits& limits, std::uint64_t bytes);

// "12.5 GiB (13421772800 bytes)".
std::string size_text(std::uint64_t bytes);

}  // namespace tardis::attention
