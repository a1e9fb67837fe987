// SPDX-License-Identifier: Apache-2.0
// The io_uring engine: each run() has a ring of its own; completions go to the worker pool, beside the I/O still in
// flight.
#pragma once

#include "block/file_device.h"
#include "block/uring_buffers.h"
#include "block/uring_ring.h"

namespace tardis {

class UringDevice final : public FileDevice {
 public:
  UringDevice(DeviceSetup setup, std::unique_ptr<WorkerPool> workers);

  void close_file(FileId file) override;
  void run(std::span<IoRequest> requests, const Completion& on_complete) override;
  Status register_memory(void* base, std::size_t bytes) override;
  void unregister_memory(void* base) override;
  BlockDeviceCounters counters() const override;

 private:
  friend class UringRun;
  UringBuffers buffers_;
  UringPool rings_;
  std::atomic<std::uint64_t> registered_requests_{0};
};

}  // namespace tardis
