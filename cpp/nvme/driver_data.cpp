// SPDX-License-Identifier: Apache-2.0
// Data of admin commands, for who wants to see it.
#include <string>

#include "nvme/driver.h"

namespace tardis::nvme {

Status Driver::read_identify(IdentifyCns cns, std::uint32_t namespace_id, std::span<std::byte> out) {
  SubmissionEntry command{};
  command.opcode = static_cast<std::uint8_t>(AdminOpcode::kIdentify);
  command.namespace_id = namespace_id;
  command.cdw10 = cns;
  return answered(admin_->execute(command, options_.admin_timeout_ms, out), "Identify");
}

Status Driver::read_log(LogPage page, std::span<std::byte> out) {
  if (out.empty() || out.size() % 4 != 0 || out.size() > kPageBytes) {
    return Error{Code::kInvalidArgument,
                 "log page: expected 4 to 4096 bytes, a multiple of 4, found " + std::to_string(out.size())};
  }
  SubmissionEntry command{};
  command.opcode = static_cast<std::uint8_t>(AdminOpcode::kGetLogPage);
  command.namespace_id = kAllNamespaces;
  // NUMDL is 0-based and in dwords.
  command.cdw10 = static_cast<std::uint32_t>(out.size() / 4 - 1) << 16 | kRetainEvent | page;
  return answered(admin_->execute(command, options_.admin_timeout_ms, out), "Get Log Page");
}

}  // namespace tardis::nvme
