// SPDX-License-Identifier: Apache-2.0
// A broker of the first controller, in this process.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "guest_support.h"
#include "nvme/broker/vfio_broker.h"

namespace tardis::nvme::testing {

using broker::VfioBroker;
using broker::VfioBrokerOptions;

// Serves until it goes.
struct ServedBroker {
  explicit ServedBroker(const std::string& socket, VfioBrokerOptions options = {}) {
    options.broker.socket_path = socket;
    options.client_queues = 12;
    auto opened = VfioBroker::open(guest_controllers().front(), options);
    if (!opened) {
      ADD_FAILURE() << opened.error().message;
      return;
    }
    broker = std::move(*opened);
    thread = std::thread([this] { EXPECT_TRUE(broker->broker().run()); });
  }
  ~ServedBroker() {
    if (broker == nullptr) return;
    broker->broker().stop();
    thread.join();
  }
  std::unique_ptr<VfioBroker> broker;
  std::thread thread;
};

inline std::string socket_path() { return std::string("/tmp/nvmed.") + std::to_string(::getpid()); }

}  // namespace tardis::nvme::testing
