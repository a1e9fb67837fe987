// SPDX-License-Identifier: Apache-2.0
// A raw namespace as a BlockDevice. Files have their names in a folder, the device's home, where each is an empty file;
// their bytes are on the namespace. What has lost its name there is gone.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "block/block_device.h"
#include "block/transfer_counters.h"
#include "nvme/raw_namespace.h"
#include "nvme/raw_volume.h"
#include "nvme/volume_home.h"

namespace tardis::nvme {

struct NvmeDeviceOptions {
  // The namespace is formatted where it holds anything but the volume of this home. Without it: only where its ends are
  // zero and the home has no volume yet.
  bool force = false;
};

class NvmeDevice final : public BlockDevice {
  struct Passkey {
    explicit Passkey() = default;
  };

 public:
  // Code::kBusy: another device uses the home or the namespace.
  static Result<std::unique_ptr<BlockDevice>> open(std::shared_ptr<RawNamespace> device, const std::string& home,
                                                   const NvmeDeviceOptions& options);
  ~NvmeDevice() override;

  // `path`: below the home. A segment of a store that lies in files has bytes of its own, and is refused.
  Result<FileId> open_file(const std::string& path, bool create, bool writable) override;
  void close_file(FileId file) override;
  Status preallocate(FileId file, std::uint64_t bytes) override { return reserve(file, bytes, bytes); }
  Status reserve(FileId file, std::uint64_t bytes, std::uint64_t zeros) override;
  Result<std::uint64_t> file_bytes(FileId file) override;
  void run(std::span<IoRequest> requests, const Completion& on_complete) override;
  Status flush(FileId file) override { return flush_files({&file, 1}).front(); }
  std::vector<Status> flush_files(std::span<const FileId> files) override;
  void share_turns(std::unique_ptr<FlushTurns> turns) override;
  Status register_memory(void* base, std::size_t bytes) override;
  void unregister_memory(void* base) override;
  std::optional<Room> room() const override;
  IoGeometry geometry() const override { return {true, device_->block_bytes(), 1}; }
  std::uint64_t join_bytes() const override { return 1u << 20; }
  const PathReport& report() const override { return report_; }
  BlockDeviceCounters counters() const override;

  class Turns;  // the namespace, with reads before writes
  NvmeDevice(Passkey, std::shared_ptr<RawNamespace> device, VolumeHome home, std::unique_ptr<Turns> turns,
             std::unique_ptr<RawVolume> volume);

 private:
  struct File {
    std::string name;  // below the home
    // Length last: who sees it sees the offset.
    std::atomic<std::uint64_t> offset{0}, bytes{0};
  };
  struct OpenFile {              // what an id stands for
    std::shared_ptr<File> file;  // null: not open
    bool writable = false;
  };
  OpenFile find(FileId file) const;
  int translate(const IoRequest& request, const OpenFile& open, NamespaceRequest& out) const;
  Result<std::string> name_below_home(const std::string& path) const;
  Status make_name(const std::string& path, const std::string& name, bool create, bool writable);
  Status remove_nameless();
  bool is_open(const std::string& name) const;

  const std::shared_ptr<RawNamespace> device_;
  const VolumeHome home_;
  const std::unique_ptr<Turns> turns_;
  const std::unique_ptr<RawVolume> volume_;
  PathReport report_;

  std::mutex names_mutex_;  // one change of what files there are at a time; taken before mutex_
  mutable std::shared_mutex mutex_;
  std::vector<OpenFile> files_;                         // by id - 1; ids of closed files are used again
  std::map<std::string, std::weak_ptr<File>> by_name_;  // also while only a request in flight has it

  TransferCounters transfers_;

  struct Memory {  // given to register_memory()
    std::size_t bytes;
    bool registered;  // the namespace took it
  };
  mutable std::mutex memory_mutex_;
  std::map<std::uintptr_t, Memory> memory_;
};

}  // namespace tardis::nvme
