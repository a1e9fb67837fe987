// SPDX-License-Identifier: Apache-2.0
// The admin queue pair: one command at a time, by PRP, each with a deadline.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "nvme/controller_registers.h"
#include "nvme/memory.h"
#include "nvme/queue.h"
#include "nvme/register_window.h"

namespace tardis::nvme {

struct AdminReply {
  CommandStatus status;
  std::uint32_t result = 0;  // DW0
};

// Thread-safe.
class AdminQueue {
 public:
  static Result<std::unique_ptr<AdminQueue>> create(DmaMapper& mapper, RegisterWindow& window,
                                                    ControllerRegisters& registers);

  AdminRings rings() const;

  // An error if there was no answer: os_error ETIMEDOUT, EIO (the controller failed or what it answered is not to be
  // believed), ENODEV (it is gone). The queue takes no more until the controller was reset, since the command may still
  // write.
  Result<AdminReply> execute(const SubmissionEntry& command, std::uint32_t timeout_ms);
  // With a page of data from the controller, which is copied to `out` if the command succeeded.
  Result<AdminReply> execute(const SubmissionEntry& command, std::uint32_t timeout_ms, std::span<std::byte> out);

  // Before the controller is switched off: waits for the command that is out, and sends no more.
  void suspend();
  // Of a controller that is switched off: everything outstanding is forgotten, and the rings are new.
  void renew();
  // The controller is ready.
  void resume();
  // Takes the rings away from the controller.
  Status revoke();

 private:
  static constexpr std::uint32_t kEntries = 16;
  static_assert(sizeof(SubmissionEntry) * kEntries + sizeof(CompletionEntry) * kEntries <= kPageBytes * 2);

  AdminQueue(RegisterWindow& window, ControllerRegisters& registers) : window_(window), registers_(registers) {}
  Result<AdminReply> execute_locked(const SubmissionEntry& command, std::uint32_t timeout_ms);
  Error broken(int error, const std::string& what);

  RegisterWindow& window_;
  ControllerRegisters& registers_;
  std::mutex mutex_;
  DmaMemory memory_;  // a page each: submission queue, completion queue, data
  std::vector<CommandSlot> slots_;
  std::optional<QueuePair> pair_;
  int broken_ = EIO;  // why nothing may be sent; 0: it may
};

}  // namespace tardis::nvme
