// SPDX-License-Identifier: Apache-2.0
// Data pointers of commands whose bytes the controller moves to and from registered memory itself, such as a KV pool in
// HBM: no bounce slot, nobody else moves them. For host and device code (C++17).
#pragma once

#include <cstddef>
#include <cstdint>

#include "gio/iocb.h"
#include "nvme/prp.h"
#include "nvme/sgl.h"
#include "nvme/spec.h"

namespace tardis::gio {

// Registered memory, contiguous for the controller, with the same offset in a page.
struct DirectRegion {
  std::uint64_t begin, end;  // addresses as in IoContext::memory
  std::uint64_t address;     // of `begin`, for the controller
  nvme::PrpTable table;      // the lists of all its pages, from the beginning of the page that `begin` is in
  std::uint64_t reserved;
};
static_assert(sizeof(DirectRegion) == 64);

// What a queue pair that lands directly needs besides. No regions: it uses bounce slots.
struct DirectLanding {
  const DirectRegion* regions;  // by address; read by the ring
  std::uint32_t count;
  std::uint32_t list_bytes;    // of a command slot
  std::byte* lists;            // for descriptors of commands of two pieces: of `commands` slots, written by the ring
  std::uint64_t list_address;  // for the controller
  std::uint64_t most_bytes;    // of a command
  bool use_sgl;

  static constexpr std::uint32_t kSglListBytes = kPieces * sizeof(nvme::SglDescriptor);
  static constexpr std::uint32_t kPrpListBytes = nvme::kPageBytes;  // no list may cross the end of a page

  TARDIS_HD DirectLanding seen_at(const DirectRegion* copy) const {
    DirectLanding other = *this;
    other.regions = copy;
    return other;
  }

  // That holds all of the piece, or null.
  TARDIS_HD const DirectRegion* find(std::uint64_t memory, std::uint64_t bytes) const {
    std::uint32_t low = 0, high = count;  // the first that begins above `memory` is in [low, high]
    while (low < high) {
      const std::uint32_t middle = (low + high) / 2;
      if (regions[middle].begin <= memory) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (low == 0) return nullptr;
    const DirectRegion& region = regions[low - 1];
    return memory < region.end && bytes <= region.end - memory ? &region : nullptr;
  }

  // Writes the slot's list, if the command needs one. False: not to be described (memory outside of the regions; with
  // PRPs a border of the two pieces that is not between pages of 4 KiB; too much), and the slot is as before.
  TARDIS_HD bool describe(const IoContext& context, std::uint32_t slot, nvme::SubmissionEntry& entry) const {
    const DirectRegion* const first = find(context.memory[0], context.bytes[0]);
    if (first == nullptr) return false;
    const std::uint64_t front = first->address + (context.memory[0] - first->begin);
    if (context.bytes[1] == 0) return describe_run(*first, context.memory[0], context.bytes[0], entry);
    const DirectRegion* const second = find(context.memory[1], context.bytes[1]);
    if (second == nullptr) return false;
    if (first == second && context.memory[0] + context.bytes[0] == context.memory[1]) {
      return describe_run(*first, context.memory[0], std::uint64_t{context.bytes[0]} + context.bytes[1], entry);
    }
    const std::uint64_t back = second->address + (context.memory[1] - second->begin);
    std::byte* const list = lists + std::uint64_t{slot} * list_bytes;
    const std::uint64_t bus = list_address + std::uint64_t{slot} * list_bytes;
    if (use_sgl) {
      auto* const blocks = reinterpret_cast<nvme::SglDescriptor*>(list);
      blocks[0] = nvme::SglDescriptor::of(nvme::SglType::kDataBlock, front, context.bytes[0]);
      blocks[1] = nvme::SglDescriptor::of(nvme::SglType::kDataBlock, back, context.bytes[1]);
      entry.set_data_pointer(nvme::DataPointer::kSgl);
      entry.sgl = nvme::SglDescriptor::of(nvme::SglType::kLastSegment, bus, kSglListBytes);
      return true;
    }
    if ((front + context.bytes[0]) % nvme::kPageBytes != 0 || back % nvme::kPageBytes != 0) return false;
    const std::uint64_t offset = front % nvme::kPageBytes;
    const std::uint64_t front_pages = nvme::prp_pages(offset, context.bytes[0]);
    const nvme::PrpList memory{reinterpret_cast<std::uint64_t*>(list), bus};
    const auto page = [=](std::uint64_t i) {
      return i < front_pages ? front - offset + i * nvme::kPageBytes : back + (i - front_pages) * nvme::kPageBytes;
    };
    entry.set_data_pointer(nvme::DataPointer::kPrp);
    return nvme::build_prp(page, offset, std::uint64_t{context.bytes[0]} + context.bytes[1], &memory, 1, entry.prp) ==
           nvme::PrpStatus::kOk;
  }

 private:
  // Bytes that follow each other in one region need no list of their own.
  TARDIS_HD bool describe_run(const DirectRegion& region, std::uint64_t memory, std::uint64_t bytes,
                              nvme::SubmissionEntry& entry) const {
    const std::uint64_t address = region.address + (memory - region.begin);
    if (use_sgl) {
      entry.set_data_pointer(nvme::DataPointer::kSgl);
      entry.sgl = nvme::SglDescriptor::of(nvme::SglType::kDataBlock, address, static_cast<std::uint32_t>(bytes));
      return true;
    }
    const std::uint64_t into_page = region.address % nvme::kPageBytes;
    entry.set_data_pointer(nvme::DataPointer::kPrp);
    return region.table.describe_contiguous(region.address - into_page, into_page + (memory - region.begin), bytes,
                                            entry.prp) == nvme::PrpStatus::kOk;
  }
};
static_assert(sizeof(DirectLanding) == 48);

}  // namespace tardis::gio
