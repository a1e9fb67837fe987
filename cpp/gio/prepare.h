// SPDX-License-Identifier: Apache-2.0
// From the pages of one layer to the contexts that move them: one command for K and V of a page, or as few as a
// command's limit allows. For host and device code (C++17).
#pragma once

#include <cstdint>

#include "gio/iocb.h"

namespace tardis::gio {

// A layer of a KV pool in which a page is `page_bytes` contiguous bytes of K and of V (or of one buffer, as MLA has
// it), and where the same page lies on the drive: K, then V.
struct LayerPages {
  static constexpr std::uint64_t kMostBlock = std::uint64_t{1} << 56;

  const std::uint32_t* memory_pages;  // page i of the transfer is this page of the pools
  const std::uint32_t* file_pages;    // and this one on the drive
  const std::uint32_t* count;         // of pages
  std::uint64_t pools[kPieces];       // addresses of page 0; the second may be 0
  std::uint64_t page_stride[kPieces];
  std::uint32_t page_bytes[kPieces];  // the second may be 0
  std::uint64_t first_block;          // of this layer in file page 0
  std::uint64_t blocks_per_page;      // from a file page to the next
  const std::uint64_t* page_blocks;   // instead: the first block of each file page; null: blocks_per_page says it
  std::uint64_t digests;              // IoContext::digests of this layer of page 0 of the transfer; 0: none
  std::uint64_t digest_stride;        // bytes from a page of the transfer to the next
  std::uint32_t block_shift;
  std::uint32_t most_bytes;  // of a command: whole blocks; with digests and several commands a page, of those 16 KiB
  IoOp op;
  // What ids and counts may not exceed; 0: not known. A page outside becomes a command that the ring refuses.
  std::uint32_t memory_page_count;  // of the pools
  std::uint32_t file_page_count;    // on the drive, or entries of page_blocks
  std::uint32_t most_pages;         // ids there are: more are not looked at, and the ring refuses the whole IOCB

  TARDIS_HD std::uint64_t bytes() const { return std::uint64_t{page_bytes[0]} + page_bytes[1]; }
  TARDIS_HD std::uint32_t commands_per_page() const {
    return static_cast<std::uint32_t>((bytes() + most_bytes - 1) / most_bytes);
  }
  // How many commands `pages` are; more than an IOCB has, so that the ring refuses all of them, if they are too many.
  TARDIS_HD std::uint32_t commands(std::uint32_t pages) const {
    const std::uint64_t wanted = std::uint64_t{pages} * commands_per_page();
    const bool fit = wanted <= kMostContexts && (most_pages == 0 || pages <= most_pages);
    return fit ? static_cast<std::uint32_t>(wanted) : kMostContexts + 1;
  }
  // Command `command` of page i.
  TARDIS_HD IoContext context(std::uint32_t i, std::uint32_t command) const {
    IoContext context{};
    context.tag = i;
    if (!inside(memory_pages[i], memory_page_count) || !inside(file_pages[i], file_page_count)) return context;
    const std::uint64_t page = page_blocks != nullptr ? page_blocks[file_pages[i]] : file_pages[i] * blocks_per_page;
    if (page > kMostBlock) return context;  // what is nowhere (all ones) must not become a block of another page
    const std::uint64_t begin = std::uint64_t{command} * most_bytes;
    const std::uint64_t end = begin + most_bytes < bytes() ? begin + most_bytes : bytes();
    const Share first = share(0, i, begin, end), second = share(1, i, begin, end);
    const bool only_second = first.bytes == 0;  // no index made at run time: a GPU would keep the context in memory
    context.block = first_block + page + (begin >> block_shift);
    context.op = op;
    context.memory[0] = only_second ? second.address : first.address;
    context.bytes[0] = only_second ? second.bytes : first.bytes;
    context.memory[1] = only_second ? 0 : second.address;
    context.bytes[1] = only_second ? 0 : second.bytes;
    context.digests = digests == 0 ? 0 : digests + i * digest_stride + begin / kDigestedBytes * sizeof(std::uint64_t);
    return context;
  }

 private:
  struct Share {
    std::uint64_t address;
    std::uint32_t bytes;
  };
  TARDIS_HD static bool inside(std::uint32_t id, std::uint32_t count) { return count == 0 || id < count; }
  // What bytes [begin, end) of page i have of its K (half 0) or V.
  TARDIS_HD Share share(std::uint32_t half, std::uint32_t i, std::uint64_t begin, std::uint64_t end) const {
    const std::uint64_t half_begin = half == 0 ? 0 : page_bytes[0], half_end = half_begin + page_bytes[half];
    const std::uint64_t from = begin > half_begin ? begin : half_begin, to = end < half_end ? end : half_end;
    if (from >= to) return {0, 0};
    return {pools[half] + memory_pages[i] * page_stride[half] + (from - half_begin),
            static_cast<std::uint32_t>(to - from)};
  }
};

}  // namespace tardis::gio
