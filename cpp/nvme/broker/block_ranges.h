// SPDX-License-Identifier: Apache-2.0
// Which blocks of which namespace are whose. No two ranges overlap or have one name.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "base/status.h"

namespace tardis::nvme::broker {

struct BlockRange {
  std::uint32_t namespace_id = 0;
  std::uint64_t first = 0, blocks = 0;
  std::string name;
  std::string owner;  // for messages
};

class BlockRanges {
 public:
  // Its number; or an error that names who has what it wants.
  Result<std::uint32_t> take(BlockRange range);
  void give_back(std::uint32_t number) { ranges_.erase(number); }
  std::size_t size() const { return ranges_.size(); }

 private:
  std::map<std::uint32_t, BlockRange> ranges_;
  std::uint32_t next_ = 1;
};

}  // namespace tardis::nvme::broker
