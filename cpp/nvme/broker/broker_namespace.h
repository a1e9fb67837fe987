// SPDX-License-Identifier: Apache-2.0
// A range of a namespace of a controller that another process has.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "nvme/broker/broker_client.h"
#include "nvme/io_plan.h"
#include "nvme/raw_namespace.h"

namespace tardis::nvme::broker {

struct BrokerRange {
  std::uint32_t namespace_id = 1;
  std::uint64_t first_block = 0;
  std::uint64_t blocks = 0;  // 0: up to the namespace's end
  std::string name;          // of the range; no other client has it at the same time
};

class BrokerNamespace final : public RawNamespace {
 public:
  // The range is this object's until it goes.
  static Result<std::unique_ptr<BrokerNamespace>> open(std::shared_ptr<BrokerClient> client, const BrokerRange& range);
  ~BrokerNamespace() override;

  std::string name() const override { return name_; }
  std::uint64_t bytes() const override { return space_.blocks * space_.block_bytes; }
  std::uint32_t block_bytes() const override { return space_.block_bytes; }
  std::uint32_t atomic_bytes() const override { return space_.atomic_blocks * space_.block_bytes; }

  // On a queue pair of its own; with more callers than the client has queue pairs they take turns.
  void run(std::span<NamespaceRequest> requests, const Completion& on_complete) override;
  Status flush() override;

  // Only what BrokerClient::allocate() gave.
  Status register_memory(void* base, std::size_t bytes) override { return client_->register_memory(base, bytes); }
  void unregister_memory(void* base) override { client_->unregister_memory(base); }

  BrokerClient& client() { return *client_; }

 private:
  BrokerNamespace(std::shared_ptr<BrokerClient> client, const BrokerRange& range, const OpenRangeReply& reply);

  const std::shared_ptr<BrokerClient> client_;
  const std::uint32_t range_;
  const std::uint64_t first_block_;
  NamespaceInfo space_;  // with the blocks of the range alone
  PlanLimits limits_;
  std::string name_;
};

}  // namespace tardis::nvme::broker
