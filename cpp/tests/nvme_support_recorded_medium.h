// SPDX-License-Identifier: Apache-2.0
// A RecordedDrive as the medium of a software controller: a volatile cache whose journal tells what was written and
// flushed, in which order, and what changed in the store's folder in between.
#pragma once

#include <cerrno>

#include "nvme/soft/medium.h"
#include "nvme_support_recorded_namespace.h"

namespace tardis::nvme::testing {

class RecordedMedium final : public Medium {
 public:
  explicit RecordedMedium(RecordedDrive& drive) : drive_(drive) {}

  std::uint64_t bytes() const override { return drive_.segment_bytes(kRawNamespace); }
  bool immediate() const override { return true; }
  bool needs_flush() const override { return true; }
  void run(std::span<MediumRequest> requests, const Completion& on_complete) override {
    for (MediumRequest& request : requests) {
      switch (request.op) {
        case MediumRequest::Op::kRead:
        case MediumRequest::Op::kWrite: {
          const bool read = request.op == MediumRequest::Op::kRead;
          request.error = drive_.transfer(read, request.offset, request.memory, kRawNamespace);
          if (request.durable && request.error == 0) drive_.flush(kRawNamespace);
          break;
        }
        case MediumRequest::Op::kFlush:
          drive_.flush(kRawNamespace);
          request.error = 0;
          break;
        case MediumRequest::Op::kWriteZeroes:
        case MediumRequest::Op::kDeallocate:
          request.error = ENOSYS;  // the store asks for neither
      }
      on_complete(request);
    }
  }

 private:
  RecordedDrive& drive_;
};

}  // namespace tardis::nvme::testing
