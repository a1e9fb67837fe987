// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "base/status.h"

namespace tardis::nvme {

// A thread that takes no signals, bound to `cpus` if there are any. `name`: for debuggers, at most 15 characters.
Result<std::thread> start_thread(const char* name, std::function<void()> body, const std::vector<int>& cpus);

// Processor time that it has used.
std::uint64_t thread_cpu_ns(const std::thread& thread);

}  // namespace tardis::nvme
