// SPDX-License-Identifier: Apache-2.0
// What clients of a software controller did wrong.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "nvme/spec.h"

namespace tardis::nvme {

enum class ViolationKind : std::uint8_t {
  kRegister,           // a register written with a value or at a time that is not allowed
  kDoorbellRange,      // a value beyond the queue, or a doorbell of no queue
  kDoorbellUnchanged,  // written with the value that it had; seen only through the window
  kSqOverrun,          // the tail moved over entries of which no completion has said that they are free
  kCqHead,             // the head moved over entries that were not posted
  kCqOverflow,         // a completion found the queue full
  kCqNotZeroed,        // a new completion queue holds entries that look posted
  kCommandId,          // in use already
  kReservedCommandId,  // 0xffff
  kOpcode,
  kNamespace,
  kField,  // a reserved or wrong field, PSDT, FUSE
  kAdmin,  // a queue created or deleted against the rules, features out of order, too many aborts
  kLbaRange,
  kTransferSize,  // above MDTS
  kPrp,
  kSgl,
  kDma,            // an address that is not mapped
  kDmaAfterUnmap,  // an address that was mapped when the command came
};

const char* violation_name(ViolationKind kind);

struct Violation {
  ViolationKind kind;
  std::uint16_t queue;       // of the submission or completion queue
  std::uint16_t command_id;  // kNoCommandId if no command is to blame
  SubmissionEntry command;   // zero if no command is to blame
  std::string text;          // what was expected and found, and the command's bytes
};

class ViolationLog {
 public:
  explicit ViolationLog(std::size_t kept) : kept_(kept) {}

  void add(ViolationKind kind, std::uint16_t queue, const SubmissionEntry* command, const std::string& text);
  std::vector<Violation> list() const;
  std::vector<Violation> take();  // and forgets them

 private:
  const std::size_t kept_;
  mutable std::mutex mutex_;
  std::vector<Violation> list_;
};

// Each on a line of its own, for a test's message.
std::string describe(const std::vector<Violation>& violations);

}  // namespace tardis::nvme
