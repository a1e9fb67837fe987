// SPDX-License-Identifier: Apache-2.0
// One I/O queue pair with the memory that its commands need. One thread at a time owns it; a thread that resets the
// controller goes through the queues of all owners, hence the lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/status.h"
#include "nvme/memory.h"
#include "nvme/prp.h"
#include "nvme/queue.h"
#include "nvme/register_window.h"

namespace tardis::nvme {

// How a command ended. In every case the controller does not touch its memory any more.
enum class Fate : std::uint8_t {
  kCompleted,  // with a status
  kLate,       // with a status, after its time was over
  kTimedOut,   // never; its queue was deleted or the controller reset
  kLost,       // as kTimedOut, but its own time was not over: it may be sent again
  kClosed,     // the controller is gone or cannot be used any more
};

struct FinishedCommand {
  std::uint64_t tag = 0;
  Fate fate = Fate::kCompleted;
  CommandStatus status{0};
};

struct ControllerInfo;

struct IoQueueShape {
  // As far as the controller allows it.
  static IoQueueShape within(const ControllerInfo& controller, std::uint32_t entries, std::uint32_t bounce_buffers,
                             std::uint32_t bounce_bytes);

  std::uint32_t entries = 0;   // of both rings
  std::uint32_t commands = 0;  // in flight at most; below entries
  std::uint32_t doorbell_stride = 0;
  std::uint32_t bounce_buffers = 0;
  std::uint32_t bounce_bytes = 0;  // of each: whole pages
};

struct QueueShadows {
  ShadowDoorbell sq_tail{}, cq_head{};
};

class IoQueue {
 public:
  // `shadows` stay as long as the queue is used.
  static Result<std::unique_ptr<IoQueue>> create(DmaMapper& mapper, Doorbells& window, std::uint16_t id,
                                                 const IoQueueShape& shape, const QueueShadows& shadows);
  // What it allocates: rings as ExternalRings has them, then pages for lists, then bounce buffers.
  static std::size_t memory_bytes(const IoQueueShape& shape);

  std::uint16_t id() const { return id_; }
  std::uint32_t commands() const { return shape_.commands; }
  std::uint32_t entries() const { return shape_.entries; }
  std::uint64_t submission_address() const { return memory_.address() + sq_offset_; }
  std::uint64_t completion_address() const { return memory_.address(); }

  // A page for the lists of one of the commands in flight: [0, commands()).
  PrpList list_page(std::uint32_t command);
  std::uint32_t bounce_buffers() const { return shape_.bounce_buffers; }
  std::uint32_t bounce_bytes() const { return shape_.bounce_bytes; }
  std::byte* bounce(std::uint32_t buffer) { return memory_.data() + bounce_offset(buffer); }
  std::uint64_t bounce_address(std::uint32_t buffer) const { return memory_.address() + bounce_offset(buffer); }

  // ---- for the owner
  enum class Submit : std::uint8_t { kOk, kFull, kClosed };
  // The controller sees the command with the next exchange(). `deadline`: of monotonic_ns().
  Submit submit(const SubmissionEntry& command, std::uint64_t tag, std::uint64_t deadline);
  // Gives the controller what was submitted, and adds what has finished to `done`. Returns how many.
  std::size_t exchange(std::vector<FinishedCommand>& done);
  // A command's time is over, or what the controller wrote is not to be believed.
  bool suspect(std::uint64_t now);
  // No submission from now on.
  void stop();
  // Takes what has completed, for the next exchange().
  void collect();
  // Those whose time is over and that were not given yet. They keep their room until they complete or the queue does.
  std::vector<std::uint16_t> quarantine_overdue(std::uint64_t now);
  std::uint32_t quarantined();
  std::uint32_t outstanding();
  // After stop(): goes on if no command is overdue and all that the controller wrote was believed. False: it must be
  // deleted.
  bool resume();
  QueueFault fault();
  // How often it was made anew or closed.
  std::uint64_t epoch();

  // ---- for who deleted the queue or switched the controller off; holding it with hold()
  [[nodiscard]] std::unique_lock<std::mutex> hold() { return std::unique_lock(mutex_); }
  // Ends every command, those that have completed with their status, and starts over as a new queue.
  void restart_held();
  // Ends every command and takes the memory away from the controller.
  Status close_held();

 private:
  IoQueue(Doorbells& window, std::uint16_t id, const IoQueueShape& shape) : window_(window), id_(id), shape_(shape) {}
  std::size_t bounce_offset(std::uint32_t buffer) const {
    return bounce_offset_ + std::size_t{buffer} * shape_.bounce_bytes;
  }
  void collect_held();
  void end_all_held(Fate fate);

  Doorbells& window_;
  const std::uint16_t id_;
  const IoQueueShape shape_;
  DmaMemory memory_;  // completion queue, submission queue, list pages, bounce buffers
  std::size_t sq_offset_ = 0, list_offset_ = 0, bounce_offset_ = 0;

  std::mutex mutex_;
  std::vector<CommandSlot> slots_;
  std::optional<QueuePair> pair_;
  std::vector<std::uint64_t> deadlines_;   // by index of a command
  std::uint64_t next_deadline_ = kNever;   // no command's is before it
  std::vector<FinishedCommand> finished_;  // not fetched by the owner yet
  bool stopped_ = false, closed_ = false;
  std::uint64_t epoch_ = 0;
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};
};

}  // namespace tardis::nvme
