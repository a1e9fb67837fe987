// SPDX-License-Identifier: Apache-2.0
// A broker on a software controller, and what its tests do as clients.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "nvme/broker/broker.h"
#include "nvme/broker/broker_client.h"
#include "nvme/broker/broker_namespace.h"
#include "nvme/soft/controller.h"
#include "tests/child_process.h"
#include "tests/nvme_marked_bytes.h"

namespace tardis::nvme::testing {

using broker::Broker;
using broker::BrokerClient;
using broker::BrokerClientOptions;
using broker::BrokerNamespace;
using broker::BrokerOptions;
using broker::BrokerRange;
using ::tardis::testing::ChildProcess;
using ::tardis::testing::SharedValue;

inline bool eventually(const std::function<bool()>& condition, int seconds = 20) {
  const std::uint64_t end = monotonic_ns() + static_cast<std::uint64_t>(seconds) * 1'000'000'000;
  while (!condition()) {
    if (monotonic_ns() >= end) return condition();
    ::usleep(500);
  }
  return true;
}

inline BrokerClientOptions client_options(const std::string& socket, const std::string& name) {
  BrokerClientOptions options;
  options.socket_path = socket;
  options.name = name;
  options.queue_entries = 32;
  options.bounce_buffers = 4;
  return options;
}
inline std::shared_ptr<BrokerClient> join_broker(BrokerClientOptions options) {
  auto client = BrokerClient::connect(std::move(options));
  if (client) return *client;
  ADD_FAILURE() << client.error().message;
  return nullptr;
}
inline std::shared_ptr<BrokerNamespace> take_range(const std::shared_ptr<BrokerClient>& client, BrokerRange range) {
  auto space = BrokerNamespace::open(client, range);
  if (space) return std::move(*space);
  ADD_FAILURE() << space.error().message;
  return nullptr;
}

// Memory that the controller reaches by itself. Null, and a failed test, if there is none.
inline DmaPages registered_pages(BrokerClient& client, std::size_t bytes) {
  auto pages = client.allocate(bytes);
  if (!pages) {
    ADD_FAILURE() << pages.error().message;
    return {};
  }
  const Status known = client.register_memory(pages->memory.get(), bytes);
  EXPECT_TRUE(known) << (known ? "" : known.error().message);
  return std::move(*pages);
}

struct BrokerRigOptions {
  std::uint64_t bytes = 32 << 20;  // of the namespace
  std::uint32_t block_shift = 12;
  SoftControllerOptions soft;
  DriverOptions driver;
  BrokerOptions broker;
};
inline BrokerRigOptions small_broker() {
  BrokerRigOptions options;
  options.soft.queue_pairs = 16;
  options.driver.queues = 1;
  options.driver.queue_entries = 8;
  options.driver.bounce_buffers = 1;
  options.driver.external_queues = 12;
  options.driver.admin_timeout_ms = 2000;
  return options;
}

// Members go in the reverse order.
struct BrokerRig {
  explicit BrokerRig(std::string socket_path, BrokerRigOptions options = small_broker())
      : socket(std::move(socket_path)) {
    if (!options.soft.faults) options.soft.faults = std::make_shared<FaultPlan>();
    faults = options.soft.faults;
    auto made = MemoryMedium::create(options.bytes);
    EXPECT_TRUE(made);
    medium = std::shared_ptr<MemoryMedium>(std::move(*made));
    options.soft.namespaces = {{.medium = medium, .block_shift = options.block_shift}};
    const std::size_t bytes = (register_bytes(options.soft) + 4095) / 4096 * 4096;
    auto file = broker::make_shared_memory("registers", bytes);
    EXPECT_TRUE(file);
    registers_file = std::move(*file);
    auto mapping = broker::Mapping::map(registers_file.get(), 0, bytes, "registers");
    EXPECT_TRUE(mapping);
    registers = std::move(*mapping);
    options.soft.registers = registers.data();
    options.soft.registers_bytes = bytes;
    auto created = SoftController::create(options.soft, space);
    EXPECT_TRUE(created) << (created ? "" : created.error().message);
    controller = std::move(*created);
    armed = std::make_unique<SoftController::Armed>(*controller);
    controller->rest_while_armed(std::chrono::microseconds(50), std::chrono::microseconds(200));
    auto opened = Driver::open(controller->window(), space, options.driver);
    EXPECT_TRUE(opened) << (opened ? "" : opened.error().message);
    driver = std::move(*opened);
    own_ranges = space.mapped_ranges();
    options.broker.socket_path = socket;
    auto server =
        Broker::open(*driver, space, {registers_file.get(), broker::DoorbellKind::kMemory, 0, bytes}, options.broker);
    EXPECT_TRUE(server) << (server ? "" : server.error().message);
    served = std::move(*server);
    thread = std::thread([this] { result = served->run(); });
  }
  ~BrokerRig() {
    stop();
    served.reset();
    EXPECT_EQ(space.mapped_ranges(), driver->state() == DriverState::kLive ? own_ranges : 0)
        << "the broker left memory mapped";
    driver.reset();
    auto violations = controller->violations();
    std::erase_if(violations, [&](const Violation& each) { return excused.contains(each.kind); });
    EXPECT_TRUE(violations.empty()) << describe(violations);
    EXPECT_EQ(space.mapped_ranges(), 0u);
  }
  void stop() {
    served->stop();
    if (thread.joinable()) thread.join();
  }
  const broker::BrokerCounters& counters() const { return served->counters(); }

  const std::string socket;
  DmaSpace space{DmaSpaceOptions{.addresses = DmaSpaceOptions::Addresses::kTranslated}};
  std::shared_ptr<FaultPlan> faults;
  std::shared_ptr<MemoryMedium> medium;
  UniqueFd registers_file;
  broker::Mapping registers;
  std::unique_ptr<SoftController> controller;
  std::unique_ptr<SoftController::Armed> armed;
  std::unique_ptr<Driver> driver;
  std::size_t own_ranges = 0;
  std::unique_ptr<Broker> served;
  std::thread thread;
  Status result;  // of run()
  std::set<ViolationKind> excused;
};

}  // namespace tardis::nvme::testing
