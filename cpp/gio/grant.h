// SPDX-License-Identifier: Apache-2.0
// Queue pairs of a driven controller for an owner that submits and completes by itself, such as a GPU. The host makes
// them, names their memory to the controller, and ends them; it has no part in any command.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "gio/granted_queue.h"
#include "gio/iocb.h"
#include "nvme/driver.h"

namespace tardis::gio {

struct GrantOptions {
  std::uint32_t namespace_id = 1;
  std::uint32_t queues = 1;              // 1 to kMostQueues, and no more than the driver has for owners outside
  std::uint32_t entries = 256;           // of each ring
  std::uint32_t commands = 0;            // in flight at most, of each queue pair; 0: entries - 1
  std::uint32_t slot_bytes = 128 << 10;  // a bounce slot: whole pages; no command moves more

  std::uint32_t commands_of_queue() const { return commands != 0 ? commands : entries - 1; }
  std::size_t ring_bytes() const { return queues * nvme::ExternalRings::bytes(entries); }
  std::size_t bounce_bytes() const { return std::size_t{queues} * commands_of_queue() * slot_bytes; }
};

// Page-aligned host memory, pinned and mapped where the owner is a GPU, that stays until the grant is closed.
struct GrantMemory {
  void* rings = nullptr;   // GrantOptions::ring_bytes()
  void* bounce = nullptr;  // GrantOptions::bounce_bytes(), not registered with the driver yet
};

class Grant {
 public:
  static Result<std::unique_ptr<Grant>> open(std::shared_ptr<nvme::Driver> driver, const GrantMemory& memory,
                                             const GrantOptions& options);
  ~Grant() { (void)close(); }
  Grant(const Grant&) = delete;
  Grant& operator=(const Grant&) = delete;

  // Without state and uses, which are the owner's (start_queue()). The tables of their data pointers are in host
  // memory; an owner that has copies of them nearer uses those with seen_at().
  const std::vector<GrantedQueue>& queues() const { return queues_; }
  std::span<const std::uint64_t> prp_table() const;
  std::span<const nvme::SglDescriptor> sgl_table() const { return {sgl_entries_.get(), sgl_count_}; }

  // ---- direct landing: data pointers of the owner's own memory (direct_landing.h)
  std::size_t direct_list_bytes() const;
  // `lists`: direct_list_bytes() of page-aligned host memory that the owner reaches too, until close().
  Status use_direct(void* lists);
  // `provider` must stay until remove_region() or close(). No owner runs while regions come and go, and none has a
  // command in flight that names the region: after a ring that ended badly that takes renew().
  Status add_region(nvme::MemoryProvider& provider, void* base, std::size_t bytes);
  void remove_region(void* base);
  const std::vector<DirectRegion>& regions() const { return direct_regions_; }
  // GrantedQueue::direct of queues()[queue], with regions() until they change. Without regions: bounce slots.
  DirectLanding direct(std::size_t queue) const;

  // False: the controller was reset, or is gone, since they were made. Rings then end with their deadline.
  bool alive();
  // For after a ring's end that ends_queue(), when no owner rings or reads any more: ends whatever is in flight, so
  // that bounce slots, and regions that landing commands named, are free again, and makes all the queue pairs anew. The
  // owner starts over with start_queue(). On an error there are none any more, and nothing in flight.
  Status renew();
  // The same, for good: afterwards the controller touches none of the memory. Owners have stopped.
  Status close();

 private:
  Grant(std::shared_ptr<nvme::Driver> driver, const GrantMemory& memory, const GrantOptions& options)
      : driver_(std::move(driver)), memory_(memory), options_(options) {}
  Status describe_memory(GrantedQueue& shape);
  Status open_queues();
  Status close_queues();
  bool direct_by_sgl() const;

  const std::shared_ptr<nvme::Driver> driver_;
  const GrantMemory memory_;
  const GrantOptions options_;
  std::shared_ptr<const nvme::RegionTable> regions_;  // keeps the PRP table
  const nvme::Region* region_ = nullptr;              // null: the bounce memory is not registered
  std::unique_ptr<nvme::SglDescriptor[]> sgl_entries_;
  std::size_t sgl_count_ = 0;
  GrantedQueue shape_{};  // what all queues have in common
  std::vector<GrantedQueue> queues_;
  void* lists_ = nullptr;           // registered
  std::uint64_t list_address_ = 0;  // for the controller
  std::vector<DirectRegion> direct_regions_;
};

}  // namespace tardis::gio
