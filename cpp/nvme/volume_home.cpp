// SPDX-License-Identifier: Apache-2.0
#include "nvme/volume_home.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/read_exactly.h"
#include "store/byte_locks.h"
#include "store/files.h"
#include "store/paths.h"

namespace tardis::nvme {
namespace {

constexpr std::size_t kOwnerBytes = 512;  // behind the binding

std::string owner_of(int fd) {
  char text[kOwnerBytes + 1] = {};
  if (::pread(fd, text, kOwnerBytes, sizeof(VolumeBinding)) <= 0 || text[0] == 0) return "an unnamed process";
  return text;
}

Status sign(int fd, const std::string& file) {
  std::string text = "pid " + std::to_string(::getpid());
  text.resize(kOwnerBytes, '\0');
  if (::pwrite(fd, text.data(), text.size(), sizeof(VolumeBinding)) == static_cast<ssize_t>(text.size())) return {};
  return errno_error(errno, file);
}

}  // namespace

std::string VolumeHome::file() const { return folder_ + "/" + kVolumeFile; }

Result<VolumeHome> VolumeHome::lock(const std::string& folder) {
  const std::string file = folder + "/" + kVolumeFile;
  UniqueFd fd(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0) return errno_error(errno, file);
  if (!S_ISREG(status.st_mode)) {
    return Error{Code::kInvalidArgument, file + ": expected a regular file, found something else; remove it"};
  }
  const auto give_up = std::chrono::steady_clock::now() + kKilledPatience;
  auto locked = try_lock(fd.get(), F_WRLCK, 0, 1, file);
  while (locked && !*locked && std::chrono::steady_clock::now() < give_up) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    locked = try_lock(fd.get(), F_WRLCK, 0, 1, file);
  }
  if (!locked) return locked.error();
  if (!*locked) {
    return Error{Code::kBusy, "path " + folder + ": its raw namespace is in use by " + owner_of(fd.get()) +
                                  "; one process uses a raw namespace at a time: stop that one, or give this one "
                                  "another path and namespace"};
  }
  if (Status signed_file = sign(fd.get(), file); !signed_file) return signed_file.error();
  return VolumeHome(folder, std::move(fd));
}

Result<std::optional<VolumeBinding>> VolumeHome::read() const {
  VolumeBinding binding;
  if (Status status = read_exactly(fd_.get(), file(), 0, &binding, sizeof binding); !status) return status.error();
  if (all_zero(&binding, sizeof binding)) return std::optional<VolumeBinding>();
  if (binding.magic == VolumeBinding::kMagic && binding.format_version > kBindingVersion) {
    return Error{Code::kUnsupportedFormat, file() + ": format version " + std::to_string(binding.format_version) +
                                               ", this release reads up to " + std::to_string(kBindingVersion) +
                                               "; upgrade sglang-tardis (nothing was changed)"};
  }
  if (!sealed(binding)) {
    return Error{Code::kCorrupt, file() +
                                     ": does not say which volume the store is on; restore it from a backup, or "
                                     "empty the folder and format the namespace with force"};
  }
  return std::optional(binding);
}

// In place, since the lock is on this very file: a sector is written whole or not at all, and nothing depends on it
// before it is durable.
Status VolumeHome::write(const Uuid& volume) {
  VolumeBinding binding{};
  binding.magic = VolumeBinding::kMagic;
  binding.format_version = kBindingVersion;
  binding.volume = volume;
  seal(binding);
  if (::pwrite(fd_.get(), &binding, sizeof binding, 0) != static_cast<ssize_t>(sizeof binding)) {
    return errno_error(errno, file());
  }
  if (::fdatasync(fd_.get()) != 0) return errno_error(errno, file());
  return sync_folder(folder_);
}

}  // namespace tardis::nvme
