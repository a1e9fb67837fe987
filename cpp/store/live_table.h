// SPDX-License-Identifier: Apache-2.0
// The mapping of a store's shared index: where its parts lie, and the memory behind them.
#pragma once

#include <string>

#include "base/status.h"
#include "base/unique_fd.h"
#include "store/live_layout.h"

namespace tardis {

// What tells this table from every other: a copied store, or the same folder seen from another container, must not meet
// it by accident.
struct LiveIdentity {
  Uuid store{};
  std::uint64_t device = 0, inode = 0;  // of the store's superblock file
};

struct LiveSizes {
  std::uint64_t capacity_bytes = 0;
  std::uint64_t segment_bytes = 0;
  std::uint32_t max_segments = 0;
  std::uint64_t objects = 0;  // how many the hash table is made for
};

class LiveTable {
 public:
  static std::string file_name(const LiveIdentity& identity);
  // A new, empty table, in place of any older file of this name. Code::kNoSpace if the tmpfs at `folder` is too small.
  static Result<LiveTable> create(const std::string& folder, const LiveIdentity& identity, const LiveSizes& sizes);
  static Result<LiveTable> attach(const std::string& folder, const LiveIdentity& identity);
  LiveTable(LiveTable&& other) noexcept;
  LiveTable& operator=(LiveTable&&) = delete;
  ~LiveTable();

  // "device:inode" of the mapped file.
  const std::string& file_id() const { return file_id_; }
  const std::string& path() const { return path_; }
  void remove_file();

  LiveHeader& header() const { return *at<LiveHeader>(0); }
  LiveProcess& process(std::uint32_t id) const { return at<LiveProcess>(header().shape.processes_offset)[id]; }
  LiveNamespace& name_space(std::uint32_t id) const { return at<LiveNamespace>(header().shape.namespaces_offset)[id]; }
  LiveSegment& segment(std::uint32_t id) const { return at<LiveSegment>(header().shape.segments_offset)[id]; }
  IndexBucket& bucket(std::uint64_t number) const { return at<IndexBucket>(header().shape.buckets_offset)[number]; }
  // Slots of all segments are numbered through: segment * slots_stride + slot.
  SlotRecord& record(std::uint64_t global_slot) const { return records_[global_slot]; }
  std::uint32_t stride() const { return stride_; }
  std::uint64_t buckets() const { return buckets_; }

  // Memory must be reserved before it is touched: a tmpfs that is full would end the process with SIGBUS.
  Status reserve_process(std::uint32_t id);
  Status reserve_segment(std::uint32_t id);
  Status reserve_records(std::uint32_t segment, std::uint32_t slots);

 private:
  LiveTable(std::string path, UniqueFd fd) : path_(std::move(path)), fd_(std::move(fd)) {}
  Status map(std::uint64_t bytes);
  void adopt_shape();
  Status reserve(std::uint64_t offset, std::uint64_t bytes);
  template <class T>
  T* at(std::uint64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }

  std::string path_;
  std::string file_id_;
  UniqueFd fd_;
  std::byte* base_ = nullptr;
  std::uint64_t bytes_ = 0;
  SlotRecord* records_ = nullptr;
  std::uint32_t stride_ = 0;
  std::uint64_t buckets_ = 0;
};

}  // namespace tardis
