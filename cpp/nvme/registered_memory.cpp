// SPDX-License-Identifier: Apache-2.0
#include "nvme/registered_memory.h"

#include <algorithm>

namespace tardis::nvme {
namespace {

bool begins_after(std::uintptr_t memory, const std::shared_ptr<const Region>& region) { return memory < region->begin; }

}  // namespace

const Region* RegionTable::find(std::uintptr_t memory) const {
  const auto after = std::upper_bound(regions_.begin(), regions_.end(), memory, begins_after);
  if (after == regions_.begin()) return nullptr;
  const Region* region = std::prev(after)->get();
  return memory < region->end ? region : nullptr;
}

RegisteredMemory::RegisteredMemory(DmaMapper& mapper) : mapper_(mapper) { publish({}); }

RegisteredMemory::~RegisteredMemory() { revoke(); }

void RegisteredMemory::publish(std::vector<std::shared_ptr<const Region>> regions) {
  table_ = std::make_shared<const RegionTable>(std::move(regions));
}

std::shared_ptr<const RegionTable> RegisteredMemory::table() const {
  const std::lock_guard lock(mutex_);
  return table_;
}

std::uint64_t RegisteredMemory::bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& region : table()->regions()) bytes += region->end - region->begin;
  return bytes;
}

Status RegisteredMemory::add(MemoryProvider& provider, void* base, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(base);
  if (bytes == 0 || begin + bytes < begin) {
    return Error{Code::kInvalidArgument, "memory to register: expected a range of at least one byte, found " +
                                             std::to_string(bytes) + " bytes"};
  }
  const std::lock_guard lock(mutex_);
  if (revoked_) return Error{Code::kClosed, "memory to register: the NVMe controller is not in use any more"};
  std::vector<std::shared_ptr<const Region>> regions = table_->regions();
  for (const auto& region : regions) {
    if (begin < region->end && region->begin < begin + bytes) {
      return Error{Code::kInvalidArgument,
                   "memory to register: expected no overlap with a registered range, found one"};
    }
  }
  auto address = provider.map(base, bytes);
  if (!address) return address.error();

  auto region = std::make_shared<Region>();
  region->begin = begin;
  region->end = begin + bytes;
  region->address = *address;
  region->provider = &provider;
  // Whatever fails from here on: the controller was told of no address yet.
  const auto give_up = [&](Error error) {
    (void)provider.unmap(base);
    return error;
  };
  if (*address % kPageBytes != begin % kPageBytes) {
    return give_up({Code::kInternal, "memory to register: expected " + provider.name() +
                                         " to keep the offset in a page, found another one"});
  }
  if (*address > UINT64_MAX - (bytes - 1)) {
    return give_up({Code::kInternal, "memory to register: expected " + provider.name() +
                                         " to have an address below 2^64 for each byte, found none"});
  }
  const std::uint64_t page_offset = begin % kPageBytes;
  const std::uint64_t table_bytes = PrpTable::memory_bytes(page_offset + bytes);
  auto memory = DmaMemory::allocate(mapper_, table_bytes);
  if (!memory) return give_up(memory.error());
  region->table_memory = std::move(*memory);
  const PrpList list{reinterpret_cast<std::uint64_t*>(region->table_memory.data()), region->table_memory.address()};
  PrpStatus made = PrpTable::make(page_offset + bytes, PrpTable::kDefaultBridge, list, table_bytes, region->table);
  if (made == PrpStatus::kOk) made = region->table.fill_contiguous(*address - page_offset);
  if (made != PrpStatus::kOk) {
    return give_up({Code::kInternal, std::string("memory to register: PRP table: ") + name_of(made)});
  }
  regions.insert(std::upper_bound(regions.begin(), regions.end(), begin, begins_after), std::move(region));
  publish(std::move(regions));
  return {};
}

void RegisteredMemory::remove(void* base) {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<const Region>> regions = table_->regions();
  const auto at = std::find_if(regions.begin(), regions.end(), [base](const auto& region) {
    return region->begin == reinterpret_cast<std::uintptr_t>(base);
  });
  if (at == regions.end()) return;
  MemoryProvider* const provider = (*at)->provider;
  regions.erase(at);
  // No request uses it now, by contract; so none finds it in a table that it took before.
  publish(std::move(regions));
  (void)provider->unmap(base);
}

bool RegisteredMemory::revoke() {
  const std::lock_guard lock(mutex_);
  revoked_ = true;
  bool all = true;
  for (const auto& region : table_->regions()) {
    if (!region->provider->unmap(reinterpret_cast<void*>(region->begin))) all = false;
  }
  publish({});
  return all;
}

}  // namespace tardis::nvme
