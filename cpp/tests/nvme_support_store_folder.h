// SPDX-License-Identifier: Apache-2.0
// The folder of a store on a raw namespace at one moment: its small files, and the names of its segments.
#pragma once

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <system_error>

#include "nvme_support_recorded_namespace.h"

namespace tardis::nvme::testing {

struct StoreFolderImage {
  std::map<std::string, std::string> files;  // by path below the folder

  static StoreFolderImage of(const std::string& folder) {
    StoreFolderImage image;
    std::error_code gone;  // a name may go while this looks
    for (const std::string part : {"", "segments", "namespaces"}) {
      for (const auto& item : std::filesystem::directory_iterator(folder + "/" + part, gone)) {
        if (!item.is_regular_file(gone)) continue;
        std::ifstream file(item.path(), std::ios::binary);
        if (!file) continue;
        const std::string path = part.empty() ? item.path().filename() : part / item.path().filename();
        image.files[path].assign(std::istreambuf_iterator<char>(file), {});
      }
    }
    return image;
  }
  // Into a folder that is not there yet.
  void put(const std::string& folder) const {
    for (const std::string part : {"", "segments", "namespaces"}) {
      std::filesystem::create_directories(folder + "/" + part);
    }
    for (const auto& [path, text] : files) {
      std::ofstream(folder + "/" + path, std::ios::binary)
          .write(text.data(), static_cast<std::streamsize>(text.size()));
    }
  }
  // With what a namespace holds, for a RecordedDrive.
  tardis::testing::FolderImage with(const BlockFile& contents) const {
    tardis::testing::FolderImage image;
    image.raw = contents;
    for (const auto& [path, text] : files) {
      if (path.starts_with("segments/")) {
        image.segments[path] = {};
      } else {
        image.texts[path] = text;
      }
    }
    return image;
  }
};

}  // namespace tardis::nvme::testing
