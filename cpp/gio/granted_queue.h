// SPDX-License-Identifier: Apache-2.0
// A queue pair as its owner gets it: rings, doorbells, bounce slots and the data pointers of those. For host and device
// code (C++17).
#pragma once

#include <cstddef>
#include <cstdint>

#include "gio/direct_landing.h"
#include "nvme/prp.h"
#include "nvme/queue.h"
#include "nvme/sgl.h"
#include "nvme/spec.h"

namespace tardis::gio {

// Names any range of the registered region to the controller.
struct DataPointers {
  nvme::PrpTable prp;
  nvme::SglTable sgl;
  bool use_sgl;

  TARDIS_HD bool describe(std::uint64_t offset, std::uint64_t length, nvme::SubmissionEntry& entry) const {
    if (use_sgl) {
      entry.set_data_pointer(nvme::DataPointer::kSgl);
      return sgl.describe(offset, length, entry.sgl) == nvme::SglStatus::kOk;
    }
    entry.set_data_pointer(nvme::DataPointer::kPrp);
    return prp.describe(offset, length, entry.prp) == nvme::PrpStatus::kOk;
  }
};

// What a ring keeps from one start to the next, so that the two ends of the queue pair agree.
struct RingState {
  std::uint32_t tail, sq_head, cq_head;
  std::uint32_t phase;
  std::uint32_t submitted;  // modulo 2^32
  std::uint32_t down;       // the RingError that made it useless; 0: it is not
};
static_assert(sizeof(RingState) == 24);

struct GrantedQueue {
  nvme::SubmissionEntry* sq;
  nvme::CompletionEntry* cq;
  volatile std::uint32_t* sq_tail;  // doorbells
  volatile std::uint32_t* cq_head;
  std::uint32_t entries;   // of each ring, 2 or more, any number
  std::uint32_t commands;  // in flight at most, each with a bounce slot: below `entries`
  std::uint16_t id;

  std::uint32_t namespace_id;
  std::uint32_t block_shift;
  std::uint64_t blocks;      // of the namespace
  std::uint64_t most_bytes;  // of a command

  std::byte* bounce;            // `commands` slots
  std::uint64_t bounce_offset;  // of the first one in the registered region
  std::uint32_t slot_bytes;
  DataPointers pointers;
  DirectLanding direct;  // regions: all commands land there, or are refused; none: they use bounce slots

  RingState* state;     // the owner's memory: start_queue()
  std::uint16_t* uses;  // `commands` of them: which identifier a slot has next
};

// No ring sees the bytes of such commands: their digests are compared behind it (verify_kernel.h), or not at all.
inline bool some_land_directly(const GrantedQueue* queues, std::uint32_t rings) {
  for (std::uint32_t i = 0; i < rings; ++i) {
    if (queues[i].direct.count != 0) return true;
  }
  return false;
}

// A queue pair that is new, to its owner: the first pass over a zeroed completion queue has phase 1.
TARDIS_HD inline void start_queue(const GrantedQueue& queue) {
  *queue.state = {0, 0, 0, 1, 0, 0};
  for (std::uint32_t i = 0; i < queue.commands; ++i) queue.uses[i] = static_cast<std::uint16_t>(i);
}

}  // namespace tardis::gio
