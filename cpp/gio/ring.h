// SPDX-License-Identifier: Apache-2.0
// Works through an IOCB on one queue pair: writes submission entries side by side, rings once for many, takes
// completions by the handful, has their bytes moved, and ends within the deadline whatever the controller does. The
// lanes may be a warp or one host thread (lanes.h), whoever moves bytes is a class of its own; for host and device code
// (C++17).
//
// Nothing that a controller writes can make it index outside its memory, land bytes of a command that is not
// outstanding or use a bounce slot again while a command or a move may touch it. All members but each()'s bodies are
// called by all lanes together, and what they hold is the same in all of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gio/granted_queue.h"
#include "gio/iocb.h"

#if defined(__CUDACC__)
#define TARDIS_RING __device__ __forceinline__
#else
#define TARDIS_RING
#endif

namespace tardis::gio {

// A command slot while the ring runs. 72 bytes, so that lanes with neighbouring slots use different banks.
struct RingSlot {
  enum class State : std::uint8_t { kFree, kGathering, kReady, kSent, kLanding };
  std::uint64_t block;
  std::uint64_t memory[kPieces];
  std::uint32_t bytes[kPieces];
  nvme::PrpPair pointer;      // bytes 24 to 39 of its submission entry
  std::uint64_t digests;      // as IoContext::digests
  std::uint32_t number;       // how many commands were submitted before it, modulo 2^32
  std::uint32_t movers_left;  // that have not moved, or digested, their share yet
  std::uint16_t context;      // which of the IOCB
  std::uint16_t id;           // in use, or the next to be
  std::uint8_t flags;
  IoOp op;
  State state;
  std::uint8_t damaged;  // by movers: a digest is not the expected one
};
static_assert(kMostContexts <= 0x10000);
static_assert(sizeof(RingSlot) == 72);

// Memory of a ring while it runs; on a GPU shared memory of its CTA.
struct RingWork {
  RingSlot* slots;                 // `commands` of each
  std::uint16_t* free;             // slots in the order in which they are used again
  std::uint16_t* ready;            // to be submitted, in order
  std::uint16_t* jobs;             // to be moved, in order: job j at j % commands
  nvme::SubmissionEntry* staging;  // one for each lane

  TARDIS_HD static constexpr std::size_t bytes(std::uint32_t commands, std::uint32_t lanes) {
    return lanes * sizeof(nvme::SubmissionEntry) + commands * (sizeof(RingSlot) + 3 * sizeof(std::uint16_t));
  }
  // In `memory` of bytes(), 64-byte aligned.
  TARDIS_HD static RingWork in(void* memory, std::uint32_t commands, std::uint32_t lanes) {
    RingWork work;
    work.staging = static_cast<nvme::SubmissionEntry*>(memory);
    work.slots = reinterpret_cast<RingSlot*>(work.staging + lanes);
    work.free = reinterpret_cast<std::uint16_t*>(work.slots + commands);
    work.ready = work.free + commands;
    work.jobs = work.ready + commands;
    return work;
  }
};

// Mover: shares(bytes, digested) of a job are to be moved or digested, publish(n) says that n more jobs are in
// RingWork::jobs, finished(slot), by one lane, whether a job's bytes have moved, seen by whoever the ring tells of it,
// and its digests were compared or written.
template <class Lanes, class Mover>
class Ring {
 public:
  TARDIS_RING Ring(const Lanes& lanes, Mover& mover, const GrantedQueue& queue, const RingWork& work)
      : lanes_(lanes), mover_(mover), queue_(queue), work_(work) {
    while (index_mask_ < queue.commands - 1) index_mask_ = index_mask_ << 1 | 1;
  }

  // Of `rings` that share the IOCB, each with a queue of its own, this is number `ring`.
  TARDIS_RING void run(const IoControlBlock& iocb, std::uint32_t ring, std::uint32_t rings) {
    iocb_ = &iocb;
    first_ = ring;
    stride_ = rings;
    now_ = lanes_.now();
    deadline_ = now_ + iocb.deadline_ns;
    const std::uint32_t contexts = lanes_.load_word(iocb.count);
    begin(contexts);
    while (report_.error == RingError::kNone && !idle()) {
      bool progress = take_completions();
      progress |= take_moved();
      progress |= start();
      progress |= submit();
      if (report_.error != RingError::kNone || idle()) break;
      now_ = lanes_.now();
      if (now_ >= deadline_) {
        // Once more after the clock: the ring may not have run for long.
        take_completions();
        if (report_.error == RingError::kNone && !idle()) report_.error = RingError::kDeadline;
      } else if (!progress) {
        lanes_.relax();
      }
    }
    end(ring);
  }

 private:
  template <class T>
  using Each = typename Lanes::template Each<T>;
  static constexpr std::uint32_t kWidth = Lanes::kWidth;
  static constexpr std::uint64_t kMoverPatienceNs = 10'000'000'000;  // beyond it, it is a bug
  static constexpr std::uint32_t kGroups = 4;  // of kWidth entries, before something else has its turn

  struct Fifo {  // of slots, in a ring of `commands` places
    std::uint32_t head, size;
  };

  TARDIS_RING static std::uint32_t distance(std::uint32_t from, std::uint32_t to, std::uint32_t entries) {
    return to >= from ? to - from : to + entries - from;
  }
  TARDIS_RING std::uint32_t place(std::uint32_t head, std::uint32_t ahead) const {  // ahead <= commands
    const std::uint32_t at = head + ahead;
    return at < queue_.commands ? at : at - queue_.commands;
  }
  TARDIS_RING static std::uint32_t least(std::uint32_t a, std::uint32_t b) { return a < b ? a : b; }
  TARDIS_RING static std::uint32_t below(std::uint32_t mask, std::uint32_t lane) {  // bits of lower lanes
    return Lanes::count(mask & ((1u << lane) - 1));
  }
  TARDIS_RING static std::uint32_t leading(std::uint32_t mask) {  // lanes from 0 on without a gap
    return ~mask == 0 ? 32 : Lanes::lowest(~mask);
  }
  // The controller moves all bytes by itself: no command is a job.
  TARDIS_RING bool direct() const { return queue_.direct.count != 0; }
  TARDIS_RING bool idle() const { return next_ == mine_ && outstanding_ == 0 && ready_.size == 0 && jobs_.size == 0; }
  TARDIS_RING void finish(std::uint32_t context, IoEnd end, std::uint16_t status = 0) {
    lanes_.store_word(iocb_->statuses + context, IoStatus::of(end, status).raw);
    if (iocb_->times != nullptr) iocb_->times[context].ended = now_;
  }
  TARDIS_RING void append(const Each<bool>& which, const Each<std::uint32_t>& slots, std::uint16_t* places,
                          Fifo& fifo) {
    const std::uint32_t mask = lanes_.ballot(which);
    if (mask == 0) return;
    lanes_.each([&](std::uint32_t lane) {
      if (mask >> lane & 1) {
        places[place(fifo.head, fifo.size + below(mask, lane))] = static_cast<std::uint16_t>(slots[lane]);
      }
    });
    fifo.size += Lanes::count(mask);
  }
  TARDIS_RING void drop(Fifo& fifo, std::uint32_t count) {
    fifo.head = place(fifo.head, count);
    fifo.size -= count;
  }

  TARDIS_RING void begin(std::uint32_t contexts) {
    report_ = {};
    const RingState& state = *queue_.state;
    if (contexts > kMostContexts) report_.error = RingError::kTooMany;
    if (state.down != 0) report_.error = RingError::kQueueDown;
    contexts = least(contexts, kMostContexts);
    mine_ = contexts > first_ ? (contexts - first_ + stride_ - 1) / stride_ : 0;
    tail_ = state.tail;
    sq_head_ = state.sq_head;
    cq_head_ = state.cq_head;
    phase_ = state.phase;
    submitted_ = state.submitted;
    for (std::uint32_t base = 0; base < queue_.commands; base += kWidth) {
      lanes_.each([&](std::uint32_t lane) {
        const std::uint32_t index = base + lane;
        if (index >= queue_.commands) return;
        work_.slots[index].id = queue_.uses[index];
        work_.slots[index].state = RingSlot::State::kFree;
        work_.free[index] = static_cast<std::uint16_t>(index);
      });
    }
    free_ = {0, queue_.commands};
  }

  // ---- contexts to slots
  TARDIS_RING bool fits(const IoContext& context, std::uint32_t slot, nvme::SubmissionEntry& entry) const {
    const std::uint64_t bytes = std::uint64_t{context.bytes[0]} + context.bytes[1];
    const std::uint64_t blocks = bytes >> queue_.block_shift;
    const bool read_or_write = context.op == IoOp::kRead || context.op == IoOp::kWrite;
    return read_or_write && context.bytes[0] != 0 &&
           (direct() ? bytes <= queue_.direct.most_bytes : bytes <= queue_.slot_bytes && bytes <= queue_.most_bytes) &&
           blocks << queue_.block_shift == bytes && blocks <= nvme::kMaxBlocksPerCommand &&
           (context.bytes[0] | context.bytes[1]) % 16 == 0 && context.memory[0] != 0 &&
           (context.bytes[1] == 0 || context.memory[1] != 0) && (context.memory[0] | context.memory[1]) % 16 == 0 &&
           context.block <= queue_.blocks && blocks <= queue_.blocks - context.block &&
           (direct() ? unseen(context) && queue_.direct.describe(context, slot, entry)
                     : (context.digests == 0 || digests_fit(context.digests, bytes)) &&
                           queue_.pointers.describe(queue_.bounce_offset + std::uint64_t{slot} * queue_.slot_bytes,
                                                    bytes, entry));
  }

  // What lands directly passes nobody here: who wants the ring itself to compare it must not be told that it is done.
  TARDIS_RING bool unseen(const IoContext& context) const { return iocb_->digested == 0 || context.digests == 0; }

  TARDIS_RING bool digests_fit(std::uint64_t digests, std::uint64_t bytes) const {
    const std::uint64_t chunks = (bytes + kDigestedBytes - 1) / kDigestedBytes;
    return iocb_->digested != 0 && digests % 8 == 0 && digests <= ~std::uint64_t{0} - chunks * 8;
  }

  TARDIS_RING bool start() {
    bool some = false;
    for (std::uint32_t group = 0; group < kGroups; ++group) {
      const std::uint32_t count = least(least(kWidth, free_.size), mine_ - next_);
      if (count == 0) break;
      some = true;
      Each<IoContext> contexts;
      Each<std::uint32_t> slots;
      Each<bool> good, refused, reads, writes;
      Each<nvme::SubmissionEntry> entries;
      lanes_.each([&](std::uint32_t lane) {
        good[lane] = refused[lane] = false;
        if (lane >= count) return;
        contexts[lane] = iocb_->contexts[first_ + (next_ + lane) * stride_];
        // Which slot it will be matters to none of them but for the data pointer.
        slots[lane] = work_.free[place(free_.head, lane)];
        entries[lane] = {};
        good[lane] = fits(contexts[lane], slots[lane], entries[lane]);
        refused[lane] = !good[lane];
      });
      lanes_.each([&](std::uint32_t lane) {
        reads[lane] = writes[lane] = false;
        if (refused[lane]) finish(first_ + (next_ + lane) * stride_, IoEnd::kRefused);
        if (!good[lane]) return;
        const IoContext& context = contexts[lane];
        RingSlot& slot = work_.slots[slots[lane]];
        slot.block = context.block;
        for (std::uint32_t i = 0; i < kPieces; ++i) {
          slot.memory[i] = context.memory[i];
          slot.bytes[i] = context.bytes[i];
        }
        slot.pointer = entries[lane].prp;
        slot.flags = entries[lane].flags;
        slot.context = static_cast<std::uint16_t>(first_ + (next_ + lane) * stride_);
        slot.op = context.op;
        slot.digests = direct() ? 0 : context.digests;  // of what lands directly, a kernel behind the ring sees to them
        slot.damaged = 0;
        reads[lane] = context.op == IoOp::kRead || direct();
        writes[lane] = !reads[lane];
        slot.state = reads[lane] ? RingSlot::State::kReady : RingSlot::State::kGathering;
        slot.movers_left = mover_.shares(slot.bytes[0] + slot.bytes[1], slot.digests != 0);
      });
      report_.refused += Lanes::count(lanes_.ballot(refused));
      next_ += count;
      // All of the slots leave; those that were not used come back.
      drop(free_, count);
      append(refused, slots, work_.free, free_);
      append(reads, slots, work_.ready, ready_);
      append(writes, slots, work_.jobs, jobs_);
      if (const std::uint32_t jobs = Lanes::count(lanes_.ballot(writes)); jobs != 0) mover_.publish(jobs);
    }
    return some;
  }

  // ---- submission
  TARDIS_RING bool submit() {
    const std::uint32_t room = queue_.entries - 1 - distance(sq_head_, tail_, queue_.entries);
    const std::uint32_t total = least(least(kGroups * kWidth, ready_.size), room);
    // Completions of all that is outstanding must find room; and often enough that a controller has no need to wait.
    // The fence below orders it before the tail.
    if (taken_ != 0 && (outstanding_ + total + taken_ >= queue_.entries || taken_ >= (queue_.entries + 1) / 2)) {
      return_taken();
    }
    if (total == 0) return false;
    now_ = lanes_.now();
    for (std::uint32_t left = total, count; left != 0; left -= count) {
      count = least(kWidth, left);
      lanes_.each([&](std::uint32_t lane) {
        if (lane >= count) return;
        RingSlot& slot = work_.slots[work_.ready[place(ready_.head, lane)]];
        const std::uint32_t bytes = slot.bytes[0] + slot.bytes[1];
        nvme::SubmissionEntry entry{};
        entry.opcode = static_cast<std::uint8_t>(slot.op);
        entry.flags = slot.flags;
        entry.command_id = slot.id;
        entry.namespace_id = queue_.namespace_id;
        entry.prp = slot.pointer;
        entry.set_start_block(slot.block);
        entry.cdw12 = (bytes >> queue_.block_shift) - 1;
        work_.staging[lane] = entry;
        slot.number = submitted_ + lane;
        slot.state = RingSlot::State::kSent;
        if (iocb_->times != nullptr) iocb_->times[slot.context].sent = now_;
      });
      lanes_.store_entries(queue_.sq, queue_.entries, tail_, work_.staging, count);
      drop(ready_, count);
      tail_ += count;
      if (tail_ >= queue_.entries) tail_ -= queue_.entries;
      submitted_ += count;
    }
    outstanding_ += total;
    lanes_.fence();
    lanes_.doorbell(queue_.sq_tail, tail_);
    ++report_.doorbells;
    return true;
  }

  // The loads of the entries were acquires: no later store, such as this one, is done before them.
  TARDIS_RING void return_taken() {
    taken_ = 0;
    lanes_.doorbell(queue_.cq_head, cq_head_);
  }

  // ---- completion
  TARDIS_RING bool take_completions() {
    std::uint32_t good = kWidth, groups = 0;
    bool some = false;
    while (good == kWidth && groups++ < kGroups && outstanding_ != 0) {
      good = take_group();
      some |= good != 0;
    }
    return some || report_.error != RingError::kNone;
  }

  // As nvme::QueuePair::judge(), of an entry that comes `moved` of the ring behind the head known so far; `before`: of
  // the entry before it. `twice`: an earlier entry of this group names the same command.
  TARDIS_RING nvme::QueueFault judge(const nvme::CompletionEntry& entry, std::uint32_t moved, std::uint32_t before,
                                     bool twice) const {
    using nvme::QueueFault;
    if (entry.sq_id != queue_.id) return QueueFault::kWrongQueue;
    if (entry.sq_head >= queue_.entries) return QueueFault::kSqHeadRange;
    if (moved < before || moved > distance(sq_head_, tail_, queue_.entries)) return QueueFault::kSqHeadMoved;
    const std::uint32_t index = entry.command_id & index_mask_;
    if (index >= queue_.commands || entry.command_id == nvme::kNoCommandId) return QueueFault::kUnknownCommand;
    const RingSlot& slot = work_.slots[index];
    if (twice || slot.id != entry.command_id || slot.state != RingSlot::State::kSent) {
      return QueueFault::kNotOutstanding;
    }
    const std::uint32_t unread = distance(entry.sq_head, tail_, queue_.entries);
    return submitted_ - slot.number <= unread ? QueueFault::kSqHeadBehind : QueueFault::kNone;
  }

  // Returns how many entries it took: those before the first that is not there yet or not to be believed.
  TARDIS_RING std::uint32_t take_group() {
    Each<nvme::CompletionEntry> entries;
    Each<bool> flags;
    lanes_.each([&](std::uint32_t lane) {
      flags[lane] = false;
      if (lane >= queue_.entries) return;
      const std::uint32_t at = cq_head_ + lane;
      const bool wraps = at >= queue_.entries;
      entries[lane] = lanes_.load_completion(queue_.cq + (wraps ? at - queue_.entries : at));
      flags[lane] = (entries[lane].status & 1) == (wraps ? phase_ ^ 1 : phase_);
    });
    const std::uint32_t found = leading(lanes_.ballot(flags));
    if (found == 0) return 0;

    Each<std::uint32_t> moved, names;
    lanes_.each([&](std::uint32_t lane) {
      moved[lane] = 0;
      names[lane] = 0x10000 + lane;  // no identifier
      if (lane >= found) return;
      const bool in_range = entries[lane].sq_head < queue_.entries;
      moved[lane] = in_range ? distance(sq_head_, entries[lane].sq_head, queue_.entries) : 0;
      names[lane] = entries[lane].command_id;
    });
    const Each<std::uint32_t> before = lanes_.from_previous(moved, 0);
    const Each<std::uint32_t> first = lanes_.first_with_same(names);
    Each<std::uint32_t> faults;
    lanes_.each([&](std::uint32_t lane) {
      const bool judged = lane < found;
      const nvme::QueueFault fault =
          judged ? judge(entries[lane], moved[lane], before[lane], first[lane] != lane) : nvme::QueueFault::kNone;
      faults[lane] = static_cast<std::uint32_t>(fault);
      flags[lane] = judged && fault == nvme::QueueFault::kNone;
    });
    const std::uint32_t good = leading(lanes_.ballot(flags));

    Each<std::uint32_t> slots, heads;
    Each<bool> failed, written, landing, free;
    lanes_.each([&](std::uint32_t lane) {
      failed[lane] = written[lane] = landing[lane] = free[lane] = false;
      heads[lane] = lane < found ? entries[lane].sq_head : 0;
      slots[lane] = 0;
      if (lane >= good) return;
      slots[lane] = entries[lane].command_id & index_mask_;
      RingSlot& slot = work_.slots[slots[lane]];
      const nvme::CommandStatus status = nvme::CommandStatus::of(entries[lane]);
      // The next use has another identifier, so that a second completion of this one is noticed.
      do {
        slot.id = static_cast<std::uint16_t>(slot.id + index_mask_ + 1);
      } while (slot.id == nvme::kNoCommandId);
      failed[lane] = !status.ok();
      landing[lane] = status.ok() && slot.op == IoOp::kRead && !direct();
      written[lane] = status.ok() && !landing[lane];
      free[lane] = !landing[lane];
      slot.state = landing[lane] ? RingSlot::State::kLanding : RingSlot::State::kFree;
      if (free[lane]) finish(slot.context, failed[lane] ? IoEnd::kFailed : IoEnd::kDone, status.raw);
    });
    report_.failed += Lanes::count(lanes_.ballot(failed));
    report_.done += Lanes::count(lanes_.ballot(written));
    append(free, slots, work_.free, free_);
    append(landing, slots, work_.jobs, jobs_);
    if (const std::uint32_t jobs = Lanes::count(lanes_.ballot(landing)); jobs != 0) mover_.publish(jobs);
    if (good != 0) sq_head_ = lanes_.pick(heads, good - 1);
    outstanding_ -= good;
    taken_ += good;
    cq_head_ += good;
    if (cq_head_ >= queue_.entries) {
      cq_head_ -= queue_.entries;
      phase_ ^= 1;
    }
    if (good != found) {
      report_.error = RingError::kQueueFault;
      report_.fault = lanes_.pick(faults, good);
      report_.entry = lanes_.pick(entries, good);
    }
    return good;
  }

  // ---- what was moved
  TARDIS_RING bool take_moved() {
    const std::uint32_t looked_at = least(kWidth, jobs_.size);
    if (looked_at == 0) return false;
    Each<std::uint32_t> slots;
    Each<bool> finished;
    lanes_.each([&](std::uint32_t lane) {
      finished[lane] = false;
      if (lane >= looked_at) return;
      slots[lane] = work_.jobs[place(jobs_.head, lane)];
      finished[lane] = mover_.finished(slots[lane]);
    });
    const std::uint32_t count = leading(lanes_.ballot(finished));
    if (count == 0) return false;
    now_ = lanes_.now();
    Each<bool> landed, gathered, damaged;
    lanes_.each([&](std::uint32_t lane) {
      landed[lane] = gathered[lane] = damaged[lane] = false;
      if (lane >= count) return;
      RingSlot& slot = work_.slots[slots[lane]];
      landed[lane] = slot.op == IoOp::kRead;
      gathered[lane] = !landed[lane];
      damaged[lane] = slot.damaged != 0;
      slot.state = landed[lane] ? RingSlot::State::kFree : RingSlot::State::kReady;
      if (landed[lane]) finish(slot.context, damaged[lane] ? IoEnd::kDamaged : IoEnd::kDone);
    });
    const std::uint32_t damages = Lanes::count(lanes_.ballot(damaged));
    report_.damaged += damages;
    report_.done += Lanes::count(lanes_.ballot(landed)) - damages;
    drop(jobs_, count);
    append(landed, slots, work_.free, free_);
    append(gathered, slots, work_.ready, ready_);
    return true;
  }

  // ---- the end
  TARDIS_RING void end(std::uint32_t ring) {
    // Copies end by themselves, and touch slots until they do.
    // Each may take its time: a link that is kept to a budget is slow, and goes on.
    std::uint64_t patience = lanes_.now() + kMoverPatienceNs;
    while (jobs_.size != 0) {
      const bool some = take_moved();
      if (some) patience = lanes_.now() + kMoverPatienceNs;
      if (!some && lanes_.now() >= patience) lanes_.give_up();
    }
    if (taken_ != 0 && !ends_queue(report_.error)) return_taken();
    const bool down = ends_queue(report_.error);
    for (std::uint32_t base = 0; base < queue_.commands; base += kWidth) {
      Each<bool> sent, unsent;
      lanes_.each([&](std::uint32_t lane) {
        sent[lane] = unsent[lane] = false;
        const std::uint32_t index = base + lane;
        if (index >= queue_.commands) return;
        const RingSlot& slot = work_.slots[index];
        queue_.uses[index] = slot.id;
        sent[lane] = slot.state == RingSlot::State::kSent;
        unsent[lane] = slot.state == RingSlot::State::kReady;
        if (sent[lane]) finish(slot.context, IoEnd::kTimedOut);
        if (unsent[lane]) finish(slot.context, IoEnd::kNotSent);
      });
      report_.timed_out += Lanes::count(lanes_.ballot(sent));
      report_.not_sent += Lanes::count(lanes_.ballot(unsent));
    }
    for (; next_ < mine_; next_ += least(kWidth, mine_ - next_)) {
      const std::uint32_t count = least(kWidth, mine_ - next_);
      lanes_.each([&](std::uint32_t lane) {
        if (lane < count) finish(first_ + (next_ + lane) * stride_, IoEnd::kNotSent);
      });
      report_.not_sent += count;
    }
    if (report_.error == RingError::kNone && report_.refused + report_.failed + report_.damaged != 0) {
      report_.error = RingError::kCommands;
    }
    lanes_.each([&](std::uint32_t lane) {
      if (lane != 0) return;
      *queue_.state = {tail_,  sq_head_,   cq_head_,
                       phase_, submitted_, down ? static_cast<std::uint32_t>(report_.error) : 0};
      iocb_->reports[ring] = report_;
    });
    if (!lanes_.last_to_end(iocb_->ended, stride_)) return;
    Each<bool> bad;
    lanes_.each([&](std::uint32_t lane) {
      bad[lane] = false;
      for (std::uint32_t other = lane; other < stride_; other += kWidth) {
        bad[lane] =
            bad[lane] || lanes_.load_word(reinterpret_cast<const std::uint32_t*>(&iocb_->reports[other].error)) != 0;
      }
    });
    lanes_.raise(iocb_->flag, lanes_.ballot(bad) != 0 ? kIoError : kIoDone);
  }

  const Lanes lanes_;
  Mover& mover_;
  const GrantedQueue& queue_;
  const RingWork work_;
  std::uint32_t index_mask_ = 0;  // the bits of an identifier that are its slot; those above count its uses

  const IoControlBlock* iocb_ = nullptr;
  std::uint32_t first_ = 0, stride_ = 1;  // its contexts: every stride_-th from first_ on
  std::uint32_t mine_ = 0, next_ = 0;     // how many they are; the next to be started
  std::uint64_t now_ = 0, deadline_ = 0;
  RingReport report_{};

  std::uint32_t tail_ = 0, sq_head_ = 0;  // the doorbell has the tail, but within submit()
  std::uint32_t cq_head_ = 0, phase_ = 1;
  std::uint32_t taken_ = 0;  // entries that the controller does not know to be free
  std::uint32_t submitted_ = 0, outstanding_ = 0;
  Fifo free_{}, ready_{}, jobs_{};
};

}  // namespace tardis::gio
