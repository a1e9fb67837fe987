// SPDX-License-Identifier: Apache-2.0
#include "nvme/broker/broker_link.h"

#include <cerrno>
#include <cstring>

#include "base/clock.h"

namespace tardis::nvme::broker {

void BrokerLink::end_held(const Error& why) {
  if (ended_.load()) return;
  why_ = why;
  // EIO would say that blocks are lost.
  closed_error_.store(why.os_error != 0 && why.os_error != EIO ? why.os_error : ENXIO);
  ended_.store(true);
}

Error BrokerLink::why() {
  const std::lock_guard lock(mutex_);
  return why_;
}

// One message from the socket. An error: the link has ended.
Status BrokerLink::take_held(Message& message, bool& nothing) {
  nothing = false;
  switch (receive(socket_.get(), message)) {
    case Received::kNothing:
      nothing = true;
      return {};
    case Received::kEnd:
      hung_up_.store(true);
      end_held({Code::kClosed,
                "NVMe broker: expected it to be there, found that it has gone; start tardis nvmed, then "
                "open the drive anew",
                ENXIO});
      return why_;
    case Received::kMalformed:
      end_held({Code::kIo, "NVMe broker: expected its messages, found others; is it one?", EPROTO});
      return why_;
    case Received::kMessage:
      break;
  }
  Answer head;
  if (message.bytes < sizeof head) {
    end_held({Code::kIo,
              "NVMe broker: expected messages of " + std::to_string(sizeof head) + " bytes at least, found one of " +
                  std::to_string(message.bytes),
              EPROTO});
    return why_;
  }
  std::memcpy(&head, message.memory.data(), sizeof head);
  // What was lost before this client came was not its own.
  if (head.header.kind == Kind::kHello) losses_before_.store(head.cache_losses);
  losses_.store(head.cache_losses);
  resets_.store(head.resets);
  if (head.header.kind != Kind::kFarewell) return {};
  farewell_.store(true);
  end_held({static_cast<Code>(head.code), get_text(head.text), head.os_error});
  return why_;
}

void BrokerLink::listen() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || ended_.load()) return;
  Message message;
  for (bool nothing = false; !nothing;) {
    if (!take_held(message, nothing)) return;
  }
}

Status BrokerLink::exchange(Header& header, std::span<const std::byte> request, int file, Message& message) {
  if (ended_.load()) return why_;
  if (++number_ == 0) ++number_;
  header.number = number_;
  // Before the request: a broker that has said farewell does not read it.
  bool nothing = false;
  while (!nothing) {
    if (auto taken = take_held(message, nothing); !taken) return taken;
  }
  const Sent sent = send(socket_.get(), request, file);
  if (sent == Sent::kFull) {
    end_held({Code::kIo, "NVMe broker: expected it to read requests, found its socket full", ETIMEDOUT});
    return why_;
  }
  const std::uint64_t deadline = monotonic_ns() + static_cast<std::uint64_t>(answer_wait_.count()) * 1'000'000;
  for (;;) {
    if (auto taken = take_held(message, nothing); !taken) return taken;
    if (!nothing) {
      Header found;
      std::memcpy(&found, message.memory.data(), sizeof found);
      if (found.number == header.number && found.kind == header.kind) return {};
      continue;  // an event
    }
    const std::uint64_t now = monotonic_ns();
    if (now >= deadline) {
      end_held({Code::kIo,
                "NVMe broker: expected an answer within " + std::to_string(answer_wait_.count()) +
                    " ms, found none; is it stopped?",
                ETIMEDOUT});
      return why_;
    }
    pollfd readable{socket_.get(), POLLIN, 0};
    const auto wait_ms = static_cast<int>((deadline - now) / 1'000'000 + 1);
    if (::poll(&readable, 1, wait_ms) < 0 && errno != EINTR) return errno_error(errno, "poll");
  }
}

void BrokerLink::say_bye() {
  if (!ended()) {
    Answer answer;
    if (call(Kind::kBye, ByeRequest{}, answer)) farewell_.store(true);
  }
  end({Code::kClosed, "NVMe broker: this client has left it", ESHUTDOWN});
}

}  // namespace tardis::nvme::broker
