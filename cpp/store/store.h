// SPDX-License-Identifier: Apache-2.0
// The object store of one folder, as one of the processes that use it sees it: objects of fixed size in the slots of
// preallocated segments.
//
// What processes share is in the LiveTable and needs no lock. A process writes slots and tables of a segment only while
// it holds the segment (claims.cpp); readers hold nothing but leases.
//
// Locks of this process, in the order they may be taken together; lookup() and get() take none of them:
//   close_mutex_  one close() at a time
//   clear_turn_  taken only to enter the gate: a waiting clear() goes before later set() calls
//   clear_gate_  shared by set(), exclusive in clear()
//   grow_mutex_  one new or re-classed segment at a time
//   Segment::io_mutex()  tables and superblock of one segment, of several in the order of their ids; held during I/O
//   mutex_       flush groups; never held during I/O
//   describe_mutex_  namespaces, and the process's use of the setup lock; taken before that lock
//   Segment::claim_mutex, open_mutex_, others_mutex_  taken alone
//   names_mutex_  before open_mutex_
//   problems_mutex_  why paths are out; taken last
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/unique_fd.h"
#include "block/striped_device.h"
#include "store/checkpoint.h"
#include "store/folder.h"
#include "store/follow.h"
#include "store/format.h"
#include "store/index.h"
#include "store/lease.h"
#include "store/segment.h"
#include "store/transfer.h"
#include "tardis/tardis.h"

namespace tardis {

class JsonWriter;

// Whether an object lies on one path, or its layers on all.
enum class Placement : std::uint8_t { kObjects, kLayers };

struct StoreOptions {
  BlockDeviceOptions device;
  std::uint64_t capacity_bytes = 0;
  std::uint64_t segment_bytes = 0;
  std::uint64_t object_bytes_hint = 0;
  std::uint64_t free_space_floor = 0;
  std::uint64_t flush_bytes = 256u << 20;
  std::uint32_t flush_milliseconds = 50;
  std::uint32_t checkpoint_seconds = 300;  // 0: only when the store is closed
  bool verify_reads = true;
  Placement placement = Placement::kObjects;           // of new segments, where there are several paths
  std::string live_folder = "/dev/shm";                // a tmpfs, the same for every process of the store
  std::optional<std::vector<std::string>> more_paths;  // further folders; nothing: those that the store has
};

class Store {
  struct Passkey {
    explicit Passkey() = default;
  };

 public:
  // See tardis.h for what each function promises.
  // `make_device`: the engine to use; tests put one that fails between the store and the files.
  using DeviceFactory = tardis::DeviceFactory;
  static Result<std::unique_ptr<Store>> open(const std::string& folder, const StoreOptions& options, bool create,
                                             const DeviceFactory& make_device = open_block_device);
  Store(Passkey, StoreFolder folder, const StoreOptions& options, std::unique_ptr<StripedDevice> device,
        LiveTable table, std::uint32_t self);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  Result<NamespaceId> open_namespace(const Fingerprint& fingerprint, const std::string& description,
                                     std::uint32_t parts, std::span<const std::uint64_t> region_bytes);
  Result<std::size_t> lookup(NamespaceId space, const Hash256* hashes, std::size_t n);
  Status set(NamespaceId space, const Hash256* hashes, const Hash256* parent_of_first, const std::uint64_t* pieces,
             std::size_t n, std::uint8_t* ok);
  Status get(NamespaceId space, const Hash256* hashes, const std::uint64_t* pieces, std::size_t n, std::uint8_t* ok);
  // lease.cpp: for who reads without get().
  // A lease on the leading run of these objects that can be found.
  Result<Lease> acquire(NamespaceId space, const Hash256* hashes, std::size_t n);
  SegmentAddresses segment_addresses() const;
  // As BlockDevice::run(). Of what is not under a lease the bytes may change meanwhile.
  void read_addresses(std::span<AddressRead> reads, const std::function<void(AddressRead&)>& on_complete);
  // Whether those are copies from memory: then read_at_once() does one, by the calling thread alone. 0 or an errno, as
  // AddressRead::error. Asked while the store is open.
  bool reads_at_once() const { return device_->reads_at_once(); }
  int read_at_once(std::uint64_t address, std::span<const iovec> memory);
  // follow.cpp: for who keeps a copy of the index.
  // Tells of every slot in which something changed since `seen` was here last. Takes no lock and does no I/O; what
  // changes meanwhile is told now or the next time.
  Status changes(SeenSlots& seen, const std::function<void(const SlotChange&)>& visit);
  // Chunk digests of objects of a namespace, [object][part][chunk], read where they lie. proven[i]: they fit the root,
  // and so prove the object's bytes; where not, they are not there any more, or were damaged.
  Status read_digests(NamespaceId space, std::span<const DigestSource> objects, std::uint64_t* digests,
                      std::uint8_t* proven);
  // Of an object whose digests proved nothing though get() finds its bytes right: reads the digests once more, and puts
  // the object aside if they are damaged, as get() does for bytes. True: it did.
  Result<bool> check_digests(NamespaceId space, const Hash256& hash);
  Result<ObjectGeometry> object_geometry(NamespaceId space) const;
  IoGeometry read_geometry() const { return read_geometry_; }
  std::uint64_t capacity_bytes() const { return folder_.superblock().capacity_bytes; }

  Status register_memory(void* base, std::uint64_t bytes);
  void unregister_memory(void* base);
  Status flush();
  // What clear() and remove() delete; pages evicted earlier count too, since a rebuild would believe their headers.
  struct Selection {
    std::optional<Fingerprint> space;
    Hash256 key{};                  // of which the first
    std::uint32_t key_nibbles = 0;  // half bytes must agree
    bool has(const Fingerprint& fingerprint, const Hash256& hash) const;
  };
  Result<std::uint64_t> remove(const Selection& selection);
  Result<std::uint64_t> clear(const std::optional<Fingerprint>& only) { return remove({only, {}, 0}); }
  // Evicts until no more than this many payload bytes are stored (of one namespace, or of all).
  Result<std::uint64_t> prune(std::uint64_t target_bytes, const std::optional<Fingerprint>& only);
  // Frees slots whose headers fail their checks. Returns how many.
  Result<std::uint64_t> repair_headers();
  // Writes a checkpoint now; segments that nobody writes just now become clean: after a crash they need no scan.
  // Returns how many did.
  Result<std::uint64_t> checkpoint();
  Status close();

  void stats(tardis_stats& out);
  std::string path_report_json();

 private:
  friend class Lease;
  struct Counters;
  struct Published {
    GlobalSlot slot;
    std::uint64_t generation;
    Segment* owner;
  };
  struct FlushGroup {
    std::uint64_t serial = 0;  // of this process
    std::uint64_t id = 0;      // in headers, of the store; 0: nobody writes in it yet
    std::vector<Published> pages;
    std::uint64_t bytes = 0;
    std::uint64_t opened_ns = 0;
    std::uint32_t writers = 0;  // set() calls that still write headers of this group
  };
  struct Quarantine {
    GlobalSlot slot;
    std::uint64_t generation;
  };
  // The arguments of one set(), as its steps see them.
  struct SetCall {
    NamespaceId space;
    const Hash256* hashes;
    const Hash256* parent_of_first;
    const std::uint64_t* pieces;
    std::size_t n;
    const ObjectGeometry& geometry;
    std::vector<bool> stored;                                // by page: it can be found ...
    std::vector<bool> written;                               // ... because this call wrote it
    std::optional<Error> failure;                            // why a page was not stored
    std::vector<std::pair<std::size_t, std::size_t>> twins;  // pages given twice: the second and the first

    std::uint64_t parent_of(std::size_t i) const;
  };
  // A slot reserved for one object of a set() call.
  struct Ticket {
    std::size_t index;  // in the call
    GlobalSlot slot;
    Segment* owner;
    std::uint64_t parent;
    std::uint64_t generation;
    std::uint32_t flush_failures;  // of the segment before anything was written
    bool failed = false;
  };
  // Slots reserved for a set() call, and the segments held for it.
  struct Reservation {
    struct Slot {
      GlobalSlot slot;
      std::uint64_t generation;
      Segment* owner;
    };
    std::vector<Slot> slots;
    std::vector<Segment*> held;
    bool busy = false;  // a segment with free slots was another process's
  };
  class Call;    // counts calls in flight, so that close() can wait for them
  class Pinned;  // keys and parents of pages that a set() call writes

  // recovery.cpp: recover() and its steps
  struct Found;  // an object that a header tells of
  Status recover();
  Status load_segments(const Checkpoint& checkpoint, std::vector<Found>& found);
  Result<std::unique_ptr<Segment>> load_segment(std::uint32_t id, SegmentName name, SegmentImage& image);
  Result<std::map<SegmentName, std::string>> find_segments();
  std::vector<Segment*> load_checkpoint(const Checkpoint& checkpoint, const std::vector<Segment*>& segments);
  Status scan_segment(Segment& segment, const SegmentImage& image, std::vector<Found>& found);
  void verify_unproven(std::vector<Found>& found, std::uint64_t durable);
  void leave_alone(const std::set<std::uint32_t>& segments, std::vector<Found>& found);
  void publish_newest(std::vector<Found>& found);
  Status settle_segments(const std::vector<Found>& found);
  Status settle_segment(Segment& segment, const std::vector<std::uint32_t>& rejected);
  Status leave();
  // save_checkpoint.cpp
  // A segment as a checkpoint tells of it.
  struct Snapshot {
    std::uint32_t id;
    std::uint64_t table_version;
    bool idle;  // nobody was about to publish what is in its tables already
  };
  Status save_checkpoint(std::vector<Snapshot>& saved);
  Result<bool> clean_segment(const Snapshot& saved);
  Result<std::uint64_t> checkpoint_now();
  // claims.cpp
  void join();              // registers this process in the table
  void reap(Owner before);  // takes over what dead processes left
  bool owner_alive(Owner owner) const;
  bool all_reads_since(std::uint64_t mark) const;
  bool claim(Segment& segment);
  bool claim_alone(Segment& segment);  // also against other calls of this process
  Status claim_waiting(Segment& segment);
  void release(Segment& segment);
  void settle_abandoned(std::uint32_t id);
  void recount(std::uint32_t id);
  std::uint64_t durable_group() const;
  std::uint64_t begin_group();
  void note_others(std::uint64_t failures);
  Status await_others();
  Status await_group(std::uint64_t group);
  // paths.cpp's folders in use: path_faults.cpp
  bool path_in_use(std::uint32_t path) const { return table_.header().paths[path].state.load() == PathState::kInUse; }
  std::uint32_t paths_in_use() const;
  // A path that is out and has a file of this segment; kMaxPaths: none.
  std::uint32_t path_out(std::uint32_t id) const {
    for (std::uint32_t left = live(id).all_paths.load(); left != 0; left &= left - 1) {
      const auto path = static_cast<std::uint32_t>(std::countr_zero(left));
      if (!path_in_use(path)) return path;
    }
    return kMaxPaths;
  }
  // What a batch met on a path: everything it asked failed there, or something succeeded.
  void path_result(std::uint32_t path, IoUse use, const Status& status);
  // Of the whole segment: with stripes, each path is told what was met there.
  void path_result(Segment& segment, IoUse use, const Status& status);
  static bool is_path_fault(int os_error);
  // What the requests of one batch met, by path.
  struct PathTally {
    std::array<std::uint32_t, kMaxPaths> worked{}, failed{};
    std::array<int, kMaxPaths> error{};
    void add(std::uint32_t path, int os_error);
    void add(Segment& segment, IoUse use, int os_error);
  };
  void tell_paths(const PathTally& tally, IoUse use);
  void take_out(std::uint32_t path, const std::string& problem);
  void forget_path(std::uint32_t path);
  Status forbid_return();
  Status join_paths(bool alone);
  void write_paths(JsonWriter& json);
  // space.cpp
  // `failure`: why fewer than asked were found, or why the store could not grow.
  Reservation reserve(const ObjectGeometry& object, std::size_t need, std::optional<Error>& failure);
  struct Share {
    std::uint32_t path;
    std::size_t slots;
  };
  std::vector<Share> shares(SlotClass slot_class, std::size_t need);
  void take_or_grow(const ObjectGeometry& object, std::size_t need, std::uint32_t path, Reservation& out);
  void take_free(SlotClass slot_class, std::size_t need, std::optional<std::uint32_t> path, Reservation& out);
  Result<bool> grow(const ObjectGeometry& object, std::optional<std::uint32_t> path);
  Status create_segment(std::uint32_t id, std::span<const std::uint32_t> paths, const ObjectGeometry& object,
                        std::uint32_t& to_blame);
  Status check_room(std::uint32_t path, std::uint64_t bytes);
  Result<std::uint64_t> free_bytes(std::uint32_t path) const;  // for segments, beyond the floor
  Result<std::uint32_t> take_number(std::uint32_t path);
  std::array<std::uint64_t, kMaxPaths> room_to_grow() const;
  std::size_t evict(SlotClass slot_class, std::size_t need);
  Result<bool> convert_segment(const ObjectGeometry& object);
  std::uint32_t room_in(Segment& segment, const ObjectGeometry& object) const;  // slots, if it were of this class
  Segment* choose_victim(const ObjectGeometry& object);
  bool drain(Segment& segment);
  Status reclass(Segment& segment, SlotClass slot_class, std::uint64_t unit);
  std::uint32_t max_segments() const;
  // striping.cpp
  Status create_striped(std::uint32_t id, const ObjectGeometry& object);
  Result<std::map<std::pair<SegmentName, std::uint32_t>, std::string>> find_stripes();
  void reserve_for_absent(std::map<SegmentName, std::string>& files);
  Status remove_stray_stripes(const std::map<SegmentName, std::uint32_t>& whole,
                              const std::map<SegmentName, std::string>& unreadable);
  // writer.cpp: the steps of set()
  void store_pages(SetCall& set, const std::vector<std::size_t>& wanted);
  void choose_pages(SetCall& set, std::vector<std::size_t>& wanted, std::vector<std::size_t>& elsewhere,
                    std::vector<std::size_t>& unread);
  void prove(SetCall& set, const std::vector<std::size_t>& unread, std::vector<std::size_t>& wanted);
  std::vector<std::size_t> still_missing(SetCall& set, const std::vector<std::size_t>& elsewhere);
  std::vector<Ticket> issue_tickets(SetCall& set, const std::vector<std::size_t>& wanted, Reservation& reserved);
  void make_dirty(SetCall& set, std::vector<Ticket>& tickets);
  void write_payloads(SetCall& set, std::vector<Ticket>& tickets, Transfer& payload);
  void write_headers(SetCall& set, std::vector<Ticket>& tickets, const Transfer& payload, std::uint64_t group,
                     std::uint64_t durable);
  void publish(SetCall& set, std::vector<Ticket>& tickets, const Transfer& payload, FlushGroup& group);
  // flusher.cpp
  void flusher_main();
  bool written_since_checkpoint() const;
  void flush_group(const FlushGroup& ended);
  void flush_failed(Segment& segment, const Error& error);
  void unpublish_page(const Published& page);
  void persist_quarantines(std::vector<Quarantine> pending);
  void persist_quarantine(Segment& owner, std::uint32_t slot, std::uint64_t generation);
  void limit_cached_tables();
  // repair.cpp
  Result<std::uint64_t> repair_headers_of(Segment& segment);
  // follow.cpp
  DigestSource digests_of(GlobalSlot slot, std::uint64_t root) const;
  std::optional<LiveObject> live_object(GlobalSlot slot) const;
  // erase.cpp
  Result<bool> erase_in(Segment& segment, const Selection& selection, std::uint64_t& pages);

  // Opens the file if this process has not yet; null if that fails or there is no such segment.
  // Only with `to_blame`, which path it was, does *why carry an error that may count against a path.
  Segment* segment(std::uint32_t id, std::optional<Error>* why = nullptr, std::uint32_t* to_blame = nullptr);
  Segment* segment_named(SegmentName name);  // null: no such segment that can be read
  Segment* adopt_segment(std::unique_ptr<Segment> segment);
  Result<const ObjectGeometry*> geometry_of(NamespaceId space) const;
  std::optional<NamespaceId> find_namespace(const Fingerprint& fingerprint) const;
  Result<NamespaceId> intern(const Fingerprint& fingerprint);  // under the setup lock
  LiveSegment& live(std::uint32_t id) const { return table_.segment(id); }
  // As its own word says, but nothing on a path that is out can be used.
  SegmentState state_of(std::uint32_t id) const {
    const SegmentState state = live(id).state.load();
    return state == SegmentState::kReady && path_out(id) < kMaxPaths ? SegmentState::kUnreadable : state;
  }
  SegmentName name_of(std::uint32_t id) const { return {live(id).path.load(), live(id).number.load()}; }
  std::string segment_path(std::uint32_t id) const { return folder_.segment_path(name_of(id)); }
  template <class Visit>  // visit(id, state) of every segment there is
  void for_each_segment(Visit visit) const;

  StoreFolder folder_;
  StoreOptions options_;
  std::unique_ptr<StripedDevice> device_;
  PathReport path_report_;
  const IoGeometry read_geometry_;
  const bool has_own_room_;         // the device, and no file system
  std::vector<std::string> notes_;  // what recovery found, in readable lines; fixed after open()

  LiveTable table_;
  const std::uint32_t self_;  // this process's place
  Owner owner_ = 0;           // and registration
  Index index_;

  std::unique_ptr<std::atomic<Segment*>[]> opened_;  // by id
  std::mutex open_mutex_;
  mutable std::shared_mutex names_mutex_;
  std::unordered_map<std::uint32_t, std::uint32_t>
      ids_by_name_;                                // SegmentName::word(); a hint, guarded by names_mutex_
  std::deque<std::unique_ptr<Segment>> segments_;  // behind opened_, and those that are of no use any more
  std::atomic<std::uint32_t> last_segment_{0};     // where slots were found last
  std::array<std::atomic<std::uint32_t>, kMaxPaths> last_on_path_{};
  std::atomic<std::uint64_t> share_turn_{0};  // of batches, over the paths
  mutable std::mutex problems_mutex_;
  std::array<std::string, kMaxPaths> path_problems_;  // why a path is out, as this process knows it

  std::mutex describe_mutex_;  // namespaces; taken before the setup lock
  std::deque<ObjectGeometry> geometry_memory_;
  std::unique_ptr<std::atomic<const ObjectGeometry*>[]> geometries_;  // by namespace; null: not opened

  std::mutex clear_turn_;
  std::shared_mutex clear_gate_;
  std::mutex grow_mutex_;

  std::mutex mutex_;
  std::uint64_t finished_group_ = 0;                                    // serial; durable or failed
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
  // Of pages that set() found stored: every group up to this one, of whichever process, may hold one; and how many
  // flushes had failed before the first of them was looked for.
  struct Others {
    std::uint64_t group = 0, failures = 0;
    void add(const Others& more);
  };
  std::mutex others_mutex_;
  Others others_;
  bool stopping_ = false;
  std::thread flusher_;

  std::mutex close_mutex_;
  std::atomic<std::uint64_t> calls_{0};  // in flight, and kClosed
  static constexpr std::uint64_t kClosed = std::uint64_t{1} << 63;
  bool closed_ = false;  // guarded by close_mutex_

  std::unique_ptr<Counters> counters_;
};

template <class Visit>
void Store::for_each_segment(Visit visit) const {
  const std::uint32_t end = table_.header().segments_end.load();
  for (std::uint32_t id = 0; id < end; ++id) {
    const SegmentState state = state_of(id);
    if (state != SegmentState::kNone) visit(id, state);
  }
}

}  // namespace tardis
