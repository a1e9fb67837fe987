// SPDX-License-Identifier: Apache-2.0
// Arithmetic on the memory of a request: a sequence of iovecs read as one run of bytes.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "block/block_device.h"

namespace tardis {

// A place in the sequence.
struct IovecCursor {
  std::size_t index = 0;   // iovec
  std::size_t offset = 0;  // bytes into it
};

std::uint64_t total_bytes(std::span<const iovec> memory);

// Whether direct I/O can use the memory as it is.
bool memory_fits(std::span<const iovec> memory, const IoGeometry& geometry);

// Copies `bytes` bytes between the sequence, from `at` on, and a flat buffer; moves `at` past them.
void gather(std::span<const iovec> memory, IovecCursor& at, std::byte* to, std::size_t bytes);
void scatter(const std::byte* from, std::span<const iovec> memory, IovecCursor& at, std::size_t bytes);
// Moves `at` without a copy.
void advance(std::span<const iovec> memory, IovecCursor& at, std::uint64_t bytes);

// Moves `at` past the next bytes, and adds to `to` where they are.
void take(std::span<const iovec> memory, IovecCursor& at, std::uint64_t bytes, std::vector<iovec>& to);

// The sequence without its first `bytes` bytes.
std::vector<iovec> without_prefix(std::span<const iovec> memory, std::uint64_t bytes);

// Judges a transfer that moved `moved` (> = 0) of `wanted` bytes.
struct TransferProgress {
  std::uint64_t bytes = 0;  // how much of it counts; the rest has to be asked for again
  int error = 0;            // or: why there is no point in that
};
TransferProgress judge_transfer(IoRequest::Op op, std::uint64_t moved, std::uint64_t wanted,
                                const IoGeometry& geometry);

}  // namespace tardis
