// SPDX-License-Identifier: Apache-2.0
// Memory of one queue pair, and a controller led by hand.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <random>

#include "nvme/queue.h"

namespace tardis::nvme::testing {

using Random = std::mt19937_64;
inline constexpr std::uint16_t kQueueId = 5;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr std::uint64_t kSlowBuild = 10;
#else
inline constexpr std::uint64_t kSlowBuild = 1;
#endif

inline std::uint64_t campaign(std::uint64_t cases) {
  const char* const times = std::getenv("TARDIS_NVME_CAMPAIGN");
  return cases / kSlowBuild * (times == nullptr ? 1 : std::max<std::uint64_t>(1, std::strtoull(times, nullptr, 10)));
}

inline std::uint32_t after(std::uint32_t index, std::uint32_t entries) { return (index + 1) % entries; }
inline std::uint32_t ahead(std::uint32_t from, std::uint32_t to, std::uint32_t entries) {
  return (to + entries - from) % entries;
}

// Of exactly the size asked for, and full of what a new queue must not show.
struct Rings {
  Rings(std::uint32_t sq_entries, std::uint32_t cq_entries, std::uint32_t max_commands)
      : sq(std::make_unique<SubmissionEntry[]>(sq_entries)),
        cq(std::make_unique<CompletionEntry[]>(cq_entries)),
        commands(std::make_unique<CommandSlot[]>(max_commands)),
        memory{sq.get(),   cq.get(),   commands.get(), &doorbells[0], &doorbells[1],
               sq_entries, cq_entries, max_commands,   kQueueId} {
    std::memset(static_cast<void*>(cq.get()), 0xff, QueuePair::cq_bytes(cq_entries));
  }
  std::unique_ptr<SubmissionEntry[]> sq;
  std::unique_ptr<CompletionEntry[]> cq;
  std::unique_ptr<CommandSlot[]> commands;
  std::uint32_t doorbells[2] = {0, 0};
  QueueMemory memory;
};

// What a call stored to the doorbells.
struct Stores {
  std::optional<std::uint32_t> tail, head;
};
template <typename Call>
Stores stores_of(Rings& rings, const Call& call) {
  constexpr std::uint32_t kUntouched = 0xdeadbeef;
  rings.doorbells[0] = rings.doorbells[1] = kUntouched;
  call();
  const auto stored = [](std::uint32_t word) { return word == kUntouched ? std::nullopt : std::optional(word); };
  return {stored(rings.doorbells[0]), stored(rings.doorbells[1])};
}

inline SubmissionEntry entry_of(std::uint64_t tag) {
  SubmissionEntry entry{};
  entry.opcode = static_cast<std::uint8_t>(IoOpcode::kRead);
  entry.namespace_id = static_cast<std::uint32_t>(tag >> 32);
  entry.prp = {~tag, tag * 3};
  entry.set_start_block(tag);
  entry.cdw15 = static_cast<std::uint32_t>(tag);
  return entry;
}

// Posts what it is told to, where the host looks next.
struct Puppet {
  Puppet(std::uint32_t sq_entries, std::uint32_t cq_entries, std::uint32_t max_commands)
      : rings(sq_entries, cq_entries, max_commands), queue(rings.memory) {}

  void post(std::uint16_t id, std::uint32_t sq_head, std::uint16_t sq_id = kQueueId, std::uint16_t status = 0) {
    rings.cq[cq_tail] = {result, 0,  static_cast<std::uint16_t>(sq_head),
                         sq_id,  id, static_cast<std::uint16_t>(status << 1 | phase)};
    cq_tail = after(cq_tail, rings.memory.cq_entries);
    if (cq_tail == 0) phase ^= 1;
  }
  std::uint16_t submit(std::uint64_t tag) { return queue.submit(entry_of(tag), tag); }
  PollResult poll() { return queue.poll(last); }
  void restart() {
    queue.release_all();
    cq_tail = 0;
    phase = 1;
  }

  Rings rings;
  QueuePair queue;
  Completion last{};
  std::uint32_t cq_tail = 0, phase = 1, result = 0;
};

}  // namespace tardis::nvme::testing
