// SPDX-License-Identifier: Apache-2.0
// What a line of nvme_sgl_vectors.txt says, for who executes it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "nvme/sgl.h"
#include "nvme_pointers.h"

namespace tardis::nvme::testing::pointers {

// TYPE:BUS:LENGTH
inline SglDescriptor descriptor_of(const std::string& text) {
  const std::vector<std::string> parts = split(text, ':');
  if (parts.size() != 3) {
    ADD_FAILURE() << "expected TYPE:BUS:LENGTH, found '" << text << "'";
    return {};
  }
  const std::uint64_t type = parts[0] == "data"      ? 0
                             : parts[0] == "segment" ? 0x20
                             : parts[0] == "last"    ? 0x30
                                                     : number(parts[0]);
  return {number(parts[1]), static_cast<std::uint32_t>(number(parts[2])), {}, static_cast<std::uint8_t>(type)};
}

inline std::vector<SglRange> blocks_of(const Vector& vector) {
  std::vector<SglRange> blocks;
  for (const std::string& block : split(vector.text("blocks"), ',')) {
    const std::size_t plus = block.find('+');
    blocks.push_back({number(block.substr(0, plus)), number(block.substr(plus + 1))});
  }
  return blocks;
}

inline std::vector<Piece> pieces_of(const Vector& vector) {
  std::vector<Piece> pieces;
  std::uint64_t left = vector.value("transfer");
  for (const SglRange& block : blocks_of(vector)) {
    if (left == 0) break;
    pieces.push_back({block.address, std::min(block.length, left)});
    left -= pieces.back().length;
  }
  return pieces;
}

struct Placed {
  std::uint64_t bus;
  SglDescriptor descriptor;
};
inline std::vector<Placed> segments_of(const Vector& vector) {
  const std::vector<SglRange> blocks = blocks_of(vector);
  std::vector<Placed> placed;
  for (const std::string& segment : split(vector.text("segments"), ';')) {
    const std::size_t colon = segment.find(':');
    std::uint64_t bus = number(segment.substr(0, colon));
    for (const std::string& item : split(segment.substr(colon + 1), ',')) {
      if (item[0] == '>') {
        placed.push_back({bus, descriptor_of(item.substr(1))});
        bus += 16;
        continue;
      }
      const std::size_t dash = item.find('-');
      const std::uint64_t last = number(item.substr(dash == std::string::npos ? 0 : dash + 1));
      for (std::uint64_t i = number(item.substr(0, dash)); i <= last; ++i, bus += 16) {
        const SglRange& block = blocks.at(i);
        placed.push_back({bus, {block.address, static_cast<std::uint32_t>(block.length), {}, 0}});
      }
    }
  }
  return placed;
}

}  // namespace tardis::nvme::testing::pointers
