// SPDX-License-Identifier: Apache-2.0
// Small files and folders, with plain system calls.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"

namespace tardis {

// For the owner alone; fine if it is there already.
Status make_folder(const std::string& path);
Status make_folders(const std::string& path);  // and those above it

// For reading. Of anything else than a regular file an error, and at once: a FIFO would wait for somebody to write it.
Result<UniqueFd> open_regular_file(const std::string& path, int more_flags = 0);
Result<std::string> read_file(const std::string& path, std::size_t limit);
Result<std::vector<std::string>> list_folder(const std::string& path);

// write-new + rename + fsync of file and folder: a crash leaves the old file or the new one.
Status write_file_durably(const std::string& folder, const std::string& name, const void* data, std::size_t bytes);
Status sync_folder(const std::string& path);

}  // namespace tardis
