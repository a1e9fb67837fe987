// SPDX-License-Identifier: Apache-2.0
// Locks on bytes of a file that belong to its open file description: they end with the process and its I/O in flight.
#pragma once

#include <fcntl.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace tardis {

// A process that was killed gives its locks back a moment after it, when the I/O of its rings has ended.
inline constexpr std::chrono::seconds kKilledPatience{2};

// `type`: F_WRLCK, or F_RDLCK beside other readers; a lock that is held already becomes of that type. False: somebody
// else holds one of the bytes.
Result<bool> try_lock(int fd, short type, std::uint32_t first, std::uint32_t count, const std::string& file);
void unlock(int fd, std::uint32_t first, std::uint32_t count);
bool held_by_another(int fd, std::uint32_t first, std::uint32_t count);

}  // namespace tardis
