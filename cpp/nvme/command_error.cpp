// SPDX-License-Identifier: Apache-2.0
#include "nvme/command_error.h"

#include <cerrno>
#include <cstdio>

namespace tardis::nvme {
namespace {

struct Meaning {
  std::uint16_t code_and_type;
  int error;
  const char* text;
};

// What is not here is EIO: a device's fault, whatever it was.
constexpr Meaning kMeanings[] = {
    {kScInvalidOpcode, EOPNOTSUPP, "invalid opcode"},
    {kScInvalidField, EINVAL, "invalid field"},
    {kScCommandIdConflict, EIO, "command id conflict"},
    {kScDataTransferError, EIO, "data transfer error"},
    {kScPowerLossAbort, EIO, "aborted by a power loss"},
    {kScInternal, EIO, "internal error"},
    {kScAbortRequested, ETIMEDOUT, "aborted on request"},
    {kScSqDeleted, EIO, "aborted by the deletion of its queue"},
    {kScInvalidNamespace, ENXIO, "invalid namespace or format"},
    {kScCommandSequence, EIO, "command sequence error"},
    {kScInvalidSglSegment, EIO, "invalid SGL segment descriptor"},
    {kScInvalidSglCount, EIO, "invalid number of SGL descriptors"},
    {kScSglLengthInvalid, EIO, "data SGL length invalid"},
    {kScSglTypeInvalid, EIO, "SGL descriptor type invalid"},
    {kScPrpOffsetInvalid, EIO, "PRP offset invalid"},
    {kScSglOffsetInvalid, EIO, "SGL offset invalid"},
    {kScSglGranularity, EIO, "SGL data block granularity invalid"},
    {kScLbaOutOfRange, EINVAL, "LBA out of range"},
    {kScCapacityExceeded, ENOSPC, "capacity exceeded"},
    {kScNamespaceNotReady, EBUSY, "namespace not ready"},
    {kScInvalidCq, EIO, "completion queue invalid"},
    {kScInvalidQueueId, EIO, "invalid queue identifier"},
    {kScInvalidQueueSize, EIO, "invalid queue size"},
    {kScAbortLimit, EIO, "abort command limit exceeded"},
    {kScInvalidVector, EIO, "invalid interrupt vector"},
    {kScInvalidQueueDeletion, EIO, "invalid queue deletion"},
    {kScWriteFault, EIO, "write fault"},
    {kScUnrecoveredRead, EIO, "unrecovered read error"},
    {kScUnwrittenBlock, EIO, "deallocated or unwritten block"},
};

const Meaning* meaning_of(CommandStatus status) {
  for (const Meaning& meaning : kMeanings) {
    if (meaning.code_and_type == status.code_and_type()) return &meaning;
  }
  return nullptr;
}

}  // namespace

int errno_of(CommandStatus status) {
  if (status.ok()) return 0;
  const Meaning* meaning = meaning_of(status);
  return meaning != nullptr ? meaning->error : EIO;
}

std::string describe(CommandStatus status) {
  if (status.ok()) return "success";
  const Meaning* meaning = meaning_of(status);
  char codes[64];
  std::snprintf(codes, sizeof codes, " (SCT %xh, SC %02xh%s)", unsigned{status.type()}, unsigned{status.code()},
                status.do_not_retry() ? ", do not retry" : "");
  return (meaning != nullptr ? meaning->text : "unknown status") + std::string(codes);
}

}  // namespace tardis::nvme
