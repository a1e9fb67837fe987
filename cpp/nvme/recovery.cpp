// SPDX-License-Identifier: Apache-2.0
// What happens when a command's time is over or a controller fails. From the mildest means to the strongest: Abort and
// a time of grace, deletion of the queue, reset of the controller, and, where that fails too, the end of its access to
// memory. Commands end, and their memory is given back, only after one of these.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "base/clock.h"
#include "nvme/backoff.h"
#include "nvme/driver.h"

namespace tardis::nvme {
namespace {

constexpr std::uint64_t kNsPerMs = 1'000'000;
constexpr std::uint32_t kLeastShutdownMs = 1'000, kUnknownShutdownMs = 10'000;  // RTD3E is small or not said

}  // namespace

void Driver::recover(IoQueue& queue) {
  const std::uint64_t epoch = queue.epoch();
  queue.stop();
  if (queue.fault() != QueueFault::kNone) count_.queue_faults.fetch_add(1, std::memory_order_relaxed);
  if (registers_.health() == Health::kReady) {
    const std::uint64_t deadline = monotonic_ns() + options_.abort_grace_ms * kNsPerMs;
    if (abort_overdue(queue, deadline)) {
      wait_for_late(queue, deadline);
      if (queue.resume()) return;
    }
  }
  const std::lock_guard lock(recovery_);
  if (queue.epoch() != epoch || state_.load() != DriverState::kLive) {
    // Another thread reset the controller meanwhile, which ended the commands of this queue too.
    (void)queue.resume();
    return;
  }
  if (registers_.health() == Health::kReady && replace_queue_locked(queue)) return;
  (void)reset_locked();
}

bool Driver::abort_overdue(IoQueue& queue, std::uint64_t deadline) {
  const auto overdue = queue.quarantine_overdue(monotonic_ns());
  count_.timeouts.fetch_add(overdue.size(), std::memory_order_relaxed);
  for (const std::uint16_t id : overdue) {
    if (monotonic_ns() >= deadline) break;
    if (!send_abort(queue, id)) return false;
    queue.collect();
    if (queue.quarantined() == 0) break;
  }
  return true;
}

void Driver::wait_for_late(IoQueue& queue, std::uint64_t deadline) {
  // Of a queue that will be deleted, all that can still complete should: it need not be sent again.
  const bool all = queue.fault() != QueueFault::kNone;
  Backoff backoff;
  for (std::uint64_t next_look = 0;;) {
    const std::uint64_t now = monotonic_ns();
    queue.collect();
    if ((all ? queue.outstanding() : queue.quarantined()) == 0 || now >= deadline) return;
    if (now >= next_look) {
      if (registers_.health() != Health::kReady) return;
      next_look = now + 10 * kNsPerMs;
    }
    backoff.pause();
  }
}

bool Driver::replace_queue_locked(IoQueue& queue) {
  // Its answer says that every command of the queue has ended. The rings stay mapped, and are used again.
  if (!delete_submission_queue(queue.id()) || !delete_completion_queue(queue.id())) return false;
  count_.queue_deletions.fetch_add(1, std::memory_order_relaxed);
  {
    const auto held = queue.hold();
    queue.restart_held();
  }
  return static_cast<bool>(create_queue(queue));
}

Status Driver::reset() {
  const std::lock_guard lock(recovery_);
  if (state_.load() != DriverState::kLive) {
    return Error{Code::kClosed, "NVMe controller reset: expected a controller in use, found none", closed_error()};
  }
  return reset_locked();
}

std::vector<std::unique_lock<std::mutex>> Driver::hold_all() {
  std::vector<std::unique_lock<std::mutex>> held;
  for (const auto& queue : queues_) held.push_back(queue->hold());
  return held;
}

Status Driver::reset_locked() {
  count_.resets.fetch_add(1, std::memory_order_relaxed);
  // One that was ready until now keeps what is in its cache; one that failed or was off has perhaps lost it.
  if (controller_.volatile_cache && registers_.health() != Health::kReady) cache_losses_.fetch_add(1);
  admin_->suspend();
  const auto held = hold_all();
  auto stopped = stop_controller();
  auto result = stopped;
  if (result) {
    for (External& external : externals_) external.alive = false;
    for (const auto& queue : queues_) queue->restart_held();
    result = start_controller();
    if (result) result = check_unchanged();
    if (result) result = configure_shadows();
    for (const auto& queue : queues_) {
      if (result) result = create_queue(*queue);
    }
    if (result) return result;
    // It was switched on again, and has addresses.
    admin_->suspend();
    stopped = stop_controller();
  }
  const bool gone = result.error().os_error == ENODEV;
  give_up_held(gone ? DriverState::kGone : DriverState::kFailed, static_cast<bool>(stopped));
  return result;
}

Status Driver::stop_controller() {
  auto stopped = registers_.disable();
  if (stopped || stopped.error().os_error == ENODEV || !options_.function_reset) return stopped;
  return options_.function_reset();
}

void Driver::give_up_held(DriverState state, bool stopped) {
  state_.store(state);
  // First what users own. Only then do their requests end.
  const bool rings_revoked = revoke_externals_locked();
  if ((!registered_.revoke() || !rings_revoked) && !stopped) {
    // The next use of that memory, by whoever gets it, could be overwritten at any time; nothing that this process
    // computes from then on could be trusted.
    std::fprintf(stderr,
                 "tardis: NVMe controller '%s' %s cannot be stopped, and memory of this process cannot be taken away "
                 "from it (expected the mapper to unmap registered memory); ending the process\n",
                 controller_.model.c_str(), controller_.serial.c_str());
    std::abort();
  }
  for (const auto& queue : queues_) (void)queue->close_held();  // what cannot be unmapped is never freed
  (void)shadow_.revoke();
  (void)admin_->revoke();
}

Status Driver::shut_down() {
  const std::lock_guard lock(recovery_);
  if (state_.load() != DriverState::kLive || admin_ == nullptr) return {};
  const auto held = hold_all();
  Status result;
  // A bring-up that failed half-way left nothing to shut down in good order.
  if (started_ && registers_.health() == Health::kReady) {
    result = delete_externals_locked();
    // A submission queue before the completion queue that it names.
    for (const auto& queue : queues_) {
      if (result) result = delete_submission_queue(queue->id());
    }
    for (const auto& queue : queues_) {
      if (result) result = delete_completion_queue(queue->id());
    }
    admin_->suspend();
    std::uint32_t timeout_ms = options_.shutdown_timeout_ms;
    if (timeout_ms == 0) {
      timeout_ms =
          controller_.shutdown_ms != 0 ? std::max(controller_.shutdown_ms, kLeastShutdownMs) : kUnknownShutdownMs;
    }
    auto shut = registers_.shut_down(timeout_ms);
    if (result) result = shut;
  }
  admin_->suspend();
  // Rings and lists are freed next.
  auto stopped = stop_controller();
  if (result) result = stopped;
  give_up_held(DriverState::kShutDown, static_cast<bool>(stopped));
  return result;
}

}  // namespace tardis::nvme
