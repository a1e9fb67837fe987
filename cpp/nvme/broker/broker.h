// SPDX-License-Identifier: Apache-2.0
// The process that has the controller, for others that use it (docs/nvmed.md): it makes and ends their queues and maps
// their memory; their commands never pass through it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "nvme/broker/broker_session.h"
#include "nvme/broker/message_socket.h"
#include "nvme/driver.h"

namespace tardis::nvme::broker {

struct BrokerOptions {
  std::string socket_path;
  std::optional<gid_t> group;  // whose members may be clients, beside those of the same user
  std::uint32_t clients = 32;
  SessionLimits limits;
  std::chrono::milliseconds hello_wait{5000};  // from a connection to its first message
  std::function<void(const std::string&)> log;
};

// What clients map the doorbells from; it stays open as long as the broker.
struct DoorbellFile {
  int fd = -1;
  DoorbellKind kind = DoorbellKind::kVfio;
  std::uint64_t offset = 0;  // of the registers in the file: whole pages
  std::uint64_t bytes = 0;   // of the registers that can be mapped
};

struct BrokerCounters {
  std::atomic<std::uint64_t> accepted{0}, refused{0};  // connections
  std::atomic<std::uint64_t> ended{0};                 // clients that went without a word
  std::atomic<std::uint64_t> dropped{0};               // by the broker, for what they did
  std::atomic<std::uint64_t> requests{0}, clients{0};  // the latter: now
};

class Broker {
 public:
  // Listens. `driver` and `mapper`, which the driver has too, outlive it. Of the driver, the queues for owners outside
  // are the clients'.
  static Result<std::unique_ptr<Broker>> open(Driver& driver, DmaMapper& mapper, const DoorbellFile& doorbells,
                                              BrokerOptions options);
  ~Broker();
  Broker(const Broker&) = delete;
  Broker& operator=(const Broker&) = delete;

  // Serves until stop(), or until the controller is of no use, which is an error. All clients have ended then.
  Status run();
  void stop();  // from any thread or signal handler
  const BrokerCounters& counters() const { return counters_; }

 private:
  Broker(Driver& driver, DmaMapper& mapper, const DoorbellFile& doorbells, BrokerOptions options)
      : driver_(driver), mapper_(mapper), doorbells_(doorbells), options_(std::move(options)) {}
  void accept_clients();
  // One message. False: it is over with the client.
  bool serve(Session& session);
  bool answer(Session& session, const Message& message, Kind kind);
  template <class Reply>
  bool reply(Session& session, const Header& request, Reply& reply, const Status& status, int file = -1);
  void fill(Answer& answer, Kind kind, std::uint32_t number, const Status& status);
  bool malformed(Session& session, const std::string& found);
  HelloReply hello() const;
  NamespacesReply namespaces(std::uint32_t first) const;

  void look_at_controller();
  // Tells clients of resets that happened meanwhile; after each call of the driver.
  void tell_of_resets();
  void send_farewell(Session& session, const Error& why);
  // Takes back what they have and closes the sockets of those that are over.
  void end(Session& session);
  void end_all(const Error& why);
  void log(const std::string& text) const {
    if (options_.log) options_.log(text);
  }

  Driver& driver_;
  DmaMapper& mapper_;
  const DoorbellFile doorbells_;
  const BrokerOptions options_;
  UniqueFd listener_, stop_event_;
  BlockRanges ranges_;
  std::vector<std::unique_ptr<Session>> sessions_;
  std::vector<Session*> over_;  // that no message reaches
  std::uint64_t resets_told_ = 0;
  BrokerCounters counters_;
};

}  // namespace tardis::nvme::broker
