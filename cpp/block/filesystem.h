// SPDX-License-Identifier: Apache-2.0
// What the operating system says about the file system of a folder and the disk below it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/status.h"

namespace tardis {

struct FilesystemFacts {
  std::string name;        // "ext4", ..., or the magic number in hex
  bool in_memory = false;  // tmpfs, ramfs: direct I/O has no meaning
  std::uint32_t logical_block = 4096;
  bool logical_block_known = false;
};

// `folder` must be an existing directory.
Result<FilesystemFacts> filesystem_facts(const std::string& folder);

struct DirectAlignment {
  std::uint32_t offset = 0;  // both 0: the file has no direct I/O
  std::uint32_t memory = 0;
};

// statx(STATX_DIOALIGN); empty where the kernel (before 6.1) or the file system does not answer.
std::optional<DirectAlignment> direct_alignment(int fd);

}  // namespace tardis
