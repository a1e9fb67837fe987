// SPDX-License-Identifier: Apache-2.0
// Admin commands of a driver: those that make and delete queues, and what becomes of the answers.
#include <cerrno>
#include <cstring>

#include "nvme/command_error.h"
#include "nvme/driver.h"

namespace tardis::nvme {
namespace {

SubmissionEntry queue_command(AdminOpcode opcode, std::uint32_t cdw10, std::uint32_t cdw11, std::uint64_t address) {
  SubmissionEntry command{};
  command.opcode = static_cast<std::uint8_t>(opcode);
  command.prp = {address, 0};
  command.cdw10 = cdw10;
  command.cdw11 = cdw11;
  return command;
}

}  // namespace

Status Driver::answered(const Result<AdminReply>& reply, const std::string& what) {
  if (!reply) return reply.error();
  if (reply->status.ok()) return {};
  return Error{Code::kIo, "NVMe admin command " + what + ": expected success, found " + describe(reply->status),
               errno_of(reply->status)};
}

Result<AdminReply> Driver::admin(const SubmissionEntry& command) {
  return admin_->execute(command, options_.admin_timeout_ms);
}

Status Driver::create_queue(IoQueue& queue) {
  // The completion queue first, since the submission queue names it.
  if (auto ok = answered(create_completion_queue(queue.id(), queue.entries(), queue.completion_address()),
                         "Create I/O Completion Queue");
      !ok) {
    return ok;
  }
  return answered(create_submission_queue(queue.id(), queue.entries(), queue.submission_address()),
                  "Create I/O Submission Queue");
}

Status Driver::configure_shadows() {
  if (!shadow_.mapped()) return {};
  std::memset(shadow_.data(), 0, shadow_.bytes());
  SubmissionEntry command{};
  command.opcode = static_cast<std::uint8_t>(AdminOpcode::kDoorbellBufferConfig);
  command.prp = {shadow_.address(), shadow_.address() + kPageBytes};
  return answered(admin(command), "Doorbell Buffer Config (the option shadow_doorbells does without)");
}

QueueShadows Driver::shadows_of(std::uint16_t id) {
  if (!shadow_.mapped()) return {};
  const auto at = [this](std::uint32_t doorbell) {
    const std::uint32_t offset = doorbell - kRegDoorbells;
    return ShadowDoorbell{reinterpret_cast<volatile std::uint32_t*>(shadow_.data() + offset),
                          reinterpret_cast<volatile std::uint32_t*>(shadow_.data() + kPageBytes + offset)};
  };
  return {at(sq_tail_doorbell(id, controller_.doorbell_stride)), at(cq_head_doorbell(id, controller_.doorbell_stride))};
}

Result<AdminReply> Driver::create_completion_queue(std::uint16_t id, std::uint32_t entries, std::uint64_t address) {
  // Polled: no interrupts.
  return admin(queue_command(AdminOpcode::kCreateCq, queue_identity(entries, id), kQueueContiguous, address));
}

Result<AdminReply> Driver::create_submission_queue(std::uint16_t id, std::uint32_t entries, std::uint64_t address) {
  return admin(queue_command(AdminOpcode::kCreateSq, queue_identity(entries, id),
                             kQueueContiguous | std::uint32_t{id} << 16, address));
}

Status Driver::delete_submission_queue(std::uint16_t id) {
  return answered(admin(queue_command(AdminOpcode::kDeleteSq, id, 0, 0)), "Delete I/O Submission Queue");
}

Status Driver::delete_completion_queue(std::uint16_t id) {
  return answered(admin(queue_command(AdminOpcode::kDeleteCq, id, 0, 0)), "Delete I/O Completion Queue");
}

bool Driver::send_abort(IoQueue& queue, std::uint16_t command_id) {
  const auto command = queue_command(AdminOpcode::kAbort, std::uint32_t{command_id} << 16 | queue.id(), 0, 0);
  count_.aborts.fetch_add(1, std::memory_order_relaxed);
  auto reply = admin(command);
  if (!reply) return false;
  // Bit 0 set, or an error: it was not aborted, and may complete yet.
  if (reply->status.ok() && (reply->result & 1) == 0) count_.aborted.fetch_add(1, std::memory_order_relaxed);
  return true;
}

}  // namespace tardis::nvme
