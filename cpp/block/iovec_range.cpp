// SPDX-License-Identifier: Apache-2.0
#include "block/iovec_range.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace tardis {
namespace {

// Calls visit(address, bytes) for each contiguous part of [at, at + bytes).
template <class Visit>
void walk(std::span<const iovec> memory, IovecCursor& at, std::uint64_t bytes, const Visit& visit) {
  while (bytes > 0) {
    const iovec& entry = memory[at.index];
    const std::uint64_t step = std::min<std::uint64_t>(bytes, entry.iov_len - at.offset);
    if (step > 0) visit(static_cast<std::byte*>(entry.iov_base) + at.offset, static_cast<std::size_t>(step));
    bytes -= step;
    at.offset += static_cast<std::size_t>(step);
    if (at.offset == entry.iov_len) {
      ++at.index;
      at.offset = 0;
    }
  }
}

}  // namespace

std::uint64_t total_bytes(std::span<const iovec> memory) {
  std::uint64_t bytes = 0;
  for (const iovec& entry : memory) bytes += entry.iov_len;
  return bytes;
}

bool memory_fits(std::span<const iovec> memory, const IoGeometry& geometry) {
  if (!geometry.direct) return true;
  std::uintptr_t addresses = 0;
  std::size_t lengths = 0;
  for (const iovec& entry : memory) {
    if (entry.iov_len == 0) continue;
    addresses |= reinterpret_cast<std::uintptr_t>(entry.iov_base);
    lengths |= entry.iov_len;
  }
  // Both are powers of two.
  return (addresses & (geometry.memory_align - 1)) == 0 && (lengths & (geometry.offset_align - 1)) == 0;
}

void gather(std::span<const iovec> memory, IovecCursor& at, std::byte* to, std::size_t bytes) {
  walk(memory, at, bytes, [&to](const std::byte* from, std::size_t n) {
    std::memcpy(to, from, n);
    to += n;
  });
}

void scatter(const std::byte* from, std::span<const iovec> memory, IovecCursor& at, std::size_t bytes) {
  walk(memory, at, bytes, [&from](std::byte* to, std::size_t n) {
    std::memcpy(to, from, n);
    from += n;
  });
}

void advance(std::span<const iovec> memory, IovecCursor& at, std::uint64_t bytes) {
  walk(memory, at, bytes, [](std::byte*, std::size_t) {});
}

void take(std::span<const iovec> memory, IovecCursor& at, std::uint64_t bytes, std::vector<iovec>& to) {
  walk(memory, at, bytes, [&](std::byte* address, std::size_t n) {
    if (!to.empty() && static_cast<std::byte*>(to.back().iov_base) + to.back().iov_len == address) {
      to.back().iov_len += n;
    } else {
      to.push_back({address, n});
    }
  });
}

std::vector<iovec> without_prefix(std::span<const iovec> memory, std::uint64_t bytes) {
  IovecCursor at;
  advance(memory, at, bytes);
  std::vector<iovec> rest(memory.begin() + static_cast<std::ptrdiff_t>(at.index), memory.end());
  if (!rest.empty()) {
    rest.front().iov_base = static_cast<std::byte*>(rest.front().iov_base) + at.offset;
    rest.front().iov_len -= at.offset;
  }
  return rest;
}

TransferProgress judge_transfer(IoRequest::Op op, std::uint64_t moved, std::uint64_t wanted,
                                const IoGeometry& geometry) {
  if (moved == wanted) return {moved, 0};
  const std::uint64_t whole = moved / geometry.offset_align * geometry.offset_align;
  if (op == IoRequest::Op::kRead) {
    // Only the end of the file cuts a read off in the middle of a block.
    if (moved == 0 || whole != moved) return {0, ENODATA};
    return {moved, 0};
  }
  // A write cut off inside a block is repeated from that block on, since direct I/O can start nowhere else; what
  // stopped it (a full disk, a size limit) then comes back as an errno.
  if (whole == 0) return {0, EIO};
  return {whole, 0};
}

}  // namespace tardis
