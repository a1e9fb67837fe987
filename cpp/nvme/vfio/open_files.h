// SPDX-License-Identifier: Apache-2.0
// Which processes have a file open, as far as procfs shows it: those of other users to root alone.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "nvme/vfio/system_paths.h"

namespace tardis::nvme {

struct FileOpener {
  pid_t process;
  std::string file;  // what `name_of` said
  std::string text;  // "/dev/vfio/5 is open in process 77 (qemu-system-x86)"
};

// The first file of each process that `name_of` has a name for; it is given the link in /proc/<pid>/fd, and says
// nothing of files that do not matter.
std::vector<FileOpener> openers_among_processes(
    const SystemPaths& paths, const std::function<std::string(const std::filesystem::path& link)>& name_of);

}  // namespace tardis::nvme
