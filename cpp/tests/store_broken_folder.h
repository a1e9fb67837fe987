// SPDX-License-Identifier: Apache-2.0
// One folder of a store on a drive that fails.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "store_support.h"

namespace tardis::testing {

// What fails in the files of one folder; 0: nothing.
struct BrokenFolder {
  std::string prefix;
  std::atomic<int> open{0}, read{0}, write{0}, flush{0};
  void all(int error) {
    for (auto* one : {&open, &read, &write, &flush}) one->store(error);
  }
};

class PathFaultDevice : public WrappedDevice {
 public:
  PathFaultDevice(std::unique_ptr<BlockDevice> inner, std::shared_ptr<BrokenFolder> broken)
      : WrappedDevice(std::move(inner)), broken_(std::move(broken)) {}

  Result<FileId> open_file(const std::string& path, bool create, bool writable) override {
    const bool there = path.starts_with(broken_->prefix);
    if (there && broken_->open != 0) return errno_error(broken_->open, path);
    auto file = inner_->open_file(path, create, writable);
    const std::lock_guard lock(mutex_);
    if (file) there_[*file] = there;
    return file;
  }
  void run(std::span<IoRequest> requests, const Completion& on_complete) override {
    for (IoRequest& request : requests) {
      const int error = request.op == IoRequest::Op::kRead ? broken_->read : broken_->write;
      if (is_there(request.file) && error != 0) {
        request.error = error;
        if (on_complete) on_complete(request);
      } else {
        inner_->run({&request, 1}, on_complete);
      }
    }
  }
  bool reads_at_once() const override { return inner_->reads_at_once(); }
  int read_at_once(FileId file, std::uint64_t offset, std::span<const iovec> memory) override {
    const int error = broken_->read;
    return is_there(file) && error != 0 ? error : inner_->read_at_once(file, offset, memory);
  }
  Status flush(FileId file) override {
    if (is_there(file) && broken_->flush != 0) return errno_error(broken_->flush, "fdatasync (injected)");
    return inner_->flush(file);
  }

 private:
  bool is_there(FileId file) {
    const std::lock_guard lock(mutex_);
    return there_[file];
  }

  std::shared_ptr<BrokenFolder> broken_;
  std::mutex mutex_;
  std::map<FileId, bool> there_;
};

inline Store::DeviceFactory breakable(const std::shared_ptr<BrokenFolder>& broken) {
  return [broken](const std::string& folder, const BlockDeviceOptions& options,
                  int fd) -> Result<std::unique_ptr<BlockDevice>> {
    auto inner = open_block_device(folder, options, fd);
    if (!inner) return inner.error();
    return std::unique_ptr<BlockDevice>(std::make_unique<PathFaultDevice>(std::move(*inner), broken));
  };
}

}  // namespace tardis::testing
