// SPDX-License-Identifier: Apache-2.0
// A machine of files: what sysfs, procfs and /dev show. No driver acts there: what is written stays as it is.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>

#include "block_support.h"
#include "nvme/vfio/system_paths.h"

namespace tardis::nvme::testing {

class FileMachine {
 public:
  FileMachine() {
    paths.sys = folder_.file("sys");
    paths.proc = folder_.file("proc");
    paths.dev = folder_.file("dev");
    write(paths.proc + "/self/mountinfo", "22 1 0:20 / / rw - tmpfs tmpfs rw\n");
  }
  static void write(const std::filesystem::path& file, const std::string& text, bool append = false) {
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, append ? std::ios::app : std::ios::trunc) << text;
  }
  std::filesystem::path device(const std::string& address) const {
    return std::filesystem::path(paths.sys) / "bus/pci/devices" / address;
  }

  SystemPaths paths;

 private:
  tardis::testing::TempFolder folder_;
};

}  // namespace tardis::nvme::testing
