// SPDX-License-Identifier: Apache-2.0
#include "nvme/broker/broker_session.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace tardis::nvme::broker {
namespace {

Error over_limit(const std::string& what, std::uint64_t most, std::uint64_t used, std::uint64_t asked) {
  return {Code::kNoSpace, "NVMe broker: expected at most " + std::to_string(most) + " " + what +
                              " for a client, found " + std::to_string(used) + " in use and " + std::to_string(asked) +
                              " asked for; ask for less, or raise the limit of tardis nvmed"};
}

// The controller may write there as long as this process lives.
void never_free(Mapping& memory) { (void)std::make_unique<Mapping>(std::move(memory)).release(); }

}  // namespace

std::string Session::who() const { return "'" + name_ + "' (pid " + std::to_string(peer_.pid) + ")"; }

void Session::greet(const std::string& name) {
  greeted_ = true;
  // It goes into logs.
  for (const char c : name) name_ += c >= ' ' && c <= '~' ? c : '?';
}

Result<std::uint32_t> Session::open_range(BlockRanges& ranges, Driver& driver, const OpenRangeRequest& request,
                                          const SessionLimits& limits, OpenRangeReply& reply) {
  const std::string name = get_text(request.name);
  const NamespaceInfo* const space = driver.find_namespace(request.namespace_id);
  if (space == nullptr) {
    std::string found;
    for (const NamespaceInfo& info : driver.namespaces()) found += " " + std::to_string(info.id);
    return Error{Code::kNotFound, "range '" + name + "': expected namespace " + std::to_string(request.namespace_id) +
                                      ", found" + (found.empty() ? " none" : found)};
  }
  if (ranges_.size() >= limits.ranges) return over_limit("ranges", limits.ranges, ranges_.size(), 1);
  const std::uint64_t left = request.first_block < space->blocks ? space->blocks - request.first_block : 0;
  const std::uint64_t blocks = request.blocks == 0 ? left : request.blocks;
  if (name.empty() || blocks == 0 || blocks > left) {
    return Error{Code::kInvalidArgument, "range '" + name + "': expected a name, and blocks within the " +
                                             std::to_string(space->blocks) + " of namespace " +
                                             std::to_string(space->id) + ", found " + std::to_string(request.blocks) +
                                             " from " + std::to_string(request.first_block)};
  }
  auto number = ranges.take({space->id, request.first_block, blocks, name, who()});
  if (!number) return number;
  ranges_.push_back(*number);
  reply.range = *number;
  reply.blocks = blocks;
  reply.space = entry_of(*space);
  return number;
}

Status Session::close_range(BlockRanges& ranges, std::uint32_t number) {
  if (std::erase(ranges_, number) == 0) {
    return Error{Code::kNotFound, "range " + std::to_string(number) + ": expected one of this client"};
  }
  ranges.give_back(number);
  return {};
}

Result<UniqueFd> Session::open_queue(Driver& driver, const OpenQueueRequest& request, const SessionLimits& limits,
                                     OpenQueueReply& reply) {
  if (queues_.size() >= limits.queues) return over_limit("queue pairs", limits.queues, queues_.size(), 1);
  const std::uint32_t most = driver.controller().max_queue_entries;
  if (request.entries < kMinQueueEntries || request.entries > most || request.more_bytes % kPageBytes != 0) {
    return Error{Code::kInvalidArgument, "NVMe queue of a broker: expected rings of 2 to " + std::to_string(most) +
                                             " entries and whole pages behind them, found " +
                                             std::to_string(request.entries) + " entries and " +
                                             std::to_string(request.more_bytes) + " bytes"};
  }
  const std::uint64_t rings = ExternalRings::bytes(request.entries);
  if (rings > limits.bytes - bytes_ || request.more_bytes > limits.bytes - bytes_ - rings) {
    return over_limit("bytes", limits.bytes, bytes_, request.more_bytes + rings);
  }
  const std::uint64_t bytes = rings + request.more_bytes;
  auto file = make_shared_memory("tardis-nvme-queue", bytes);
  if (!file) return file;
  auto memory = Mapping::map(file->get(), 0, bytes, "queue memory");
  if (!memory) return memory.error();
  auto queue = driver.open_external({.memory = memory->data(),
                                     .entries = request.entries,
                                     .more_bytes = static_cast<std::size_t>(request.more_bytes)});
  if (!queue) return queue.error();
  reply.queue = queue->id;
  reply.memory_bytes = bytes;
  reply.address = queue->address;
  bytes_ += bytes;
  queues_[queue->id].memory = std::move(*memory);
  return file;
}

Status Session::renew_queue(Driver& driver, std::uint32_t id) {
  if (!queues_.contains(id)) {
    return Error{Code::kNotFound, "NVMe queue " + std::to_string(id) + ": expected one of this client"};
  }
  return driver.renew_external(static_cast<std::uint16_t>(id));
}

Status Session::close_queue(Driver& driver, std::uint32_t id) {
  const auto at = queues_.find(id);
  if (at == queues_.end()) {
    return Error{Code::kNotFound, "NVMe queue " + std::to_string(id) + ": expected one of this client"};
  }
  auto closed = driver.close_external(static_cast<std::uint16_t>(id));
  bytes_ -= at->second.memory.bytes();
  if (!closed) never_free(at->second.memory);
  queues_.erase(at);
  return closed;
}

Status Session::map_memory(DmaMapper& mapper, const MapMemoryRequest& request, int file, const SessionLimits& limits,
                           MapMemoryReply& reply) {
  if (regions_.size() >= limits.regions) return over_limit("mapped ranges", limits.regions, regions_.size(), 1);
  if (request.bytes > limits.bytes - bytes_) return over_limit("bytes", limits.bytes, bytes_, request.bytes);
  if (auto good = check_shared_memory(file, request.offset, request.bytes); !good) return good;
  auto memory = Mapping::map(file, request.offset, request.bytes, "a client's memory");
  if (!memory) return memory.error();
  auto address = mapper.map(memory->data(), memory->bytes());
  if (!address) return address.error();
  reply.memory = next_region_++;
  reply.address = *address;
  bytes_ += memory->bytes();
  regions_[reply.memory].memory = std::move(*memory);
  return {};
}

Status Session::unmap(DmaMapper& mapper, Mapping& memory) {
  bytes_ -= memory.bytes();
  auto unmapped = mapper.unmap(memory.data());
  if (!unmapped) never_free(memory);
  return unmapped;
}

Status Session::unmap_memory(DmaMapper& mapper, std::uint64_t number) {
  const auto at = regions_.find(number);
  if (at == regions_.end()) {
    return Error{Code::kNotFound, "mapped memory " + std::to_string(number) + ": expected a range of this client"};
  }
  auto unmapped = unmap(mapper, at->second.memory);
  regions_.erase(at);
  return unmapped;
}

Status Session::unmap_all(DmaMapper& mapper) {
  Status result;
  for (auto& [number, region] : regions_) {
    auto unmapped = unmap(mapper, region.memory);
    if (result) result = unmapped;
  }
  regions_.clear();
  return result;
}

Status Session::take_back(Driver& driver, DmaMapper& mapper, BlockRanges& ranges) {
  Status result;
  while (!queues_.empty()) {
    auto closed = close_queue(driver, queues_.begin()->first);
    if (result) result = closed;
  }
  auto unmapped = unmap_all(mapper);
  if (result) result = unmapped;
  // Last: until here the controller may have written to them.
  for (const std::uint32_t range : ranges_) ranges.give_back(range);
  ranges_.clear();
  return result;
}

}  // namespace tardis::nvme::broker
