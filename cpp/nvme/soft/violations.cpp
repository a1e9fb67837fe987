// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/violations.h"

#include <cstdio>
#include <cstring>
#include <utility>

namespace tardis::nvme {
namespace {

std::string hex_dump(const SubmissionEntry& command) {
  unsigned char bytes[sizeof command];
  std::memcpy(bytes, &command, sizeof bytes);
  std::string text;
  for (std::size_t i = 0; i < sizeof bytes; ++i) {
    char byte[4];
    std::snprintf(byte, sizeof byte, "%s%02x", i == 0 ? "" : i % 4 == 0 ? " " : "", bytes[i]);
    text += byte;
  }
  return text;
}

}  // namespace

const char* violation_name(ViolationKind kind) {
  switch (kind) {
    case ViolationKind::kRegister:
      return "register";
    case ViolationKind::kDoorbellRange:
      return "doorbell range";
    case ViolationKind::kDoorbellUnchanged:
      return "doorbell unchanged";
    case ViolationKind::kSqOverrun:
      return "submission queue overrun";
    case ViolationKind::kCqHead:
      return "completion queue head";
    case ViolationKind::kCqOverflow:
      return "completion queue overflow";
    case ViolationKind::kCqNotZeroed:
      return "completion queue not zeroed";
    case ViolationKind::kCommandId:
      return "command id in use";
    case ViolationKind::kReservedCommandId:
      return "command id reserved";
    case ViolationKind::kOpcode:
      return "opcode";
    case ViolationKind::kNamespace:
      return "namespace";
    case ViolationKind::kField:
      return "field";
    case ViolationKind::kAdmin:
      return "admin";
    case ViolationKind::kLbaRange:
      return "LBA range";
    case ViolationKind::kTransferSize:
      return "transfer size";
    case ViolationKind::kPrp:
      return "PRP";
    case ViolationKind::kSgl:
      return "SGL";
    case ViolationKind::kDma:
      return "DMA address";
    case ViolationKind::kDmaAfterUnmap:
      return "DMA after unmap";
  }
  return "unknown";
}

void ViolationLog::add(ViolationKind kind, std::uint16_t queue, const SubmissionEntry* command,
                       const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (list_.size() >= kept_) return;
  Violation violation{kind,
                      queue,
                      kNoCommandId,
                      {},
                      std::string(violation_name(kind)) + ", queue " + std::to_string(queue) + ": " + text};
  if (command != nullptr) {
    violation.command_id = command->command_id;
    violation.command = *command;
    violation.text += "; command " + hex_dump(*command);
  }
  list_.push_back(std::move(violation));
}

std::vector<Violation> ViolationLog::list() const {
  const std::lock_guard lock(mutex_);
  return list_;
}

std::vector<Violation> ViolationLog::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(list_, {});
}

std::string describe(const std::vector<Violation>& violations) {
  std::string text;
  for (const Violation& violation : violations) text += violation.text + '\n';
  return text;
}

}  // namespace tardis::nvme
