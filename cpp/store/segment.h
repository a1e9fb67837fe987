// SPDX-License-Identifier: Apache-2.0
// One preallocated data file: superblock, header table, digest table, payload slots.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "block/block_device.h"
#include "store/format.h"
#include "store/index.h"

namespace tardis {

enum class SlotState : std::uint8_t {
  kFree,
  kWriting,      // reserved by a ticket, invisible
  kLive,         // has an index entry
  kDying,        // unpublished, still read by a lease; becomes free when the last one ends
  kQuarantined,  // failed its digest in a clean segment; never reused until verified or cleared
};

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

class Segment {
  struct Passkey {
    explicit Passkey() = default;
  };

 public:
  Segment(Passkey, BlockDevice& device, std::string path, std::uint32_t id, FileId file);

  struct Slot {
    SlotState state = SlotState::kFree;
    std::uint32_t leases = 0;
    IndexEntry* entry = nullptr;
  };

  // Creates the file, reserves its blocks and makes a dirty superblock durable.
  static Result<std::unique_ptr<Segment>> create(BlockDevice& device, const std::string& path, std::uint32_t id,
                                                 const Uuid& store, std::uint64_t bytes, SlotClass slot_class);
  // Opens and checks an existing file. Code::kNotFound: never used (all zero), safe to remove.
  static Result<std::unique_ptr<Segment>> load(BlockDevice& device, const std::string& path, std::uint32_t id,
                                               const Uuid& store, std::uint64_t bytes);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::uint32_t id() const { return id_; }
  FileId file() const { return file_; }
  const std::string& path() const { return path_; }
  const SegmentGeometry& geometry() const { return geometry_; }
  SlotClass slot_class() const { return {geometry_.slot_bytes, geometry_.digests_per_slot}; }
  std::uint32_t epoch() const { return superblock_.epoch; }
  bool dirty() const { return (superblock_.flags & kSegmentDirty) != 0; }
  bool suspect() const { return (superblock_.flags & kSegmentSuspect) != 0; }
  bool truncated() const { return truncated_; }
  std::uint64_t file_bytes() const { return file_bytes_; }

  // The functions below do I/O; the caller holds io_mutex().
  std::mutex& io_mutex() { return io_mutex_; }
  Status set_flags(std::uint32_t flags);  // durable before it returns; no-op when already so
  Status reclass(SlotClass slot_class);   // every slot must be free: next epoch, empty tables
  Result<SegmentTable*> table();          // loads it if need be
  void drop_table() { table_.reset(); }
  std::uint64_t table_bytes() const { return table_ ? table_->bytes() : 0; }
  Status write_table(const std::set<std::uint64_t>& blocks);
  Status flush() { return device_.flush(file_); }
  Status restore_length();  // gives a truncated file its blocks back

  void adopt_class() { reset_slots(); }  // after reclass(), under the store's mutex

  std::uint64_t table_used_ns() const { return table_used_ns_.load(std::memory_order_relaxed); }

  // Guarded by the store's mutex.
  std::vector<Slot> slots;
  std::uint32_t free_slots = 0;
  std::uint32_t next_slot = 0;  // where the search for a free slot starts
  std::uint32_t flush_failures = 0;
  bool doubtful = false;  // a write or flush failed: some slot may not hold what its header says
  bool reclassing = false;

 private:
  Status write_superblock();
  Status zero_tables();
  void reset_slots();

  BlockDevice& device_;
  std::string path_;
  std::uint32_t id_;
  FileId file_;
  SegmentSuperblock superblock_{};
  SegmentGeometry geometry_;
  bool truncated_ = false;
  std::uint64_t file_bytes_ = 0;
  std::mutex io_mutex_;
  std::unique_ptr<SegmentTable> table_;
  std::atomic<std::uint64_t> table_used_ns_{0};
};

// One read or write that must succeed as a whole.
Status transfer_bytes(BlockDevice& device, IoRequest::Op op, FileId file, std::uint64_t offset, void* memory,
                      std::uint64_t bytes, const std::string& what);

}  // namespace tardis
