// SPDX-License-Identifier: Apache-2.0
// Data pointers as SGLs (4.3.2): one built for one command, and a static table of a registered region that most
// commands' descriptors already lie in. For host and device code (C++17). Nothing here orders memory: see prp.h.
#pragma once

#include <cstdint>

#include "nvme/spec.h"

namespace tardis::nvme {

enum class SglStatus : std::uint8_t {
  kOk,
  kNoBytes,        // a transfer or a data block of none: legal, but never meant
  kGranularity,    // SGLS = 10b: address and length of every data block are multiples of 4
  kTooManyBlocks,  // more data blocks than SglRules::max_blocks
  kLength,         // the blocks are not what the command moves, or a block is beyond 32 bits
  kOverflow,       // address + length is beyond 2^64
  kAlignment,      // of descriptor memory: a qword
  kMemoryTooSmall,
  kOutOfRange,  // not in the region
  kGranule,     // make(): a power of two from 4 KiB to 2 GiB; describe(): neither one run nor whole granules
};

TARDIS_HD constexpr const char* name_of(SglStatus status) {
  switch (status) {
    case SglStatus::kOk:
      return "ok";
    case SglStatus::kNoBytes:
      return "no-bytes";
    case SglStatus::kGranularity:
      return "granularity";
    case SglStatus::kTooManyBlocks:
      return "too-many-blocks";
    case SglStatus::kLength:
      return "length";
    case SglStatus::kOverflow:
      return "overflow";
    case SglStatus::kAlignment:
      return "alignment";
    case SglStatus::kMemoryTooSmall:
      return "memory-too-small";
    case SglStatus::kOutOfRange:
      return "out-of-range";
    case SglStatus::kGranule:
      return "granule";
  }
  return "unknown";
}

// What one controller takes (Identify: SGLS and MSDBD).
struct SglRules {
  bool dword;                // kSglDword
  std::uint32_t max_blocks;  // data blocks of a command; 0: no limit
  TARDIS_HD static constexpr SglRules of(std::uint32_t sgls, std::uint8_t msdbd) {
    return {(sgls & kSglMask) != kSglAnyAlignment, msdbd};  // the stricter, should it ever be asked for no SGLs
  }
  TARDIS_HD constexpr bool allow(std::uint64_t blocks) const { return max_blocks == 0 || blocks <= max_blocks; }
};

// SGLs or PRPs for reads and writes of up to `max_transfer` bytes (0: no limit) of regions that are contiguous by
// `granule`. SGLs where the largest command, whole granules, stays within what the controller takes (MSDBD) and what it
// is fast with (SDT, SGLS 15:8); PRPs otherwise, since SGLs would then mean more and smaller commands.
TARDIS_HD constexpr DataPointer choose_data_pointer(std::uint32_t sgls, std::uint8_t msdbd, std::uint64_t max_transfer,
                                                    std::uint64_t granule) {
  const std::uint32_t support = sgls & kSglMask, threshold = sgls >> 8 & 0xff;
  if (support != kSglAnyAlignment && support != kSglDword) return DataPointer::kPrp;
  std::uint32_t most = msdbd;
  if (threshold != 0 && (most == 0 || threshold < most)) most = threshold;
  if (most == 0) return DataPointer::kSgl;
  const bool fits = max_transfer != 0 && (max_transfer - 1) / granule < most;
  return fits ? DataPointer::kSgl : DataPointer::kPrp;
}

// A data block: bytes that are contiguous for the controller.
struct SglRange {
  std::uint64_t address;
  std::uint64_t length;
};

TARDIS_HD constexpr SglStatus check_block(const SglRules& rules, const SglRange& range) {
  if (range.length == 0) return SglStatus::kNoBytes;
  if (range.length > UINT32_MAX) return SglStatus::kLength;
  if (range.address > UINT64_MAX - (range.length - 1)) return SglStatus::kOverflow;
  if (rules.dword && (range.address | range.length) % 4 != 0) return SglStatus::kGranularity;
  return SglStatus::kOk;
}

// Descriptor memory, contiguous for the controller. Unlike PRP lists it may cross pages.
struct SglMemory {
  SglDescriptor* entries;
  std::uint64_t bus;
  std::uint32_t count;
};

// The descriptor for the command, of a transfer into or out of `ranges` in order: a data block in the command itself if
// there is one, else a pointer to a segment in memory[0]. What that cannot hold goes on in memory[1] and so on, the
// last entry of each giving way to the pointer to the next. Writes no more than that, and `descriptor` only if all is
// well.
TARDIS_HD inline SglStatus build_sgl(const SglRules& rules, const SglRange* ranges, std::uint32_t range_count,
                                     std::uint64_t transfer, const SglMemory* memory, std::uint32_t memory_count,
                                     SglDescriptor& descriptor) {
  std::uint64_t total = 0;
  for (std::uint32_t i = 0; i < range_count; ++i) {
    if (const SglStatus status = check_block(rules, ranges[i]); status != SglStatus::kOk) return status;
    total += ranges[i].length;
  }
  if (range_count == 0) return SglStatus::kNoBytes;
  if (total != transfer) return SglStatus::kLength;
  if (!rules.allow(range_count)) return SglStatus::kTooManyBlocks;
  if (range_count == 1) {
    descriptor = SglDescriptor::of(SglType::kDataBlock, ranges[0].address, static_cast<std::uint32_t>(transfer));
    return SglStatus::kOk;
  }
  // A first pass without stores, so that memory is written only if there is enough of it.
  for (std::uint32_t segment = 0, left = range_count;; ++segment) {
    if (segment == memory_count || memory[segment].count == 0) return SglStatus::kMemoryTooSmall;
    if (memory[segment].bus % sizeof(std::uint64_t) != 0) return SglStatus::kAlignment;
    const std::uint64_t bytes = std::uint64_t{memory[segment].count} * sizeof(SglDescriptor);
    if (bytes > UINT32_MAX) return SglStatus::kLength;
    if (memory[segment].bus > UINT64_MAX - (bytes - 1)) return SglStatus::kOverflow;
    if (left <= memory[segment].count) break;
    left -= memory[segment].count - 1;
  }
  SglDescriptor* pointer = &descriptor;
  for (std::uint32_t segment = 0, next = 0; next < range_count; ++segment) {
    const SglMemory& here = memory[segment];
    const std::uint32_t left = range_count - next;
    const bool last = left <= here.count;
    *pointer = SglDescriptor::of(last ? SglType::kLastSegment : SglType::kSegment, here.bus,
                                 (last ? left : here.count) * static_cast<std::uint32_t>(sizeof(SglDescriptor)));
    const std::uint32_t blocks = last ? left : here.count - 1;
    for (std::uint32_t i = 0; i < blocks; ++i, ++next) {
      here.entries[i] =
          SglDescriptor::of(SglType::kDataBlock, ranges[next].address, static_cast<std::uint32_t>(ranges[next].length));
    }
    pointer = &here.entries[blocks];  // the next segment's, if there is one
  }
  return SglStatus::kOk;
}

// A data block descriptor for every granule of a region, in order. A command that moves whole granules (or up to the
// end of the region) points to its descriptors in the table; one whose bytes are contiguous needs no memory at all.
// Anything else is split where longest() says: at most a partial granule, whole ones, and a partial one.
//
// Trivially copyable, for one controller, and usable from several threads once it is filled.
class SglTable {
 public:
  static constexpr std::uint64_t kDefaultGranule = 64 << 10;  // what NVIDIA GPUs map at

  TARDIS_HD static constexpr std::uint64_t granules_of(std::uint64_t region_bytes, std::uint64_t granule) {
    return region_bytes / granule + (region_bytes % granule != 0 ? 1 : 0);
  }
  TARDIS_HD static constexpr std::uint64_t memory_bytes(std::uint64_t region_bytes,
                                                        std::uint64_t granule = kDefaultGranule) {
    return granules_of(region_bytes, granule) * sizeof(SglDescriptor);
  }

  // `entries`: memory_bytes() or more in `bytes`, contiguous from the bus address on. Every granule has to be set
  // before the first longest() or describe().
  TARDIS_HD static SglStatus make(const SglRules& rules, std::uint64_t region_bytes, std::uint64_t granule,
                                  SglDescriptor* entries, std::uint64_t bus, std::uint64_t bytes, SglTable& table) {
    if (region_bytes == 0) return SglStatus::kNoBytes;
    if (granule < kPageBytes || granule > kMaxGranule || (granule & (granule - 1)) != 0) return SglStatus::kGranule;
    if (rules.dword && region_bytes % 4 != 0) return SglStatus::kGranularity;
    if (bus % sizeof(std::uint64_t) != 0) return SglStatus::kAlignment;
    const std::uint64_t needed = memory_bytes(region_bytes, granule);
    if (bytes < needed) return SglStatus::kMemoryTooSmall;
    if (bus > UINT64_MAX - (needed - 1)) return SglStatus::kOverflow;
    table.entries_ = entries;
    table.bus_ = bus;
    table.bytes_ = region_bytes;
    table.granule_ = granule;
    table.rules_ = rules;
    return SglStatus::kOk;
  }

  TARDIS_HD std::uint64_t bytes() const { return bytes_; }
  TARDIS_HD std::uint64_t granule() const { return granule_; }
  TARDIS_HD std::uint64_t granules() const { return granules_of(bytes_, granule_); }

  // As PrpTable::seen_at().
  TARDIS_HD SglTable seen_at(SglDescriptor* entries) const {
    SglTable other = *this;
    other.entries_ = entries;
    return other;
  }

  TARDIS_HD SglStatus set_granule(std::uint64_t index, std::uint64_t address) {
    if (index >= granules()) return SglStatus::kOutOfRange;
    const std::uint64_t rest = bytes_ - index * granule_;
    const SglRange range = {address, rest < granule_ ? rest : granule_};
    if (const SglStatus status = check_block(rules_, range); status != SglStatus::kOk) return status;
    entries_[index] = SglDescriptor::of(SglType::kDataBlock, address, static_cast<std::uint32_t>(range.length));
    return SglStatus::kOk;
  }
  // granule_address(i): the bus address of the region's i-th granule. Host code.
  template <class GranuleAddress>
  SglStatus fill(const GranuleAddress& granule_address) {
    for (std::uint64_t i = 0; i < granules(); ++i) {
      if (const SglStatus status = set_granule(i, granule_address(i)); status != SglStatus::kOk) return status;
    }
    return SglStatus::kOk;
  }
  SglStatus fill_contiguous(std::uint64_t base) {
    return fill([this, base](std::uint64_t index) { return base + index * granule_; });
  }

  // How many of the next `wanted` bytes from `offset` on one command can move. 0 where no command can start.
  TARDIS_HD std::uint64_t longest(std::uint64_t offset, std::uint64_t wanted) const {
    if (offset >= bytes_) return 0;
    if (wanted > bytes_ - offset) wanted = bytes_ - offset;
    if (wanted > kMaxLength) wanted = kMaxLength;
    if (rules_.dword) wanted = offset % 4 != 0 ? 0 : wanted - wanted % 4;
    const std::uint64_t one = run(offset, wanted);
    if (one == wanted || offset % granule_ != 0) return one;
    std::uint64_t blocks = wanted / granule_;
    if (offset + wanted == bytes_ && wanted % granule_ != 0) ++blocks;
    if (!rules_.allow(blocks)) blocks = rules_.max_blocks;
    const std::uint64_t several = blocks * granule_ < wanted ? blocks * granule_ : wanted;
    return one > several ? one : several;
  }

  TARDIS_HD SglStatus describe(std::uint64_t offset, std::uint64_t length, SglDescriptor& descriptor) const {
    if (length == 0) return SglStatus::kNoBytes;
    if (offset >= bytes_ || length > bytes_ - offset) return SglStatus::kOutOfRange;
    if (length > kMaxLength) return SglStatus::kLength;
    if (rules_.dword && (offset | length) % 4 != 0) return SglStatus::kGranularity;
    const std::uint64_t first = offset / granule_;
    if (run(offset, length) == length) {
      descriptor = SglDescriptor::of(SglType::kDataBlock, entries_[first].address + offset % granule_,
                                     static_cast<std::uint32_t>(length));
      return SglStatus::kOk;
    }
    const bool whole = offset % granule_ == 0 && (length % granule_ == 0 || offset + length == bytes_);
    if (!whole) return SglStatus::kGranule;
    const std::uint64_t blocks = granules_of(length, granule_);
    if (!rules_.allow(blocks)) return SglStatus::kTooManyBlocks;
    descriptor = SglDescriptor::of(SglType::kLastSegment, bus_ + first * sizeof(SglDescriptor),
                                   static_cast<std::uint32_t>(blocks * sizeof(SglDescriptor)));
    return SglStatus::kOk;
  }

 private:
  static constexpr std::uint64_t kMaxGranule = std::uint64_t{1} << 31;
  static constexpr std::uint64_t kMaxLength = UINT32_MAX - 3;  // of one block

  // How many of the next `most` bytes are contiguous: at least what is left of the granule.
  TARDIS_HD std::uint64_t run(std::uint64_t offset, std::uint64_t most) const {
    std::uint64_t index = offset / granule_, end = granule_ - offset % granule_;
    while (end < most && entries_[index].address + granule_ == entries_[index + 1].address) {
      ++index;
      end += granule_;
    }
    return end < most ? end : most;
  }

  SglDescriptor* entries_ = nullptr;
  std::uint64_t bus_ = 0;
  std::uint64_t bytes_ = 0;
  std::uint64_t granule_ = kDefaultGranule;
  SglRules rules_ = {};
};

}  // namespace tardis::nvme
