// SPDX-License-Identifier: Apache-2.0
#include "nvme/admin_queue.h"

#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "nvme/backoff.h"

namespace tardis::nvme {
namespace {

constexpr std::uint64_t kHealthNs = 10'000'000;  // how often a wait looks whether the controller is still there

std::string name_of(const SubmissionEntry& command) {
  switch (static_cast<AdminOpcode>(command.opcode)) {
    case AdminOpcode::kDeleteSq:
      return "Delete I/O Submission Queue";
    case AdminOpcode::kCreateSq:
      return "Create I/O Submission Queue";
    case AdminOpcode::kGetLogPage:
      return "Get Log Page";
    case AdminOpcode::kDeleteCq:
      return "Delete I/O Completion Queue";
    case AdminOpcode::kCreateCq:
      return "Create I/O Completion Queue";
    case AdminOpcode::kIdentify:
      return "Identify";
    case AdminOpcode::kAbort:
      return "Abort";
    case AdminOpcode::kSetFeatures:
      return "Set Features";
    case AdminOpcode::kGetFeatures:
      return "Get Features";
    case AdminOpcode::kAsyncEvent:
      return "Asynchronous Event Request";
    case AdminOpcode::kDoorbellBufferConfig:
      return "Doorbell Buffer Config";
  }
  return "admin command " + std::to_string(command.opcode);
}

}  // namespace

Result<std::unique_ptr<AdminQueue>> AdminQueue::create(DmaMapper& mapper, RegisterWindow& window,
                                                       ControllerRegisters& registers) {
  const std::uint32_t stride = registers.capabilities().doorbell_stride();
  if (cq_head_doorbell(0, stride) + 4 > window.bytes()) {
    return Error{Code::kUnsupportedFormat, "NVMe controller: expected the doorbells of the admin queue within the " +
                                               std::to_string(window.bytes()) +
                                               " bytes of the register window, found CAP.DSTRD = " +
                                               std::to_string(stride) + "; is it an NVMe controller?"};
  }
  auto memory = DmaMemory::allocate(mapper, 3 * kPageBytes);
  if (!memory) return memory.error();
  std::unique_ptr<AdminQueue> admin(new AdminQueue(window, registers));
  admin->memory_ = std::move(*memory);
  admin->slots_.resize(1);
  std::byte* const rings = admin->memory_.data();
  const auto doorbell = [&window](std::uint32_t offset) { return window.doorbells() + (offset - kRegDoorbells) / 4; };
  admin->pair_.emplace(QueueMemory{
      .sq = reinterpret_cast<SubmissionEntry*>(rings),
      .cq = reinterpret_cast<CompletionEntry*>(rings + kPageBytes),
      .commands = admin->slots_.data(),
      .sq_tail = doorbell(sq_tail_doorbell(0, stride)),
      .cq_head = doorbell(cq_head_doorbell(0, stride)),
      .sq_entries = kEntries,
      .cq_entries = kEntries,
      .max_commands = 1,
      .sq_id = 0,
  });
  return admin;
}

AdminRings AdminQueue::rings() const { return {memory_.address(), memory_.address() + kPageBytes, kEntries}; }

Error AdminQueue::broken(int error, const std::string& what) {
  broken_ = error;
  return {Code::kIo, what, error};
}

Result<AdminReply> AdminQueue::execute_locked(const SubmissionEntry& command, std::uint32_t timeout_ms) {
  const std::string who = "NVMe admin command " + name_of(command) + ": ";
  if (broken_ != 0) {
    return Error{Code::kIo, who + "not sent, since the controller does not take commands; it must be reset", broken_};
  }
  // Until the reply is there nobody else may use the queue: it is of one command.
  pair_->submit(command, 0);
  pair_->ring();
  window_.notify();

  const std::uint64_t start = monotonic_ns(), deadline = start + timeout_ms * std::uint64_t{1'000'000};
  std::uint64_t next_look = start + kHealthNs;
  Backoff backoff;
  for (;;) {
    const std::uint64_t now = monotonic_ns();  // before the poll: one more look after a long sleep
    Completion reply;
    const PollResult found = pair_->poll(reply);
    if (found != PollResult::kNothing) {
      pair_->acknowledge();
      window_.notify();
    }
    if (found == PollResult::kFault) return broken(EIO, who + fault_text(pair_->fault()));
    if (found == PollResult::kCompletion) return AdminReply{reply.status, reply.result};
    if (now >= next_look) {
      next_look = now + kHealthNs;
      const Health health = registers_.health();
      if (health == Health::kGone) return broken(ENODEV, who + "the controller is gone");
      if (health != Health::kReady) {
        return broken(EIO, who + "expected a ready controller, found " + registers_.describe());
      }
    }
    if (now >= deadline) {
      return broken(ETIMEDOUT, who + "expected an answer within " + std::to_string(timeout_ms) + " ms, found none (" +
                                   registers_.describe() + ")");
    }
    backoff.pause();
  }
}

Result<AdminReply> AdminQueue::execute(const SubmissionEntry& command, std::uint32_t timeout_ms) {
  const std::lock_guard lock(mutex_);
  return execute_locked(command, timeout_ms);
}

Result<AdminReply> AdminQueue::execute(const SubmissionEntry& command, std::uint32_t timeout_ms,
                                       std::span<std::byte> out) {
  const std::lock_guard lock(mutex_);
  std::byte* const page = memory_.data() + 2 * kPageBytes;
  SubmissionEntry with_data = command;
  with_data.set_data_pointer(DataPointer::kPrp);
  with_data.prp = {memory_.address() + 2 * kPageBytes, 0};
  if (broken_ == 0) std::memset(page, 0, kPageBytes);
  auto reply = execute_locked(with_data, timeout_ms);
  if (reply && reply->status.ok()) std::memcpy(out.data(), page, std::min<std::size_t>(out.size(), kPageBytes));
  return reply;
}

void AdminQueue::suspend() {
  const std::lock_guard lock(mutex_);
  if (broken_ == 0) broken_ = EIO;
}

void AdminQueue::renew() {
  const std::lock_guard lock(mutex_);
  pair_->release_all();
}

void AdminQueue::resume() {
  const std::lock_guard lock(mutex_);
  broken_ = 0;
}

Status AdminQueue::revoke() {
  const std::lock_guard lock(mutex_);
  broken_ = ENODEV;
  return memory_.revoke();
}

}  // namespace tardis::nvme
