// SPDX-License-Identifier: Apache-2.0
#include "store/store.h"

#include <sys/random.h>
#include <sys/resource.h>

#include <algorithm>
#include <ctime>
#include <numeric>

#include "base/json.h"
#include "block/path_report_json.h"
#include "store/counters.h"

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

Status make_superblock(StoreFolder& folder, const StoreOptions& options, const PathReport& path) {
  auto files = folder.segment_files();
  if (!files) return files.error();
  if (!files->empty()) {
    return Error{Code::kCorrupt, folder.path() + ": has " + std::to_string(files->size()) +
                                     " segment files but no tardis.store; restore that file, or empty the folder"};
  }
  auto free = folder.free_bytes();
  if (!free) return free.error();
  StoreSuperblock s{};
  s.capacity_bytes = options.capacity_bytes != 0 ? options.capacity_bytes : std::min(100 * kGiB, *free / 2);
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
  if (*free < first_segment || *free - first_segment < options.free_space_floor) {
    return Error{Code::kNoSpace, folder.path() + ": " + human_bytes(*free) + " free; a first segment of " +
                                     human_bytes(s.segment_bytes) + " and free_space_floor " +
                                     human_bytes(options.free_space_floor) +
                                     " do not fit; free space, lower free_space_floor or choose another path"};
  }
  s.block_bytes = std::clamp<std::uint32_t>(std::max(path.logical_block, path.offset_align), 512, kTableBlockBytes);
  s.created_unix_seconds = static_cast<std::uint64_t>(std::time(nullptr));
  if (::getrandom(s.uuid.data(), s.uuid.size(), 0) != static_cast<ssize_t>(s.uuid.size())) {
    return errno_error(errno, "getrandom");
  }
  return folder.write_superblock(s);
}

Status match_settings(StoreFolder& folder, const StoreOptions& options, const PathReport& path) {
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
    if (options.capacity_bytes < s.segment_bytes + kMetadataBytes) {
      return Error{Code::kInvalidArgument, "capacity: expected at least one segment (" +
                                               human_bytes(s.segment_bytes + kMetadataBytes) + "), found " +
                                               human_bytes(options.capacity_bytes)};
    }
    s.capacity_bytes = options.capacity_bytes;
    return folder.write_superblock(s);
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Store>> Store::open(const std::string& path, const StoreOptions& options, bool create,
                                           const DeviceFactory& make_device) {
  StoreFolder folder(path);
  if (!folder.has_superblock()) {
    if (!create) return Error{Code::kNotFound, path + ": no tardis store here"};
    if (Status status = folder.create_folders(); !status) return status.error();
  }
  if (Status status = folder.lock(); !status) return status.error();
  // Only now: another process may just have made it.
  const bool fresh = !folder.has_superblock();
  if (!fresh) {
    if (Status status = folder.read_superblock(); !status) return status.error();
    if (Status status = folder.create_folders(); !status) return status.error();
  }
  auto device = make_device(path, options.device, folder.lock_fd());
  if (!device) return device.error();
  const PathReport& report = (*device)->report();
  if (Status status = fresh ? make_superblock(folder, options, report) : match_settings(folder, options, report);
      !status) {
    return status.error();
  }
  auto store = std::make_unique<Store>(Passkey(), std::move(folder), options, std::move(*device));
  allow_open_files(store->max_segments() + std::uint64_t{kFilesBesideSegments});
  if (Status status = store->recover(); !status) return status.error();
  store->flusher_ = std::thread([raw = store.get()] { raw->flusher_main(); });
  return store;
}

Store::Store(Passkey, StoreFolder folder, const StoreOptions& options, std::unique_ptr<BlockDevice> device)
    : folder_(std::move(folder)),
      options_(options),
      device_(std::move(device)),
      path_report_(device_->report()),
      // One reuse is worth as many touches as a quarter of the store holds objects.
      index_(std::max<std::uint64_t>(
          64, folder_.superblock().capacity_bytes / std::max<std::uint64_t>(options.object_bytes_hint, 64 * 1024) / 4)),
      counters_(std::make_unique<Counters>()) {}

Store::~Store() {
  if (flusher_.joinable()) (void)close();
}

Status Store::close() {
  const std::lock_guard closing(close_mutex_);  // who comes second returns when the store is really released
  {
    std::unique_lock lock(calls_mutex_);
    if (closed_) return {};
    closed_ = true;
    calls_done_.wait(lock, [&] { return calls_ == 0; });
  }
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    flusher_wake_.notify_all();
  }
  flusher_.join();  // it ends the open group first
  Status result;
  for (const auto& [id, segment] : segments_) {
    const std::lock_guard io(segment->io_mutex());
    if (!segment->dirty() && !segment->doubtful) continue;
    Status status = segment->flush();
    // A write that failed may have left bytes that fit no header: as after a crash, not as corruption of a whole
    // segment.
    const bool suspect = segment->suspect() || segment->doubtful;
    if (status) status = segment->set_flags(suspect ? std::uint32_t{kSegmentSuspect} : 0u);
    if (!status) result = status;
  }
  if (flush_failures_ > flush_failures_told_) result = *flush_error_;
  segments_.clear();
  retired_.clear();  // these too hold files of the device
  device_.reset();
  folder_.unlock();
  return result;
}

std::uint32_t Store::max_segments() const {
  const StoreSuperblock& s = folder_.superblock();
  return static_cast<std::uint32_t>(
      std::min<std::uint64_t>((s.capacity_bytes - kMetadataBytes) / s.segment_bytes, UINT32_MAX));
}

NamespaceId Store::intern(const Fingerprint& fingerprint) {
  const auto it = std::find_if(namespaces_.begin(), namespaces_.end(),
                               [&](const Namespace& known) { return known.fingerprint == fingerprint; });
  if (it != namespaces_.end()) return static_cast<NamespaceId>(it - namespaces_.begin());
  namespaces_.push_back({fingerprint, std::nullopt});
  return static_cast<NamespaceId>(namespaces_.size() - 1);
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
  if (SegmentGeometry::of(folder_.superblock().segment_bytes, slot_class.slot_bytes, slot_class.digests_per_slot)
          .slots == 0) {
    return Error{Code::kInvalidArgument,
                 "page of " + human_bytes(geometry.payload_bytes()) + ": does not fit a segment of " +
                     human_bytes(folder_.superblock().segment_bytes) + " (store at " + folder_.path() +
                     "); use a smaller --page-size, or a new store with a larger capacity or segment_size"};
  }
  {
    const std::lock_guard describe(describe_mutex_);
    if (Status status = folder_.describe_namespace(fingerprint, description); !status) return status.error();
  }
  const std::lock_guard lock(mutex_);
  const NamespaceId id = intern(fingerprint);
  Namespace& space = namespaces_[id];
  if (space.geometry && (space.geometry->parts != geometry.parts || space.geometry->regions != geometry.regions ||
                         space.geometry->region_bytes != geometry.region_bytes)) {
    return Error{Code::kInvalidArgument, "namespace " + hex(fingerprint.data(), fingerprint.size()) +
                                             ": opened before with another object layout"};
  }
  space.geometry = geometry;
  return id;
}

Result<ObjectGeometry> Store::geometry_of(NamespaceId space) {
  const std::lock_guard lock(mutex_);
  if (space >= namespaces_.size() || !namespaces_[space].geometry) {
    return Error{Code::kInvalidArgument, "namespace handle " + std::to_string(space) + ": not opened"};
  }
  return *namespaces_[space].geometry;
}

Result<std::size_t> Store::lookup(NamespaceId space, const Hash256* hashes, std::size_t n) {
  const Call call(*this);
  if (!call) return Call::closed();
  std::size_t run = 0;
  {
    const std::lock_guard lock(mutex_);
    while (run < n && index_.find({space, hashes[run]}) != nullptr) ++run;
  }
  counters_->lookups += 1;
  counters_->lookup_pages += n;
  counters_->lookup_hit_pages += run;
  return run;
}

Result<std::uint64_t> Store::clear(const std::optional<Fingerprint>& only) {
  const Call call(*this);
  if (!call) return Call::closed();
  std::unique_lock turn(clear_turn_);
  const std::unique_lock gate(clear_gate_);  // a page being stored must not appear after the headers were invalidated
  turn.unlock();
  std::uint64_t pages = 0;
  std::vector<Segment*> segments;
  {
    const std::lock_guard lock(mutex_);
    std::vector<IndexEntry*> doomed;
    index_.for_each([&](IndexEntry& entry) {
      if (!only || namespaces_[entry.key.space].fingerprint == *only) doomed.push_back(&entry);
    });
    pages = doomed.size();
    for (IndexEntry* entry : doomed) unpublish(*entry);
    for (const auto& [id, segment] : segments_) segments.push_back(segment.get());
  }
  // Evicted objects left headers that a rebuild would believe, so every header counts, not only published ones. A
  // segment that fails does not keep the others from being emptied.
  Status result;
  for (Segment* segment : segments) {
    const std::lock_guard io(segment->io_mutex());
    auto table = segment->table();
    if (!table) {
      result = table.error();
      continue;
    }
    std::set<std::uint64_t> blocks;
    std::vector<std::uint32_t> released;
    for (std::uint32_t slot = 0; slot < segment->geometry().slots; ++slot) {
      SlotHeader& header = (*table)->header(slot);
      if (all_zero(&header, sizeof header)) continue;
      if (only && (!sealed(header) || header.fingerprint != *only)) continue;
      header = {};
      (*table)->blocks_of(slot, blocks);
      released.push_back(slot);
    }
    if (blocks.empty()) continue;
    const Status written = segment->write_table(blocks);
    const Status flushed = segment->flush();
    const std::lock_guard lock(mutex_);
    if (!flushed) flush_failed(*segment, flushed.error());
    if (!written || !flushed) {
      result = written ? flushed : written;
      segment->doubtful = true;
      continue;
    }
    for (const std::uint32_t slot : released) {
      Segment::Slot& s = segment->slots[slot];
      if (s.state == SlotState::kQuarantined) release_slot({segment->id(), slot});
    }
  }
  limit_cached_tables();
  counters_->cleared_pages += pages;
  if (!result) return result.error();
  const std::lock_guard lock(mutex_);
  if (!unreadable_.empty()) {
    return Error{Code::kCorrupt, std::to_string(pages) + " pages deleted, but what is in " +
                                     folder_.segment_path(unreadable_.begin()->first) +
                                     " cannot be known: " + unreadable_.begin()->second +
                                     "; delete that file by hand while the store is closed"};
  }
  return pages;
}

void Store::stats(tardis_stats& out) {
  out = {};
  const Counters& c = *counters_;
#define TARDIS_COPY(field) out.field = c.field.load(std::memory_order_relaxed);
  TARDIS_STATS_SUMS(TARDIS_COPY)
#undef TARDIS_COPY
  const Call call(*this);
  if (!call) return;
  const BlockDeviceCounters io = device_->counters();
  out.io_reads = io.reads;
  out.io_writes = io.writes;
  out.io_read_bytes = io.read_bytes;
  out.io_written_bytes = io.written_bytes;
  out.io_errors = io.errors;
  out.io_peak_in_flight = io.peak_in_flight;
  out.bounced_requests = io.bounced_requests;
  out.bounced_bytes = io.bounced_bytes;
  const StoreSuperblock& s = folder_.superblock();
  out.capacity_bytes = s.capacity_bytes;
  const std::lock_guard lock(mutex_);
  out.segments = segments_.size();
  out.segments_unreadable = unreadable_.size();
  out.allocated_bytes = (segments_.size() + unreadable_.size()) * s.segment_bytes;
  out.durable_group = durable_group_;
  const auto count = [&](SlotState state) { return slot_counts_[static_cast<std::size_t>(state)]; };
  out.slots_total = std::accumulate(slot_counts_.begin(), slot_counts_.end(), std::uint64_t{0});
  out.slots_free = count(SlotState::kFree);
  out.slots_live = count(SlotState::kLive);
  out.slots_writing = count(SlotState::kWriting) + count(SlotState::kDying);
  out.slots_quarantined = count(SlotState::kQuarantined);
  out.payload_bytes = payload_bytes_;
}

std::string Store::path_report_json() const {
  JsonWriter json;
  json.begin_object();
  json.field("path", folder_.path());
  write_fields(json, path_report_);
  json.field("capacity_bytes", folder_.superblock().capacity_bytes);
  json.field("segment_bytes", folder_.superblock().segment_bytes);
  json.field("verify_reads", options_.verify_reads);
  json.begin_array("notes");
  for (const std::string& note : notes_) json.value(note);
  json.end_array();
  json.end_object();
  return json.text();
}

}  // namespace tardis
