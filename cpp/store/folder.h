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
#include "block/block_device.h"
#include "store/format.h"
#include "store/live_table.h"
#include "store/paths.h"

namespace tardis {

// Where new segments of one path are numbered from, given those that it has: after the last one. But a stray file may
// have one of the last numbers and must not use them all up: then the largest gap is begun, if that is any better.
std::uint32_t number_for_next_segment(const std::map<SegmentName, std::string>& files);

class StoreFolder {
 public:
  explicit StoreFolder(std::string path) : path_(std::move(path)), paths_(path_) {}
  StoreFolder(StoreFolder&&) = default;
  StoreFolder& operator=(StoreFolder&&) = delete;
  ~StoreFolder() { unlock(); }

  const std::string& path() const { return path_; }
  const StoreSuperblock& superblock() const { return superblock_; }
  Result<LiveIdentity> live_identity() const;
  int lock_fd() const { return lock_.get(); }

  // Makes the folder and its subfolders if they are missing.
  Status create_folders();

  // ---- locks: bytes of one file under open-file-description locks, which end with the process and its I/O in flight
  // Byte 0: held while a process opens or closes the store. Waits; Code::kBusy names the owner.
  Status lock_setup();
  void unlock_setup();
  // One byte for each process that uses the store, the lowest free one.
  Result<std::uint32_t> lock_process();
  // Whether the process in that place lives. Not for the own place.
  bool process_alive(std::uint32_t place) const;
  bool any_process_alive() const;  // other than this one
  // As any_process_alive(), once processes that were killed have given up their locks, which they do when their I/O
  // ends.
  bool any_process_stays() const;
  // For tools that need the store for themselves: like lock_setup(), and Code::kBusy while any process uses it.
  Status lock_alone();
  void unlock();
  // "pid 12 on host since ..." of every process that holds a lock, as it wrote it; empty if there is none.
  std::string owner() const;

  // ---- which shared index the processes of this store use
  Status write_live(const std::string& file_id) const;
  Status check_live(const std::string& file_id) const;  // Code::kBusy: this process would use another one

  std::string checkpoint_path() const;
  Status remove_checkpoint() const;

  bool has_superblock() const;
  Status read_superblock();
  // write-new + rename + fsync, so that a crash leaves the old one or the new one.
  Status write_superblock(const StoreSuperblock& superblock);

  // Segments on a raw namespace are empty files to one who looks for them in the file system.
  // `device`: null if they are read by plain system calls.
  Status check_device(const BlockDevice* device) const;

  // ---- the folders that hold its segments, this one first
  StorePaths& paths() { return paths_; }
  const StorePaths& paths() const { return paths_; }

  std::string segment_path(SegmentName name) const;
  // Files in the segments/ of a path, or of every path that is there; names that are not segments are ignored.
  Result<std::map<SegmentName, std::string>> segment_files(std::uint32_t path) const;
  Result<std::map<SegmentName, std::string>> segment_files() const;
  // With the files of its stripes, on every path that is there.
  Status remove_segment(SegmentName name) const;
  Status remove_file(const std::string& file) const;  // it need not be there; not durable before the folder is synced

  // The stripes of a segment in the segments/ of another path than its own.
  std::string stripe_path(SegmentName segment, std::uint32_t path) const;
  // Those on a path, by the segment they are of.
  Result<std::map<SegmentName, std::string>> stripe_files(std::uint32_t path) const;
  Status sync_segments_folder(std::size_t path) const;

  Status describe_namespace(const Fingerprint& fingerprint, const std::string& description);
  Result<std::map<std::string, std::string>> namespaces() const;  // fingerprint in hex -> description

  Result<std::uint64_t> free_bytes(std::size_t path) const;  // of its file system, for an ordinary user

 private:
  Status open_lock();
  Status fill_lock_file() const;
  std::string owner_of(std::uint32_t byte, int fd) const;
  Status sign(std::uint32_t byte) const;  // says in the lock file who holds this byte

  std::string path_;
  StorePaths paths_;
  StoreSuperblock superblock_{};
  UniqueFd lock_;
};

std::string hex(const std::uint8_t* bytes, std::size_t n);
std::string human_bytes(std::uint64_t bytes);

}  // namespace tardis
