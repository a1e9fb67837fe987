// SPDX-License-Identifier: Apache-2.0
// What a line of nvme_prp_vectors.txt says, for who executes it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "nvme/spec.h"
#include "nvme_pointers.h"

namespace tardis::nvme::testing::pointers {

// The pages that [offset, offset + length) of a buffer lies in.
template <class PageAddress>
void naive_pieces(const PageAddress& page_address, std::uint64_t offset, std::uint64_t length,
                  std::vector<Piece>& pieces) {
  for (const std::uint64_t end = offset + length; offset < end;) {
    const std::uint64_t next = std::min(end, (offset / kPageBytes + 1) * kPageBytes);
    pieces.push_back({page_address(offset / kPageBytes) + offset % kPageBytes, next - offset});
    offset = next;
  }
}

struct Word {
  std::uint64_t bus, value;
};
// Of list memory, as the vector has it.
inline std::vector<Word> words_of(const Vector& vector) {
  const AddressRule page_address(vector.text("pages"));
  std::vector<Word> words;
  for (const std::string& list : split(vector.text("list"), ';')) {
    const std::size_t colon = list.find(':');
    std::uint64_t bus = number(list.substr(0, colon));
    for (const std::string& item : split(list.substr(colon + 1), ',')) {
      if (item[0] == '>' || item[0] == '=') {
        words.push_back({bus, number(item.substr(1))});
        bus += 8;
        continue;
      }
      const std::size_t dash = item.find('-');
      const std::uint64_t last = number(item.substr(dash == std::string::npos ? 0 : dash + 1));
      for (std::uint64_t page = number(item.substr(0, dash)); page <= last; ++page, bus += 8) {
        words.push_back({bus, page_address(page)});
      }
    }
  }
  return words;
}

}  // namespace tardis::nvme::testing::pointers
