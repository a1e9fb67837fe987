// SPDX-License-Identifier: Apache-2.0
// One preallocated data file: superblock, header table, digest table, payload slots.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "block/block_device.h"
#include "store/format.h"
#include "store/live_layout.h"

namespace tardis {

// Memory image of a segment's header and digest tables, so that a 4 KiB block is always written whole.
class SegmentTable {
 public:
  explicit SegmentTable(const SegmentGeometry& geometry);
  SlotHeader& header(std::uint32_t slot);
  std::uint64_t* digests(std::uint32_t slot);
  // Table blocks (numbered from the header table's start) that hold this slot's header and digests.
  void blocks_of(std::uint32_t slot, std::set<std::uint64_t>& blocks) const;
  std::byte* data() { return bytes_.data(); }
  std::uint64_t bytes() const { return used_; }

 private:
  SegmentGeometry geometry_;
  std::uint64_t used_;
  AlignedBuffer bytes_;
};

// What a file says of itself.
struct SegmentImage {
  SegmentSuperblock superblock{};
  std::uint64_t file_bytes = 0;
  SegmentGeometry geometry() const { return SegmentGeometry::of(superblock); }
  bool dirty() const { return (superblock.flags & kSegmentDirty) != 0; }
  bool suspect() const { return (superblock.flags & kSegmentSuspect) != 0; }
  bool truncated() const { return file_bytes < superblock.segment_bytes; }
};

// A segment file as one process has it open. What processes must agree on is in its LiveSegment; offline tools use one
// of their own.
class Segment {
  struct Passkey {
    explicit Passkey() = default;
  };

 public:
  Segment(Passkey, BlockDevice& device, LiveSegment& live, std::string path, std::uint32_t id, FileId file,
          const Uuid& store, std::uint64_t bytes);

  // `live` says already which file it is. Creates the file, reserves its blocks and makes a dirty superblock durable.
  static Result<std::unique_ptr<Segment>> create(BlockDevice& device, LiveSegment& live, const std::string& path,
                                                 std::uint32_t id, const Uuid& store, std::uint64_t bytes,
                                                 SlotClass slot_class);
  // Opens the file; its state is known already.
  static Result<std::unique_ptr<Segment>> open(BlockDevice& device, LiveSegment& live, const std::string& path,
                                               std::uint32_t id, const Uuid& store, std::uint64_t bytes);
  // Opens and checks a file, and fills in `live`. Code::kNotFound: never used (all zero), safe to remove.
  static Result<std::unique_ptr<Segment>> load(BlockDevice& device, LiveSegment& live, const std::string& path,
                                               std::uint32_t id, const Uuid& store, std::uint64_t bytes,
                                               SegmentImage& image);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::uint32_t id() const { return id_; }                      // in the running index
  std::uint32_t number() const { return live_.number.load(); }  // in its folder
  std::uint32_t on_path() const { return live_.path.load(); }
  FileId file() const { return file_; }
  const std::string& path() const { return path_; }
  LiveSegment& live() { return live_; }
  SegmentGeometry geometry() const;
  SlotClass slot_class() const { return {live_.slot_bytes.load(), live_.digests_per_slot.load()}; }
  std::uint32_t epoch() const { return live_.epoch.load(); }
  bool dirty() const { return (live_.flags.load() & kSegmentDirty) != 0; }
  bool suspect() const { return (live_.flags.load() & kSegmentSuspect) != 0; }
  std::uint64_t slot_offset(std::uint32_t slot) const {
    return live_.payload_offset.load() + slot * live_.slot_bytes.load();
  }

  // The functions below do I/O; the caller holds io_mutex(), and its process holds the segment where they write.
  std::mutex& io_mutex() { return io_mutex_; }
  Status make_dirty();                    // durable before it returns; no-op when already so
  Status set_flags(std::uint32_t flags);  // durable before it returns; no-op when already so
  Status rewrite_superblock();            // so that no checkpoint written before holds
  Status reclass(SlotClass slot_class);   // every slot must be free: next epoch, empty tables
  Result<SegmentTable*> table();          // loads it if need be
  void drop_table() { table_.reset(); }
  std::uint64_t table_bytes() const { return table_ ? table_->bytes() : 0; }
  Status write_table(const std::set<std::uint64_t>& blocks);
  // The same in two steps, so that the tables of several segments go to the device together. `pieces`: memory of the
  // requests; keeps its elements where they are.
  void add_table_writes(const std::set<std::uint64_t>& blocks, std::deque<iovec>& pieces,
                        std::vector<IoRequest>& requests);
  Status tables_written(std::span<const IoRequest> requests);
  Status flush() { return device_.flush(file_); }
  Status restore_length();  // gives a truncated file its blocks back

  std::uint64_t table_used_ns() const { return table_used_ns_.load(std::memory_order_relaxed); }

  // Of this process.
  std::mutex claim_mutex;
  std::uint32_t claims = 0;                       // calls that write in it; guarded by claim_mutex
  bool alone = false;                             // and no other call may
  std::atomic<std::uint32_t> flush_failures = 0;  // as this process saw them

 private:
  Status write_superblock(std::uint32_t flags);
  void adopt(SlotClass slot_class);

  BlockDevice& device_;
  LiveSegment& live_;
  const std::string path_;
  const std::uint32_t id_;
  const FileId file_;
  const Uuid store_;
  const std::uint64_t bytes_;
  std::mutex io_mutex_;
  std::unique_ptr<SegmentTable> table_;
  std::uint64_t table_version_ = 0;  // of live_ when table_ was read or written
  std::atomic<std::uint64_t> table_used_ns_{0};
};

// One read or write that must succeed as a whole.
Status transfer_bytes(BlockDevice& device, IoRequest::Op op, FileId file, std::uint64_t offset, void* memory,
                      std::uint64_t bytes, const std::string& what);

}  // namespace tardis
