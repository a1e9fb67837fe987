// SPDX-License-Identifier: Apache-2.0
// One command inside a software controller, from fetch to completion.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "nvme/soft/data_pointer.h"
#include "nvme/soft/dma_space.h"
#include "nvme/soft/faults.h"
#include "nvme/soft/medium.h"
#include "nvme/spec.h"

namespace tardis::nvme {

class MediumRunner;
class SoftWorker;
struct SoftSubmissionQueue;

// A namespace as the controller keeps it.
struct SoftNamespaceState {
  Medium* medium = nullptr;        // none: inactive
  MediumRunner* runner = nullptr;  // none: the medium is immediate
  std::uint32_t block_shift = 0;
  std::uint64_t blocks = 0;
  std::uint16_t optimal_boundary = 0;
};

// What a command waits for while it is held back.
enum class HeldFor : std::uint8_t {
  kStart,       // its data has not moved
  kCompletion,  // done, but a slower drive would not be
  kPost,        // its completion is late
  kGathered,    // its completion waits for others, to be mixed with them
  kCopy,        // not a command: the second completion of one
};

struct SoftCommand {
  SoftWorker* worker = nullptr;
  SoftSubmissionQueue* sq = nullptr;
  SubmissionEntry entry{};
  std::uint16_t status = kScSuccess;
  std::uint32_t result = 0;
  bool prepared = false;  // pieces and requests are set
  std::optional<FaultRule> fault;
  HeldFor held_for = HeldFor::kStart;
  std::uint64_t due = 0;

  std::vector<DmaPiece> pieces;
  struct Part {
    DmaSpace::Range* range;  // null: a bit bucket
    std::uint64_t offset;
    std::size_t bytes;
  };
  std::vector<Part> parts;
  std::vector<iovec> memory;
  std::vector<std::byte> bounce;
  bool bounced = false;  // between the medium and memory that threads cannot touch
  bool pinned = false;

  // With memory that engines move (worker_copies.cpp).
  bool by_engine = false;
  bool copied = false;            // their part is done
  bool in_staging = false;        // `host` is of the staging memory
  std::byte* host = nullptr;      // the other end of the copies, of the medium itself or staging memory
  std::uint32_t copies_left = 0;  // batches that copies of it are in
  bool copy_failed = false;

  std::vector<MediumRequest> requests;
  std::vector<const SoftNamespaceState*> targets;  // of the requests
  std::atomic<std::uint32_t> running{0};           // requests
  std::atomic<int> error{0};
  std::atomic<std::uint64_t> not_before{0};

  void reset(SoftWorker& by, SoftSubmissionQueue& from, const SubmissionEntry& fetched) {
    worker = &by;
    sq = &from;
    entry = fetched;
    status = kScSuccess;
    result = 0;
    prepared = bounced = pinned = false;
    by_engine = copied = in_staging = copy_failed = false;
    host = nullptr;
    copies_left = 0;
    fault.reset();
    held_for = HeldFor::kStart;
    pieces.clear();
    parts.clear();
    memory.clear();
    requests.clear();
    targets.clear();
    error.store(0, std::memory_order_relaxed);
    not_before.store(0, std::memory_order_relaxed);
  }
};

}  // namespace tardis::nvme
