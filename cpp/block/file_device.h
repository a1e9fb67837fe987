// SPDX-License-Identifier: Apache-2.0
// What both engines share: files, workers, bounce buffers, counters.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "block/block_device.h"
#include "block/bounce_pool.h"
#include "block/file_table.h"
#include "block/run_scope.h"
#include "block/transfer_counters.h"
#include "block/worker_pool.h"

namespace tardis {

// What the self-test settled.
struct DeviceSetup {
  BlockDeviceOptions options;
  IoGeometry geometry;
  PathReport report;
  int keep_open_fd = -1;
  // What queue_depth 0 may become; `least` and `most` are equal where the setting names a depth.
  QueueTuner::Limits depth{128, 128, 128};
  // fdatasync, except in tests of slow and failing drives. 0 or an errno.
  std::function<int(int fd)> sync_file;
};

class FileDevice : public BlockDevice {
 public:
  FileDevice(DeviceSetup setup, std::unique_ptr<WorkerPool> workers);

  Result<FileId> open_file(const std::string& path, bool create, bool writable) override;
  void close_file(FileId file) override;
  Status preallocate(FileId file, std::uint64_t bytes) override;
  Result<std::uint64_t> file_bytes(FileId file) override;
  Status flush(FileId file) override;
  std::vector<Status> flush_files(std::span<const FileId> files) override;
  void share_turns(std::unique_ptr<FlushTurns> turns) override { run_state_.arbiter.share(std::move(turns)); }
  IoGeometry geometry() const override { return setup_.geometry; }
  std::uint64_t join_bytes() const override;
  const PathReport& report() const override { return setup_.report; }
  BlockDeviceCounters counters() const override;

 protected:
  // EINVAL if direct I/O cannot express the request at all, else 0. `bytes` is its length.
  int check_request(const IoRequest& request, std::uint64_t bytes) const;
  RunState& run_state() { return run_state_; }

  const DeviceSetup setup_;
  const std::unique_ptr<WorkerPool> workers_;
  FileTable files_;
  BouncePool bounce_;
  TransferCounters transfers_;

 private:
  Result<std::shared_ptr<OpenFile>> find(FileId file) const;

  RunState run_state_;
};

}  // namespace tardis
