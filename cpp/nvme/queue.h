// SPDX-License-Identifier: Apache-2.0
// One NVMe queue pair: a submission queue, a completion queue and the commands in between (NVM Express Base 2.2, 3.3.1
// and 4.2). For host and device code (C++17).
#pragma once

#include <cstddef>
#include <cstdint>

#include "nvme/ordering.h"
#include "nvme/spec.h"

namespace tardis::nvme {

// What a controller did that it must not do. The queue is suspect from then on.
enum class QueueFault : std::uint8_t {
  kNone,
  kWrongQueue,      // a completion names another submission queue
  kSqHeadRange,     // it reports a submission queue head beyond the queue
  kSqHeadMoved,     // it reports a head outside what it was given
  kUnknownCommand,  // it names a command identifier that this queue never uses
  kNotOutstanding,  // it names a command that has completed already, or was never submitted
  kNotPublished,    // it names a command that the controller was not given yet
  kSqHeadBehind,    // it names a command that lies beyond the head that it reports: one that was not read yet
  kDeclared,        // by the owner, with mark_suspect()
};

TARDIS_HD constexpr const char* fault_text(QueueFault fault) {
  switch (fault) {
    case QueueFault::kNone:
      return "no fault";
    case QueueFault::kWrongQueue:
      return "a completion names another submission queue";
    case QueueFault::kSqHeadRange:
      return "a completion reports a submission queue head beyond the queue";
    case QueueFault::kSqHeadMoved:
      return "a completion reports a submission queue head outside what was submitted";
    case QueueFault::kUnknownCommand:
      return "a completion names a command identifier that is never used";
    case QueueFault::kNotOutstanding:
      return "a completion names a command that is not outstanding";
    case QueueFault::kNotPublished:
      return "a completion names a command that was not given to the controller yet";
    case QueueFault::kSqHeadBehind:
      return "a completion names a command beyond the submission queue head that it reports";
    case QueueFault::kDeclared:
      return "declared suspect by its owner";
  }
  return "unknown fault";
}

// One per command that may be outstanding; owned by the queue.
struct CommandSlot {
  enum class State : std::uint8_t { kFree, kPrepared, kPublished, kQuarantined };
  std::uint64_t tag;
  std::uint32_t number;          // how many were submitted before it, modulo 2^32
  std::uint16_t id;              // the identifier in use, or the next to be
  std::uint16_t next, previous;  // in the list of its state
  State state;
};
static_assert(sizeof(CommandSlot) == 24);

// A doorbell in memory, which a controller looks at while it works (5.2.5), and the value beyond which it wants to be
// told by the doorbell itself.
struct ShadowDoorbell {
  volatile std::uint32_t* value;
  volatile std::uint32_t* event;  // written by the controller
};

// Owned by the caller, and in place as long as the queue pair is used.
struct QueueMemory {
  SubmissionEntry* sq;              // sq_bytes(), where the controller reads
  CompletionEntry* cq;              // cq_bytes(), where the controller writes
  CommandSlot* commands;            // command_bytes(), private
  volatile std::uint32_t* sq_tail;  // doorbells
  volatile std::uint32_t* cq_head;
  std::uint32_t sq_entries, cq_entries;  // 2 to 65536 each, any number
  std::uint32_t max_commands;            // outstanding at once: 1 to cq_entries - 1, so that the queue cannot overflow
  std::uint16_t sq_id;                   // that completions name
  ShadowDoorbell sq_tail_shadow{}, cq_head_shadow{};  // null: the controller reads none. Used by host threads alone
};

struct Completion {
  std::uint64_t tag;
  std::uint32_t result;  // DW0
  std::uint16_t id;
  CommandStatus status;
  bool quarantined;  // its time was over: nobody waits, but its memory is free again now
};

// One that has been submitted and has not completed.
struct OutstandingCommand {
  std::uint64_t tag;
  std::uint16_t id;
  bool published;  // the controller was given it
  bool quarantined;
};

enum class PollResult : std::uint8_t { kNothing, kCompletion, kFault };

// Used by one owner at a time: a host thread, or one thread of a GPU. A plain value: a copy hands the queue over, and
// of the two only one may be used. Nothing that a controller writes can make it index outside its memory, complete a
// command that is not outstanding or hand out a tag that was not submitted.
class QueuePair {
 public:
  TARDIS_HD static constexpr std::size_t sq_bytes(std::uint32_t entries) {
    return std::size_t{entries} * sizeof(SubmissionEntry);
  }
  TARDIS_HD static constexpr std::size_t cq_bytes(std::uint32_t entries) {
    return std::size_t{entries} * sizeof(CompletionEntry);
  }
  TARDIS_HD static constexpr std::size_t command_bytes(std::uint32_t max_commands) {
    return std::size_t{max_commands} * sizeof(CommandSlot);
  }
  // Sizes in range, no null pointer, entries aligned to their size.
  TARDIS_HD static bool valid(const QueueMemory& memory);

  // Of memory that is valid(). Zeroes the completion queue, so it precedes the command that creates the queues.
  TARDIS_HD explicit QueuePair(const QueueMemory& memory);

  // ---- submission
  // False without room, which only completions bring: waiting for it needs a deadline.
  TARDIS_HD bool can_submit() const;
  // Copies the entry into the ring under a new command identifier, which it returns; the controller does not see it
  // before ring(). kNoCommandId if !can_submit(). `tag` comes back with the completion.
  TARDIS_HD std::uint16_t submit(const SubmissionEntry& entry, std::uint64_t tag);
  // Gives the controller all that was submitted since the last call, with one store to the tail doorbell, or to its
  // shadow if that does; acknowledges
  // first if completions might not find room otherwise. False, and no store, if there is nothing to give or the queue
  // is suspect.
  TARDIS_HD bool ring();

  // ---- completion
  // Takes the next entry of the completion queue if there is one. kFault: the entry was not to be believed; it was
  // skipped and the command that it names, if any, is as outstanding as before. `out` holds what it said, with tag 0.
  TARDIS_HD PollResult poll(Completion& out);
  // Polls until there is an entry or now() >= deadline, once at least. kNothing: the deadline passed. `now` may yield.
  template <typename Clock>
  TARDIS_HD PollResult wait(Completion& out, std::uint64_t deadline, Clock&& now);
  // Gives the controller the room of all entries taken, with one store to the head doorbell. False, and no store, if
  // none were taken since the last call.
  TARDIS_HD bool acknowledge();

  // ---- commands that take too long
  // The oldest that is not quarantined; false if there is none.
  TARDIS_HD bool oldest(OutstandingCommand& out) const;
  // visit(OutstandingCommand): those in quarantine, then the others from the oldest to the newest. It may quarantine
  // the command that it is shown.
  template <typename Visit>
  TARDIS_HD void for_each_outstanding(Visit&& visit) const;
  // Gives up waiting for it. Its identifier and its room stay taken until its late completion, which poll() marks, or
  // release_all(). False if it is not outstanding, not published or in quarantine already.
  TARDIS_HD bool quarantine(std::uint16_t id);
  // Once the queue was deleted or the controller reset: forgets all commands, whose memory is free again, and starts
  // over as a new queue. Identifiers go on where they were, so a completion of before is not taken for one of after.
  TARDIS_HD void release_all();

  // ---- state
  TARDIS_HD std::uint32_t outstanding() const { return live_.size + quarantined_.size; }  // with those not published
  TARDIS_HD std::uint32_t quarantined() const { return quarantined_.size; }
  // Then nothing more is submitted until release_all(); what was published may still complete.
  TARDIS_HD bool suspect() const { return fault_ != QueueFault::kNone; }
  TARDIS_HD void mark_suspect() { blame(QueueFault::kDeclared, CompletionEntry{}); }
  TARDIS_HD QueueFault fault() const { return fault_; }                       // the first since the queue is new
  TARDIS_HD const CompletionEntry& fault_entry() const { return evidence_; }  // that showed it
  TARDIS_HD const QueueMemory& memory() const { return memory_; }
  // Which of the commands [0, max_commands) an identifier stands for: for tables of the owner beside this one.
  TARDIS_HD std::uint32_t index_of(std::uint16_t id) const { return id & index_mask_; }

 private:
  static constexpr std::uint16_t kNil = 0xffff;  // no index: there are at most 65535 commands
  // An entry in as few stores as there can be, for the ring may be across a bus: field by field it takes a dozen.
  struct alignas(SubmissionEntry) [[gnu::may_alias]] EntryWords {
    std::uint64_t words[8];
  };
  struct List {  // of commands, linked by index; first in, first out
    std::uint32_t size;
    std::uint16_t first, last;
  };

  TARDIS_HD static std::uint32_t following(std::uint32_t index, std::uint32_t entries) {
    return index + 1 == entries ? 0 : index + 1;
  }
  TARDIS_HD static std::uint32_t distance(std::uint32_t from, std::uint32_t to, std::uint32_t entries) {
    return to >= from ? to - from : to + entries - from;
  }
  TARDIS_HD static OutstandingCommand describe(const CommandSlot& slot) {
    return {slot.tag, slot.id, slot.state != CommandSlot::State::kPrepared,
            slot.state == CommandSlot::State::kQuarantined};
  }

  // Tells the controller that a doorbell went from one value to another.
  TARDIS_HD static void tell(volatile std::uint32_t* doorbell, const ShadowDoorbell& shadow, std::uint32_t before,
                             std::uint32_t now);
  TARDIS_HD void start();
  TARDIS_HD void append(List& list, std::uint16_t index, CommandSlot::State state);
  TARDIS_HD void remove(List& list, std::uint16_t index);
  TARDIS_HD void retire(std::uint16_t index);
  TARDIS_HD QueueFault judge(const CompletionEntry& entry) const;
  TARDIS_HD void blame(QueueFault fault, const CompletionEntry& entry);
  TARDIS_HD bool sq_full() const { return following(tail_, memory_.sq_entries) == sq_head_; }

  QueueMemory memory_;
  std::uint32_t index_mask_ = 0;      // the bits of an identifier that are its index; those above count its uses
  std::uint32_t tail_, rung_;         // where the next entry goes; what the controller was told
  std::uint32_t submitted_;           // modulo 2^32
  std::uint32_t sq_head_;             // what it has read, as far as it said; entries from here on are not overwritten
  std::uint32_t cq_head_, returned_;  // the next entry to take; what the controller was told
  std::uint32_t phase_;               // of an entry that is new
  List free_, live_, quarantined_;
  QueueFault fault_;
  CompletionEntry evidence_;
};

TARDIS_HD inline bool QueuePair::valid(const QueueMemory& memory) {
  const auto aligned = [](const void* pointer, std::uintptr_t bytes) {
    return pointer != nullptr && reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
  };
  const auto size = [](std::uint32_t entries) { return entries >= kMinQueueEntries && entries <= kMaxQueueEntries; };
  return size(memory.sq_entries) && size(memory.cq_entries) && memory.max_commands >= 1 &&
         memory.max_commands < memory.cq_entries && aligned(memory.sq, alignof(SubmissionEntry)) &&
         aligned(memory.cq, alignof(CompletionEntry)) && aligned(memory.commands, alignof(CommandSlot)) &&
         aligned(const_cast<const std::uint32_t*>(memory.sq_tail), 4) &&
         aligned(const_cast<const std::uint32_t*>(memory.cq_head), 4);
}

TARDIS_HD inline QueuePair::QueuePair(const QueueMemory& memory) : memory_(memory) {
  while (index_mask_ < memory.max_commands - 1) index_mask_ = index_mask_ << 1 | 1;
  for (std::uint32_t i = 0; i < memory.max_commands; ++i) {
    memory.commands[i] = {0, 0, static_cast<std::uint16_t>(i), kNil, kNil, CommandSlot::State::kFree};
  }
  start();
}

TARDIS_HD inline void QueuePair::start() {
#if !defined(__CUDA_ARCH__)
  const ShadowDoorbell shadows[] = {memory_.sq_tail_shadow, memory_.cq_head_shadow};
  for (const ShadowDoorbell& shadow : shadows) {
    if (shadow.value == nullptr) continue;
    store_shared(shadow.value, 0);
    store_shared(shadow.event, 0);
  }
#endif
  auto* const words = reinterpret_cast<volatile std::uint32_t*>(memory_.cq);
  for (std::uint32_t i = 0; i < memory_.cq_entries * (sizeof(CompletionEntry) / 4); ++i) store_shared(words + i, 0);
  tail_ = rung_ = submitted_ = sq_head_ = cq_head_ = returned_ = 0;
  phase_ = 1;  // the first pass over a zeroed queue (4.2.4)
  free_ = live_ = quarantined_ = {0, kNil, kNil};
  for (std::uint32_t i = 0; i < memory_.max_commands; ++i) {
    append(free_, static_cast<std::uint16_t>(i), CommandSlot::State::kFree);
  }
  fault_ = QueueFault::kNone;
  evidence_ = {};
}

TARDIS_HD inline void QueuePair::append(List& list, std::uint16_t index, CommandSlot::State state) {
  CommandSlot& slot = memory_.commands[index];
  slot.state = state;
  slot.next = kNil;
  slot.previous = list.last;
  (list.last == kNil ? list.first : memory_.commands[list.last].next) = index;
  list.last = index;
  ++list.size;
}

TARDIS_HD inline void QueuePair::remove(List& list, std::uint16_t index) {
  const CommandSlot& slot = memory_.commands[index];
  (slot.previous == kNil ? list.first : memory_.commands[slot.previous].next) = slot.next;
  (slot.next == kNil ? list.last : memory_.commands[slot.next].previous) = slot.previous;
  --list.size;
}

// The identifier's next use has another one with the same index, so that a second completion of this use is noticed.
TARDIS_HD inline void QueuePair::retire(std::uint16_t index) {
  std::uint16_t& id = memory_.commands[index].id;
  do {
    id = static_cast<std::uint16_t>(id + index_mask_ + 1);
  } while (id == kNoCommandId);
}

TARDIS_HD inline bool QueuePair::can_submit() const { return !suspect() && free_.size != 0 && !sq_full(); }

TARDIS_HD inline std::uint16_t QueuePair::submit(const SubmissionEntry& entry, std::uint64_t tag) {
  if (!can_submit()) return kNoCommandId;
  const std::uint16_t index = free_.first;  // the one that has been free for longest
  CommandSlot& slot = memory_.commands[index];
  remove(free_, index);
  append(live_, index, CommandSlot::State::kPrepared);
  slot.tag = tag;
  slot.number = submitted_++;
  EntryWords copy = *reinterpret_cast<const EntryWords*>(&entry);
  copy.words[0] = (copy.words[0] & ~std::uint64_t{0xffff0000}) | std::uint64_t{slot.id} << 16;
  *reinterpret_cast<EntryWords*>(memory_.sq + tail_) = copy;
  tail_ = following(tail_, memory_.sq_entries);
  return slot.id;
}

TARDIS_HD inline bool QueuePair::ring() {
  if (tail_ == rung_ || suspect()) return false;
  std::uint16_t index = live_.last;  // the newest, which none of those before may overtake
  for (std::uint32_t n = distance(rung_, tail_, memory_.sq_entries); n > 0; --n) {
    memory_.commands[index].state = CommandSlot::State::kPublished;
    index = memory_.commands[index].previous;
  }
  const std::uint32_t taken = distance(returned_, cq_head_, memory_.cq_entries);
  if (outstanding() + taken >= memory_.cq_entries) acknowledge();
  const std::uint32_t before = rung_;
  rung_ = tail_;
  tell(memory_.sq_tail, memory_.sq_tail_shadow, before, rung_);
  return true;
}

TARDIS_HD inline void QueuePair::tell(volatile std::uint32_t* doorbell, const ShadowDoorbell& shadow,
                                      std::uint32_t before, std::uint32_t now) {
#if !defined(__CUDA_ARCH__)
  if (shadow.value != nullptr) {
    store_shadow(shadow.value, now);
    // All modulo 2^16, as the event is.
    const std::uint32_t event = load_shared(shadow.event);
    if (static_cast<std::uint16_t>(now - event - 1) >= static_cast<std::uint16_t>(now - before)) return;
  }
#endif
  store_doorbell(doorbell, now);
}

TARDIS_HD inline QueueFault QueuePair::judge(const CompletionEntry& entry) const {
  if (entry.sq_id != memory_.sq_id) return QueueFault::kWrongQueue;
  if (entry.sq_head >= memory_.sq_entries) return QueueFault::kSqHeadRange;
  if (distance(sq_head_, entry.sq_head, memory_.sq_entries) > distance(sq_head_, rung_, memory_.sq_entries)) {
    return QueueFault::kSqHeadMoved;
  }
  const std::uint32_t index = index_of(entry.command_id);
  if (index >= memory_.max_commands || entry.command_id == kNoCommandId) return QueueFault::kUnknownCommand;
  const CommandSlot& slot = memory_.commands[index];
  if (slot.id != entry.command_id || slot.state == CommandSlot::State::kFree) return QueueFault::kNotOutstanding;
  if (slot.state == CommandSlot::State::kPrepared) return QueueFault::kNotPublished;
  // The controller says how far it has read; what lies beyond cannot have completed, so another command was meant. That
  // one's memory would be given back while it is read or written.
  const std::uint32_t unread = distance(entry.sq_head, tail_, memory_.sq_entries);
  return submitted_ - slot.number <= unread ? QueueFault::kSqHeadBehind : QueueFault::kNone;
}

TARDIS_HD inline void QueuePair::blame(QueueFault fault, const CompletionEntry& entry) {
  if (suspect()) return;
  fault_ = fault;
  evidence_ = entry;
}

TARDIS_HD inline PollResult QueuePair::poll(Completion& out) {
  const auto* const words = reinterpret_cast<volatile const std::uint32_t*>(memory_.cq + cq_head_);
  // The phase is in the last word, and no other may be read before it: they would be those of the pass before. Each
  // word is read once, so that what is judged is what is used.
  const std::uint32_t last = load_acquire(words + 3);
  if ((last >> 16 & 1) != phase_) return PollResult::kNothing;
  const std::uint32_t heads = load_shared(words + 2);
  const CompletionEntry entry{load_shared(words),
                              0,
                              static_cast<std::uint16_t>(heads),
                              static_cast<std::uint16_t>(heads >> 16),
                              static_cast<std::uint16_t>(last),
                              static_cast<std::uint16_t>(last >> 16)};
  cq_head_ = following(cq_head_, memory_.cq_entries);
  if (cq_head_ == 0) phase_ ^= 1;
  out = {0, entry.result, entry.command_id, CommandStatus::of(entry), false};

  const QueueFault fault = judge(entry);
  if (fault != QueueFault::kNone) {
    blame(fault, entry);
    return PollResult::kFault;
  }
  sq_head_ = entry.sq_head;
  const auto index = static_cast<std::uint16_t>(index_of(entry.command_id));
  const CommandSlot& slot = memory_.commands[index];
  out.tag = slot.tag;
  out.quarantined = slot.state == CommandSlot::State::kQuarantined;
  remove(out.quarantined ? quarantined_ : live_, index);
  retire(index);
  append(free_, index, CommandSlot::State::kFree);
  return PollResult::kCompletion;
}

TARDIS_HD_CALLS_BACK
template <typename Clock>
TARDIS_HD PollResult QueuePair::wait(Completion& out, std::uint64_t deadline, Clock&& now) {
  PollResult result = poll(out);
  while (result == PollResult::kNothing) {
    relax();
    const bool over = now() >= deadline;
    result = poll(out);  // after the clock: this thread may not have run for long
    if (over) break;
  }
  return result;
}

TARDIS_HD inline bool QueuePair::acknowledge() {
  if (returned_ == cq_head_) return false;
  const std::uint32_t before = returned_;
  returned_ = cq_head_;
  tell(memory_.cq_head, memory_.cq_head_shadow, before, returned_);
  return true;
}

TARDIS_HD inline bool QueuePair::oldest(OutstandingCommand& out) const {
  if (live_.first == kNil) return false;
  out = describe(memory_.commands[live_.first]);
  return true;
}

TARDIS_HD_CALLS_BACK
template <typename Visit>
TARDIS_HD void QueuePair::for_each_outstanding(Visit&& visit) const {
  const std::uint16_t firsts[] = {quarantined_.first, live_.first};  // visit() moves them from the second to the first
  for (std::uint16_t index : firsts) {
    while (index != kNil) {
      const CommandSlot& slot = memory_.commands[index];
      index = slot.next;
      visit(describe(slot));
    }
  }
}

TARDIS_HD inline bool QueuePair::quarantine(std::uint16_t id) {
  const std::uint32_t index = index_of(id);
  if (index >= memory_.max_commands) return false;
  const CommandSlot& slot = memory_.commands[index];
  if (slot.id != id || slot.state != CommandSlot::State::kPublished) return false;
  remove(live_, static_cast<std::uint16_t>(index));
  append(quarantined_, static_cast<std::uint16_t>(index), CommandSlot::State::kQuarantined);
  return true;
}

TARDIS_HD inline void QueuePair::release_all() {
  for (std::uint32_t i = 0; i < memory_.max_commands; ++i) {
    if (memory_.commands[i].state != CommandSlot::State::kFree) retire(static_cast<std::uint16_t>(i));
  }
  start();
}

}  // namespace tardis::nvme
