// SPDX-License-Identifier: Apache-2.0
// One preallocated data file: superblock, header table, digest table, payload slots. Or one such file and others that
// have their stripes of the payload.
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
#include "block/striped_device.h"
#include "store/folder.h"
#include "store/format.h"
#include "store/live_layout.h"
#include "store/stripes.h"

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
  std::uint64_t file_bytes = 0;  // segment_bytes, or where its files end too early
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
  Segment(Passkey, StripedDevice& device, LiveSegment& live, const StoreFolder& folder, std::uint32_t id);

  // Which of a segment's paths was to blame for an error.
  struct Blame {
    std::uint32_t path = 0;
    bool lost = false;  // a file is missing or belongs to another segment: this one can never be whole again
  };
  // `live` says already which file it is. Creates the files, reserves their blocks and makes a dirty superblock
  // durable, last. `unit`: with stripes, what they are dealt in.
  static Result<std::unique_ptr<Segment>> create(StripedDevice& device, LiveSegment& live, const StoreFolder& folder,
                                                 std::uint32_t id, SlotClass slot_class, const Stripes& stripes,
                                                 std::uint64_t unit, Blame& blame);
  // Opens the files; their state is known already.
  static Result<std::unique_ptr<Segment>> open(StripedDevice& device, LiveSegment& live, const StoreFolder& folder,
                                               std::uint32_t id, Blame& blame);
  // Opens and checks the files, and fills in `live`. Code::kNotFound: never used (all zero), safe to remove.
  static Result<std::unique_ptr<Segment>> load(StripedDevice& device, LiveSegment& live, const StoreFolder& folder,
                                               std::uint32_t id, SegmentImage& image, Blame& blame);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::uint32_t id() const { return id_; }                      // in the running index
  std::uint32_t number() const { return live_.number.load(); }  // in its folder
  std::uint32_t on_path() const { return live_.path.load(); }   // its own file; there may be others
  const Stripes& stripes() const { return stripes_; }
  FileId file() const { return file_; }  // where the payload is found at slot_offset()
  const std::string& path() const { return path_; }
  // Of a striped segment, what its files met since this was asked last.
  struct Met {
    std::uint32_t path;
    StripedDevice::Met met;
  };
  std::vector<Met> take_met(IoUse use);
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
  // Every slot must be free: next epoch, empty tables. The slots of room_for() must not be none.
  Status reclass(SlotClass slot_class, std::uint64_t unit);
  SegmentGeometry room_for(SlotClass slot_class, std::uint64_t unit) const;
  Result<SegmentTable*> table();  // loads it if need be
  void drop_table() { table_.reset(); }
  std::uint64_t table_bytes() const { return table_ ? table_->bytes() : 0; }
  Status write_table(const std::set<std::uint64_t>& blocks);
  // The same in two steps, so that the tables of several segments go to the device together. `pieces`: memory of the
  // requests; keeps its elements where they are.
  void add_table_writes(const std::set<std::uint64_t>& blocks, std::deque<iovec>& pieces,
                        std::vector<IoRequest>& requests);
  Status tables_written(std::span<const IoRequest> requests);
  Status flush() { return device_.flush(file_); }
  Status flush_tables() { return device_.flush(files_.front()); }
  // Its whole length, or where a file that was truncated ends.
  Result<std::uint64_t> available_bytes();
  Status restore_length();  // gives truncated files their blocks back

  std::uint64_t table_used_ns() const { return table_used_ns_.load(std::memory_order_relaxed); }

  // Of this process.
  std::mutex claim_mutex;
  std::uint32_t claims = 0;                       // calls that write in it; guarded by claim_mutex
  bool alone = false;                             // and no other call may
  std::atomic<std::uint32_t> flush_failures = 0;  // as this process saw them

 private:
  Status write_superblock(std::uint32_t flags);
  Result<SegmentSuperblock> read_superblock();
  void adopt(SlotClass slot_class, std::uint64_t unit);
  Status open_own(bool create);
  Status create_members(Blame& blame);
  Status open_members(Blame& blame);
  void join();
  std::string member_path(std::uint32_t file) const { return folder_.stripe_path(name(), stripes_.paths[file]); }
  SegmentName name() const { return {live_.path.load(), live_.number.load()}; }

  StripedDevice& device_;
  LiveSegment& live_;
  const StoreFolder& folder_;
  const std::string path_;
  const std::uint32_t id_;
  const Uuid store_;
  const std::uint64_t bytes_;
  Stripes stripes_;
  std::vector<FileId> files_;  // its own, then those of its stripes
  FileId file_ = 0;            // all of them as one
  bool joined_ = false;
  std::mutex io_mutex_;
  std::unique_ptr<SegmentTable> table_;
  std::uint64_t table_version_ = 0;  // of live_ when table_ was read or written
  std::atomic<std::uint64_t> table_used_ns_{0};
};

// One read or write that must succeed as a whole.
Status transfer_bytes(BlockDevice& device, IoRequest::Op op, FileId file, std::uint64_t offset, void* memory,
                      std::uint64_t bytes, const std::string& what);

}  // namespace tardis
