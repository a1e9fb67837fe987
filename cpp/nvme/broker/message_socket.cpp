// SPDX-License-Identifier: Apache-2.0
#include "nvme/broker/message_socket.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace tardis::nvme::broker {
namespace {

constexpr int kBacklog = 64;
constexpr std::size_t kMostFiles = 4;  // that are taken off the socket, to be closed

Result<sockaddr_un> address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    return Error{Code::kInvalidArgument, "socket '" + path + "': expected a path of 1 to " +
                                             std::to_string(sizeof address.sun_path - 1) + " bytes, found " +
                                             std::to_string(path.size())};
  }
  std::memcpy(address.sun_path, path.c_str(), path.size());
  return address;
}

Result<UniqueFd> make_socket() {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return errno_error(errno, "socket(AF_UNIX, SOCK_SEQPACKET)");
  return socket;
}

}  // namespace

Received receive(int socket, Message& message) {
  alignas(cmsghdr) std::byte control[CMSG_SPACE(kMostFiles * sizeof(int))];
  iovec data{message.memory.data(), message.memory.size()};
  msghdr head{};
  head.msg_iov = &data;
  head.msg_iovlen = 1;
  head.msg_control = control;
  head.msg_controllen = sizeof control;
  ssize_t got = 0;
  bool reset_seen = false;
  for (;;) {
    got = ::recvmsg(socket, &head, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got >= 0 || (errno != EINTR && (errno != ECONNRESET || reset_seen))) break;
    // Said once, when the other side went without reading all; what it sent before can still be read.
    reset_seen = reset_seen || errno == ECONNRESET;
  }
  if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? Received::kNothing : Received::kEnd;

  message.file.reset();
  std::size_t files = 0;
  for (cmsghdr* each = CMSG_FIRSTHDR(&head); each != nullptr; each = CMSG_NXTHDR(&head, each)) {
    if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (each->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(each) + i * sizeof fd, sizeof fd);
      message.file.reset(fd);
      ++files;
    }
  }
  if (got == 0 && files == 0) return Received::kEnd;
  message.bytes = static_cast<std::size_t>(got);
  Header header;
  bool good = (head.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0 && files <= 1 && message.bytes >= sizeof header;
  if (good) {
    std::memcpy(&header, message.memory.data(), sizeof header);
    good = header.magic == kMagic && header.bytes == message.bytes;
  }
  if (good) return Received::kMessage;
  message.file.reset();
  return Received::kMalformed;
}

Sent send(int socket, std::span<const std::byte> message, int file) {
  alignas(cmsghdr) std::byte control[CMSG_SPACE(sizeof(int))]{};
  iovec data{const_cast<std::byte*>(message.data()), message.size()};
  msghdr head{};
  head.msg_iov = &data;
  head.msg_iovlen = 1;
  if (file >= 0) {
    head.msg_control = control;
    head.msg_controllen = sizeof control;
    cmsghdr* const files = CMSG_FIRSTHDR(&head);
    files->cmsg_level = SOL_SOCKET;
    files->cmsg_type = SCM_RIGHTS;
    files->cmsg_len = CMSG_LEN(sizeof file);
    std::memcpy(CMSG_DATA(files), &file, sizeof file);
  }
  ssize_t put = 0;
  do {
    put = ::sendmsg(socket, &head, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (put < 0 && errno == EINTR);
  if (put == static_cast<ssize_t>(message.size())) return Sent::kYes;
  const bool full = put < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ETOOMANYREFS);
  return full ? Sent::kFull : Sent::kEnd;
}

Result<UniqueFd> listen_at(const std::string& path) {
  auto address = address_of(path);
  if (!address) return address.error();
  struct stat found {};
  if (::lstat(path.c_str(), &found) == 0) {
    if (!S_ISSOCK(found.st_mode)) {
      return Error{Code::kInvalidArgument, "socket '" + path + "': expected nothing or a socket there, found a file"};
    }
    if (connect_to(path)) {
      return Error{Code::kBusy,
                   "socket '" + path + "': expected nobody to listen there, found a broker; stop it first"};
    }
    if (::unlink(path.c_str()) != 0) return errno_error(errno, "unlink of the socket '" + path + "'");
  }
  auto socket = make_socket();
  if (!socket) return socket;
  if (::bind(socket->get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address) != 0) {
    return errno_error(errno, "bind to '" + path + "'");
  }
  if (::listen(socket->get(), kBacklog) != 0) return errno_error(errno, "listen at '" + path + "'");
  return socket;
}

Result<UniqueFd> connect_to(const std::string& path) {
  auto address = address_of(path);
  if (!address) return address.error();
  auto socket = make_socket();
  if (!socket) return socket;
  if (::connect(socket->get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address) != 0) {
    return errno_error(errno, "socket '" + path + "': expected a broker (tardis nvmed) that listens there");
  }
  return socket;
}

}  // namespace tardis::nvme::broker
