// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/open_files.h"

#include <charconv>

#include "nvme/vfio/text_file.h"

namespace tardis::nvme {

namespace fs = std::filesystem;

std::vector<FileOpener> openers_among_processes(const SystemPaths& paths,
                                                const std::function<std::string(const fs::path& link)>& name_of) {
  std::vector<FileOpener> found;
  for (const std::string& name : names_in(paths.proc)) {
    pid_t process = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), process);
    if (error != std::errc() || end != name.data() + name.size()) continue;
    const fs::path folder = fs::path(paths.proc) / name;
    for (const std::string& fd : names_in(folder / "fd")) {
      std::string file = name_of(folder / "fd" / fd);
      if (file.empty()) continue;
      std::string text =
          file + " is open in process " + name + " (" + first_line(read_text(folder / "comm").value_or("?")) + ")";
      found.push_back({process, std::move(file), std::move(text)});
      break;
    }
  }
  return found;
}

}  // namespace tardis::nvme
