// SPDX-License-Identifier: Apache-2.0
// Who is at the other end of a Unix socket.
#pragma once

#include <sys/types.h>

#include <optional>

#include "base/status.h"

namespace tardis::nvme::broker {

struct Peer {
  pid_t pid = 0;
  uid_t uid = 0;
};
// An error unless it is of this process's user, or in `group`.
Result<Peer> admit_peer(int socket, std::optional<gid_t> group);

}  // namespace tardis::nvme::broker
