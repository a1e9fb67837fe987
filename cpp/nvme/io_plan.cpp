// SPDX-License-Identifier: Apache-2.0
#include "nvme/io_plan.h"

#include <algorithm>

namespace tardis::nvme {
namespace {

constexpr std::uint64_t kDword = 4;  // of a PRP offset, and of SGL data blocks where the controller asks for it
constexpr std::uint32_t kListDescriptors = kPageBytes / sizeof(SglDescriptor);
constexpr std::uint64_t kListPages = 1 + kPrpSlots;  // that a command reaches with a list of one page

// Where an iovec sequence is at.
class Walk {
 public:
  Walk(std::span<const iovec> memory, IovecCursor at) : memory_(memory), at_(at) { skip_empty(); }
  bool done() const { return at_.index == memory_.size(); }
  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(memory_[at_.index].iov_base) + at_.offset; }
  std::uint64_t length() const { return memory_[at_.index].iov_len - at_.offset; }
  void step(std::uint64_t bytes) {
    at_.offset += static_cast<std::size_t>(bytes);
    skip_empty();
  }

 private:
  void skip_empty() {
    while (at_.index < memory_.size() && at_.offset == memory_[at_.index].iov_len) {
      ++at_.index;
      at_.offset = 0;
    }
  }
  std::span<const iovec> memory_;
  IovecCursor at_;
};

// How many bytes of the ranges PRPs can name: every page but the first begins at its beginning, every one but the last
// is used to its end.
std::uint64_t prp_bytes(std::span<const PlanRange> ranges) {
  if (ranges.empty() || ranges.front().address % kDword != 0) return 0;
  // One range in one region may use the region's table, beyond what a list of one page reaches.
  const PlanRange& first = ranges.front();
  std::uint64_t in_table = first.region->table.longest(first.region->table_offset(first.address));
  in_table = std::min(in_table, first.length);
  const std::uint64_t in_list = kListPages * kPageBytes - first.address % kPageBytes;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    if (i > 0 &&
        ((ranges[i - 1].address + ranges[i - 1].length) % kPageBytes != 0 || ranges[i].address % kPageBytes != 0)) {
      break;
    }
    bytes += ranges[i].length;
  }
  return std::max(in_table, std::min(bytes, in_list));
}

std::uint64_t sgl_bytes(const PlanLimits& limits, std::span<const PlanRange> ranges) {
  if (limits.sgl == SglRule::kNone) return 0;
  const std::size_t most = std::min<std::size_t>({ranges.size(), limits.sgl_blocks, kListDescriptors});
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < most; ++i) {
    if (limits.sgl == SglRule::kDword && ranges[i].address % kDword != 0) break;
    bytes += ranges[i].length;
    if (limits.sgl == SglRule::kDword && ranges[i].length % kDword != 0) {
      bytes -= ranges[i].length % kDword;
      break;
    }
  }
  return bytes;
}

// Appends what of the walk is registered, up to `most` bytes.
std::uint64_t gather_ranges(const RegionTable& regions, Walk walk, std::uint64_t most, std::vector<PlanRange>& ranges) {
  std::uint64_t bytes = 0;
  const Region* region = nullptr;
  while (bytes < most && !walk.done()) {
    if (region == nullptr || walk.address() < region->begin || walk.address() >= region->end) {
      region = regions.find(walk.address());
      if (region == nullptr) break;
    }
    const std::uint64_t step = std::min({walk.length(), most - bytes, std::uint64_t{region->end - walk.address()}});
    const std::uint64_t address = region->address_of(walk.address());
    if (!ranges.empty() && ranges.back().address + ranges.back().length == address && ranges.back().region == region) {
      ranges.back().length += step;
    } else {
      if (ranges.size() == kListPages) break;
      ranges.push_back({address, step, region});
    }
    bytes += step;
    walk.step(step);
  }
  return bytes;
}

void keep(std::vector<PlanRange>& ranges, std::uint64_t bytes) {
  std::size_t count = 0;
  for (PlanRange& range : ranges) {
    if (bytes == 0) break;
    range.length = std::min(range.length, bytes);
    bytes -= range.length;
    ++count;
  }
  ranges.resize(count);
}

// How far to bounce: to the next piece that is registered and worth a command of its own.
CommandPlan plan_bounce(const PlanLimits& limits, const RegionTable& regions, Walk walk, std::uint64_t most) {
  most = std::min(most, limits.bounce_bytes);
  std::uint64_t bytes = 0;
  while (bytes < most) {
    const Region* region = regions.find(walk.address());
    const bool copied = region == nullptr || region->provider->host_accessible();
    const bool worth_a_command = region != nullptr && walk.address() % kDword == 0 &&
                                 std::min(walk.length(), std::uint64_t{region->end - walk.address()}) >= kPageBytes;
    if (bytes > 0 && bytes % limits.block_bytes == 0 && (!copied || worth_a_command)) break;
    if (!copied) return {};
    const std::uint64_t step = std::min(walk.length(), most - bytes);
    bytes += step;
    walk.step(step);
  }
  return {CommandPlan::Way::kBounce, bytes};
}

}  // namespace

PlanLimits plan_limits(const ControllerInfo& controller, const NamespaceInfo& space, std::uint64_t max_command_bytes,
                       bool split_at_boundary, std::uint64_t bounce_bytes) {
  PlanLimits limits;
  limits.block_bytes = space.block_bytes;
  limits.max_bytes = std::min(
      {controller.max_transfer_bytes, max_command_bytes, std::uint64_t{kMaxBlocksPerCommand} * space.block_bytes});
  limits.max_bytes -= limits.max_bytes % space.block_bytes;
  if (split_at_boundary) limits.boundary_bytes = std::uint64_t{space.boundary_blocks} * space.block_bytes;
  limits.sgl = controller.sgl;
  limits.sgl_blocks = controller.sgl_blocks;
  limits.bounce_bytes = bounce_bytes;
  return limits;
}

CommandPlan plan_command(const PlanLimits& limits, const RegionTable& regions, std::uint64_t offset,
                         std::span<const iovec> memory, IovecCursor at, std::uint64_t left,
                         std::vector<PlanRange>& ranges) {
  ranges.clear();
  std::uint64_t most = std::min(left, limits.max_bytes);
  if (limits.boundary_bytes != 0) most = std::min(most, limits.boundary_bytes - offset % limits.boundary_bytes);
  const Walk walk(memory, at);
  if (!regions.regions().empty()) gather_ranges(regions, walk, most, ranges);

  const auto whole = [&limits](std::uint64_t bytes) { return bytes - bytes % limits.block_bytes; };
  const std::uint64_t by_prp = whole(prp_bytes(ranges)), by_sgl = whole(sgl_bytes(limits, ranges));
  const std::uint64_t bytes = std::max(by_prp, by_sgl);
  const bool host = ranges.empty() || ranges.front().region->provider->host_accessible();
  // Less than a page is copied with what follows, rather than sent alone.
  if (bytes == 0 || (host && bytes < kPageBytes && bytes < most)) {
    ranges.clear();
    return plan_bounce(limits, regions, walk, most);
  }
  keep(ranges, bytes);
  // Up to two pages PRPs need no memory beside the command; beyond, one descriptor is less to fetch than a list.
  const bool two_pages = ranges.front().address % kPageBytes + bytes <= 2 * kPageBytes;
  return {by_prp == bytes && (by_sgl < bytes || two_pages) ? CommandPlan::Way::kPrp : CommandPlan::Way::kSgl, bytes};
}

PrpStatus point_by_prp(std::span<const PlanRange> ranges, const PrpList& list, PrpPair& pointer) {
  const PlanRange& first = ranges.front();
  if (ranges.size() == 1) {
    const std::uint64_t offset = first.region->table_offset(first.address);
    if (first.length <= first.region->table.longest(offset)) {
      return first.region->table.describe(offset, first.length, pointer);
    }
  }
  // Pages are asked for in ascending order.
  std::size_t range = 0;
  std::uint64_t pages_before = 0;
  std::uint64_t length = 0;
  for (const PlanRange& each : ranges) length += each.length;
  const auto page_address = [&](std::uint64_t page) {
    const auto pages_of = [&](std::size_t i) { return prp_pages(ranges[i].address % kPageBytes, ranges[i].length); };
    while (page - pages_before >= pages_of(range)) pages_before += pages_of(range++);
    return ranges[range].address - ranges[range].address % kPageBytes + (page - pages_before) * kPageBytes;
  };
  return build_prp(page_address, first.address % kPageBytes, length, &list, 1, pointer);
}

SglStatus point_by_sgl(const PlanLimits& limits, std::span<const PlanRange> ranges, const PrpList& list,
                       SglDescriptor& descriptor) {
  SglRange blocks[kListDescriptors];
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    blocks[i] = {ranges[i].address, ranges[i].length};
    length += ranges[i].length;
  }
  const SglMemory memory{reinterpret_cast<SglDescriptor*>(list.words), list.bus, kListDescriptors};
  const SglRules rules{limits.sgl == SglRule::kDword, limits.sgl_blocks};
  return build_sgl(rules, blocks, static_cast<std::uint32_t>(ranges.size()), length, &memory, 1, descriptor);
}

}  // namespace tardis::nvme
