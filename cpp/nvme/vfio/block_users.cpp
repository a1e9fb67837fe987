// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/block_users.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/unique_fd.h"
#include "nvme/vfio/open_files.h"
#include "nvme/vfio/text_file.h"

namespace tardis::nvme {
namespace {

namespace fs = std::filesystem;

std::string number_text(unsigned first, unsigned second) {
  return std::to_string(first) + ":" + std::to_string(second);
}

// The node that a path or a link of /proc/<pid>/fd leads to.
const DeviceNode* node_at(const fs::path& path, std::span<const DeviceNode> nodes, const SystemPaths& paths) {
  std::error_code error;
  const fs::path target = fs::read_symlink(path, error);
  const fs::path named = error ? path : target;
  // As far as it is known already: a file of a server that is gone must not be waited for.
  struct statx status {};
  const bool known = ::statx(AT_FDCWD, path.c_str(), AT_STATX_DONT_SYNC, STATX_TYPE, &status) == 0;
  const bool device = known && (S_ISBLK(status.stx_mode) || S_ISCHR(status.stx_mode));
  const std::string number = device ? number_text(status.stx_rdev_major, status.stx_rdev_minor) : std::string();
  for (const DeviceNode& node : nodes) {
    const bool character = node.name.starts_with("ng");
    if (device && S_ISCHR(status.stx_mode) == character && number == node.number) return &node;
    if (named == fs::path(paths.dev) / node.name) return &node;
  }
  return nullptr;
}

void add_loops(std::span<const DeviceNode> nodes, const SystemPaths& paths, std::vector<std::string>& users) {
  const fs::path block = fs::path(paths.sys) / "block";
  for (const std::string& name : names_in(block)) {
    const auto file = read_text(block / name / "loop/backing_file");
    if (!file) continue;
    if (const DeviceNode* const node = node_at(first_line(*file), nodes, paths)) {
      users.push_back(node->name + " is behind " + name);
    }
  }
}

void add_targets(std::span<const DeviceNode> nodes, const SystemPaths& paths, std::vector<std::string>& users) {
  const fs::path subsystems = fs::path(paths.sys) / "kernel/config/nvmet/subsystems";
  for (const std::string& subsystem : names_in(subsystems)) {
    const fs::path spaces = subsystems / subsystem / "namespaces";
    for (const std::string& space : names_in(spaces)) {
      if (first_line(read_text(spaces / space / "enable").value_or("0")) == "0") continue;
      const std::string path = first_line(read_text(spaces / space / "device_path").value_or(""));
      if (const DeviceNode* const node = node_at(path, nodes, paths)) {
        users.push_back(node->name + " is exported as namespace " + space + " of " + subsystem);
      }
    }
  }
}

void add_processes(std::span<const DeviceNode> nodes, const SystemPaths& paths, std::vector<std::string>& users) {
  const auto opened = openers_among_processes(paths, [&](const fs::path& link) {
    const DeviceNode* const node = node_at(link, nodes, paths);
    return node != nullptr ? node->name : std::string();
  });
  for (const FileOpener& opener : opened) {
    if (opener.process != ::getpid()) users.push_back(opener.text);  // a release claims its drive before it looks again
  }
}

}  // namespace

std::vector<std::string> openers_of(std::span<const DeviceNode> nodes, const SystemPaths& paths) {
  std::vector<std::string> users;
  add_loops(nodes, paths, users);
  add_targets(nodes, paths, users);
  add_processes(nodes, paths, users);
  return users;
}

std::optional<std::string> exclusive_opener_of(const DeviceNode& disk, const SystemPaths& paths) {
  const fs::path path = fs::path(paths.dev) / disk.name;
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_EXCL | O_CLOEXEC | O_NONBLOCK));
  if (!fd) {
    const int error = errno;
    if (error == EBUSY) return disk.name + " is open exclusively, or one of its partitions is";
    std::error_code gone;
    if (!fs::exists(disk.sysfs, gone)) return std::nullopt;  // the namespace went away meanwhile
    return path.string() + " cannot be opened to find out who uses " + disk.name + " (" + std::strerror(error) + ")";
  }
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) return path.string() + " cannot be looked at (" + std::strerror(errno) + ")";
  // A container may have another node there, or an old one. A test's machine has files only.
  if (paths.dev != SystemPaths().dev) return std::nullopt;
  const std::string found = number_text(major(status.st_rdev), minor(status.st_rdev));
  if (S_ISBLK(status.st_mode) && found == disk.number) return std::nullopt;
  return path.string() + " is not the block device " + disk.number + ", so who uses " + disk.name + " is not known";
}

}  // namespace tardis::nvme
