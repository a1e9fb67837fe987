// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/iova_space.h"

#include <algorithm>
#include <iterator>

namespace tardis::nvme {

IovaSpace::IovaSpace(const std::vector<IovaRange>& usable) {
  for (const IovaRange& range : usable) {
    const std::uint64_t first = std::max(range.first, kLeastAddress);
    // The last page of all is left out: an address behind it would be 0.
    const std::uint64_t last = std::min(range.last, ~std::uint64_t{0} - kLeastAddress);
    if (first <= last) free_.emplace(first, last);
  }
}

std::optional<std::uint64_t> IovaSpace::take(std::uint64_t bytes, std::uint64_t align, std::uint64_t phase) {
  if (bytes == 0) return std::nullopt;
  auto found = take_from(next_, bytes, align, phase);
  if (!found) found = take_from(0, bytes, align, phase);
  if (found) next_ = *found + bytes;
  return found;
}

std::optional<std::uint64_t> IovaSpace::take_from(std::uint64_t from, std::uint64_t bytes, std::uint64_t align,
                                                  std::uint64_t phase) {
  auto at = free_.upper_bound(from);
  if (at != free_.begin() && std::prev(at)->second >= from) --at;
  for (; at != free_.end(); ++at) {
    const auto [first, last] = *at;
    const std::uint64_t least = std::max(first, from);
    const std::uint64_t address = least + ((phase - least) & (align - 1));
    if (address < least || address > last || last - address < bytes - 1) continue;
    const std::uint64_t end = address + (bytes - 1);
    free_.erase(at);
    if (first < address) free_.emplace(first, address - 1);
    if (end < last) free_.emplace(end + 1, last);
    return address;
  }
  return std::nullopt;
}

void IovaSpace::give_back(std::uint64_t address, std::uint64_t bytes) {
  std::uint64_t first = address, last = address + (bytes - 1);
  auto after = free_.upper_bound(address);
  if (after != free_.end() && after->first == last + 1) {
    last = after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->second + 1 == first) {
      first = before->first;
      free_.erase(before);
    }
  }
  free_.emplace(first, last);
}

std::uint64_t IovaSpace::free_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& [first, last] : free_) bytes += last - first + 1;
  return bytes;
}

std::uint64_t IovaSpace::largest() const {
  std::uint64_t bytes = 0;
  for (const auto& [first, last] : free_) bytes = std::max(bytes, last - first + 1);
  return bytes;
}

}  // namespace tardis::nvme
