// SPDX-License-Identifier: Apache-2.0
// Which byte of a file that is spread over several lies where. Up to `start` it is the first file's; from there on
// units are dealt to the files in turn, each file keeping its own side by side.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

namespace tardis {

struct StripeMap {
  static constexpr std::uint64_t kBlock = 4096;        // what `start` and `unit` are multiples of
  static constexpr std::uint64_t kMemberStart = 4096;  // of the units in every file but the first

  std::uint64_t start = 0;
  std::uint64_t unit = 0;
  std::uint32_t files = 0;

  // Both in one word, so that who reads them at any moment gets two that belong together.
  static constexpr std::uint64_t pack(std::uint64_t start, std::uint64_t unit) {
    return start / kBlock << 32 | unit / kBlock;
  }
  static constexpr StripeMap of(std::uint64_t word, std::uint32_t files) {
    return {(word >> 32) * kBlock, (word & 0xFFFFFFFFu) * kBlock, files};
  }

  std::uint64_t start_in(std::uint32_t file) const { return file == 0 ? start : kMemberStart; }

  // Calls visit(file, offset in it, bytes) for [offset, offset + bytes), in order. What a file has of it is one run.
  template <class Visit>
  void pieces(std::uint64_t offset, std::uint64_t bytes, const Visit& visit) const {
    const std::uint64_t head = offset < start ? std::min(bytes, start - offset) : 0;
    if (head > 0) visit(0u, offset, head);
    offset += head;
    for (bytes -= head; bytes > 0;) {
      const std::uint64_t number = (offset - start) / unit, into = (offset - start) % unit;
      const std::uint64_t step = std::min(bytes, unit - into);
      const auto file = static_cast<std::uint32_t>(number % files);
      visit(file, start_in(file) + number / files * unit + into, step);
      offset += step;
      bytes -= step;
    }
  }

  // How many of the first `bytes` bytes behind `start` a file has.
  std::uint64_t share(std::uint32_t file, std::uint64_t bytes) const {
    const std::uint64_t units = bytes / unit;
    return (units / files + (units % files > file ? 1 : 0)) * unit + (units % files == file ? bytes % unit : 0);
  }

  // How many bytes there are before the first that is beyond the end of its file.
  std::uint64_t available(std::span<const std::uint64_t> file_bytes) const {
    if (file_bytes[0] < start) return file_bytes[0];
    std::uint64_t least = UINT64_MAX;
    for (std::uint32_t file = 0; file < files; ++file) {
      const std::uint64_t own = file_bytes[file] - std::min(file_bytes[file], start_in(file));
      least = std::min(least, start + (own / unit * files + file) * unit + own % unit);
    }
    return least;
  }
};

}  // namespace tardis
