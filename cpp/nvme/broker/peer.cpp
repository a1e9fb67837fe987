// SPDX-License-Identifier: Apache-2.0
#include "nvme/broker/peer.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <vector>

namespace tardis::nvme::broker {
namespace {

bool in_group(int socket, const ucred& who, gid_t group) {
  if (who.gid == group) return true;
  std::vector<gid_t> groups(64);
  auto bytes = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &bytes) != 0) {
    if (errno != ERANGE) return false;
    groups.resize(bytes / sizeof(gid_t));  // the kernel has said how many there are
    if (::getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &bytes) != 0) return false;
  }
  groups.resize(bytes / sizeof(gid_t));
  return std::find(groups.begin(), groups.end(), group) != groups.end();
}

}  // namespace

Result<Peer> admit_peer(int socket, std::optional<gid_t> group) {
  ucred who{};
  socklen_t bytes = sizeof who;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &bytes) != 0) return errno_error(errno, "SO_PEERCRED");
  if (who.uid == ::geteuid() || (group && in_group(socket, who, *group))) return Peer{who.pid, who.uid};
  std::string expected = "a client of user " + std::to_string(::geteuid());
  if (group) expected += " or in group " + std::to_string(*group);
  return Error{Code::kPermission, "NVMe broker: expected " + expected + ", found user " + std::to_string(who.uid) +
                                      " (group " + std::to_string(who.gid) +
                                      "); run the client as that user, or see --group of tardis nvmed"};
}

}  // namespace tardis::nvme::broker
