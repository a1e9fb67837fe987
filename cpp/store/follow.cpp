// SPDX-License-Identifier: Apache-2.0
#include "store/follow.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/aligned_buffer.h"
#include "store/counters.h"
#include "store/digest.h"
#include "store/store.h"

namespace tardis {
namespace {

constexpr std::uint64_t kMostTogether = 256u << 10;  // bytes of one read of digests: several threads compare them
constexpr std::uint64_t kMostBetween = 16u << 10;    // that nobody asked for

}  // namespace

DigestSource Store::digests_of(GlobalSlot slot, std::uint64_t root) const {
  const SlotRef where = index_.where(slot);
  const LiveSegment& segment = live(where.segment);
  const SlotClass slot_class{segment.slot_bytes.load(), segment.digests_per_slot.load()};
  const SegmentGeometry geometry =
      SegmentGeometry::with(segment.slots.load(), slot_class.slot_bytes, slot_class.digests_per_slot);
  const std::uint64_t offset =
      geometry.digest_table_offset + std::uint64_t{where.slot} * slot_class.digests_per_slot * sizeof(std::uint64_t);
  return {segment_addresses().of(name_of(where.segment), offset), root};
}

std::optional<LiveObject> Store::live_object(GlobalSlot slot) const {
  const auto entry = index_.read(slot);
  if (!entry) return std::nullopt;
  const SlotRef where = index_.where(slot);
  const LiveSegment& segment = live(where.segment);
  const std::uint64_t offset = segment.payload_offset.load() + where.slot * segment.slot_bytes.load();
  LiveObject object{*entry, segment_addresses().of(name_of(where.segment), offset), digests_of(slot, entry->root)};
  // Only now: the segment may have been given another class, once this slot was free.
  const Stamp stamp = index_.stamp(slot);
  if (!stamp.live() || stamp.generation() != entry->stamp.generation()) return std::nullopt;
  return object;
}

Result<ObjectGeometry> Store::object_geometry(NamespaceId space) const {
  auto geometry = geometry_of(space);
  if (!geometry) return geometry.error();
  return **geometry;
}

Status Store::changes(SeenSlots& seen, const std::function<void(const SlotChange&)>& visit) {
  const Call call(*this);
  if (!call) return Call::closed();
  const std::uint32_t end = table_.header().segments_end.load();
  if (seen.generations_.size() < end) seen.generations_.resize(end);
  for (std::uint32_t id = 0; id < end; ++id) {
    std::vector<std::uint64_t>& known = seen.generations_[id];
    const bool ready = state_of(id) == SegmentState::kReady;
    const std::uint32_t slots = ready ? live(id).slots.load() : 0;
    if (known.size() < slots) known.resize(slots);
    const GlobalSlot first = index_.global({id, 0});
    for (std::uint32_t i = 0; i < known.size(); ++i) {
      const Stamp stamp = i < slots ? index_.stamp(first + i) : Stamp();
      const std::uint64_t generation = stamp.live() ? stamp.generation() : 0;
      if (generation == known[i]) continue;
      SlotChange change{first + i, known[i] != 0, std::nullopt};
      if (generation != 0) change.now = live_object(first + i);
      seen.objects_ -= change.gone;
      seen.objects_ += change.now.has_value();
      known[i] = change.now ? change.now->entry.stamp.generation() : 0;
      if (change.gone || change.now) visit(change);
    }
  }
  return {};
}

Status Store::read_digests(NamespaceId space, std::span<const DigestSource> objects, std::uint64_t* digests,
                           std::uint8_t* proven) {
  std::fill(proven, proven + objects.size(), std::uint8_t{0});
  const Call call(*this);
  if (!call) return Call::closed();
  auto found = geometry_of(space);
  if (!found) return found.error();
  const ObjectGeometry& geometry = **found;
  const std::uint64_t bytes = geometry.chunks() * sizeof(std::uint64_t);
  const std::uint64_t align = std::max<std::uint64_t>(512, read_geometry_.offset_align);

  std::vector<std::size_t> order(objects.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return objects[a].address < objects[b].address; });
  struct Run {
    std::size_t first, end;  // in `order`
    std::uint64_t begin, bytes;
  };
  std::vector<Run> runs;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::uint64_t begin = objects[order[i]].address / align * align;
    const std::uint64_t end = round_up(objects[order[i]].address + bytes, align);
    if (!runs.empty() && begin <= runs.back().begin + runs.back().bytes + kMostBetween &&
        end - runs.back().begin <= kMostTogether) {
      Run& run = runs.back();
      run.end = i + 1;
      run.bytes = std::max(run.bytes, end - run.begin);
      continue;
    }
    runs.push_back({i, i + 1, begin, end - begin});
  }
  std::vector<AlignedBuffer> memory;
  std::vector<iovec> pieces;
  std::vector<AddressRead> reads;
  memory.reserve(runs.size());
  pieces.reserve(runs.size());
  for (const Run& run : runs) {
    memory.emplace_back(run.bytes);
    pieces.push_back({memory.back().data(), run.bytes});
    reads.push_back({run.begin, {&pieces.back(), 1}, 0});
  }
  read_addresses(reads, [&](AddressRead& read) {
    if (read.error != 0) return;
    const auto r = static_cast<std::size_t>(&read - reads.data());
    for (std::size_t i = runs[r].first; i < runs[r].end; ++i) {
      const DigestSource& object = objects[order[i]];
      std::uint64_t* const to = digests + order[i] * geometry.chunks();
      std::memcpy(to, memory[r].data() + (object.address - runs[r].begin), bytes);
      proven[order[i]] = digest_root(geometry, to) == object.root;
    }
  });
  return {};
}

Result<bool> Store::check_digests(NamespaceId space, const Hash256& hash) {
  auto lease = acquire(space, &hash, 1);
  if (!lease) return lease.error();
  if (lease->size() == 0) return false;
  const std::uint64_t bytes = lease->geometry().chunks() * sizeof(std::uint64_t);
  const std::uint64_t align = std::max<std::uint64_t>(512, read_geometry_.offset_align);
  const std::uint64_t address = lease->digest_address(0), begin = address / align * align;
  AlignedBuffer memory(round_up(address + bytes, align) - begin);
  const iovec piece{memory.data(), memory.size()};
  AddressRead read{begin, {&piece, 1}, 0};
  read_addresses({&read, 1}, [](AddressRead&) {});
  std::vector<std::uint64_t> digests(lease->geometry().chunks());
  std::memcpy(digests.data(), memory.data() + (address - begin), bytes);
  const bool proven = read.error == 0 && digest_root(lease->geometry(), digests.data()) == lease->root_digest(0);
  if (proven || (read.error != 0 && !bytes_are_lost(read.error))) return false;
  const auto entry = index_.find(space, hash);
  if (!entry || entry->stamp.generation() != lease->generation(0)) return false;
  if (entry->stamp.suspect()) {
    counters_->get_pages_torn += 1;  // a write that the last crash cut short
    index_.unpublish(*entry);
    return true;
  }
  if (!index_.quarantine(*entry, /*recorded=*/read.error == 0)) return false;
  if (read.error != 0) return true;
  counters_->get_pages_corrupt += 1;
  const std::lock_guard lock(mutex_);
  quarantines_.push_back({entry->slot, entry->stamp.generation()});
  flusher_wake_.notify_all();
  return true;
}

}  // namespace tardis
