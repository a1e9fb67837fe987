// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/worker.h"

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/clock.h"
#include "nvme/soft/core.h"
#include "nvme/soft/threads.h"

namespace tardis::nvme {
namespace {

constexpr std::uint32_t kBatch = 64;                     // commands of one queue in a pass
constexpr std::uint64_t kNearNs = 100'000;               // what is due so soon is waited for awake
constexpr std::uint64_t kNoQueuesSleepNs = 100'000'000;  // who has no queue is told when it gets one
constexpr std::uint32_t kPassesPerYield = 1024;
constexpr std::uint64_t kIdlePerSleep = 8;      // who was idle for 8 ms sleeps for 1 ms
constexpr unsigned long kTimerSlackNs = 1'000;  // the kernel's own 50 us would double a short sleep
constexpr std::uint64_t kAlways = ~std::uint64_t{0};

// Sent again, the same command may end otherwise.
bool may_succeed_later(std::uint16_t status) {
  switch (status) {
    case kScSuccess:
    case kScDataTransferError:
    case kScAbortLimit:
    case kScAsyncEventLimit:
    case kScInvalidQueueDeletion:
      return true;
    default:
      return false;
  }
}

// Of a command that was not executed for what it says itself.
std::uint16_t status_of_refused(std::uint16_t status) {
  return may_succeed_later(status) ? status : static_cast<std::uint16_t>(status | kDoNotRetry);
}

}  // namespace

SoftWorker::SoftWorker(SoftController::Core& core, std::size_t index)
    : core_(core), index_(index), reader_(core.space()) {}

Status SoftWorker::start(const std::vector<int>& cpus) {
  Result<std::thread> thread = start_thread(
      "tardis-nvme", [this] { loop(); }, cpus);
  if (!thread) return thread.error();
  thread_ = std::move(*thread);
  return {};
}

void SoftWorker::stop() {
  stop_.store(true);
  wakeup_.notify();
  if (thread_.joinable()) thread_.join();
}

std::uint64_t SoftWorker::thread_cpu(const std::thread& thread) { return thread_cpu_ns(thread); }

void SoftWorker::loop() {
  const auto ns = [](std::chrono::nanoseconds time) { return static_cast<std::uint64_t>(time.count()); };
  const std::uint64_t spin = ns(core_.options().spin), least = ns(core_.options().least_sleep),
                      most = std::max(least, ns(core_.options().most_sleep));
  (void)::prctl(PR_SET_TIMERSLACK, kTimerSlackNs, 0, 0, 0);  // only a matter of speed
  std::uint64_t last_work = monotonic_ns();
  bool idle = false;
  std::uint32_t armed_passes = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    if (pass()) {
      idle = false;
      continue;
    }
    const std::uint64_t now = monotonic_ns();
    if (!std::exchange(idle, true)) last_work = now;
    const bool armed = core_.armed();
    const std::uint64_t longest = armed ? core_.armed_sleep_ns() : most;
    const std::uint64_t awake = !armed ? spin : longest == 0 ? kAlways : core_.armed_spin_ns();
    if (now - last_work < awake || due_ < now + kNearNs) {
      // Clients that share the processor get on.
      if (armed && ++armed_passes % kPassesPerYield == 0) sched_yield();
      continue;
    }
    const std::uint64_t sleep = std::clamp((now - last_work) / kIdlePerSleep, std::min(least, longest), longest);
    const bool had_queues = has_queues_;
    const std::uint64_t limit = had_queues || index_ == 0 ? sleep : kNoQueuesSleepNs;
    wakeup_.sleep(std::min(limit, due_ - now - kNearNs / 2), [&] {
      const bool worked = stop_.load() || core_.armed() != armed || pass();
      if (worked) idle = false;
      return worked || has_queues_ != had_queues;
    });
  }
}

bool SoftWorker::pass() {
  const std::lock_guard turn(turn_);
  const std::uint64_t now = monotonic_ns();
  bool worked = index_ == 0 && core_.control(now);
  {
    const std::lock_guard no_unmap(reader_);
    // Before commands that a drive has finished are completed: a ring of theirs may have been unmapped meanwhile.
    const bool serves = !core_.halted() && rings_hold();
    worked |= take_finished();
    worked |= take_copied();
    if (serves && !core_.halted()) worked |= serve(now);
    submit_pending();
  }
  due_ = earliest_due();
  has_queues_ = !sqs_.empty();
  return worked;
}

bool SoftWorker::serve(std::uint64_t now) {
  bool worked = run_due(now);
  for (const auto& cq : cqs_) {
    const Doorbell head = cq->refresh(core_.log());
    if (head == Doorbell::kWrong) core_.admin().doorbell_event(kEventDoorbellValue);
    worked |= head == Doorbell::kMoved;
    worked |= cq->drain();
  }
  // By index: an admin command may add a queue.
  for (std::size_t i = 0; i < sqs_.size(); ++i) worked |= fetch(*sqs_[i], now);
  if (index_ == 0) worked |= core_.admin().poll();
  return worked;
}

// Memory of rings that was unmapped, perhaps for other memory, is not touched.
bool SoftWorker::rings_hold() {
  const std::uint64_t generation = reader_.generation();
  if (generation == rings_generation_) return true;
  const auto lost = [&](std::uint16_t id, std::uint64_t address, const char* what) {
    core_.log().add(ViolationKind::kDmaAfterUnmap, id, nullptr,
                    std::string("the ring of a ") + what + " queue at " + hex_address(address) +
                        " was unmapped while the queue exists");
    core_.fail();
    return false;
  };
  for (const auto& cq : cqs_) {
    std::byte* ring = reader_.translate(cq->address, cq->entries * sizeof(CompletionEntry));
    if (ring == nullptr) return lost(cq->id, cq->address, "completion");
    cq->ring = reinterpret_cast<CompletionEntry*>(ring);
  }
  for (const auto& sq : sqs_) {
    const std::byte* ring = reader_.translate(sq->address, sq->entries * sizeof(SubmissionEntry));
    if (ring == nullptr) return lost(sq->id, sq->address, "submission");
    sq->ring = reinterpret_cast<const SubmissionEntry*>(ring);
  }
  rings_generation_ = generation;
  return true;
}

std::uint64_t SoftWorker::earliest_due() const {
  std::uint64_t due = index_ == 0 ? core_.control_due() : ~std::uint64_t{0};
  if (copies_run()) due = 0;  // nobody wakes this thread for them
  if (core_.halted()) return due;
  if (!held_.empty()) due = std::min(due, held_.front()->due);
  for (const auto& sq : sqs_) {
    if (sq->stalled_until != 0 && sq->head != sq->tail && !sq->deleting) due = std::min(due, sq->stalled_until);
  }
  return due;
}

bool SoftWorker::fetch(SoftSubmissionQueue& sq, std::uint64_t now) {
  if (sq.deleting || now < sq.stalled_until) return false;
  sq.stalled_until = 0;
  // Who leaves its completions lying gets no more, so that those that wait for room stay few.
  if (!sq.cq.waiting.empty()) return false;
  if (sq.refresh(core_.log()) == Doorbell::kWrong) core_.admin().doorbell_event(kEventDoorbellValue);
  if (sq.head == sq.tail) return false;
  std::uint32_t fetched = 0;
  while (sq.head != sq.tail && fetched < kBatch && !sq.deleting && sq.stalled_until == 0 && !core_.halted()) {
    SoftCommand& command = take(sq, sq.ring[sq.head]);
    if (++sq.head == sq.entries) sq.head = 0;
    ++fetched;
    begin(command);
  }
  counts_.commands.fetch_add(fetched, std::memory_order_relaxed);
  return true;
}

SoftCommand& SoftWorker::take(SoftSubmissionQueue& sq, const SubmissionEntry& entry) {
  if (free_.empty()) {
    commands_.push_back(std::make_unique<SoftCommand>());
    free_.push_back(commands_.back().get());
  }
  SoftCommand& command = *free_.back();
  free_.pop_back();
  command.reset(*this, sq, entry);
  return command;
}

void SoftWorker::begin(SoftCommand& command) {
  SoftSubmissionQueue& sq = *command.sq;
  const std::uint16_t id = command.entry.command_id;
  if (id == kNoCommandId) {
    core_.log().add(ViolationKind::kReservedCommandId, sq.id, &command.entry, "0xffff is not for commands");
  }
  if (sq.id_used(id)) {
    core_.log().add(ViolationKind::kCommandId, sq.id, &command.entry,
                    "no completion was posted for an earlier command of this id");
    command.status = kScCommandIdConflict;
    post(sq, entry_of(command), false);
    recycle(command);
    return;
  }
  sq.use_id(id);
  if (core_.faults() != nullptr && !core_.faults()->empty()) {
    command.fault = core_.faults()->match(sq.id, command.entry);
    if (command.fault && inject_before(command)) return;
  }
  start(command);
}

bool SoftWorker::prepare(SoftCommand& command) {
  if (command.prepared || command.sq->id == 0) return true;
  command.prepared = true;
  const Sc status = prepare_io(command, core_.rules(), core_.log(), reader_);
  if (status == kScSuccess) return true;
  command.status = status_of_refused(status);
  return false;
}

void SoftWorker::start(SoftCommand& command) {
  if (command.sq->id == 0) {
    if (!core_.admin().execute(command)) return;
    command.status = status_of_refused(command.status);
    return complete(command);
  }
  if (!prepare(command)) return complete(command);
  const bool waits = std::any_of(command.targets.begin(), command.targets.end(),
                                 [](const SoftNamespaceState* target) { return target->runner != nullptr; });
  if (const Sc status = attach_memory(command, core_.log(), reader_, waits)) {
    command.status = status;
    return complete(command);
  }
  if (command.by_engine) return start_by_engine(command);
  ask_media(command);
}

void SoftWorker::ask_media(SoftCommand& command) {
  std::uint32_t running = 0;
  static const Medium::Completion kept = [](MediumRequest&) {};
  for (std::size_t i = 0; i < command.requests.size(); ++i) {
    const SoftNamespaceState& target = *command.targets[i];
    MediumRequest& request = command.requests[i];
    if (target.runner != nullptr) {
      auto pending = std::find_if(pending_.begin(), pending_.end(),
                                  [&](const Pending& other) { return other.runner == target.runner; });
      if (pending == pending_.end()) pending = pending_.insert(pending, {target.runner, {}});
      pending->requests.push_back(request);
      ++running;
      continue;
    }
    target.medium->run({&request, 1}, kept);
    if (request.error != 0) command.error.store(request.error, std::memory_order_relaxed);
    if (request.not_before > command.not_before.load(std::memory_order_relaxed)) {
      command.not_before.store(request.not_before, std::memory_order_relaxed);
    }
  }
  if (running == 0) return finish(command);
  ++command.sq->in_drive;
  command.running.store(running, std::memory_order_relaxed);  // before submit_pending()
}

void SoftWorker::submit_pending() {
  for (Pending& pending : pending_) {
    if (pending.requests.empty()) continue;
    pending.runner->submit(pending.requests);
    pending.requests.clear();
  }
  for (const auto& copies : engines_) copies->submit();
}

void SoftWorker::medium_done(SoftCommand& command) {
  {
    const std::lock_guard lock(finished_mutex_);
    finished_.push_back(&command);
    finished_count_.fetch_add(1);
  }
  wakeup_.notify();
}

bool SoftWorker::take_finished() {
  if (finished_count_.load() == 0) return false;
  {
    const std::lock_guard lock(finished_mutex_);
    finished_now_.swap(finished_);
    finished_count_.store(0);
  }
  for (SoftCommand* command : finished_now_) {
    SoftSubmissionQueue& sq = *command->sq;
    finish(*command);
    left_drive(sq);
  }
  finished_now_.clear();
  return true;
}

void SoftWorker::left_drive(SoftSubmissionQueue& sq) {
  // Its deletion is another thread's to complete, which may be asleep.
  if (--sq.in_drive == 0 && sq.deleting) core_.workers().front()->wakeup().notify();
}

void SoftWorker::finish(SoftCommand& command) {
  if (command.by_engine) return finish_by_engine(command);
  conclude(command);
}

void SoftWorker::conclude(SoftCommand& command) {
  command.status = finish_io(command);
  if (!command.requests.empty() && command.status == kScSuccess) {
    const MediumRequest& request = command.requests.front();
    if (request.op == MediumRequest::Op::kRead) {
      counts_.read_bytes.fetch_add(request.bytes, std::memory_order_relaxed);
    } else if (request.op == MediumRequest::Op::kWrite) {
      counts_.written_bytes.fetch_add(request.bytes, std::memory_order_relaxed);
    }
  }
  const std::uint64_t not_before = command.not_before.load(std::memory_order_relaxed);
  if (not_before != 0 && !command.sq->deleting && not_before > monotonic_ns()) {
    return hold(command, HeldFor::kCompletion, not_before);
  }
  complete(command);
}

void SoftWorker::complete(SoftCommand& command) {
  if (core_.halted()) {
    lost_.push_back(&command);
    return;
  }
  if (command.fault && inject_after(command)) return;
  post(command);
}

CompletionEntry SoftWorker::entry_of(const SoftCommand& command) {
  SoftSubmissionQueue& sq = *command.sq;
  if (!sq.stuck_head) sq.reported_head = sq.head;
  CompletionEntry entry{};
  entry.result = command.result;
  entry.sq_head = static_cast<std::uint16_t>(sq.reported_head);
  entry.sq_id = sq.id;
  entry.command_id = command.entry.command_id;
  entry.status = static_cast<std::uint16_t>(command.status << 1);
  return entry;
}

void SoftWorker::post(SoftCommand& command) {
  SoftSubmissionQueue& sq = *command.sq;
  if (!sq.silent) {
    sq.free_id(command.entry.command_id);
    post(sq, entry_of(command), true);
  }
  recycle(command);
}

void SoftWorker::post(SoftSubmissionQueue& sq, const CompletionEntry& entry, bool accounted) {
  sq.cq.post(entry, accounted, core_.log());
  counts_.completions.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace tardis::nvme
