// SPDX-License-Identifier: Apache-2.0
#include "block/file_table.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <mutex>

namespace tardis {

Result<FileId> FileTable::open(const std::string& path, bool create, bool writable, bool direct) {
  const int flags = O_CLOEXEC | (writable ? O_RDWR : O_RDONLY) | (create ? O_CREAT : 0) | (direct ? O_DIRECT : 0);
  // Cached KV is as private as the prompts it was made from: for the owner only.
  auto file = std::make_shared<OpenFile>();
  int fd;
  do {
    fd = ::open(path.c_str(), flags, 0600);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0 && errno == EINVAL && direct) {
    return Error{Code::kInvalidArgument,
                 path +
                     ": expected a regular file that can be opened with O_DIRECT, as the rest of "
                     "its folder; found one that cannot. Set direct_io to off, or remove it"};
  }
  if (fd < 0) return errno_error(errno, "open " + path);
  file->fd.reset(fd);
  file->path = path;

  struct stat status;
  if (::fstat(fd, &status) != 0) return errno_error(errno, "fstat " + path);
  if (!S_ISREG(status.st_mode)) {
    return Error{Code::kInvalidArgument, path + ": expected a regular file, found something else (mode " +
                                             std::to_string(status.st_mode & S_IFMT) + ")"};
  }

  const std::unique_lock lock(mutex_);
  const auto hole = std::find(files_.begin(), files_.end(), nullptr);
  const auto id = static_cast<FileId>(hole - files_.begin());
  if (hole == files_.end()) {
    files_.push_back(std::move(file));
  } else {
    *hole = std::move(file);
  }
  return id;
}

std::shared_ptr<OpenFile> FileTable::get(FileId id) const {
  const std::shared_lock lock(mutex_);
  return id < files_.size() ? files_[id] : nullptr;
}

std::shared_ptr<OpenFile> FileTable::remove(FileId id) {
  const std::unique_lock lock(mutex_);
  if (id >= files_.size() || files_[id] == nullptr) return nullptr;
  files_[id]->closed.store(true);
  return std::move(files_[id]);
}

}  // namespace tardis
