// SPDX-License-Identifier: Apache-2.0
// A process that uses a controller which another has (broker.h): its own queues, on which it alone works.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "nvme/broker/broker_link.h"
#include "nvme/broker/client_memory.h"
#include "nvme/broker/doorbell_page.h"
#include "nvme/io_host.h"
#include "nvme/io_queue.h"
#include "nvme/queue_pool.h"
#include "nvme/registered_memory.h"

namespace tardis::nvme::broker {

struct BrokerClientOptions {
  std::string socket_path;
  std::string name = "client";  // in messages of the broker
  std::uint32_t queues = 2;     // the broker may have fewer for a client
  std::uint32_t queue_entries = 128;
  std::uint32_t bounce_buffers = 16;  // of each queue
  std::uint32_t bounce_bytes = 128u << 10;
  std::uint32_t max_command_bytes = 1u << 20;
  bool use_sgl = true;
  bool split_at_boundary = true;  // NOIOB

  std::uint32_t io_timeout_ms = 10'000;
  std::uint32_t grace_ms = 1'000;  // for late completions, before the broker is asked to make the queue anew
  std::uint32_t max_retry_delay_ms = 5'000;
  std::uint32_t retries = 4;
  std::chrono::milliseconds answer_wait{30'000};  // the broker may be resetting the controller, for others too
};

// Thread-safe.
class BrokerClient final : public IoHost {
 public:
  static Result<std::shared_ptr<BrokerClient>> connect(BrokerClientOptions options);
  ~BrokerClient() override;
  BrokerClient(const BrokerClient&) = delete;
  BrokerClient& operator=(const BrokerClient&) = delete;

  const ControllerInfo& controller() const { return controller_; }
  Result<std::vector<NamespaceInfo>> namespaces();
  const BrokerClientOptions& options() const { return options_; }
  std::uint32_t queue_pairs() const { return static_cast<std::uint32_t>(queues_.size()); }
  std::uint32_t bounce_bytes() const { return queues_.front()->queue->bounce_bytes(); }

  // Memory that can be registered, which the controller then reaches without copies.
  Result<DmaPages> allocate(std::size_t bytes) { return mapper_.allocate(bytes); }
  Status register_memory(void* base, std::size_t bytes) { return registered_.add(host_memory_, base, bytes); }
  void unregister_memory(void* base) { registered_.remove(base); }

  // The broker or the controller is gone, or the broker has dropped this client; all requests end with closed_error().
  bool closed() const { return link_.ended(); }
  Error why_closed() { return link_.why(); }
  // Data may be lost that was not flushed.
  bool cache_lost() const { return link_.cache_lost(); }

  // ---- for I/O
  // A queue for one thread, which is waited for; made again if the controller was reset meanwhile.
  class QueueLease : public QueuePool::Lease {
   public:
    explicit QueueLease(BrokerClient& client) : Lease(client.pool_) {
      client.listen_at_times();
      if (!client.current(**this)) client.recover(**this);
    }
  };
  void recover(IoQueue& queue) override;
  bool healthy(IoQueue& queue) override;
  int closed_error() const override { return link_.closed_error(); }
  std::shared_ptr<const RegionTable> regions() const override { return registered_.table(); }
  IoTiming timing() const override {
    return {options_.io_timeout_ms, options_.retries, options_.max_retry_delay_ms, controller_.retry_delay_ms};
  }
  BrokerLink& link() { return link_; }

 private:
  struct OwnQueue {
    std::unique_ptr<QueueMemoryMapper> memory;
    std::unique_ptr<IoQueue> queue;
    std::atomic<std::uint32_t> made_after{0};  // so many resets of the controller
  };
  BrokerClient(UniqueFd socket, BrokerClientOptions options);
  Status greet();
  Status open_queue();
  OwnQueue& own(const IoQueue& queue);
  bool current(IoQueue& queue) { return !link_.ended() && own(queue).made_after.load() == link_.resets(); }
  // Also while all goes well: queues work on without their broker, and the drive is nobody else's until this ends.
  void listen_at_times();
  void wait_for_late(IoQueue& queue);
  // Ends all requests. What the controller could touch is taken from it, if the broker has not done that.
  void give_up(const Error& why);
  bool stop_device();

  const BrokerClientOptions options_;
  // In the order of making; they go in the reverse order.
  BrokerLink link_;
  DeviceStopped stopped_{false};
  ControllerInfo controller_;
  HelloReply hello_;
  UniqueFd device_;
  std::unique_ptr<DoorbellPage> doorbells_;
  ClientMapper mapper_;
  HostMemory host_memory_;
  RegisteredMemory registered_;
  std::vector<std::unique_ptr<OwnQueue>> queues_;
  QueuePool pool_;
  std::atomic<std::uint64_t> next_listen_{0};  // of monotonic_ns()
  std::mutex give_up_mutex_;
  bool given_up_ = false;
};

}  // namespace tardis::nvme::broker
