// SPDX-License-Identifier: Apache-2.0
// The memory that users registered: mapped, with the data pointers of all its pages ready.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "nvme/memory.h"
#include "nvme/prp.h"

namespace tardis::nvme {

struct Region {
  std::uintptr_t begin = 0, end = 0;
  std::uint64_t address = 0;  // of `begin`, for the controller; the region is contiguous there
  MemoryProvider* provider = nullptr;
  DmaMemory table_memory;
  PrpTable table;  // from the beginning of the page that `begin` is in

  std::uint64_t address_of(std::uintptr_t memory) const { return address + (memory - begin); }
  std::uint64_t table_offset(std::uint64_t of_address) const { return of_address - address + address % kPageBytes; }
};

// The regions of one moment, by address.
class RegionTable {
 public:
  explicit RegionTable(std::vector<std::shared_ptr<const Region>> regions) : regions_(std::move(regions)) {}
  const Region* find(std::uintptr_t memory) const;  // that holds it
  const std::vector<std::shared_ptr<const Region>>& regions() const { return regions_; }

 private:
  const std::vector<std::shared_ptr<const Region>> regions_;
};

// Thread-safe.
class RegisteredMemory {
 public:
  explicit RegisteredMemory(DmaMapper& mapper);
  ~RegisteredMemory();

  // `provider` must stay until remove() or revoke(). One map() for the region, and one for its table.
  Status add(MemoryProvider& provider, void* base, std::size_t bytes);
  void remove(void* base);
  std::shared_ptr<const RegionTable> table() const;
  std::uint64_t bytes() const;

  // Takes all of it away from the controller, for good: nothing is registered any more. False: some of it could not be
  // taken, and may still be written to.
  bool revoke();

 private:
  void publish(std::vector<std::shared_ptr<const Region>> regions);  // mutex_ held

  DmaMapper& mapper_;
  mutable std::mutex mutex_;
  std::shared_ptr<const RegionTable> table_;
  bool revoked_ = false;
};

}  // namespace tardis::nvme
