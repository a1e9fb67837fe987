// SPDX-License-Identifier: Apache-2.0
#include "nvme/io_run.h"

#include <algorithm>
#include <cerrno>

#include "base/clock.h"
#include "nvme/backoff.h"
#include "nvme/command_error.h"

namespace tardis::nvme {
namespace {

constexpr std::uint64_t kNsPerMs = 1'000'000;
constexpr std::uint32_t kMostAtOnce = 32;         // commands planned before the controller is told of them
constexpr std::uint64_t kLookNs = 10 * kNsPerMs;  // how often a wait looks whether the controller is still there

void add(std::atomic<std::uint64_t>& counter, std::uint64_t amount) {
  counter.fetch_add(amount, std::memory_order_relaxed);
}

}  // namespace

IoRun::IoRun(IoHost& host, IoQueue& queue, const NamespaceInfo& space, const PlanLimits& limits,
             std::uint64_t first_block)
    : host_(host),
      queue_(queue),
      space_(space),
      limits_(limits),
      begin_(first_block * space.block_bytes),
      timing_(host.timing()),
      regions_(host.regions()) {
  for (std::uint32_t i = queue.bounce_buffers(); i > 0; --i) free_bounces_.push_back(i - 1);
}

void IoRun::execute(std::span<NamespaceRequest> requests, const RawNamespace::Completion& on_complete,
                    bool force_unit_access) {
  requests_ = requests;
  on_complete_ = on_complete ? &on_complete : nullptr;
  write_flags_ = force_unit_access ? kForceUnitAccess : 0;
  states_.resize(requests.size());
  std::uint64_t most = 0;  // commands, if they were all of one block
  for (std::size_t i = 0; i < requests.size(); ++i) {
    states_[i].bytes = total_bytes(requests[i].memory);
    most += states_[i].bytes / limits_.block_bytes;
  }
  const auto flights = static_cast<std::uint32_t>(std::min<std::uint64_t>(most, queue_.commands()));
  flights_ = std::make_unique<Flight[]>(flights);
  for (std::uint32_t i = flights; i > 0; --i) free_flights_.push_back(i - 1);
  drive();
}

int IoRun::flush() {
  flights_ = std::make_unique<Flight[]>(1);
  Flight& flight = flights_[0];
  flight = {};
  flight.command.opcode = static_cast<std::uint8_t>(IoOpcode::kFlush);
  flight.command.namespace_id = space_.id;
  flight.request = kFlush;
  waiting_.push_back(0);
  drive();
  return flush_error_;
}

void IoRun::drive() {
  Backoff backoff;
  std::uint64_t next_look = monotonic_ns() + kLookNs;
  for (;;) {
    const std::uint64_t now =
        monotonic_ns();  // before completions are looked for: this thread may not have run for long
    if (send_waiting(now)) issue(now);
    if (sent_ == 0 && waiting_.empty()) {
      if (current_ == requests_.size()) return;
      continue;  // requests failed, whose room others can use
    }
    done_.clear();
    const bool progress = queue_.exchange(done_) > 0;
    for (const FinishedCommand& finished : done_) end(static_cast<std::uint32_t>(finished.tag), finished, now);
    if (queue_.suspect(now)) {
      host_.recover(queue_);
      continue;
    }
    if (progress) {
      backoff.reset();
      next_look = now + kLookNs;
      continue;
    }
    if (now >= next_look) {
      if (!host_.healthy(queue_)) host_.recover(queue_);
      next_look = now + kLookNs;
    }
    backoff.pause();
  }
}

void IoRun::begin(std::size_t index) {
  NamespaceRequest& request = requests_[index];
  const State& state = states_[index];
  request.error = 0;
  const std::uint64_t size = space_.blocks * space_.block_bytes;
  if (request.offset % limits_.block_bytes != 0 || state.bytes % limits_.block_bytes != 0 || request.offset > size ||
      state.bytes > size - request.offset) {
    fail(index, EINVAL);
  } else if (request.op == NamespaceRequest::Op::kWrite && space_.read_only) {
    fail(index, EROFS);
  }
}

void IoRun::issue(std::uint64_t now) {
  for (std::uint32_t issued = 0; current_ < requests_.size() && issued < kMostAtOnce;) {
    if (!current_begun_) begin(current_);
    current_begun_ = true;
    State& state = states_[current_];
    if (state.issued < state.bytes && requests_[current_].error == 0) {
      if (free_flights_.empty() || !issue_command() || !send_waiting(now)) return;
      ++issued;
      continue;
    }
    state.issue_over = true;
    complete_if_over(current_);
    ++current_;
    current_begun_ = false;
  }
}

bool IoRun::issue_command() {
  NamespaceRequest& request = requests_[current_];
  State& state = states_[current_];
  const std::uint64_t offset = begin_ + request.offset + state.issued;
  const CommandPlan plan =
      plan_command(limits_, *regions_, offset, request.memory, state.at, state.bytes - state.issued, ranges_);
  if (plan.way == CommandPlan::Way::kImpossible) {
    fail(current_, EFAULT);
    return true;
  }
  if (plan.way == CommandPlan::Way::kBounce && free_bounces_.empty()) return false;

  const std::uint32_t index = free_flights_.back();
  free_flights_.pop_back();
  Flight& flight = flights_[index];
  flight = {};
  flight.request = current_;
  flight.at = state.at;
  flight.bytes = plan.bytes;
  SubmissionEntry& command = flight.command;
  const bool write = request.op == NamespaceRequest::Op::kWrite;
  command.opcode = static_cast<std::uint8_t>(write ? IoOpcode::kWrite : IoOpcode::kRead);
  command.namespace_id = space_.id;
  command.set_start_block(offset / limits_.block_bytes);
  command.cdw12 = static_cast<std::uint32_t>(plan.bytes / limits_.block_bytes - 1) | (write ? write_flags_ : 0);
  if (plan.way == CommandPlan::Way::kBounce) {
    flight.bounce = free_bounces_.back();
    free_bounces_.pop_back();
    IovecCursor at = state.at;
    if (write) gather(request.memory, at, queue_.bounce(flight.bounce), static_cast<std::size_t>(plan.bytes));
    add(host_.count().bounced_commands, 1);
    add(host_.count().bounced_bytes, plan.bytes);
  }
  ++state.in_flight;
  state.issued += plan.bytes;
  advance(request.memory, state.at, plan.bytes);
  if (point(flight, index, plan.way)) {
    waiting_.push_back(index);
  } else {
    ++sent_;  // as end() has it
    end(index, {index, Fate::kCompleted, {kScInvalidField | 1u << 14}}, 0);
  }
  return true;
}

bool IoRun::point(Flight& flight, std::uint32_t index, CommandPlan::Way way) {
  const PrpList list = queue_.list_page(index);
  SubmissionEntry& command = flight.command;
  if (way == CommandPlan::Way::kSgl) {
    command.set_data_pointer(DataPointer::kSgl);
    return point_by_sgl(limits_, ranges_, list, command.sgl) == SglStatus::kOk;
  }
  if (way == CommandPlan::Way::kPrp) return point_by_prp(ranges_, list, command.prp) == PrpStatus::kOk;
  const std::uint64_t address = queue_.bounce_address(flight.bounce);
  const auto page_address = [address](std::uint64_t page) { return address + page * kPageBytes; };
  return build_prp(page_address, 0, flight.bytes, &list, 1, command.prp) == PrpStatus::kOk;
}

bool IoRun::send_waiting(std::uint64_t now) {
  for (std::size_t i = 0; i < waiting_.size();) {
    const std::uint32_t index = waiting_[i];
    Flight& flight = flights_[index];
    if (flight.not_before > now) {
      ++i;
      continue;
    }
    const std::uint64_t deadline = now + timing_.io_timeout_ms * kNsPerMs;
    const IoQueue::Submit submitted = queue_.submit(flight.command, index, deadline);
    if (submitted == IoQueue::Submit::kFull) return false;
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    ++sent_;
    if (submitted == IoQueue::Submit::kClosed) end(index, {index, Fate::kClosed, {0}}, now);
  }
  return true;
}

int IoRun::error_of(const FinishedCommand& finished) const {
  switch (finished.fate) {
    case Fate::kCompleted:
      return errno_of(finished.status);
    case Fate::kLate:
      return finished.status.ok() ? 0 : ETIMEDOUT;  // what it says was the Abort's doing, most often
    case Fate::kTimedOut:
      return ETIMEDOUT;
    case Fate::kClosed:
      return host_.closed_error();
    case Fate::kLost:
      break;
  }
  return EREMOTEIO;  // of what it should have moved nothing is known
}

bool IoRun::again(Flight& flight, const FinishedCommand& finished, std::uint64_t now) {
  const bool lost = finished.fate == Fate::kLost;
  const bool failed = finished.fate == Fate::kCompleted && !finished.status.ok() && !finished.status.do_not_retry();
  if ((!lost && !failed) || flight.retries >= timing_.retries) return false;
  if (flight.request != kFlush && requests_[flight.request].error != 0) return false;  // its request failed already
  const std::uint32_t delay_ms = failed ? timing_.retry_delay_ms[finished.status.retry_delay()] : 0;
  if (delay_ms > timing_.max_retry_delay_ms) return false;
  ++flight.retries;
  flight.not_before = now + delay_ms * kNsPerMs;
  return true;
}

void IoRun::end(std::uint32_t index, const FinishedCommand& finished, std::uint64_t now) {
  Flight& flight = flights_[index];
  --sent_;
  if (again(flight, finished, now)) {
    add(host_.count().retries, 1);
    waiting_.push_back(index);
    return;
  }
  const int error = error_of(finished);
  IoCounters& count = host_.count();
  add(count.commands, 1);
  if (error != 0) add(count.errors, 1);
  if (flight.request == kFlush) {
    flush_error_ = error;
    return;
  }
  const std::size_t request = flight.request;
  const bool read = requests_[request].op == NamespaceRequest::Op::kRead;
  if (error != 0) {
    fail(request, error);
  } else {
    if (read && flight.bounce != kNone) {
      scatter(queue_.bounce(flight.bounce), requests_[request].memory, flight.at,
              static_cast<std::size_t>(flight.bytes));
    }
    add(read ? count.read_bytes : count.written_bytes, flight.bytes);
  }
  if (flight.bounce != kNone) free_bounces_.push_back(flight.bounce);
  free_flights_.push_back(index);
  --states_[request].in_flight;
  complete_if_over(request);
}

void IoRun::fail(std::size_t request, int error) {
  if (requests_[request].error == 0) requests_[request].error = error;
}

void IoRun::complete_if_over(std::size_t request) {
  State& state = states_[request];
  if (!state.issue_over || state.in_flight != 0) return;
  if (on_complete_ != nullptr) (*on_complete_)(requests_[request]);
}

}  // namespace tardis::nvme
