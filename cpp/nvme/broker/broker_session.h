// SPDX-License-Identifier: Apache-2.0
// What a broker has given one client, and takes back when it ends.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "nvme/broker/block_ranges.h"
#include "nvme/broker/peer.h"
#include "nvme/broker/protocol.h"
#include "nvme/broker/shared_memory.h"
#include "nvme/driver.h"

namespace tardis::nvme::broker {

struct SessionLimits {
  std::uint32_t queues = 8, ranges = 16, regions = 1024;
  std::uint64_t bytes = std::uint64_t{4} << 30;  // of queues and mapped memory together
};

class Session {
 public:
  Session(UniqueFd socket, const Peer& peer)
      : socket_(std::move(socket)), peer_(peer), since_(std::chrono::steady_clock::now()) {}

  int socket() const { return socket_.get(); }
  bool greeted() const { return greeted_; }
  std::chrono::steady_clock::time_point since() const { return since_; }
  std::string who() const;  // "'rank0' (pid 42)"

  void greet(const std::string& name);
  Result<std::uint32_t> open_range(BlockRanges& ranges, Driver& driver, const OpenRangeRequest& request,
                                   const SessionLimits& limits, OpenRangeReply& reply);
  Status close_range(BlockRanges& ranges, std::uint32_t number);
  // Its memory's file.
  Result<UniqueFd> open_queue(Driver& driver, const OpenQueueRequest& request, const SessionLimits& limits,
                              OpenQueueReply& reply);
  Status renew_queue(Driver& driver, std::uint32_t id);
  Status close_queue(Driver& driver, std::uint32_t id);
  Status map_memory(DmaMapper& mapper, const MapMemoryRequest& request, int file, const SessionLimits& limits,
                    MapMemoryReply& reply);
  Status unmap_memory(DmaMapper& mapper, std::uint64_t number);

  // Afterwards the controller touches nothing of it, and nothing is its own any more. The first error.
  Status take_back(Driver& driver, DmaMapper& mapper, BlockRanges& ranges);
  // Its mapped memory alone: for a controller that could not be stopped.
  Status unmap_all(DmaMapper& mapper);

 private:
  struct Queue {
    Mapping memory;
  };
  struct Region {
    Mapping memory;
  };
  Status unmap(DmaMapper& mapper, Mapping& memory);

  UniqueFd socket_;
  const Peer peer_;
  const std::chrono::steady_clock::time_point since_;
  std::string name_;
  bool greeted_ = false;
  std::vector<std::uint32_t> ranges_;
  std::map<std::uint32_t, Queue> queues_;    // by their identifier at the controller
  std::map<std::uint64_t, Region> regions_;  // by their number
  std::uint64_t next_region_ = 1;
  std::uint64_t bytes_ = 0;
};

}  // namespace tardis::nvme::broker
