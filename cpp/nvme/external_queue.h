// SPDX-License-Identifier: Apache-2.0
// A queue pair whose owner is not the driver: it writes and reads the rings and stores to the doorbells itself, from a
// GPU perhaps. The driver makes the queue pair, and ends it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nvme/memory.h"
#include "nvme/queue.h"

namespace tardis::nvme {

// How rings of `entries` entries each lie in memory: the completion queue, then the submission queue from the beginning
// of a page on.
struct ExternalRings {
  static constexpr std::size_t whole_pages(std::size_t bytes) {
    return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  }
  static constexpr std::size_t sq_offset(std::uint32_t entries) { return whole_pages(QueuePair::cq_bytes(entries)); }
  static constexpr std::size_t bytes(std::uint32_t entries) {
    return sq_offset(entries) + whole_pages(QueuePair::sq_bytes(entries));
  }
  std::size_t mapped_bytes() const { return bytes(entries) + more_bytes; }

  void* memory = nullptr;  // mapped_bytes(), page-aligned, and in place until close_external() has returned
  std::uint32_t entries = 0;
  std::size_t more_bytes = 0;  // whole pages behind the rings that are mapped with them
};

struct ExternalQueue {
  std::uint16_t id = 0;
  std::uint32_t entries = 0;
  SubmissionEntry* sq = nullptr;
  CompletionEntry* cq = nullptr;
  volatile std::uint32_t* sq_tail = nullptr;  // doorbells, in the register window
  volatile std::uint32_t* cq_head = nullptr;
  std::uint64_t address = 0;  // of the memory, for the controller
};

}  // namespace tardis::nvme
