// SPDX-License-Identifier: Apache-2.0
// The open files of a device, by id.
#pragma once

#include <atomic>
#include <memory>
#include <shared_mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "block/block_device.h"

namespace tardis {

struct OpenFile {
  UniqueFd fd;
  std::string path;
  std::atomic<bool> closed{false};  // close_file was called; rings let go of it
};

// Thread-safe. A file stays open while somebody holds its pointer, even after remove().
class FileTable {
 public:
  Result<FileId> open(const std::string& path, bool create, bool writable, bool direct);
  // Null if the id names no open file.
  std::shared_ptr<OpenFile> get(FileId id) const;
  std::shared_ptr<OpenFile> remove(FileId id);

 private:
  mutable std::shared_mutex mutex_;
  std::vector<std::shared_ptr<OpenFile>> files_;  // ids of closed files are used again, the lowest first
};

}  // namespace tardis
