// SPDX-License-Identifier: Apache-2.0
#include "store/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

namespace tardis {

// KV is as private as the prompts it came from: folders and files are the owner's alone.
Status make_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) == 0 || errno == EEXIST) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) return errno_error(errno, path);
    if (!S_ISDIR(status.st_mode)) return Error{Code::kInvalidArgument, path + ": expected a folder, found a file"};
    return {};
  }
  return errno_error(errno, path + ": cannot create the store's folder");
}

Status make_folders(const std::string& path) {
  for (std::size_t at = path.find('/', 1); at != std::string::npos; at = path.find('/', at + 1)) {
    if (Status status = make_folder(path.substr(0, at)); !status) return status;
  }
  return make_folder(path);
}

Result<UniqueFd> open_regular_file(const std::string& path, int more_flags) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | more_flags));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0) return errno_error(errno, path);
  if (!S_ISREG(status.st_mode)) {
    return Error{Code::kInvalidArgument, path + ": expected a regular file, found something else; remove it"};
  }
  return fd;
}

Result<std::string> read_file(const std::string& path, std::size_t limit) {
  auto fd = open_regular_file(path);
  if (!fd) return fd.error();
  std::string text(limit, '\0');
  std::size_t at = 0;
  while (at < limit) {
    const ssize_t got = ::pread(fd->get(), text.data() + at, limit - at, static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_error(errno, path);
    if (got == 0) break;
    at += static_cast<std::size_t>(got);
  }
  text.resize(at);
  return text;
}

Result<std::vector<std::string>> list_folder(const std::string& path) {
  const auto close_folder = [](DIR* folder) { ::closedir(folder); };
  std::unique_ptr<DIR, decltype(close_folder)> folder(::opendir(path.c_str()), close_folder);
  if (!folder) return errno_error(errno, path);
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* item = ::readdir(folder.get())) names.emplace_back(item->d_name);
  if (errno != 0) return errno_error(errno, path);
  return names;
}

Status sync_folder(const std::string& path) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) return errno_error(errno, path);
  if (::fsync(fd.get()) != 0) return errno_error(errno, path + ": fsync");
  return {};
}

Status write_file_durably(const std::string& folder, const std::string& name, const void* data, std::size_t bytes) {
  const std::string path = folder + "/" + name, fresh = path + ".new";
  UniqueFd fd(::open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK, 0600));
  if (!fd) return errno_error(errno, fresh);
  const auto* from = static_cast<const char*>(data);
  for (std::size_t at = 0; at < bytes;) {
    const ssize_t put = ::write(fd.get(), from + at, bytes - at);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return errno_error(errno, fresh);
    at += static_cast<std::size_t>(put);
  }
  if (::fsync(fd.get()) != 0) return errno_error(errno, fresh + ": fsync");
  if (::rename(fresh.c_str(), path.c_str()) != 0) return errno_error(errno, path);
  return sync_folder(folder);
}

}  // namespace tardis
