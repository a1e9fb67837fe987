// SPDX-License-Identifier: Apache-2.0
#include "gio/grant.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

namespace tardis::gio {
namespace {

using nvme::kPageBytes;

constexpr std::uint64_t kMostGranule = std::uint64_t{1} << 31;  // of an SGL table

Error refused(const std::string& what, const std::string& expected, std::uint64_t found) {
  return {Code::kInvalidArgument,
          "grant of NVMe queues, " + what + ": expected " + expected + ", found " + std::to_string(found)};
}

std::uint64_t value_of(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

}  // namespace

Result<std::unique_ptr<Grant>> Grant::open(std::shared_ptr<nvme::Driver> driver, const GrantMemory& memory,
                                           const GrantOptions& options) {
  const std::uint32_t most_queues = std::min(kMostQueues, driver->external_queues());
  const std::uint32_t most_entries = driver->controller().max_queue_entries;
  if (options.queues == 0 || options.queues > most_queues) {
    return refused("queues", "1 to " + std::to_string(most_queues), options.queues);
  }
  if (options.entries < nvme::kMinQueueEntries || options.entries > most_entries) {
    return refused("entries", "2 to " + std::to_string(most_entries), options.entries);
  }
  const std::uint32_t most_commands = std::min(options.entries - 1, driver->controller().most_commands);
  const std::uint32_t commands = options.commands_of_queue();
  if (commands == 0 || commands > most_commands) {
    return refused("commands", "1 to " + std::to_string(most_commands), commands);
  }
  if (options.slot_bytes == 0 || options.slot_bytes % kPageBytes != 0) {
    return refused("slot_bytes", "whole pages of 4096", options.slot_bytes);
  }
  for (const void* pointer : {memory.rings, memory.bounce}) {
    if (pointer == nullptr || value_of(pointer) % kPageBytes != 0) {
      return refused("memory", "page-aligned pointers", value_of(pointer));
    }
  }
  const nvme::NamespaceInfo* const space = driver->find_namespace(options.namespace_id);
  if (space == nullptr) return refused("namespace", "one that the driver has", options.namespace_id);

  std::unique_ptr<Grant> grant(new Grant(std::move(driver), memory, options));
  GrantedQueue& shape = grant->shape_;
  shape.entries = options.entries;
  shape.commands = commands;
  shape.namespace_id = space->id;
  shape.block_shift = static_cast<std::uint32_t>(std::countr_zero(space->block_bytes));
  shape.blocks = space->blocks;
  shape.slot_bytes = options.slot_bytes;
  shape.most_bytes = std::min<std::uint64_t>({grant->driver_->controller().max_transfer_bytes, options.slot_bytes,
                                              std::uint64_t{nvme::kMaxBlocksPerCommand} * space->block_bytes});
  if (auto described = grant->describe_memory(shape); !described) return described.error();
  if (auto opened = grant->open_queues(); !opened) return opened.error();
  return grant;
}

Status Grant::describe_memory(GrantedQueue& shape) {
  if (auto registered = driver_->register_memory(memory_.bounce, options_.bounce_bytes()); !registered) {
    return registered;
  }
  regions_ = driver_->regions();
  region_ = regions_->find(value_of(memory_.bounce));
  if (region_ == nullptr) {
    return Error{
        Code::kInvalidArgument,
        "grant of NVMe queues: expected bounce memory that the controller can be told of, found a driver without "
        "zero copy"};
  }
  shape.pointers.prp = region_->table;
  shape.pointers.use_sgl = driver_->controller().sgl != nvme::SglRule::kNone;
  // The region is contiguous for the controller, so a command of it is one data block.
  const std::uint64_t bytes = options_.bounce_bytes();
  const std::uint64_t granule = std::min(kMostGranule, std::bit_ceil(bytes));
  sgl_count_ = nvme::SglTable::granules_of(bytes, granule);
  sgl_entries_ = std::make_unique<nvme::SglDescriptor[]>(sgl_count_);
  const nvme::SglRules rules{driver_->controller().sgl == nvme::SglRule::kDword, 1};
  auto made = nvme::SglTable::make(rules, bytes, granule, sgl_entries_.get(), 0,
                                   sgl_count_ * sizeof(nvme::SglDescriptor), shape.pointers.sgl);
  if (made == nvme::SglStatus::kOk) made = shape.pointers.sgl.fill_contiguous(region_->address);
  if (made != nvme::SglStatus::kOk) {
    return Error{Code::kInternal, std::string("grant of NVMe queues: SGL table: ") + nvme::name_of(made)};
  }
  // A command of a whole slot must need no list of its own.
  for (std::uint64_t at = 0; at < bytes && !shape.pointers.use_sgl; at += shape.slot_bytes) {
    shape.most_bytes = std::min(shape.most_bytes, region_->table.longest(at) / kPageBytes * kPageBytes);
  }
  return {};
}

std::span<const std::uint64_t> Grant::prp_table() const {
  if (region_ == nullptr) return {};
  return {reinterpret_cast<const std::uint64_t*>(region_->table_memory.data()),
          region_->table_memory.bytes() / sizeof(std::uint64_t)};
}

Status Grant::open_queues() {
  for (std::uint32_t i = 0; i < options_.queues; ++i) {
    nvme::ExternalRings rings;
    rings.memory = static_cast<std::byte*>(memory_.rings) + i * nvme::ExternalRings::bytes(options_.entries);
    rings.entries = options_.entries;
    auto opened = driver_->open_external(rings);
    if (!opened) {
      (void)close_queues();
      return opened.error();
    }
    GrantedQueue queue = shape_;
    queue.sq = opened->sq;
    queue.cq = opened->cq;
    queue.sq_tail = opened->sq_tail;
    queue.cq_head = opened->cq_head;
    queue.id = opened->id;
    queue.bounce_offset = std::uint64_t{i} * shape_.commands * shape_.slot_bytes;
    queue.bounce = static_cast<std::byte*>(memory_.bounce) + queue.bounce_offset;
    queues_.push_back(queue);
  }
  return {};
}

Status Grant::close_queues() {
  Status result;
  for (const GrantedQueue& queue : queues_) {
    auto closed = driver_->close_external(queue.id);
    if (result) result = closed;
  }
  queues_.clear();
  return result;
}

bool Grant::alive() {
  return !queues_.empty() && std::all_of(queues_.begin(), queues_.end(),
                                         [&](const GrantedQueue& queue) { return driver_->external_alive(queue.id); });
}

Status Grant::renew() {
  if (auto closed = close_queues(); !closed) return closed;
  return open_queues();
}

Status Grant::close() {
  auto closed = close_queues();
  while (!direct_regions_.empty()) remove_region(reinterpret_cast<void*>(direct_regions_.back().begin));
  if (lists_ != nullptr) driver_->unregister_memory(std::exchange(lists_, nullptr));
  if (region_ != nullptr) {
    region_ = nullptr;
    regions_.reset();
    driver_->unregister_memory(memory_.bounce);
  }
  return closed;
}

}  // namespace tardis::gio
