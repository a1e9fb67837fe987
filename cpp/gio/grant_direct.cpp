// SPDX-License-Identifier: Apache-2.0
// Memory of the owner that the controller is told of, so that commands of a grant land there.
#include <algorithm>
#include <string>

#include "gio/grant.h"

namespace tardis::gio {

// Two data blocks are needed for K and V.
bool Grant::direct_by_sgl() const {
  const nvme::ControllerInfo& controller = driver_->controller();
  return controller.sgl != nvme::SglRule::kNone && controller.sgl_blocks >= kPieces;
}

std::size_t Grant::direct_list_bytes() const {
  const std::size_t bytes = direct_by_sgl() ? DirectLanding::kSglListBytes : DirectLanding::kPrpListBytes;
  const std::size_t all = bytes * options_.commands_of_queue() * options_.queues;
  return (all + nvme::kPageBytes - 1) / nvme::kPageBytes * nvme::kPageBytes;
}

Status Grant::use_direct(void* lists) {
  if (lists == nullptr || reinterpret_cast<std::uintptr_t>(lists) % nvme::kPageBytes != 0 || lists_ != nullptr) {
    return Error{Code::kInvalidArgument, "direct landing: expected page-aligned memory for lists, once, found " +
                                             std::string(lists_ != nullptr ? "a grant that has some" : "other memory")};
  }
  if (auto registered = driver_->register_memory(lists, direct_list_bytes()); !registered) return registered;
  const auto table = driver_->regions();
  const nvme::Region* const region = table->find(reinterpret_cast<std::uintptr_t>(lists));
  if (region == nullptr) {
    return Error{Code::kInvalidArgument,
                 "direct landing: expected lists that the controller can be told of, found a driver without zero copy"};
  }
  lists_ = lists;
  list_address_ = region->address;
  return {};
}

Status Grant::add_region(nvme::MemoryProvider& provider, void* base, std::size_t bytes) {
  if (lists_ == nullptr) {
    return Error{Code::kInvalidArgument, "direct landing: expected use_direct() before the first region"};
  }
  if (auto registered = driver_->register_memory(provider, base, bytes); !registered) return registered;
  const auto table = driver_->regions();
  const nvme::Region* const region = table->find(reinterpret_cast<std::uintptr_t>(base));
  if (region == nullptr) {
    return Error{
        Code::kInvalidArgument,
        "direct landing: expected memory that the controller can be told of, found a driver without zero copy"};
  }
  const DirectRegion added{region->begin, region->end, region->address, region->table.seen_at(nullptr), 0};
  const auto after = std::upper_bound(direct_regions_.begin(), direct_regions_.end(), added.begin,
                                      [](std::uint64_t begin, const DirectRegion& each) { return begin < each.begin; });
  direct_regions_.insert(after, added);
  return {};
}

void Grant::remove_region(void* base) {
  const auto begin = reinterpret_cast<std::uintptr_t>(base);
  if (std::erase_if(direct_regions_, [begin](const DirectRegion& each) { return each.begin == begin; }) != 0) {
    driver_->unregister_memory(base);
  }
}

DirectLanding Grant::direct(std::size_t queue) const {
  DirectLanding landing{};
  if (direct_regions_.empty()) return landing;
  const std::uint64_t first = std::uint64_t{queue} * options_.commands_of_queue();
  landing.regions = direct_regions_.data();
  landing.count = static_cast<std::uint32_t>(direct_regions_.size());
  landing.use_sgl = direct_by_sgl();
  landing.list_bytes = landing.use_sgl ? DirectLanding::kSglListBytes : DirectLanding::kPrpListBytes;
  landing.lists = static_cast<std::byte*>(lists_) + first * landing.list_bytes;
  landing.list_address = list_address_ + first * landing.list_bytes;
  landing.most_bytes =
      std::min<std::uint64_t>({driver_->controller().max_transfer_bytes,
                               std::uint64_t{nvme::kMaxBlocksPerCommand} << shape_.block_shift, UINT32_MAX});
  return landing;
}

}  // namespace tardis::gio
