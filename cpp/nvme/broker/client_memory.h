// SPDX-License-Identifier: Apache-2.0
// Memory of a client that a controller reaches because its broker maps it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "nvme/broker/broker_link.h"
#include "nvme/broker/shared_memory.h"
#include "nvme/dma.h"

namespace tardis::nvme::broker {

// Whether the controller can still touch memory of a client whose link has ended: not if this is set.
using DeviceStopped = std::atomic<bool>;

// Thread-safe. Only memory that allocate() gave can be mapped: the broker needs its file.
class ClientMapper final : public DmaMapper {
 public:
  ClientMapper(BrokerLink& link, const DeviceStopped& stopped)
      : link_(link), stopped_(stopped), files_(std::make_shared<Files>()) {}

  Result<DmaPages> allocate(std::size_t bytes) override;  // may outlive this
  Result<std::uint64_t> map(void* memory, std::size_t bytes) override;
  Status unmap(void* memory) override;

 private:
  struct File {
    UniqueFd fd;
    Mapping memory;
  };
  struct Files {
    std::mutex mutex;
    std::map<std::byte*, File> by_memory;
  };

  BrokerLink& link_;
  const DeviceStopped& stopped_;
  const std::shared_ptr<Files> files_;
  std::mutex mutex_;
  std::map<void*, std::uint64_t> mapped_;  // their numbers at the broker
};

// The memory of one queue, which the broker made and mapped: unmap() has the broker close the queue.
class QueueMemoryMapper final : public DmaMapper {
 public:
  QueueMemoryMapper(BrokerLink& link, const DeviceStopped& stopped, std::uint32_t queue, Mapping memory,
                    std::uint64_t address)
      : link_(link),
        stopped_(stopped),
        queue_(queue),
        memory_(std::make_shared<Mapping>(std::move(memory))),
        address_(address) {}

  Result<DmaPages> allocate(std::size_t bytes) override;  // all of it, once
  Result<std::uint64_t> map(void*, std::size_t) override { return address_; }
  Status unmap(void* memory) override;

 private:
  BrokerLink& link_;
  const DeviceStopped& stopped_;
  const std::uint32_t queue_;
  const std::shared_ptr<Mapping> memory_;
  const std::uint64_t address_;
};

}  // namespace tardis::nvme::broker
