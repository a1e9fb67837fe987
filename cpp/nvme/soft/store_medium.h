// SPDX-License-Identifier: Apache-2.0
// The data files of an open store as a namespace to be read: block = address / block size, where SegmentAddresses
// numbers the bytes of all segments that the store has or can have (docs/nvme.md). Who has a lease on objects knows
// which blocks they are.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "nvme/soft/medium.h"
#include "store/store.h"

namespace tardis::nvme {

class StoreMedium final : public Medium {
 public:
  // `store` must outlive the medium. It may be closed: reads fail from then on.
  static Result<std::unique_ptr<StoreMedium>> create(Store& store);

  std::uint64_t bytes() const override { return store_.segment_addresses().end(); }
  std::uint64_t capacity() const override { return store_.capacity_bytes(); }
  std::uint32_t granularity() const override { return granularity_; }
  // Files in memory are copied by whoever serves the queues: handed to other threads, a read would wait for a processor
  // behind those that look for doorbells.
  bool immediate() const override { return at_once_; }
  bool needs_flush() const override { return false; }
  bool read_only() const override { return true; }
  void run(std::span<MediumRequest> requests, const Completion& on_complete) override;

 private:
  StoreMedium(Store& store, std::uint32_t granularity)
      : store_(store), granularity_(granularity), at_once_(store.reads_at_once()) {}

  Store& store_;
  const std::uint32_t granularity_;
  const bool at_once_;
};

// Blocks that hold bytes of an object.
struct BlockRange {
  std::uint64_t first = 0, blocks = 0;
  std::uint32_t skip = 0;   // bytes of the first block before the object's
  std::uint64_t bytes = 0;  // of the object
};

// Those of bytes [first, first + bytes) of an object as it is stored, in their order; a layer is part * part_stride and
// part_bytes. Empty: it has no such bytes. `block_bytes`: of the namespace.
std::vector<BlockRange> blocks_of(const Lease& lease, std::size_t object, std::uint64_t first, std::uint64_t bytes,
                                  std::uint32_t block_bytes);

}  // namespace tardis::nvme
