// SPDX-License-Identifier: Apache-2.0
// Cuts the memory of a request into commands: how much one command moves, and how it names its memory.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <span>
#include <vector>

#include "block/iovec_range.h"
#include "nvme/identify.h"
#include "nvme/registered_memory.h"
#include "nvme/sgl.h"

namespace tardis::nvme {

// What bounds a command.
struct PlanLimits {
  std::uint32_t block_bytes = 0;
  std::uint64_t max_bytes = 0;       // whole blocks
  std::uint64_t boundary_bytes = 0;  // not to be crossed; 0: none
  SglRule sgl = SglRule::kNone;
  std::uint32_t sgl_blocks = 1;    // most data blocks of a command
  std::uint64_t bounce_bytes = 0;  // of a bounce buffer, whole blocks
};

// Of commands for a namespace.
PlanLimits plan_limits(const ControllerInfo& controller, const NamespaceInfo& space, std::uint64_t max_command_bytes,
                       bool split_at_boundary, std::uint64_t bounce_bytes);

// Memory that is contiguous for the controller.
struct PlanRange {
  std::uint64_t address = 0, length = 0;
  const Region* region = nullptr;  // of its first byte
};

struct CommandPlan {
  enum class Way : std::uint8_t { kPrp, kSgl, kBounce, kImpossible };
  Way way = Way::kImpossible;
  std::uint64_t bytes = 0;  // whole blocks
};

// The next command of a request, which begins at byte `offset` of the namespace and at `at` of `memory`, with `left`
// bytes (whole blocks) to go. `ranges`: what it moves, unless it bounces. kImpossible: memory that the CPU cannot reach
// and a data pointer cannot name.
CommandPlan plan_command(const PlanLimits& limits, const RegionTable& regions, std::uint64_t offset,
                         std::span<const iovec> memory, IovecCursor at, std::uint64_t left,
                         std::vector<PlanRange>& ranges);

// PRPs for the ranges of a plan: from the table of their region if they are one range, else a list in `list`.
PrpStatus point_by_prp(std::span<const PlanRange> ranges, const PrpList& list, PrpPair& pointer);
SglStatus point_by_sgl(const PlanLimits& limits, std::span<const PlanRange> ranges, const PrpList& list,
                       SglDescriptor& descriptor);

}  // namespace tardis::nvme
