// SPDX-License-Identifier: Apache-2.0
#include "store/store.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <set>

#include "store/counters.h"
#include "store/files.h"

namespace tardis {
namespace {

constexpr std::uint64_t kGiB = 1u << 30;
constexpr std::uint32_t kFilesBesideSegments = 256;

std::uint64_t auto_segment_bytes(std::uint64_t capacity, std::uint64_t object_bytes) {
  std::uint64_t bytes = std::clamp(capacity / 256, kMinSegmentBytes, kMaxAutoSegmentBytes);
  // A segment of one or two large objects would be mostly its 1 MiB head.
  const std::uint64_t eight_objects = 2 * kFirstPayloadAlign + 8 * round_up(object_bytes, kSlotAlign);
  bytes = std::max(bytes, std::min(eight_objects, capacity / 4));
  return std::max(bytes, 2 * kFirstPayloadAlign + round_up(object_bytes, kSlotAlign)) / kFirstPayloadAlign *
         kFirstPayloadAlign;
}

// One descriptor a segment; the default soft limit of 1024 would end a store of 1 TiB.
void allow_open_files(std::uint64_t wanted) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted) return;
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, std::max<rlim_t>(wanted, limit.rlim_cur));
  ::setrlimit(RLIMIT_NOFILE, &limit);  // if refused, opening a segment reports EMFILE by name
}

// `free`: over all paths, and the most on one of them.
struct FreeSpace {
  std::uint64_t sum = 0, most = 0;
};

Result<FreeSpace> free_space(const std::string& folder, const std::vector<std::string>& more) {
  FreeSpace free;
  std::set<dev_t> seen;  // folders on one file system share its space
  for (std::size_t i = 0; i <= more.size(); ++i) {
    const std::string& path = i == 0 ? folder : more[i - 1];
    struct stat status {};
    struct statvfs space {};
    if (::stat(path.c_str(), &status) != 0 || ::statvfs(path.c_str(), &space) != 0) return errno_error(errno, path);
    if (!seen.insert(status.st_dev).second) continue;
    const std::uint64_t bytes = std::uint64_t{space.f_bavail} * space.f_frsize;
    free.sum += bytes;
    free.most = std::max(free.most, bytes);
  }
  return free;
}

Status check_capacity(std::uint64_t capacity, const BlockDevice& device) {
  const auto room = device.room();
  if (!room || capacity <= room->total) return {};
  return Error{Code::kInvalidArgument, "capacity: expected at most " + std::to_string(room->total) +
                                           " bytes, which is what fits (" + device.report().reason + "), found " +
                                           std::to_string(capacity) + "; lower capacity, or leave it out"};
}

Status make_superblock(StoreFolder& folder, const StoreOptions& options, const BlockDevice& device) {
  const PathReport& path = device.report();
  auto files = folder.segment_files();
  if (!files) return files.error();
  if (!files->empty()) {
    return Error{Code::kCorrupt, folder.path() + ": has " + std::to_string(files->size()) +
                                     " segment files but no tardis.store; restore that file, or empty the folder"};
  }
  const auto room = device.room();
  auto free = room ? FreeSpace{room->free, room->free} : free_space(folder.path(), options.device.more_folders);
  if (!free) return free.error();
  StoreSuperblock s{};
  // Others use a file system too; what fits on a raw namespace is the store's.
  s.capacity_bytes = room ? room->total : std::min(100 * kGiB, free->sum / 2);
  if (options.capacity_bytes != 0) s.capacity_bytes = options.capacity_bytes;
  if (Status status = check_capacity(s.capacity_bytes, device); !status) return status;
  s.segment_bytes = options.segment_bytes != 0 ? options.segment_bytes
                                               : auto_segment_bytes(s.capacity_bytes, options.object_bytes_hint);
  s.segment_bytes = round_up(s.segment_bytes, kTableBlockBytes);
  if (s.segment_bytes < kMinSegmentBytes || s.segment_bytes > kMaxSegmentBytes) {
    return Error{Code::kInvalidArgument, "segment_size: expected " + human_bytes(kMinSegmentBytes) + " to " +
                                             human_bytes(kMaxSegmentBytes) + ", found " + human_bytes(s.segment_bytes)};
  }
  if (s.capacity_bytes < s.segment_bytes + kMetadataBytes) {
    return Error{options.capacity_bytes != 0 ? Code::kInvalidArgument : Code::kNoSpace,
                 "capacity: expected at least one segment (" + human_bytes(s.segment_bytes + kMetadataBytes) +
                     "), found " + human_bytes(s.capacity_bytes) + " for " + folder.path() +
                     "; raise capacity or free space there"};
  }
  const std::uint64_t first_segment = s.segment_bytes + kMetadataBytes;
  const std::uint64_t floor = room ? 0 : options.free_space_floor;
  if (free->most < first_segment || free->most - first_segment < floor) {
    return Error{Code::kNoSpace, folder.path() + ": " + human_bytes(free->most) + " free; a first segment of " +
                                     human_bytes(s.segment_bytes) + " and free_space_floor " + human_bytes(floor) +
                                     " do not fit; free space, lower free_space_floor or choose another path"};
  }
  s.block_bytes = std::clamp<std::uint32_t>(std::max(path.logical_block, path.offset_align), 512, kTableBlockBytes);
  s.created_unix_seconds = static_cast<std::uint64_t>(std::time(nullptr));
  if (::getrandom(s.uuid.data(), s.uuid.size(), 0) != static_cast<ssize_t>(s.uuid.size())) {
    return errno_error(errno, "getrandom");
  }
  return folder.write_superblock(s);
}

Status match_settings(StoreFolder& folder, const StoreOptions& options, const BlockDevice& device) {
  const PathReport& path = device.report();
  StoreSuperblock s = folder.superblock();
  if (options.segment_bytes != 0 && round_up(options.segment_bytes, kTableBlockBytes) != s.segment_bytes) {
    return Error{Code::kInvalidArgument, "segment_size: the store at " + folder.path() + " has " +
                                             std::to_string(s.segment_bytes) + ", the configuration says " +
                                             std::to_string(options.segment_bytes) +
                                             "; leave segment_size out or make a new store at another path"};
  }
  if (path.direct && path.offset_align > s.block_bytes) {
    return Error{Code::kInvalidArgument, "direct_io: " + folder.path() + " needs " + std::to_string(path.offset_align) +
                                             "-byte blocks, the store was made with " + std::to_string(s.block_bytes) +
                                             "; set direct_io to off or make a new store"};
  }
  if (options.capacity_bytes != 0 && options.capacity_bytes != s.capacity_bytes) {
    if (folder.any_process_stays()) {
      return Error{Code::kInvalidArgument,
                   "capacity: the store at " + folder.path() + " is in use with " + std::to_string(s.capacity_bytes) +
                       ", the configuration of this process says " + std::to_string(options.capacity_bytes) +
                       "; all processes of a store share one capacity: give them the same, or leave it out"};
    }
    if (options.capacity_bytes < s.segment_bytes + kMetadataBytes) {
      return Error{Code::kInvalidArgument, "capacity: expected at least one segment (" +
                                               human_bytes(s.segment_bytes + kMetadataBytes) + "), found " +
                                               human_bytes(options.capacity_bytes)};
    }
    if (Status status = check_capacity(options.capacity_bytes, device); !status) return status;
    s.capacity_bytes = options.capacity_bytes;
    return folder.write_superblock(s);
  }
  return {};
}

// What checkpoints may take of the capacity, beyond kMetadataBytes.
std::uint64_t checkpoint_share(const StoreSuperblock& s) {
  return s.capacity_bytes < kGiB ? 0 : s.capacity_bytes / 512;
}

std::uint32_t segments_of(const StoreSuperblock& s) {
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(
      (s.capacity_bytes - kMetadataBytes - checkpoint_share(s)) / s.segment_bytes, kMaxSegments));
}

bool read_segment_superblock(BlockDevice& device, const std::string& path, SegmentSuperblock& superblock) {
  if (!device.room()) {
    const auto fd = open_regular_file(path);
    return fd && ::pread(fd->get(), &superblock, sizeof superblock, 0) == static_cast<ssize_t>(sizeof superblock);
  }
  const auto file = device.open_file(path, /*create=*/false, /*writable=*/false);
  if (!file) return false;
  AlignedBuffer block(kTableBlockBytes);
  const Status read = transfer_bytes(device, IoRequest::Op::kRead, *file, 0, block.data(), block.size(), path);
  device.close_file(*file);
  std::memcpy(&superblock, block.data(), sizeof superblock);
  return static_cast<bool>(read);
}

// How many objects the index is made for: as many as the capacity holds of the size that was announced, or of the size
// that the store has now.
std::uint64_t expected_objects(const StoreFolder& folder, const StoreOptions& options, BlockDevice& device) {
  constexpr std::uint64_t kAssumedObjectBytes = 64 * 1024;
  constexpr std::uint64_t kAtLeast = 64 * 1024;  // costs a megabyte
  const StoreSuperblock& s = folder.superblock();
  std::uint64_t objects =
      s.capacity_bytes / (options.object_bytes_hint != 0 ? options.object_bytes_hint : kAssumedObjectBytes);
  auto files = folder.segment_files();
  objects = std::max(objects, kAtLeast);
  if (!files || files->empty()) return objects;
  std::uint64_t slots = 0;
  for (const auto& [id, path] : *files) {
    SegmentSuperblock segment;
    if (!read_segment_superblock(device, path, segment)) continue;
    if (sealed(segment) && segment.slots <= s.segment_bytes / kSlotAlign) slots += segment.slots;
  }
  return std::max(objects, slots * std::max<std::uint64_t>(1, s.capacity_bytes / s.segment_bytes) / files->size());
}

// The shared index: a new one for the first process, the others' for one that joins them. Under the setup lock.
Result<LiveTable> open_table(const StoreFolder& folder, const StoreOptions& options, BlockDevice& device, bool alone) {
  auto identity = folder.live_identity();
  if (!identity) return identity.error();
  const auto create = [&] {
    const StoreSuperblock& s = folder.superblock();
    return LiveTable::create(
        options.live_folder, *identity,
        {s.capacity_bytes, s.segment_bytes, segments_of(s), expected_objects(folder, options, device)});
  };
  auto table = alone ? create() : LiveTable::attach(options.live_folder, *identity);
  if (!table) return table;
  Status status = alone ? folder.write_live(table->file_id()) : folder.check_live(table->file_id());
  if (!status) return status.error();
  if (!alone && table->header().ready.load() == 0) {
    return Error{Code::kBusy, "path " + folder.path() + ": a process died while it opened the store; start again"};
  }
  return table;
}

}  // namespace

Result<std::unique_ptr<Store>> Store::open(const std::string& path, const StoreOptions& asked, bool create,
                                           const DeviceFactory& make_device) {
  StoreOptions options = asked;
  StoreFolder folder(path);
  if (options.more_paths) {
    if (Status status = folder.paths().check_names(*options.more_paths); !status) return status.error();
  }
  if (!folder.has_superblock()) {
    if (!create) return Error{Code::kNotFound, path + ": no tardis store here"};
    if (Status status = folder.create_folders(); !status) return status.error();
  }
  if (Status status = folder.lock_setup(); !status) return status.error();
  // Only now: another process may just have made it.
  const bool fresh = !folder.has_superblock();
  std::vector<std::string> notes;
  const bool alone = !folder.any_process_stays();
  const auto usable = [&](const std::string& more) -> Status {
    auto report = probe_path(more, options.device, /*read_only=*/false);
    return report ? Status() : Status(report.error());
  };
  const auto settle = [&] {
    return folder.paths().settle(
        options.more_paths, folder.superblock().uuid, usable, [&] { return folder.remove_checkpoint(); }, notes);
  };
  if (fresh) {
    options.device.more_folders = options.more_paths.value_or(std::vector<std::string>());
    for (const std::string& more : options.device.more_folders) {
      if (Status status = make_folders(more); !status) return status.error();
    }
  } else {
    if (Status status = folder.read_superblock(); !status) return status.error();
    if (Status status = folder.create_folders(); !status) return status.error();
    if (Status status = folder.paths().load(folder.superblock().uuid); !status) return status.error();
    if (Status status = alone ? settle() : folder.paths().match(options.more_paths, usable); !status)
      return status.error();
    options.device.more_folders = folder.paths().more_present();
  }
  auto device = make_device(path, options.device, folder.lock_fd());
  if (!device) return device.error();
  if (Status status = folder.check_device(device->get()); !status) return status.error();
  if (Status status = fresh ? make_superblock(folder, options, **device) : match_settings(folder, options, **device);
      !status) {
    return status.error();
  }
  if (fresh) {
    if (Status status = settle(); !status) return status.error();
  }
  auto table = open_table(folder, options, **device, alone);
  if (!table) return table.error();
  auto place = folder.lock_process();
  if (!place) return place.error();
  if (Status status = table->reserve_process(*place); !status) return status.error();
  allow_open_files(segments_of(folder.superblock()) * std::uint64_t{folder.paths().known()} + kFilesBesideSegments);
  auto store = std::make_unique<Store>(Passkey(), std::move(folder), options,
                                       std::make_unique<StripedDevice>(std::move(*device)), std::move(*table), *place);
  store->notes_ = std::move(notes);
  if (Status status = store->join_paths(alone); !status) return status.error();
  store->join();
  if (alone) {
    Status status = store->recover();
    if (!status) {
      store->table_.remove_file();
      return status.error();
    }
    store->table_.header().ready.store(1);
  }
  store->folder_.unlock_setup();
  store->flusher_ = std::thread([raw = store.get()] { raw->flusher_main(); });
  return store;
}

Store::Store(Passkey, StoreFolder folder, const StoreOptions& options, std::unique_ptr<StripedDevice> device,
             LiveTable table, std::uint32_t self)
    : folder_(std::move(folder)),
      options_(options),
      device_(std::move(device)),
      path_report_(device_->report()),
      read_geometry_(device_->geometry()),
      has_own_room_(device_->room().has_value()),
      table_(std::move(table)),
      self_(self),
      // One reuse is worth as many touches as a quarter of the store holds objects.
      index_(table_, self,
             std::max<std::uint64_t>(64, folder_.superblock().capacity_bytes /
                                             std::max<std::uint64_t>(options.object_bytes_hint, 64 * 1024) / 4),
             [this](std::uint32_t place) { return place == self_ || folder_.process_alive(place); }),
      opened_(std::make_unique<std::atomic<Segment*>[]>(table_.header().shape.max_segments)),
      geometries_(std::make_unique<std::atomic<const ObjectGeometry*>[]>(kMaxNamespaces)),
      counters_(std::make_unique<Counters>()) {
  group_->serial = 1;
}

Store::~Store() {
  if (flusher_.joinable()) (void)close();
}

Status Store::close() {
  const std::lock_guard closing(close_mutex_);  // who comes second returns when the store is really released
  if (closed_) return {};
  closed_ = true;
  for (std::uint64_t calls = calls_.fetch_or(kClosed) | kClosed; calls != kClosed; calls = calls_.load()) {
    calls_.wait(calls);
  }
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    flusher_wake_.notify_all();
  }
  flusher_.join();  // it ends the open group first
  const Status others = await_others();
  Status result = leave();
  if (result) result = others;
  if (flush_failures_ > flush_failures_told_) result = *flush_error_;
  segments_.clear();  // these hold files of the device
  device_.reset();
  folder_.unlock();
  return result;
}

// The last process leaves segments that say they are whole, and a checkpoint.
Status Store::leave() {
  if (Status status = folder_.lock_setup(); !status) return status;
  reap(0);
  if (folder_.any_process_alive()) {
    table_.process(self_).owner.store(0);
    return {};
  }
  Status result;
  for_each_segment([&](std::uint32_t id, SegmentState state) {
    if (state != SegmentState::kReady || (!(live(id).flags.load() & kSegmentDirty) && !live(id).doubtful.load()))
      return;
    std::optional<Error> why;
    Segment* own = segment(id, &why);
    Status status = own == nullptr ? Status(*why) : own->flush();
    if (!status) {
      result = status;
      live(id).state.store(SegmentState::kUnreadable);  // stays dirty, and out of the checkpoint
    }
  });
  std::vector<Snapshot> saved;
  Status status = save_checkpoint(saved);
  if (!status) {
    notes_.push_back("no checkpoint: " + status.error().message);
    if (Status removed = folder_.remove_checkpoint(); !removed) result = removed;
  }
  for_each_segment([&](std::uint32_t id, SegmentState state) {
    if (state != SegmentState::kReady) return;
    LiveSegment& s = live(id);
    // A write that failed may have left bytes that fit no header: as after a crash, not as corruption of a whole
    // segment.
    const bool suspect = (s.flags.load() & kSegmentSuspect) != 0 || s.doubtful.load() != 0;
    const std::uint32_t flags = suspect ? std::uint32_t{kSegmentSuspect} : 0u;
    if (s.flags.load() == flags) return;
    Segment* own = segment(id);
    Status status = own == nullptr ? Status() : own->set_flags(flags);
    if (!status) result = status;
  });
  table_.remove_file();
  return result;
}

std::uint32_t Store::max_segments() const { return segments_of(folder_.superblock()); }

Segment* Store::segment(std::uint32_t id, std::optional<Error>* why, std::uint32_t* to_blame) {
  if (Segment* known = opened_[id].load(std::memory_order_acquire)) return known;
  const std::lock_guard lock(open_mutex_);
  if (Segment* known = opened_[id].load()) return known;
  // A file that is being created may be removed again, and this process would go on with what was removed.
  const SegmentState state = live(id).state.load();
  if (state == SegmentState::kNone || state == SegmentState::kCreating) {
    if (why != nullptr) *why = Error{Code::kBusy, segment_path(id) + ": is being created"};
    return nullptr;
  }
  Segment::Blame blame;
  auto opened = Segment::open(*device_, live(id), folder_, id, blame);
  if (!opened) {
    if (why != nullptr) *why = opened.error();
    if (to_blame != nullptr) {
      *to_blame = blame.path;
    } else if (why != nullptr) {
      path_result(blame.path, IoUse::kRead, opened.error());
      (*why)->os_error = 0;
    }
    return nullptr;
  }
  segments_.push_back(std::move(*opened));
  opened_[id].store(segments_.back().get(), std::memory_order_release);
  return segments_.back().get();
}

Segment* Store::adopt_segment(std::unique_ptr<Segment> segment) {
  const std::lock_guard lock(open_mutex_);
  segments_.push_back(std::move(segment));
  Segment* own = segments_.back().get();
  opened_[own->id()].store(own, std::memory_order_release);
  return own;
}

std::optional<NamespaceId> Store::find_namespace(const Fingerprint& fingerprint) const {
  const std::uint32_t end = table_.header().namespaces_end.load();
  for (NamespaceId id = 0; id < end; ++id) {
    if (table_.name_space(id).fingerprint == fingerprint) return id;
  }
  return std::nullopt;
}

Result<NamespaceId> Store::intern(const Fingerprint& fingerprint) {
  if (const auto known = find_namespace(fingerprint)) return *known;
  const std::uint32_t id = table_.header().namespaces_end.load();
  if (id == kMaxNamespaces) {
    return Error{Code::kNoSpace, folder_.path() + ": holds pages of " + std::to_string(id) +
                                     " namespaces, which is the most; delete old ones (tardis rm --namespace)"};
  }
  table_.name_space(id).fingerprint = fingerprint;
  table_.header().namespaces_end.store(id + 1);
  return id;
}

Result<NamespaceId> Store::open_namespace(const Fingerprint& fingerprint, const std::string& description,
                                          std::uint32_t parts, std::span<const std::uint64_t> region_bytes) {
  const Call call(*this);
  if (!call) return Call::closed();
  const bool sane = parts > 0 && parts <= (1u << 20) && !region_bytes.empty() && region_bytes.size() <= kMaxRegions &&
                    std::all_of(region_bytes.begin(), region_bytes.end(),
                                [](std::uint64_t bytes) { return bytes > 0 && bytes <= (std::uint64_t{1} << 32); });
  if (!sane) {
    return Error{Code::kInvalidArgument,
                 "object layout: expected 1 or more parts of 1 to 4 regions of 1 byte to 4 GiB, found " +
                     std::to_string(parts) + " parts of " + std::to_string(region_bytes.size()) + " regions"};
  }
  const ObjectGeometry geometry = ObjectGeometry::of(parts, static_cast<std::uint32_t>(region_bytes.size()),
                                                     region_bytes.data(), folder_.superblock().block_bytes);
  const SlotClass slot_class = geometry.slot_class();
  if (geometry.payload_bytes() > UINT32_MAX ||
      SegmentGeometry::of(folder_.superblock().segment_bytes, slot_class.slot_bytes, slot_class.digests_per_slot)
              .slots == 0) {
    return Error{Code::kInvalidArgument,
                 "page of " + human_bytes(geometry.payload_bytes()) + ": does not fit a segment of " +
                     human_bytes(folder_.superblock().segment_bytes) + " (store at " + folder_.path() +
                     "), or has 4 GiB or more; use a smaller --page-size, or a new store with a larger capacity or "
                     "segment_size"};
  }
  const std::lock_guard describe(describe_mutex_);
  if (Status status = folder_.lock_setup(); !status) return status.error();
  Status status = folder_.describe_namespace(fingerprint, description);
  Result<NamespaceId> id = status ? intern(fingerprint) : Result<NamespaceId>(status.error());
  folder_.unlock_setup();
  if (!id) return id;
  if (const ObjectGeometry* known = geometries_[*id].load()) {
    if (known->parts == geometry.parts && known->regions == geometry.regions &&
        known->region_bytes == geometry.region_bytes) {
      return id;
    }
    return Error{Code::kInvalidArgument, "namespace " + hex(fingerprint.data(), fingerprint.size()) +
                                             ": opened before with another object layout"};
  }
  geometry_memory_.push_back(geometry);
  geometries_[*id].store(&geometry_memory_.back());
  return id;
}

Result<const ObjectGeometry*> Store::geometry_of(NamespaceId space) const {
  const ObjectGeometry* geometry = space < kMaxNamespaces ? geometries_[space].load() : nullptr;
  if (geometry == nullptr) {
    return Error{Code::kInvalidArgument, "namespace handle " + std::to_string(space) + ": not opened"};
  }
  return geometry;
}

Result<std::size_t> Store::lookup(NamespaceId space, const Hash256* hashes, std::size_t n) {
  const Call call(*this);
  if (!call) return Call::closed();
  const std::size_t run = index_.run(space, hashes, n);
  counters_->lookups += 1;
  counters_->lookup_pages += n;
  counters_->lookup_hit_pages += run;
  return run;
}

Status Store::register_memory(void* base, std::uint64_t bytes) {
  const Call call(*this);
  if (!call) return Call::closed();
  return device_->register_memory(base, bytes);
}

void Store::unregister_memory(void* base) {
  const Call call(*this);
  if (call) device_->unregister_memory(base);
}

}  // namespace tardis
