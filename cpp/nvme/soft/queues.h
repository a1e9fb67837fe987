// SPDX-License-Identifier: Apache-2.0
// The rings of a software controller, seen from its side. All of it under the turn of the worker that serves them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "nvme/soft/registers.h"
#include "nvme/soft/violations.h"
#include "nvme/spec.h"

namespace tardis::nvme {

// What a look at a doorbell finds.
enum class Doorbell : std::uint8_t { kSame, kMoved, kWrong };

struct SoftCompletionQueue {
  std::uint16_t id = 0;
  std::uint32_t entries = 0;
  std::uint64_t address = 0;
  std::uint32_t* doorbell = nullptr;
  CompletionEntry* ring = nullptr;
  std::uint32_t head = 0, tail = 0;
  std::uint32_t refused_head = kNone;  // a doorbell value that was wrong, reported once
  bool phase = true;
  bool surplus = false;  // since it was empty, entries were posted for which a client need not have left room
  std::uint32_t submission_queues = 0;
  std::deque<CompletionEntry> waiting;  // for room

  static constexpr std::uint32_t kNone = 0xffffffff;

  // A new one that does is not of zeros: the client will take what it holds for completions.
  bool looks_posted() const {
    return std::any_of(ring, ring + entries, [](const CompletionEntry& entry) { return entry.phase(); });
  }
  bool full() const { return (tail + 1 == entries ? 0 : tail + 1) == head; }
  // Takes over the client's head. A value that is wrong is found so once, and passed over.
  Doorbell refresh(ViolationLog& log);
  // `accounted`: a client that keeps the rules has left room for it.
  void post(const CompletionEntry& entry, bool accounted, ViolationLog& log);
  // Posts what waited, as far as there is room. True if something was posted.
  bool drain();

 private:
  void put(CompletionEntry entry);
};

struct SoftSubmissionQueue {
  SoftSubmissionQueue(std::uint16_t queue, SoftCompletionQueue& to) : id(queue), cq(to), used_ids(65536 / 64) {}

  const std::uint16_t id;
  SoftCompletionQueue& cq;
  std::uint32_t entries = 0;
  std::uint64_t address = 0;
  std::uint32_t* doorbell = nullptr;
  const SubmissionEntry* ring = nullptr;
  std::uint32_t head = 0, tail = 0;
  std::uint32_t reported_head = 0;  // the last that a completion carried: what the client knows to be free
  std::uint32_t refused_tail = kNone;
  bool stuck_head = false;
  bool deleting = false;  // fetches nothing more
  bool silent = false;    // and posts nothing more
  std::uint64_t stalled_until = 0;
  std::uint32_t outstanding = 0;  // command ids in use
  std::uint32_t in_drive = 0;     // commands that a medium's threads have
  std::vector<std::uint64_t> used_ids;

  static constexpr std::uint32_t kNone = 0xffffffff;

  bool id_used(std::uint16_t id) const { return used_ids[id / 64] >> (id % 64) & 1; }
  void use_id(std::uint16_t id) {
    used_ids[id / 64] |= std::uint64_t{1} << (id % 64);
    ++outstanding;
  }
  void free_id(std::uint16_t id) {
    used_ids[id / 64] &= ~(std::uint64_t{1} << (id % 64));
    --outstanding;
  }
  // Takes over the client's tail, as SoftCompletionQueue::refresh() does its head.
  Doorbell refresh(ViolationLog& log);
};

}  // namespace tardis::nvme
