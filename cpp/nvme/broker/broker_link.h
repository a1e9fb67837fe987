// SPDX-License-Identifier: Apache-2.0
// A client's connection to its broker: requests, answers, and what the broker says unasked.
#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

#include "base/status.h"
#include "base/unique_fd.h"
#include "nvme/broker/message_socket.h"

namespace tardis::nvme::broker {

// Thread-safe; requests take turns. It ends once, with a reason, and then nothing is sent any more.
class BrokerLink {
 public:
  BrokerLink(UniqueFd socket, std::chrono::milliseconds answer_wait)
      : socket_(std::move(socket)), answer_wait_(answer_wait) {}

  // What came with the answer, if anything. An error that the broker answers with leaves the link as it is.
  template <class Request, class Reply>
  Result<UniqueFd> call(Kind kind, Request request, Reply& reply, int file = -1) {
    const std::lock_guard lock(mutex_);
    Message message;
    request.header.kind = kind;
    request.header.bytes = sizeof request;
    if (auto came = exchange(request.header, bytes_of(request), file, message); !came) return came.error();
    Answer head;
    const bool fits = message.bytes >= sizeof head && read_message(message.memory.data(), message.bytes, reply);
    if (!fits) {
      end_held({Code::kIo,
                "NVMe broker: expected an answer of " + std::to_string(sizeof reply) + " bytes, found " +
                    std::to_string(message.bytes) + "; use the same release on both sides",
                EPROTO});
      return why_;
    }
    std::memcpy(&head, message.memory.data(), sizeof head);
    if (head.code != 0) return Error{static_cast<Code>(head.code), get_text(head.text), head.os_error};
    return std::move(message.file);
  }

  // Takes what the broker said unasked, if no request is under way that does.
  void listen();

  std::uint32_t resets() const { return resets_.load(); }  // of the controller, as far as the broker has told
  bool cache_lost() const { return losses_.load() != losses_before_.load(); }
  bool ended() const { return ended_.load(); }
  int closed_error() const { return closed_error_.load(); }  // once it has ended
  Error why();                                               // it has ended
  // Whether the broker's side is closed, and whether it said before that the controller touches nothing of this client.
  bool hung_up() const { return hung_up_.load(); }
  bool farewell() const { return farewell_.load(); }

  void end(const Error& why) {
    const std::lock_guard lock(mutex_);
    end_held(why);
  }
  // Ends it in good order.
  void say_bye();

 private:
  Status exchange(Header& header, std::span<const std::byte> request, int file, Message& message);
  void end_held(const Error& why);
  Status take_held(Message& message, bool& nothing);  // an event, or an answer that the caller looks at

  const UniqueFd socket_;
  const std::chrono::milliseconds answer_wait_;
  std::mutex mutex_;
  std::uint32_t number_ = 0;
  Error why_{Code::kClosed, "", ENXIO};
  std::atomic<std::uint32_t> resets_{0}, losses_{0}, losses_before_{0};
  std::atomic<int> closed_error_{ENXIO};
  std::atomic<bool> ended_{false}, hung_up_{false}, farewell_{false};
};

}  // namespace tardis::nvme::broker
