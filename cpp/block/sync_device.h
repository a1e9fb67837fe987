// SPDX-License-Identifier: Apache-2.0
// preadv/pwritev on the worker pool: for buffered files, and where io_uring cannot be used.
#pragma once

#include "block/file_device.h"

namespace tardis {

class SyncDevice final : public FileDevice {
 public:
  using FileDevice::FileDevice;

  void run(std::span<IoRequest> requests, const Completion& on_complete) override;
  bool reads_at_once() const override { return setup_.report.in_memory; }
  int read_at_once(FileId file, std::uint64_t offset, std::span<const iovec> memory) override;

 private:
  void execute(IoRequest& request);
  int move_in_place(int fd, const IoRequest& request);
  int move_bounced(int fd, const IoRequest& request, std::uint64_t bytes);
  // The whole sequence at `offset`; 0 or an errno.
  int transfer(int fd, IoRequest::Op op, std::uint64_t offset, std::span<const iovec> memory);
};

}  // namespace tardis
