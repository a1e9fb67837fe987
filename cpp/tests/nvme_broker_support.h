// SPDX-License-Identifier: Apache-2.0
// A broker on a software controller, and what its tests do as clients.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
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

namespace tardis::nvme::testing {

using broker::Broker;
using broker::BrokerClient;
using broker::BrokerClientOptions;
using broker::BrokerNamespace;
using broker::BrokerOptions;
using broker::BrokerRange;
using Op = NamespaceRequest::Op;

// Memory that parent and children share.
template <class T>
class SharedValue {
 public:
  SharedValue() : memory_(::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    EXPECT_NE(memory_, MAP_FAILED);
  }
  ~SharedValue() { ::munmap(memory_, sizeof(T)); }
  SharedValue(const SharedValue&) = delete;
  SharedValue& operator=(const SharedValue&) = delete;
  T* operator->() { return static_cast<T*>(memory_); }

 private:
  void* memory_;
};

// The fork comes before this process has threads or opens anything.
class ChildProcess {
 public:
  explicit ChildProcess(const std::function<void()>& body) : pid_(::fork()) {
    if (pid_ != 0) return;
    body();
    std::fflush(stdout);
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  ~ChildProcess() {
    if (pid_ > 0) kill();
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  void kill() {
    ::kill(pid_, SIGKILL);
    EXPECT_EQ(::waitpid(std::exchange(pid_, -1), nullptr, 0) > 0, true);
  }
  void join() {
    int status = 0;
    ASSERT_EQ(::waitpid(std::exchange(pid_, -1), &status, 0) > 0, true);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "a child failed";
  }

 private:
  pid_t pid_;
};

inline bool eventually(const std::function<bool()>& condition, int seconds = 20) {
  const std::uint64_t end = monotonic_ns() + static_cast<std::uint64_t>(seconds) * 1'000'000'000;
  while (!condition()) {
    if (monotonic_ns() >= end) return condition();
    ::usleep(500);
  }
  return true;
}

// Bytes that say where in the namespace they belong and who wrote them.
inline void mark(std::byte* to, std::size_t bytes, std::uint64_t offset, std::uint64_t seed) {
  for (std::size_t at = 0; at < bytes; at += 8) {
    const std::uint64_t word = (offset + at + 8) * 0x9e3779b97f4a7c15u ^ seed * 0xbf58476d1ce4e5b9u;
    std::memcpy(to + at, &word, 8);
  }
}
inline bool holds_mark(const std::byte* memory, std::size_t bytes, std::uint64_t offset, std::uint64_t seed) {
  std::vector<std::byte> expected(bytes);
  mark(expected.data(), bytes, offset, seed);
  return std::memcmp(memory, expected.data(), bytes) == 0;
}

inline int move(RawNamespace& space, Op op, std::uint64_t offset, std::byte* memory, std::size_t bytes) {
  const iovec range{memory, bytes};
  NamespaceRequest request{.op = op, .offset = offset, .memory = {&range, 1}, .error = -1};
  space.run({&request, 1}, nullptr);
  return request.error;
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
