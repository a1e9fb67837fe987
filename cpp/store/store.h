// SPDX-License-Identifier: Apache-2.0
// The object store of one folder, used by one process: objects of fixed size in the slots of preallocated segments.
//
// Locks, in the order they may be taken together:
//   close_mutex_  one close() at a time
//   clear_turn_  taken only to enter the gate: a waiting clear() goes before later set() calls
//   clear_gate_  shared by set(), exclusive in clear()
//   grow_mutex_  one new or re-classed segment at a time
//   Segment::io_mutex()  tables and superblock of one segment; held during I/O
//   mutex_       index, slots, flush groups; never held during I/O
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "block/block_device.h"
#include "store/folder.h"
#include "store/format.h"
#include "store/index.h"
#include "store/segment.h"
#include "store/transfer.h"
#include "tardis/tardis.h"

namespace tardis {

struct StoreOptions {
  BlockDeviceOptions device;
  std::uint64_t capacity_bytes = 0;
  std::uint64_t segment_bytes = 0;
  std::uint64_t object_bytes_hint = 0;
  std::uint64_t free_space_floor = 0;
  std::uint64_t flush_bytes = 256u << 20;
  std::uint32_t flush_milliseconds = 50;
  bool verify_reads = true;
};

class Store {
  struct Passkey {
    explicit Passkey() = default;
  };

 public:
  // See tardis.h for what each function promises.
  // `make_device`: the engine to use; tests put one that fails between the store and the files.
  using DeviceFactory = std::function<Result<std::unique_ptr<BlockDevice>>(
      const std::string& folder, const BlockDeviceOptions& options, int keep_open_fd)>;
  static Result<std::unique_ptr<Store>> open(const std::string& folder, const StoreOptions& options, bool create,
                                             const DeviceFactory& make_device = open_block_device);
  Store(Passkey, StoreFolder folder, const StoreOptions& options, std::unique_ptr<BlockDevice> device);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  Result<NamespaceId> open_namespace(const Fingerprint& fingerprint, const std::string& description,
                                     std::uint32_t parts, std::span<const std::uint64_t> region_bytes);
  Result<std::size_t> lookup(NamespaceId space, const Hash256* hashes, std::size_t n);
  Status set(NamespaceId space, const Hash256* hashes, const Hash256* parent_of_first, const std::uint64_t* pieces,
             std::size_t n, std::uint8_t* ok);
  Status get(NamespaceId space, const Hash256* hashes, const std::uint64_t* pieces, std::size_t n, std::uint8_t* ok);
  Status flush();
  Result<std::uint64_t> clear(const std::optional<Fingerprint>& only);
  Status close();

  void stats(tardis_stats& out);
  std::string path_report_json() const;

 private:
  struct Namespace {
    Fingerprint fingerprint{};
    std::optional<ObjectGeometry> geometry;  // set by open_namespace
  };
  struct Counters;
  struct Published {
    ObjectKey key;
    std::uint64_t generation;
    Segment* owner;
  };
  struct FlushGroup {
    std::uint64_t id = 0;
    std::vector<Published> pages;
    std::uint64_t bytes = 0;
    std::uint64_t opened_ns = 0;
    std::uint32_t writers = 0;  // set() calls that still write headers of this group
  };
  struct Quarantine {
    SlotRef where;
    std::uint64_t generation;
  };
  // The arguments of one set(), as its steps see them.
  struct SetCall {
    NamespaceId space;
    const Hash256* hashes;
    const Hash256* parent_of_first;
    const std::uint64_t* pieces;
    std::size_t n;
    ObjectGeometry geometry;
    std::optional<Error> failure;  // why a page was not stored

    std::uint64_t parent_of(std::size_t i) const;
  };
  // A slot reserved for one object of a set() call.
  struct Ticket {
    std::size_t index;  // in the call
    SlotRef where;
    Segment* owner;
    std::uint64_t parent;
    std::uint64_t generation;
    std::uint32_t flush_failures;  // of the segment before anything was written
    bool failed = false;
  };
  class Call;  // counts calls in flight, so that close() can wait for them

  // recovery.cpp: recover() and its steps
  struct Found;  // an object that a header tells of
  Status recover();
  Status scan_segments(std::vector<Found>& found);
  void verify_unproven(std::vector<Found>& found);
  void publish_newest(const std::vector<Found>& found);
  Status settle_segments(const std::vector<Found>& found);
  // space.cpp
  // `failure`: why fewer than asked were found, or why the store could not grow.
  std::vector<SlotRef> reserve(SlotClass slot_class, std::size_t need, std::optional<Error>& failure);
  void take_free(SlotClass slot_class, std::size_t need, std::vector<SlotRef>& out);
  Result<bool> grow(SlotClass slot_class);
  std::size_t evict(SlotClass slot_class, std::size_t need);
  Result<bool> convert_segment(SlotClass slot_class);
  Segment* choose_victim(SlotClass slot_class);
  SlotRef forget(IndexEntry& entry);
  void unpublish(IndexEntry& entry);   // its slot can be used again
  void quarantine(IndexEntry& entry);  // its slot cannot
  void release_slot(SlotRef where);    // free now, or when the last lease on it ends
  void end_lease(SlotRef where);
  std::uint32_t max_segments() const;
  // writer.cpp: the steps of set()
  std::vector<std::size_t> choose_pages(const SetCall& set);
  std::vector<Ticket> issue_tickets(SetCall& set, const std::vector<std::size_t>& wanted);
  void make_dirty(SetCall& set, std::vector<Ticket>& tickets);
  void write_payloads(SetCall& set, std::vector<Ticket>& tickets, Transfer& payload);
  void write_headers(SetCall& set, std::vector<Ticket>& tickets, const Transfer& payload, std::uint64_t group,
                     std::uint64_t durable);
  void publish(SetCall& set, std::vector<Ticket>& tickets, const Transfer& payload, FlushGroup& group);
  void publish_page(const SetCall& set, const Ticket& ticket, std::uint64_t root, FlushGroup& group);
  // flusher.cpp
  void flusher_main();
  void flush_group(const FlushGroup& ended);
  void flush_failed(Segment& segment, const Error& error);
  void unpublish_page(const Published& page);
  void persist_quarantines(std::vector<Quarantine> pending);
  void limit_cached_tables();

  Segment& segment(std::uint32_t id) { return *segments_.at(id); }
  void set_state(SlotRef where, SlotState next);
  void adopt_segment(std::unique_ptr<Segment> segment);
  Segment::Slot& slot(SlotRef where) { return segment(where.segment).slots[where.slot]; }
  Result<ObjectGeometry> geometry_of(NamespaceId space);
  NamespaceId intern(const Fingerprint& fingerprint);

  StoreFolder folder_;
  StoreOptions options_;
  std::unique_ptr<BlockDevice> device_;
  PathReport path_report_;
  std::vector<std::string> notes_;  // what recovery found, in readable lines; fixed after open()

  std::mutex describe_mutex_;  // namespace texts; taken alone
  std::mutex clear_turn_;
  std::shared_mutex clear_gate_;
  std::mutex grow_mutex_;

  std::mutex mutex_;
  Index index_;
  std::map<std::uint32_t, std::unique_ptr<Segment>> segments_;
  std::vector<std::unique_ptr<Segment>> retired_;    // failed while being re-classed; a flush group may still name them
  std::map<std::uint32_t, std::string> unreadable_;  // segment id -> why; they keep their share of the capacity
  std::array<std::uint64_t, 5> slot_counts_{};       // by SlotState
  std::uint64_t payload_bytes_ = 0;                  // of published objects
  std::vector<Namespace> namespaces_;
  std::uint64_t next_generation_ = 1;
  std::uint64_t durable_group_ = 0;
  std::uint64_t finished_group_ = 0;                                    // durable or failed
  std::shared_ptr<FlushGroup> group_ = std::make_shared<FlushGroup>();  // the open one
  std::shared_ptr<FlushGroup> ended_;                                   // the one being made durable, or null
  std::uint64_t flush_wanted_ = 0;                                      // groups up to this one must end now
  std::optional<Error> flush_error_;                                    // the last
  std::uint64_t flush_failures_ = 0;                                    // each unpublished pages ...
  std::uint64_t flush_failures_told_ = 0;                               // ... and is told once, by flush() or close()
  std::vector<Quarantine> quarantines_;
  std::condition_variable flusher_wake_;
  std::condition_variable flush_done_;
  std::condition_variable writers_done_;
  bool stopping_ = false;
  std::thread flusher_;

  std::mutex close_mutex_;
  std::mutex calls_mutex_;
  std::condition_variable calls_done_;
  std::uint64_t calls_ = 0;
  bool closed_ = false;

  std::unique_ptr<Counters> counters_;
};

}  // namespace tardis
