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

// What is not here is a controller's fault, whatever it was, or if its type says so, the medium's.
constexpr std::uint8_t kMediaErrors = 2;  // status code type
constexpr Meaning kMeanings[] = {
    {kScInvalidOpcode, EOPNOTSUPP, "invalid opcode"},
    {kScInvalidField, EINVAL, "invalid field"},
    {kScCommandIdConflict, EREMOTEIO, "command id conflict"},
    {kScDataTransferError, EREMOTEIO, "data transfer error"},
    {kScPowerLossAbort, EREMOTEIO, "aborted by a power loss"},
    {kScInternal, EREMOTEIO, "internal error"},
    {kScAbortRequested, ETIMEDOUT, "aborted on request"},
    {kScSqDeleted, EREMOTEIO, "aborted by the deletion of its queue"},
    {kScInvalidNamespace, ENXIO, "invalid namespace or format"},
    {kScCommandSequence, EREMOTEIO, "command sequence error"},
    {kScInvalidSglSegment, EREMOTEIO, "invalid SGL segment descriptor"},
    {kScInvalidSglCount, EREMOTEIO, "invalid number of SGL descriptors"},
    {kScSglLengthInvalid, EREMOTEIO, "data SGL length invalid"},
    {kScSglTypeInvalid, EREMOTEIO, "SGL descriptor type invalid"},
    {kScPrpOffsetInvalid, EREMOTEIO, "PRP offset invalid"},
    {kScSglOffsetInvalid, EREMOTEIO, "SGL offset invalid"},
    {kScSglGranularity, EREMOTEIO, "SGL data block granularity invalid"},
    {kScWriteProtected, EROFS, "namespace is write protected"},
    {kScLbaOutOfRange, EINVAL, "LBA out of range"},
    {kScCapacityExceeded, ENOSPC, "capacity exceeded"},
    {kScNamespaceNotReady, EBUSY, "namespace not ready"},
    {kScInvalidCq, EREMOTEIO, "completion queue invalid"},
    {kScInvalidQueueId, EREMOTEIO, "invalid queue identifier"},
    {kScInvalidQueueSize, EREMOTEIO, "invalid queue size"},
    {kScAbortLimit, EREMOTEIO, "abort command limit exceeded"},
    {kScInvalidVector, EREMOTEIO, "invalid interrupt vector"},
    {kScInvalidQueueDeletion, EREMOTEIO, "invalid queue deletion"},
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
  if (meaning != nullptr) return meaning->error;
  return status.type() == kMediaErrors ? EIO : EREMOTEIO;
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
