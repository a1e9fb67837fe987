// SPDX-License-Identifier: Apache-2.0
// The folder of a store: superblock file, lock, readable namespaces, names of segment files. Plain system calls; no I/O
// engine.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "store/format.h"

namespace tardis {

class StoreFolder {
 public:
  explicit StoreFolder(std::string path) : path_(std::move(path)) {}
  StoreFolder(StoreFolder&&) = default;
  StoreFolder& operator=(StoreFolder&&) = delete;
  ~StoreFolder() { unlock(); }

  const std::string& path() const { return path_; }
  const StoreSuperblock& superblock() const { return superblock_; }
  int lock_fd() const { return lock_.get(); }

  // Makes the folder and its subfolders if they are missing.
  Status create_folders();
  // An open-file-description lock that ends with the process and its I/O in flight. Code::kBusy names the owner.
  Status lock();
  void unlock();
  // "pid 12 on host since ..." as the owner wrote it; empty if nobody holds the lock.
  std::string owner() const;

  bool has_superblock() const;
  Status read_superblock();
  // write-new + rename + fsync, so that a crash leaves the old one or the new one.
  Status write_superblock(const StoreSuperblock& superblock);

  std::string segment_path(std::uint32_t id) const;
  // Files in segments/ by id; names that are not segments are ignored.
  Result<std::map<std::uint32_t, std::string>> segment_files() const;
  Status remove_segment(std::uint32_t id);
  Status sync_segments_folder() const;

  Status describe_namespace(const Fingerprint& fingerprint, const std::string& description);
  Result<std::map<std::string, std::string>> namespaces() const;  // fingerprint in hex -> description

  Result<std::uint64_t> free_bytes() const;  // of the file system, for an ordinary user

 private:
  std::string path_;
  StoreSuperblock superblock_{};
  UniqueFd lock_;
};

std::string hex(const std::uint8_t* bytes, std::size_t n);
std::string human_bytes(std::uint64_t bytes);

}  // namespace tardis
