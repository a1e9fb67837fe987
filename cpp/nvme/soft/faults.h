// SPDX-License-Identifier: Apache-2.0
// What a software controller does wrong on purpose.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <random>
#include <vector>

#include "nvme/spec.h"

namespace tardis::nvme {

enum class FaultKind : std::uint8_t {
  kLostCompletion,  // the command is executed, its completion never posted
  kLateCompletion,  // posted `delay` later
  kDuplicate,       // posted twice, the second time `delay` later
  kReorder,         // completions are gathered, `group` of them or for `delay`, and posted in random order
  kWrongCommandId,  // posted under a command id that is not outstanding; its own never
  kStatus,          // posted with `status`, not executed
  kMediaError,      // Unrecovered Read Error or Write Fault, not executed
  kStuckSqHead,     // this and all later completions of the queue report an old SQ head, while it exists
  kSlow,            // executed `delay` later, and no other command of its queue meanwhile
  kFatal,           // CSTS.CFS; nothing is served until a reset
  kRemovedAllOnes,  // gone: registers read as all ones, nothing is served any more
  kRemovedZeros,    // gone, as QEMU does it: registers read as zero
};
inline constexpr std::size_t kFaultKinds = 12;

struct FaultRule {
  FaultKind kind = FaultKind::kLostCompletion;

  // The commands that it hits: all of these must hold.
  std::optional<std::uint16_t> queue;  // of the submission queue; 0: admin
  std::optional<std::uint8_t> opcode;
  std::uint64_t first_block = 0, last_block = ~std::uint64_t{0};  // if narrowed: I/O commands that touch one of these
  std::uint64_t skip = 0;                                         // so many such commands go unharmed first
  double probability = 1;
  std::uint64_t count = 1;  // so many are hit; 0: without end

  std::chrono::nanoseconds delay{0};
  // With kLateCompletion or kLostCompletion: the data moves after `delay` too, to the addresses that the command named;
  // or, if that comes first, when its queue is deleted or the controller is reset.
  bool late_data = false;
  std::uint16_t status = kScInternal;  // SCT << 8 | SC
  std::uint32_t group = 4;
};

// Rules may be added and removed while controllers run. Thread-safe.
class FaultPlan {
 public:
  explicit FaultPlan(std::uint64_t seed = 1) : random_(seed) {}

  std::uint64_t add(const FaultRule& rule);  // its id
  void remove(std::uint64_t id);
  void clear();
  // How often a rule has hit; counted for removed rules too.
  std::uint64_t injected(FaultKind kind) const { return injected_[static_cast<std::size_t>(kind)].load(); }
  std::uint64_t injected() const;

  // The controller's side. The first rule that hits this command.
  bool empty() const { return rules_present_.load(std::memory_order_relaxed) == 0; }
  std::optional<FaultRule> match(std::uint16_t queue, const SubmissionEntry& command);
  std::uint32_t random();

 private:
  struct Entry {
    std::uint64_t id;
    FaultRule rule;
    std::uint64_t seen, hit;
  };
  mutable std::mutex mutex_;
  std::mt19937_64 random_;
  std::vector<Entry> rules_;
  std::uint64_t next_id_ = 1;
  std::atomic<std::size_t> rules_present_{0};
  std::array<std::atomic<std::uint64_t>, kFaultKinds> injected_{};
};

}  // namespace tardis::nvme
