// SPDX-License-Identifier: Apache-2.0
#include "nvme/broker/block_ranges.h"

#include <utility>

namespace tardis::nvme::broker {
namespace {

std::string blocks_text(const BlockRange& range) {
  return "blocks " + std::to_string(range.first) + " to " + std::to_string(range.first + range.blocks - 1) +
         " of namespace " + std::to_string(range.namespace_id);
}

}  // namespace

Result<std::uint32_t> BlockRanges::take(BlockRange range) {
  for (const auto& [number, other] : ranges_) {
    if (other.name == range.name) {
      return Error{Code::kBusy, "range '" + range.name + "': expected that nobody has it, found that " + other.owner +
                                    " has " + blocks_text(other) + " under this name; wait until it ends"};
    }
    if (other.namespace_id == range.namespace_id && other.first < range.first + range.blocks &&
        range.first < other.first + other.blocks) {
      return Error{Code::kBusy, "range '" + range.name + "': expected that nobody has any of " + blocks_text(range) +
                                    ", found that " + other.owner + " has " + blocks_text(other) + " as '" +
                                    other.name + "'; take other blocks, or wait until it ends"};
    }
  }
  while (next_ == 0 || ranges_.contains(next_)) ++next_;
  ranges_.emplace(next_, std::move(range));
  return next_++;
}

}  // namespace tardis::nvme::broker
