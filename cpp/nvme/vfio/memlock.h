// SPDX-License-Identifier: Apache-2.0
// How much memory this process may lock, and so pin for a controller.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tardis::nvme {

struct Memlock {
  std::optional<std::uint64_t> limit;  // RLIMIT_MEMLOCK in bytes; none: unlimited
  std::uint64_t locked = 0;            // bytes that this process has locked or pinned already, for whatever
  bool exempt = false;                 // CAP_IPC_LOCK: the limit is not for it, except in a user namespace of its own

  static Memlock read(const std::string& proc = "/proc");
};

// Why the kernel would not pin more, and what to do. `pinned`: bytes of `locked` that are one drive's. `of_user`: what
// the user's other processes have pinned counts as well.
std::string memlock_text(const Memlock& memlock, std::uint64_t pinned, bool of_user);

}  // namespace tardis::nvme
