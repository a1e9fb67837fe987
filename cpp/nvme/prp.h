// SPDX-License-Identifier: Apache-2.0
// Data pointers as PRPs (4.3.1): a list built for one command, and a static table of a registered region in which every
// command's list already lies. For host and device code (C++17). Nothing here orders memory: what was stored into a
// list or a table must be visible to the controller before the doorbell of the first command that points to it.
#pragma once

#include <cstdint>

#include "nvme/spec.h"

namespace tardis::nvme {

enum class PrpStatus : std::uint8_t {
  kOk,
  kNoBytes,
  kOffsetAlignment,  // of the first byte: a dword
  kOutOfRange,       // the offset is not in the region (table), or not in the first page (builder)
  kTooLong,          // more than PrpTable::longest()
  kPageAlignment,    // a page's bus address
  kListAlignment,    // of list memory: a qword where a list starts, a page for every further one and for a table
  kListTooSmall,     // list or table memory
  kBridge,           // PrpTable::make(): not 0 and not a power of two from 2 to 512
};

TARDIS_HD constexpr const char* name_of(PrpStatus status) {
  switch (status) {
    case PrpStatus::kOk:
      return "ok";
    case PrpStatus::kNoBytes:
      return "no-bytes";
    case PrpStatus::kOffsetAlignment:
      return "offset-alignment";
    case PrpStatus::kOutOfRange:
      return "out-of-range";
    case PrpStatus::kTooLong:
      return "too-long";
    case PrpStatus::kPageAlignment:
      return "page-alignment";
    case PrpStatus::kListAlignment:
      return "list-alignment";
    case PrpStatus::kListTooSmall:
      return "list-too-small";
    case PrpStatus::kBridge:
      return "bridge";
  }
  return "unknown";
}

inline constexpr std::uint32_t kPrpSlots = kPageBytes / sizeof(std::uint64_t);  // qwords of a page of list memory

// How many pages [offset, offset + length) touches; `offset` in the first page, length > 0.
TARDIS_HD constexpr std::uint64_t prp_pages(std::uint64_t offset, std::uint64_t length) {
  return (length - 1) / kPageBytes + (offset + (length - 1) % kPageBytes) / kPageBytes + 1;  // cannot overflow
}

// List memory from `bus` to the end of its page, and where this code writes it.
struct PrpList {
  std::uint64_t* words;
  std::uint64_t bus;
};

// How many pages of list memory `entries` entries, one or more, take if the list starts at `bus`. The last qword of a
// page is an entry if it is the list's last, and points to the next page otherwise; every page but the last loses one
// to that.
TARDIS_HD constexpr std::uint64_t prp_list_pages(std::uint64_t entries, std::uint64_t bus) {
  const std::uint64_t end = bus % kPageBytes / sizeof(std::uint64_t) + entries;
  return end <= kPrpSlots ? 1 : (end + kPrpSlots - 3) / (kPrpSlots - 1);
}

// Data pointer of `length` bytes from `offset` in the first of some pages, which page_address(i) gives the bus
// addresses of. A list, where one is needed, goes into lists[0], lists[1] and so on; the first may begin anywhere in
// its page. Writes no more than the list has, and `pointer` only if all is well.
template <class PageAddress>
TARDIS_HD PrpStatus build_prp(const PageAddress& page_address, std::uint64_t offset, std::uint64_t length,
                              const PrpList* lists, std::uint32_t list_count, PrpPair& pointer) {
  if (length == 0) return PrpStatus::kNoBytes;
  if (offset >= kPageBytes) return PrpStatus::kOutOfRange;
  if (offset % 4 != 0) return PrpStatus::kOffsetAlignment;
  const std::uint64_t pages = prp_pages(offset, length);
  PrpPair built = {page_address(std::uint64_t{0}), 0};
  if (built.prp1 % kPageBytes != 0) return PrpStatus::kPageAlignment;
  built.prp1 += offset;
  if (pages == 2) {
    built.prp2 = page_address(std::uint64_t{1});
    if (built.prp2 % kPageBytes != 0) return PrpStatus::kPageAlignment;
  } else if (pages > 2) {
    if (list_count == 0 || list_count < prp_list_pages(pages - 1, lists[0].bus)) return PrpStatus::kListTooSmall;
    if (lists[0].bus % sizeof(std::uint64_t) != 0) return PrpStatus::kListAlignment;
    built.prp2 = lists[0].bus;
    std::uint32_t list = 0, at = 0;  // qwords written from lists[list].words on
    auto room = static_cast<std::uint32_t>(kPrpSlots - lists[0].bus % kPageBytes / sizeof(std::uint64_t));
    for (std::uint64_t page = 1; page < pages; ++page) {
      if (at + 1 == room && page + 1 < pages) {
        if (lists[list + 1].bus % kPageBytes != 0) return PrpStatus::kListAlignment;
        lists[list].words[at] = lists[list + 1].bus;
        ++list;
        at = 0;
        room = kPrpSlots;
      }
      const std::uint64_t address = page_address(page);
      if (address % kPageBytes != 0) return PrpStatus::kPageAlignment;
      lists[list].words[at++] = address;
    }
  }
  pointer = built;
  return PrpStatus::kOk;
}

// The bus address of every page of a region, in order, so that a command's list is a pointer into the table. A list
// must not run past the end of a page of table memory (its last qword would be taken for a chain pointer), so behind
// the table come bridges: one for each of those ends, with the `bridge` entries around it once more. Where a list would
// cross an end, it lies in the bridge. 0: no bridges, a command ends there. 512: a second whole table, shifted by half
// a page. With the default, 0.244 % of the region in all, 260 KiB are one command wherever they start; what is aligned
// to its own size is one up to 2 MiB, with or without bridges. What is longer is split where longest() says.
//
// Trivially copyable, for one controller (its bus addresses), and usable from several threads once it is filled.
class PrpTable {
 public:
  static constexpr std::uint32_t kDefaultBridge = 128;

  // Whole pages, because a controller may fetch list memory by the page.
  TARDIS_HD static constexpr std::uint64_t memory_bytes(std::uint64_t region_bytes,
                                                        std::uint32_t bridge = kDefaultBridge) {
    const std::uint64_t pages = pages_of(region_bytes);
    return (table_pages(pages) + (bridges(pages) * bridge + kPrpSlots - 1) / kPrpSlots) * kPageBytes;
  }

  // `memory`: of memory_bytes() or more, contiguous from a page-aligned bus address on. Every page has to be set before
  // the first describe().
  TARDIS_HD static PrpStatus make(std::uint64_t region_bytes, std::uint32_t bridge, const PrpList& memory,
                                  std::uint64_t bytes, PrpTable& table) {
    if (region_bytes == 0) return PrpStatus::kNoBytes;
    if (bridge == 1 || bridge > kPrpSlots || (bridge & (bridge - 1)) != 0) return PrpStatus::kBridge;
    if (memory.bus % kPageBytes != 0) return PrpStatus::kListAlignment;
    if (bytes < memory_bytes(region_bytes, bridge)) return PrpStatus::kListTooSmall;
    table.words_ = memory.words;
    table.bus_ = memory.bus;
    table.bytes_ = region_bytes;
    table.half_ = bridge / 2;
    return PrpStatus::kOk;
  }

  TARDIS_HD std::uint64_t bytes() const { return bytes_; }
  TARDIS_HD std::uint64_t pages() const { return pages_of(bytes_); }
  // So many bytes are one command, wherever they start.
  TARDIS_HD std::uint64_t any_offset_bytes() const { return std::uint64_t{half_ + 1} * kPageBytes; }

  // The same table, its memory read and written at another address: that of a mapping for a GPU, say.
  TARDIS_HD PrpTable seen_at(std::uint64_t* words) const {
    PrpTable other = *this;
    other.words_ = words;
    return other;
  }

  TARDIS_HD PrpStatus set_page(std::uint64_t page, std::uint64_t address) {
    if (page >= pages()) return PrpStatus::kOutOfRange;
    if (address % kPageBytes != 0) return PrpStatus::kPageAlignment;
    words_[page] = address;
    const std::uint64_t table_page = page / kPrpSlots, slot = page % kPrpSlots;
    if (slot >= kPrpSlots - half_ && table_page < bridges(pages())) {
      words_[bridge_slot(table_page) + slot - (kPrpSlots - half_)] = address;
    } else if (slot < half_ && table_page > 0) {
      words_[bridge_slot(table_page - 1) + half_ + slot] = address;
    }
    return PrpStatus::kOk;
  }
  // page_address(i): the bus address of the region's i-th page. Host code.
  template <class PageAddress>
  PrpStatus fill(const PageAddress& page_address) {
    for (std::uint64_t page = 0; page < pages(); ++page) {
      if (const PrpStatus status = set_page(page, page_address(page)); status != PrpStatus::kOk) return status;
    }
    return PrpStatus::kOk;
  }
  PrpStatus fill_contiguous(std::uint64_t base) {
    return fill([base](std::uint64_t page) { return base + page * kPageBytes; });
  }

  // How many bytes from `offset` on one command can move; fewer always do, too. 0 where no command can start.
  TARDIS_HD std::uint64_t longest(std::uint64_t offset) const {
    if (offset >= bytes_ || offset % 4 != 0) return 0;
    const std::uint64_t list = offset / kPageBytes + 1;  // the page in a list's first entry
    const std::uint64_t entries = list_end(list) - list;
    const std::uint64_t most = (1 + entries) * kPageBytes - offset % kPageBytes, rest = bytes_ - offset;
    return most < rest ? most : rest;
  }

  TARDIS_HD PrpStatus describe(std::uint64_t offset, std::uint64_t length, PrpPair& pointer) const {
    return describe_with([this](std::uint64_t page) { return words_[page]; }, offset, length, pointer);
  }
  // The same where fill_contiguous(base) has been called, without a look at the table.
  TARDIS_HD PrpStatus describe_contiguous(std::uint64_t base, std::uint64_t offset, std::uint64_t length,
                                          PrpPair& pointer) const {
    return describe_with([base](std::uint64_t page) { return base + page * kPageBytes; }, offset, length, pointer);
  }

 private:
  template <class PageAddress>
  TARDIS_HD PrpStatus describe_with(const PageAddress& page_address, std::uint64_t offset, std::uint64_t length,
                                    PrpPair& pointer) const {
    if (length == 0) return PrpStatus::kNoBytes;
    if (offset >= bytes_) return PrpStatus::kOutOfRange;
    if (offset % 4 != 0) return PrpStatus::kOffsetAlignment;
    if (length > longest(offset)) return PrpStatus::kTooLong;
    const std::uint64_t page = offset / kPageBytes, into = offset % kPageBytes;
    const std::uint64_t touched = prp_pages(into, length);
    pointer.prp1 = page_address(page) + into;
    pointer.prp2 = touched == 1   ? 0
                   : touched == 2 ? page_address(page + 1)
                                  : bus_ + list_slot(page + 1, touched - 1) * sizeof(std::uint64_t);
    return PrpStatus::kOk;
  }
  TARDIS_HD static constexpr std::uint64_t pages_of(std::uint64_t bytes) {
    return bytes / kPageBytes + (bytes % kPageBytes != 0 ? 1 : 0);
  }
  TARDIS_HD static constexpr std::uint64_t table_pages(std::uint64_t pages) {
    return (pages + kPrpSlots - 1) / kPrpSlots;
  }
  // As many as ends of table pages with an entry behind them.
  TARDIS_HD static constexpr std::uint64_t bridges(std::uint64_t pages) {
    return pages == 0 ? 0 : (pages - 1) / kPrpSlots;
  }
  // Where the bridge over the end of a table page starts. Bridges are a power of two: none crosses the end of a page.
  TARDIS_HD std::uint64_t bridge_slot(std::uint64_t table_page) const {
    return table_pages(pages()) * kPrpSlots + table_page * 2 * half_;
  }
  // A list that starts with entry `page` must end before this one.
  TARDIS_HD std::uint64_t list_end(std::uint64_t page) const {
    const std::uint64_t end = (page / kPrpSlots + 1) * kPrpSlots;
    return page + half_ < end ? end : end + half_;
  }
  TARDIS_HD std::uint64_t list_slot(std::uint64_t page, std::uint64_t entries) const {
    const std::uint64_t table_page = page / kPrpSlots, end = (table_page + 1) * kPrpSlots;
    return page + entries <= end ? page : bridge_slot(table_page) + page + half_ - end;
  }

  std::uint64_t* words_ = nullptr;
  std::uint64_t bus_ = 0;
  std::uint64_t bytes_ = 0;
  std::uint32_t half_ = 0;  // entries of a bridge on either side of an end
};

}  // namespace tardis::nvme
