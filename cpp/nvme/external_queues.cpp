// SPDX-License-Identifier: Apache-2.0
// Queue pairs of owners outside the driver: how they come and go. Nobody here knows what is in flight on them, so they
// are never aborted: they are deleted, made anew if their owner asks for it, or end with a reset.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "nvme/driver.h"

namespace tardis::nvme {
namespace {

Error no_external(std::uint16_t id) {
  return {Code::kNotFound, "external NVMe queue " + std::to_string(id) + ": expected one that is open"};
}

}  // namespace

Result<ExternalQueue> Driver::open_external(MemoryProvider& provider, const ExternalRings& rings) {
  const std::uint32_t most = controller_.max_queue_entries;
  if (rings.memory == nullptr || reinterpret_cast<std::uintptr_t>(rings.memory) % kPageBytes != 0 ||
      rings.entries < kMinQueueEntries || rings.entries > most) {
    return Error{Code::kInvalidArgument, "external NVMe queue: expected page-aligned rings of 2 to " +
                                             std::to_string(most) + " entries, found " + std::to_string(rings.entries)};
  }
  const std::lock_guard lock(recovery_);
  if (state_.load() != DriverState::kLive) {
    return Error{Code::kClosed, "external NVMe queue: expected a controller in use, found none", closed_error()};
  }
  auto id = static_cast<std::uint16_t>(queues_.size() + 1);
  while (id <= granted_queues_ && find_external_locked(id) != externals_.end()) ++id;
  if (id > granted_queues_ || externals_.size() >= options_.external_queues) {
    return Error{Code::kBusy, "external NVMe queue: expected one of " + std::to_string(options_.external_queues) +
                                  " asked for, found " + std::to_string(externals_.size()) + " in use and " +
                                  std::to_string(granted_queues_) +
                                  " queue pairs granted by the controller; close one or ask for more"};
  }
  const std::uint32_t tail = sq_tail_doorbell(id, controller_.doorbell_stride);
  const std::uint32_t head = cq_head_doorbell(id, controller_.doorbell_stride);
  if (doorbells_end(id, controller_.doorbell_stride) > window_.bytes()) {
    return Error{Code::kInternal, "external NVMe queue " + std::to_string(id) + ": its doorbells are beyond the " +
                                      std::to_string(window_.bytes()) + " bytes of the register window"};
  }
  auto* const memory = static_cast<std::byte*>(rings.memory);
  if (provider.host_accessible()) std::memset(memory, 0, QueuePair::cq_bytes(rings.entries));
  auto address = provider.map(memory, rings.mapped_bytes());
  if (!address) return address.error();
  externals_.push_back({id, memory, &provider, rings.entries, *address, true, true});
  if (auto created = create_external_locked(externals_.back()); !created) {
    (void)end_external_locked(externals_.back());
    externals_.pop_back();
    return created.error();
  }
  ExternalQueue queue;
  queue.id = id;
  queue.entries = rings.entries;
  queue.address = *address;
  queue.cq = reinterpret_cast<CompletionEntry*>(memory);
  queue.sq = reinterpret_cast<SubmissionEntry*>(memory + ExternalRings::sq_offset(rings.entries));
  queue.sq_tail = window_.doorbells() + (tail - kRegDoorbells) / 4;
  queue.cq_head = window_.doorbells() + (head - kRegDoorbells) / 4;
  return queue;
}

// An error leaves it alive if some of it may exist.
Status Driver::create_external_locked(External& external) {
  const std::uint32_t entries = external.entries;
  const std::uint64_t address = external.address;
  if (address % kPageBytes != 0) {
    external.alive = false;
    return Error{Code::kInternal, "external NVMe queue: expected a page-aligned address for the controller, found " +
                                      std::to_string(address)};
  }
  const auto cq = create_completion_queue(external.id, entries, address);
  if (!cq || !cq->status.ok()) {
    external.alive = !cq;
    return answered(cq, "Create I/O Completion Queue (external)");
  }
  const auto sq = create_submission_queue(external.id, entries, address + ExternalRings::sq_offset(entries));
  if (sq && sq->status.ok()) return {};
  external.alive = !sq || !delete_completion_queue(external.id);
  return answered(sq, "Create I/O Submission Queue (external)");
}

std::vector<Driver::External>::iterator Driver::find_external_locked(std::uint16_t id) {
  return std::find_if(externals_.begin(), externals_.end(), [id](const External& each) { return each.id == id; });
}

Status Driver::renew_external(std::uint16_t id) {
  const std::lock_guard lock(recovery_);
  const auto at = find_external_locked(id);
  if (at == externals_.end()) return no_external(id);
  if (state_.load() == DriverState::kLive) stop_external_locked(*at);
  // A controller that failed has lost queues of which nobody knows yet.
  if (state_.load() == DriverState::kLive && registers_.health() != Health::kReady) (void)reset_locked();
  if (state_.load() != DriverState::kLive) {
    return Error{Code::kClosed, "external NVMe queue: expected a controller in use, found none", closed_error()};
  }
  if (at->provider->host_accessible()) std::memset(at->memory, 0, QueuePair::cq_bytes(at->entries));
  at->alive = true;
  auto created = create_external_locked(*at);
  if (!created) stop_external_locked(*at);
  return created;
}

Status Driver::close_external(std::uint16_t id) {
  const std::lock_guard lock(recovery_);
  const auto at = find_external_locked(id);
  if (at == externals_.end()) return no_external(id);
  auto ended = end_external_locked(*at);
  externals_.erase(at);
  return ended;
}

bool Driver::external_alive(std::uint16_t id) {
  const std::lock_guard lock(recovery_);
  const auto at = find_external_locked(id);
  return at != externals_.end() && at->alive;
}

void Driver::stop_external_locked(External& external) {
  if (!external.alive) return;
  const bool deleted = state_.load() == DriverState::kLive && registers_.health() == Health::kReady &&
                       delete_submission_queue(external.id) && delete_completion_queue(external.id);
  if (deleted) count_.queue_deletions.fetch_add(1, std::memory_order_relaxed);
  // If that fails too, it has unmapped everything.
  if (!deleted) (void)reset_locked();
  external.alive = false;
}

Status Driver::end_external_locked(External& external) {
  stop_external_locked(external);
  if (!external.mapped) return {};
  external.mapped = false;
  return external.provider->unmap(external.memory);
}

// In good order, before the controller is shut down: submission queues before their completion queues.
Status Driver::delete_externals_locked() {
  Status result;
  for (const External& external : externals_) {
    if (result && external.alive) result = delete_submission_queue(external.id);
  }
  for (const External& external : externals_) {
    if (result && external.alive) result = delete_completion_queue(external.id);
  }
  return result;
}

bool Driver::revoke_externals_locked() {
  bool all = true;
  for (External& external : externals_) {
    external.alive = false;
    if (external.mapped && !external.provider->unmap(external.memory)) all = false;
    external.mapped = false;
  }
  return all;
}

}  // namespace tardis::nvme
