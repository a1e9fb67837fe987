// SPDX-License-Identifier: Apache-2.0
// Rebuilds the index: from the checkpoint for the segments that have not been written since, from header tables for the
// others. Runs under the setup lock, when no other process uses the store.
#include <algorithm>
#include <map>
#include <set>
#include <thread>

#include "store/counters.h"
#include "store/digest.h"
#include "store/files.h"
#include "store/scan.h"
#include "store/store.h"

namespace tardis {
namespace {

constexpr unsigned kMostLoaders = 8;

Status erase_headers(Segment& segment, const std::vector<std::uint32_t>& slots) {
  if (slots.empty()) return {};
  auto table = segment.table();
  if (!table) return table.error();
  std::set<std::uint64_t> blocks;
  for (const std::uint32_t slot : slots) {
    (*table)->header(slot) = {};
    (*table)->blocks_of(slot, blocks);
  }
  const Status status = segment.write_table(blocks);
  segment.drop_table();
  return status;
}

}  // namespace

struct Store::Found {
  Claim claim;
  GlobalSlot slot;
  bool dirty;     // its segment was being written when the store was last in use
  bool away;      // without which the store went on since: the numbers of later groups prove nothing of it
  bool suspect;   // or survived a crash earlier
  bool rejected;  // not believed: its payload or its digest table entry is of another object
};

Status Store::recover() {
  const Checkpoint checkpoint = Checkpoint::load(folder_.checkpoint_path(), folder_.superblock().uuid);
  if (const CheckpointHeader* h = checkpoint.header()) {
    table_.header().next_generation.store(std::max<std::uint64_t>(1, h->next_generation));
    table_.header().next_group.store(std::max<std::uint64_t>(1, h->next_group));
    table_.header().clock.store(h->clock);
  }
  std::vector<Found> found;
  if (Status status = load_segments(checkpoint, found); !status) return status;
  verify_unproven(found, checkpoint.header() == nullptr ? 0 : checkpoint.header()->durable_group);
  publish_newest(found);
  if (Status status = settle_segments(found); !status) return status;
  for (std::uint32_t path = 0; path < kMaxPaths; ++path) {
    if (!path_in_use(path)) forget_path(path);  // it may have been taken out after some of it was loaded
  }
  return folder_.paths().welcome_back([this](std::uint32_t path) { return path_in_use(path); });
}

// The segment files on all paths. A further path that cannot even be listed is out.
Result<std::map<SegmentName, std::string>> Store::find_segments() {
  std::map<SegmentName, std::string> all;
  for (std::uint32_t path = 0; path < kMaxPaths; ++path) {
    if (!path_in_use(path)) continue;
    // What a process that died had created or renamed may not be durable: nothing durable may come to depend on it.
    const Status synced = folder_.sync_segments_folder(path);
    auto files = synced ? folder_.segment_files(path) : synced.error();
    if (files) {
      table_.header().paths[path].next_number.store(number_for_next_segment(*files));
      all.merge(*files);
    } else if (path == 0) {
      return files.error();
    } else {
      notes_.push_back("path " + folder_.paths()[path].folder + ": left out: " + files.error().message);
      take_out(path, files.error().message);
    }
  }
  return all;
}

// What can be said of a segment before its tables are read. An error leaves it alone, unless it was removed: then the
// code is kNotFound.
Result<std::unique_ptr<Segment>> Store::load_segment(std::uint32_t id, SegmentName name, SegmentImage& image) {
  live(id).path.store(name.path);
  live(id).number.store(name.number);
  live(id).all_paths.store(1u << name.path);
  if (!path_in_use(name.path)) {
    return Error{Code::kIo, folder_.segment_path(name) + ": its path is away; its stripes on other paths are kept"};
  }
  Segment::Blame blame;
  auto loaded = Segment::load(*device_, live(id), folder_, id, image, blame);
  if (loaded) return loaded;
  Error error = loaded.error();
  // Stripes that were wiped, or whose path was forgotten, do not come back: what is left is of no use. But a path that
  // is away may have them still.
  if (blame.lost && (path_in_use(blame.path) || folder_.paths()[blame.path].flags == 0)) {
    notes_.push_back("segment removed, since a part of it is gone: " + error.message);
    error.code = Code::kNotFound;
  }
  if (error.code == Code::kNotFound) {
    const Status removed = folder_.remove_segment(name);
    if (removed) return error;
    error = {Code::kIo, removed.error().message, removed.error().os_error};
  }
  path_result(blame.path, IoUse::kRead, error);
  return error;
}

Status Store::load_segments(const Checkpoint& checkpoint, std::vector<Found>& found) {
  if (Status status = sync_folder(folder_.path()); !status) return status;
  auto files = find_segments();
  if (!files) return files.error();
  reserve_for_absent(*files);
  while (files->size() > max_segments()) {
    const auto last = std::prev(files->end());
    notes_.push_back("capacity is smaller than before: removed " + last->second);
    if (Status status = folder_.remove_segment(last->first); !status) return status;
    files->erase(last);
  }
  const StoreSuperblock& superblock = folder_.superblock();
  std::vector<Segment*> known, unknown;  // to the checkpoint
  std::vector<SegmentImage> images(files->size());
  std::map<SegmentName, std::uint32_t> whole;
  std::map<SegmentName, std::string> unreadable;
  std::uint32_t id = 0;
  for (const auto& [name, path] : *files) {
    if (Status status = table_.reserve_segment(id); !status) return status;
    SegmentImage& image = images[id];
    auto loaded = load_segment(id, name, image);
    if (!loaded && loaded.error().code == Code::kNotFound) continue;
    table_.header().segments_end.store(id + 1);
    if (!loaded) {
      live(id++).state.store(SegmentState::kUnreadable);
      notes_.push_back("segment left alone: " + loaded.error().message);
      unreadable[name] = path;
      continue;
    }
    whole[name] = live(id).all_paths.load();
    for (std::uint32_t one = 0; one < kMaxPaths; ++one) {
      if ((whole[name] >> one & 1) != 0) path_result(one, IoUse::kRead, Status());
    }
    if (Status status = table_.reserve_records(id, image.superblock.slots); !status) return status;
    live(id).counts[static_cast<std::size_t>(SlotState::kFree)].store(image.superblock.slots);
    live(id).state.store(SegmentState::kReady);
    Segment* segment = adopt_segment(std::move(*loaded));
    if (image.truncated()) {
      notes_.push_back(path + ": " + std::to_string(image.file_bytes) + " bytes instead of " +
                       std::to_string(superblock.segment_bytes) + "; pages beyond its end are lost");
    }
    const bool covered = !image.dirty() && !image.truncated() &&
                         checkpoint.covers(name, image.superblock.epoch, image.superblock.write_sequence);
    (covered ? known : unknown).push_back(segment);
    ++id;
  }
  if (Status status = remove_stray_stripes(whole, unreadable); !status) {
    notes_.push_back("stripes of no segment were not removed: " + status.error().message);
  }
  for (Segment* segment : load_checkpoint(checkpoint, known)) unknown.push_back(segment);
  counters_->recovered_scanned += unknown.size();
  for (Segment* segment : unknown) {
    if (Status status = scan_segment(*segment, images[segment->id()], found); !status) {
      live(segment->id()).state.store(SegmentState::kUnreadable);
      notes_.push_back("segment left alone: " + status.error().message);
    }
  }
  return {};
}

// Returns the segments of which it says nothing that could be believed.
std::vector<Segment*> Store::load_checkpoint(const Checkpoint& checkpoint, const std::vector<Segment*>& segments) {
  std::vector<NamespaceId> spaces;
  for (const Fingerprint& fingerprint : checkpoint.namespaces()) {
    auto id = intern(fingerprint);
    if (!id) return segments;
    spaces.push_back(*id);
  }
  std::vector<Segment*> refused;
  std::mutex refused_mutex;
  std::atomic<std::size_t> next{0};
  const auto load = [&] {
    std::vector<CheckpointEntry> entries;
    for (std::size_t i = next.fetch_add(1); i < segments.size(); i = next.fetch_add(1)) {
      const std::uint32_t id = segments[i]->id();
      const bool fits = checkpoint.read(name_of(id), entries) &&
                        std::all_of(entries.begin(), entries.end(), [&](const CheckpointEntry& entry) {
                          return entry.slot < live(id).slots.load() && entry.space < spaces.size();
                        });
      if (fits) {
        index_.restore(id, entries, spaces);
      } else {
        const std::lock_guard lock(refused_mutex);
        refused.push_back(segments[i]);
      }
    }
  };
  std::vector<std::thread> threads;
  const unsigned count = std::clamp(std::thread::hardware_concurrency(), 1u, kMostLoaders);
  for (unsigned t = 1; t < count && t < segments.size(); ++t) threads.emplace_back(load);
  load();
  for (std::thread& thread : threads) thread.join();
  index_.for_each([&](const IndexEntry&) { counters_->recovered_pages += 1; });
  return refused;
}

Status Store::scan_segment(Segment& segment, const SegmentImage& image, std::vector<Found>& found) {
  auto table = segment.table();
  if (!table) return table.error();
  // In a dirty or truncated segment a broken header is what a crash leaves: an ordinary free slot.
  const bool whole = !image.dirty() && !image.suspect() && !image.truncated();
  const SegmentFacts facts{segment.number(), image.superblock.epoch, image.geometry(), image.file_bytes,
                           folder_.superblock().block_bytes};
  bool away = false;
  for (std::uint32_t path = 0; path < kMaxPaths; ++path) {
    const bool own = (segment.live().all_paths.load() >> path & 1) != 0;
    away = away || (own && (folder_.paths()[path].flags & kPathAway) != 0);
  }
  for (std::uint32_t slot = 0; slot < facts.geometry.slots; ++slot) {
    const SlotHeader& header = (*table)->header(slot);
    const GlobalSlot global = index_.global({segment.id(), slot});
    const Belief belief = judge(header, slot, facts);
    if (belief == Belief::kBad) counters_->recovered_rejected += 1;
    if (belief == Belief::kQuarantined || (belief == Belief::kBad && whole)) {
      index_.change(global, Stamp(), Stamp(SlotState::kQuarantined, 0));
    }
    if (belief != Belief::kObject) continue;
    const bool torn =
        image.dirty() && digest_root(ObjectGeometry::of(header), (*table)->digests(slot)) != header.root_digest;
    found.push_back({{segment.file(), facts.geometry.slot_offset(slot), header},
                     global,
                     image.dirty(),
                     away,
                     image.dirty() || image.suspect(),
                     torn});
  }
  segment.drop_table();
  return {};
}

// Pages of groups that no header proves durable are believed only after their payload was read.
void Store::verify_unproven(std::vector<Found>& found, std::uint64_t durable) {
  for (const Found& one : found) {
    if (!one.away) durable = std::max(durable, one.claim.header.last_durable_group);
  }
  std::vector<tardis::Claim> claims;
  std::vector<Found*> claimed;
  for (Found& one : found) {
    if (one.rejected || !one.dirty || (!one.away && one.claim.header.flush_group <= durable)) continue;
    claims.push_back(one.claim);
    claimed.push_back(&one);
  }
  verify_claims(*device_, claims, {});
  std::set<std::uint32_t> unread;  // segments
  for (std::size_t k = 0; k < claims.size(); ++k) {
    claimed[k]->claim.verified = claims[k].verified;
    claimed[k]->rejected = !claims[k].verified;
    if (claims[k].verified) counters_->recovered_verified += 1;
    const int error = claims[k].error;
    if (error == 0 || bytes_are_lost(error)) continue;
    const std::uint32_t id = index_.where(claimed[k]->slot).segment;
    if (unread.insert(id).second) {
      notes_.push_back("segment left alone: " + errno_error(error, segment_path(id) + ": reading a page").message);
    }
  }
  leave_alone(unread, found);
}

// Until the store is opened again: what could not be read may be what was flushed last.
void Store::leave_alone(const std::set<std::uint32_t>& segments, std::vector<Found>& found) {
  for (const std::uint32_t id : segments) live(id).state.store(SegmentState::kUnreadable);
  std::erase_if(found, [&](const Found& one) { return segments.contains(index_.where(one.slot).segment); });
}

// The newest generation of a key wins; insertion goes from old to new, which is also the order of recency.
void Store::publish_newest(std::vector<Found>& found) {
  std::atomic<std::uint64_t>& next_generation = table_.header().next_generation;
  std::vector<const Found*> order;
  for (const Found& one : found) {
    next_generation.store(std::max(next_generation.load(), one.claim.header.generation + 1));
    if (one.rejected) {
      counters_->recovered_rejected += 1;
    } else {
      order.push_back(&one);
    }
  }
  const auto generation = [](const Found* one) { return one->claim.header.generation; };
  std::sort(order.begin(), order.end(), [&](auto* a, auto* b) { return generation(a) < generation(b); });
  for (const Found* one : order) {
    const SlotHeader& header = one->claim.header;
    const auto space = intern(header.fingerprint);
    if (!space) continue;
    if (const auto present = index_.find(*space, header.key)) {
      if (present->stamp.generation() >= header.generation) continue;
      index_.unpublish(*present);
      counters_->recovered_pages -= 1;
    }
    const Stamp writing(SlotState::kWriting, header.generation);
    index_.change(one->slot, index_.stamp(one->slot), writing);
    const auto published = index_.publish({.slot = one->slot,
                                           .stamp = writing,
                                           .key = header.key,
                                           .space = *space,
                                           .payload_bytes = static_cast<std::uint32_t>(header.payload_bytes),
                                           .root = header.root_digest,
                                           .parent = header.parent},
                                          one->suspect && !one->claim.verified, index_.tick(1));
    if (published == Index::Published::kYes) counters_->recovered_pages += 1;
  }
  // A checkpoint that told of every segment also told how many extensions each object has.
  if (counters_->recovered_scanned > 0) index_.count_children();
}

// What is in it counts from now on, and later headers may vouch for it. `rejected`: slots whose headers were not
// believed.
Status Store::settle_segment(Segment& segment, const std::vector<std::uint32_t>& rejected) {
  const std::lock_guard io(segment.io_mutex());
  auto length = segment.available_bytes();
  if (!length) return length.error();
  if (*length < folder_.superblock().segment_bytes) {
    if (Status status = segment.restore_length(); !status) return status;
    if (Status status = segment.rewrite_superblock(); !status) return status;
  }
  if (!segment.dirty()) return {};
  notes_.push_back(segment.path() + ": was not closed; recovered");
  // Headers that were not believed go: later groups will be durable, and would vouch for these by their number.
  if (Status status = erase_headers(segment, rejected); !status) return status;
  // What was just read may still be in the operating system's cache only.
  if (Status status = segment.flush(); !status) return status;
  segment.live().flags.store(kSegmentDirty | kSegmentSuspect);
  return segment.rewrite_superblock();
}

Status Store::settle_segments(const std::vector<Found>& found) {
  std::map<std::uint32_t, std::vector<std::uint32_t>> rejected;  // slots by segment
  std::uint64_t last_group = table_.header().next_group.load() - 1;
  for (const Found& one : found) {
    last_group = std::max(last_group, one.claim.header.flush_group);
    const SlotRef where = index_.where(one.slot);
    if (one.rejected) rejected[where.segment].push_back(where.slot);
  }
  Status result;
  for_each_segment([&](std::uint32_t id, SegmentState state) {
    Segment* segment = state == SegmentState::kReady ? opened_[id].load() : nullptr;
    if (segment == nullptr || !result) return;
    Status settled = settle_segment(*segment, rejected[id]);
    if (settled) return;
    if (live(id).all_paths.load() == 1) {  // the store's own folder alone
      result = settled;
      return;
    }
    path_result(live(id).path.load(), IoUse::kWrite, settled);
    notes_.push_back("segment left alone: " + settled.error().message);
    index_.for_each_in(id, [&](const IndexEntry& entry) { index_.unpublish(entry); });
    live(id).state.store(SegmentState::kUnreadable);
  });
  table_.header().next_group.store(last_group + 1);
  return result;
}

}  // namespace tardis
