// SPDX-License-Identifier: Apache-2.0
// Messages with at most one file each, over a Unix socket that keeps them apart.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>

#include "base/status.h"
#include "base/unique_fd.h"
#include "nvme/broker/protocol.h"

namespace tardis::nvme::broker {

struct Message {
  std::array<std::byte, kMostMessageBytes> memory;
  std::size_t bytes = 0;
  UniqueFd file;
};

enum class Received : std::uint8_t {
  kMessage,
  kNothing,    // now
  kEnd,        // the other side is gone
  kMalformed,  // too long, no message of this protocol, or more than one file; what came with it is closed
};
// Without waiting.
Received receive(int socket, Message& message);

enum class Sent : std::uint8_t {
  kYes,
  kFull,  // the other side does not read
  kEnd,
};
// `file`: -1: none. Without waiting.
Sent send(int socket, std::span<const std::byte> message, int file = -1);

template <class T>
std::span<const std::byte> bytes_of(const T& message) {
  return std::as_bytes(std::span(&message, 1));
}

// A socket that listens at `path`, which replaces one that nobody listens at.
Result<UniqueFd> listen_at(const std::string& path);
Result<UniqueFd> connect_to(const std::string& path);

}  // namespace tardis::nvme::broker
