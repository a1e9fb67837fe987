// SPDX-License-Identifier: Apache-2.0
// Bytes that say where in a namespace they belong, and requests that move them.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "nvme/raw_namespace.h"

namespace tardis::nvme::testing {

using Op = NamespaceRequest::Op;

// `seed`: who wrote them.
inline void mark(std::byte* to, std::size_t bytes, std::uint64_t offset, std::uint64_t seed = 0) {
  for (std::size_t at = 0; at < bytes; at += 8) {
    const std::uint64_t word = (offset + at + 8) * 0x9e3779b97f4a7c15u ^ seed * 0xbf58476d1ce4e5b9u;
    std::memcpy(to + at, &word, 8);
  }
}
inline bool holds_mark(const std::byte* memory, std::size_t bytes, std::uint64_t offset, std::uint64_t seed = 0) {
  std::vector<std::byte> expected(bytes);
  mark(expected.data(), bytes, offset, seed);
  return std::memcmp(memory, expected.data(), bytes) == 0;
}

// One request; 0 or an errno.
inline int move(RawNamespace& space, Op op, std::uint64_t offset, std::byte* memory, std::size_t bytes) {
  const iovec range{memory, bytes};
  NamespaceRequest request{.op = op, .offset = offset, .memory = {&range, 1}, .error = -1};
  space.run({&request, 1}, nullptr);
  return request.error;
}

}  // namespace tardis::nvme::testing
