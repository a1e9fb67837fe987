// SPDX-License-Identifier: Apache-2.0
// Commands that a worker holds back: injected faults, slower drives, and how they end with their queue.
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "base/clock.h"
#include "nvme/soft/core.h"
#include "nvme/soft/worker.h"

namespace tardis::nvme {
namespace {

constexpr std::uint64_t kGatherNs = 1'000'000;  // completions that are to be mixed wait so long for others

bool later(const SoftCommand* a, const SoftCommand* b) { return a->due > b->due; }

std::uint64_t after(const FaultRule& rule) {
  return monotonic_ns() + static_cast<std::uint64_t>(std::max<std::int64_t>(0, rule.delay.count()));
}

}  // namespace

// True if the command is taken care of.
bool SoftWorker::inject_before(SoftCommand& command) {
  const FaultRule& fault = *command.fault;
  switch (fault.kind) {
    case FaultKind::kStatus:
      command.status = fault.status;
      break;
    case FaultKind::kMediaError:
      command.status =
          static_cast<IoOpcode>(command.entry.opcode) == IoOpcode::kRead ? kScUnrecoveredRead : kScWriteFault;
      break;
    case FaultKind::kSlow:
      command.sq->stalled_until = after(fault);
      hold(command, HeldFor::kStart, command.sq->stalled_until);
      return true;
    case FaultKind::kLostCompletion:
    case FaultKind::kLateCompletion:
      if (!fault.late_data || command.sq->id == 0) return false;
      // What is wrong with the command is found at once; only the memory is touched later.
      if (!prepare(command)) break;
      hold(command, HeldFor::kStart, after(fault));
      return true;
    case FaultKind::kFatal:
      core_.fail();
      lost_.push_back(&command);
      return true;
    case FaultKind::kRemovedAllOnes:
    case FaultKind::kRemovedZeros:
      core_.remove(fault.kind == FaultKind::kRemovedZeros);
      lost_.push_back(&command);
      return true;
    default:
      return false;
  }
  complete(command);
  return true;
}

// True if the completion is taken care of.
bool SoftWorker::inject_after(SoftCommand& command) {
  const FaultRule fault = *command.fault;
  SoftSubmissionQueue& sq = *command.sq;
  if (sq.deleting) {
    const bool lost = fault.kind == FaultKind::kLostCompletion || fault.kind == FaultKind::kWrongCommandId;
    if (lost) recycle(command);
    return lost;
  }
  switch (fault.kind) {
    case FaultKind::kLostCompletion:
      lost_.push_back(&command);
      return true;
    case FaultKind::kLateCompletion:
      if (fault.late_data) return false;
      hold(command, HeldFor::kPost, after(fault));
      return true;
    case FaultKind::kDuplicate: {
      SoftCommand& copy = take(sq, command.entry);
      copy.status = command.status;
      copy.result = command.result;
      hold(copy, HeldFor::kCopy, after(fault));
      return false;
    }
    case FaultKind::kReorder:
      hold(command, HeldFor::kGathered, fault.delay.count() > 0 ? after(fault) : monotonic_ns() + kGatherNs);
      if (std::count_if(held_.begin(), held_.end(), [&](const SoftCommand* other) {
            return other->sq == &sq && other->held_for == HeldFor::kGathered;
          }) >= static_cast<std::ptrdiff_t>(fault.group)) {
        release_gathered(sq);
      }
      return true;
    case FaultKind::kWrongCommandId: {
      CompletionEntry entry = entry_of(command);
      entry.command_id = wrong_id(sq);
      post(sq, entry, false);
      lost_.push_back(&command);
      return true;
    }
    case FaultKind::kStuckSqHead:
      sq.stuck_head = true;
      return false;
    default:
      return false;
  }
}

std::uint16_t SoftWorker::wrong_id(const SoftSubmissionQueue& sq) {
  if (sq.outstanding >= kNoCommandId) return kNoCommandId;
  // Half of them are such as the client uses, but not now.
  const std::uint32_t random = core_.faults()->random();
  std::uint32_t id = (random & 1) != 0 ? (random >> 1) % sq.entries : random >> 16;
  while (id == kNoCommandId || sq.id_used(static_cast<std::uint16_t>(id))) id = (id + 1) & 0xffff;
  return static_cast<std::uint16_t>(id);
}

void SoftWorker::hold(SoftCommand& command, HeldFor what, std::uint64_t due) {
  command.held_for = what;
  command.due = due;
  held_.push_back(&command);
  std::push_heap(held_.begin(), held_.end(), later);
}

bool SoftWorker::run_due(std::uint64_t now) {
  bool some = false;
  while (!held_.empty() && held_.front()->due <= now && !core_.halted()) {
    std::pop_heap(held_.begin(), held_.end(), later);
    SoftCommand& command = *held_.back();
    held_.pop_back();
    resume(command);
    some = true;
  }
  return some;
}

void SoftWorker::resume(SoftCommand& command) {
  switch (command.held_for) {
    case HeldFor::kStart:
      start(command);
      break;
    case HeldFor::kCompletion:
      complete(command);
      break;
    case HeldFor::kPost:
      post(command);
      break;
    case HeldFor::kGathered: {
      SoftSubmissionQueue& sq = *command.sq;
      hold(command, HeldFor::kGathered, command.due);
      release_gathered(sq);
      break;
    }
    case HeldFor::kCopy:
      if (!command.sq->silent) post(*command.sq, entry_of(command), false);
      recycle(command);
      break;
  }
}

template <class Matches>
std::vector<SoftCommand*> SoftWorker::take_held(Matches matches) {
  const auto taken =
      std::stable_partition(held_.begin(), held_.end(), [&](const SoftCommand* command) { return !matches(*command); });
  std::vector<SoftCommand*> found(taken, held_.end());
  held_.erase(taken, held_.end());
  std::make_heap(held_.begin(), held_.end(), later);
  return found;
}

void SoftWorker::release_gathered(SoftSubmissionQueue& sq) {
  std::vector<SoftCommand*> gathered = take_held(
      [&](const SoftCommand& command) { return command.sq == &sq && command.held_for == HeldFor::kGathered; });
  for (std::size_t i = gathered.size(); i > 1; --i) std::swap(gathered[i - 1], gathered[core_.faults()->random() % i]);
  for (SoftCommand* command : gathered) post(*command);
}

bool SoftWorker::abort(SoftSubmissionQueue& sq, std::uint16_t command_id) {
  const auto matches = [&](const SoftCommand& command) {
    return command.sq == &sq && command.entry.command_id == command_id && command.held_for != HeldFor::kCopy;
  };
  if (!rings_hold()) return false;
  SoftCommand* found = nullptr;
  const auto lost =
      std::find_if(lost_.begin(), lost_.end(), [&](const SoftCommand* command) { return matches(*command); });
  if (lost != lost_.end()) {
    found = *lost;
    lost_.erase(lost);
  } else if (const auto held = take_held(matches); !held.empty()) {
    found = held.front();
  }
  if (found == nullptr) return false;
  found->status = kScAbortRequested;
  found->result = 0;
  post(*found);
  return true;
}

void SoftWorker::quiesce(SoftSubmissionQueue& sq, bool silent, bool cut) {
  sq.deleting = true;
  // Another thread does this, perhaps long after this worker has looked for its rings.
  sq.silent |= silent || core_.halted() || !rings_hold();
  for (SoftCommand* command : take_held([&](const SoftCommand& held) { return held.sq == &sq; })) {
    const bool unstarted_admin = sq.id == 0 && command->held_for == HeldFor::kStart;
    if (cut || unstarted_admin) {
      recycle(*command);
    } else if (command->held_for == HeldFor::kGathered) {
      post(*command);
    } else {
      resume(*command);
    }
  }
  submit_pending();
  const auto lost =
      std::stable_partition(lost_.begin(), lost_.end(), [&](const SoftCommand* command) { return command->sq != &sq; });
  std::for_each(lost, lost_.end(), [&](SoftCommand* command) { recycle(*command); });
  lost_.erase(lost, lost_.end());
}

void SoftWorker::quiesce_all(bool cut) {
  for (const auto& sq : sqs_) quiesce(*sq, true, cut);
}

std::uint32_t SoftWorker::in_drive() const {
  std::uint32_t sum = 0;
  for (const auto& sq : sqs_) sum += sq->in_drive;
  return sum;
}

std::uint32_t SoftWorker::outstanding() const {
  std::uint32_t sum = 0;
  for (const auto& sq : sqs_) sum += sq->outstanding;
  return sum;
}

SoftCompletionQueue& SoftWorker::add_cq(std::uint16_t id, std::uint32_t entries, std::uint64_t address,
                                        CompletionEntry* ring) {
  auto queue = std::make_unique<SoftCompletionQueue>();
  queue->id = id;
  queue->entries = entries;
  queue->address = address;
  queue->ring = ring;
  core_.registers().set_doorbell_exists(id, false, true);
  queue->doorbell = core_.registers().head_doorbell(id);
  cqs_.push_back(std::move(queue));
  rings_generation_ = 0;
  return *cqs_.back();
}

SoftSubmissionQueue& SoftWorker::add_sq(std::uint16_t id, SoftCompletionQueue& cq, std::uint32_t entries,
                                        std::uint64_t address, const SubmissionEntry* ring) {
  auto queue = std::make_unique<SoftSubmissionQueue>(id, cq);
  queue->entries = entries;
  queue->address = address;
  queue->ring = ring;
  core_.registers().set_doorbell_exists(id, true, true);
  queue->doorbell = core_.registers().tail_doorbell(id);
  ++cq.submission_queues;
  sqs_.push_back(std::move(queue));
  rings_generation_ = 0;
  return *sqs_.back();
}

SoftCompletionQueue* SoftWorker::cq(std::uint16_t id) {
  const auto found = std::find_if(cqs_.begin(), cqs_.end(), [&](const auto& queue) { return queue->id == id; });
  return found == cqs_.end() ? nullptr : found->get();
}

bool SoftWorker::has_io_queues() const {
  return std::any_of(cqs_.begin(), cqs_.end(), [](const auto& queue) { return queue->id != 0; });
}

SoftSubmissionQueue* SoftWorker::sq(std::uint16_t id) {
  const auto found = std::find_if(sqs_.begin(), sqs_.end(), [&](const auto& queue) { return queue->id == id; });
  return found == sqs_.end() ? nullptr : found->get();
}

void SoftWorker::remove_cq(SoftCompletionQueue& cq) {
  core_.registers().set_doorbell_exists(cq.id, false, false);
  std::erase_if(cqs_, [&](const auto& queue) { return queue.get() == &cq; });
}

void SoftWorker::remove_sq(SoftSubmissionQueue& sq) {
  core_.registers().set_doorbell_exists(sq.id, true, false);
  --sq.cq.submission_queues;
  std::erase_if(sqs_, [&](const auto& queue) { return queue.get() == &sq; });
}

std::size_t SoftWorker::waiting(AdminOpcode opcode) const {
  const auto counts = [&](const SoftCommand* command) {
    return command->sq->id == 0 && command->entry.opcode == static_cast<std::uint8_t>(opcode) &&
           command->held_for != HeldFor::kCopy;
  };
  return static_cast<std::size_t>(std::count_if(held_.begin(), held_.end(), counts) +
                                  std::count_if(lost_.begin(), lost_.end(), counts));
}

void SoftWorker::forget_queues() {
  while (!sqs_.empty()) remove_sq(*sqs_.back());
  while (!cqs_.empty()) remove_cq(*cqs_.back());
  held_.clear();
  lost_.clear();
  free_.clear();
  for (const auto& command : commands_) free_.push_back(command.get());
}

}  // namespace tardis::nvme
