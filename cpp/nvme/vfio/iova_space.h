// SPDX-License-Identifier: Apache-2.0
// Which addresses of a controller are free.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace tardis::nvme {

struct IovaRange {
  std::uint64_t first = 0, last = 0;  // both belong to it
  bool operator==(const IovaRange&) const = default;
};

// Not thread-safe.
class IovaSpace {
 public:
  // `usable`: what an IOMMU translates. Nothing below kLeastAddress is given out.
  explicit IovaSpace(const std::vector<IovaRange>& usable);

  static constexpr std::uint64_t kLeastAddress = std::uint64_t{1} << 20;  // 0 is no address, nor is what is near it

  // `bytes` bytes at an address that leaves the remainder `phase` when it is divided by `align` (a power of two). An
  // address is given out again as late as can be: a command that was forgotten must not find other memory there.
  std::optional<std::uint64_t> take(std::uint64_t bytes, std::uint64_t align, std::uint64_t phase);
  // As it was taken.
  void give_back(std::uint64_t address, std::uint64_t bytes);
  std::uint64_t free_bytes() const;
  std::uint64_t largest() const;  // bytes that lie side by side

 private:
  std::optional<std::uint64_t> take_from(std::uint64_t from, std::uint64_t bytes, std::uint64_t align,
                                         std::uint64_t phase);

  std::map<std::uint64_t, std::uint64_t> free_;  // first -> last
  std::uint64_t next_ = 0;
};

}  // namespace tardis::nvme
