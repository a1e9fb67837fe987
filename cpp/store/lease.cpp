// SPDX-License-Identifier: Apache-2.0
// Takes leases and reads by address. As in reader.cpp no lock is held: the lease keeps the slot, and the stamp is
// looked at once more after it was taken.
#include "store/lease.h"

#include <algorithm>
#include <atomic>
#include <deque>

#include "block/iovec_range.h"
#include "store/counters.h"
#include "store/store.h"

namespace tardis {

class Lease::Held {
 public:
  struct Object {
    GlobalSlot slot;
    std::uint32_t pin;
    std::uint64_t address, root, generation, digests;
  };
  Held(Store& store, const ObjectGeometry& of) : call(store), geometry(of), index(store.index_) {}
  ~Held() {
    for (const Object& object : objects) index.end_lease(object.pin, object.slot);
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  const Store::Call call;  // the store is not closed before its end
  const ObjectGeometry geometry;
  Index& index;
  std::vector<Object> objects;
};

Lease::Lease() noexcept = default;
Lease::Lease(std::unique_ptr<Held> held) : held_(std::move(held)) {}
Lease::Lease(Lease&&) noexcept = default;
Lease& Lease::operator=(Lease&&) noexcept = default;
Lease::~Lease() = default;

std::size_t Lease::size() const { return held_ == nullptr ? 0 : held_->objects.size(); }
const ObjectGeometry& Lease::geometry() const { return held_->geometry; }
std::uint64_t Lease::root_digest(std::size_t object) const { return held_->objects[object].root; }
std::uint64_t Lease::generation(std::size_t object) const { return held_->objects[object].generation; }
std::uint64_t Lease::digest_address(std::size_t object) const { return held_->objects[object].digests; }

std::vector<Extent> Lease::extents(std::size_t object, std::uint64_t first, std::uint64_t bytes) const {
  if (object >= size()) return {};
  const std::uint64_t end = held_->geometry.stored_bytes();
  if (bytes == 0 || first > end || bytes > end - first) return {};
  return {{held_->objects[object].address + first, bytes}};
}

Result<Lease> Store::acquire(NamespaceId space, const Hash256* hashes, std::size_t n) {
  auto geometry = geometry_of(space);
  if (!geometry) return geometry.error();
  auto held = std::make_unique<Lease::Held>(*this, **geometry);
  if (!held->call) return Call::closed();
  const SegmentAddresses addresses = segment_addresses();
  std::optional<Error> failure;
  for (std::size_t i = 0; i < n; ++i) {
    const auto entry = index_.find(space, hashes[i]);
    if (!entry || entry->payload_bytes != (*geometry)->payload_bytes()) break;
    const std::uint32_t pin = index_.lease(entry->slot);
    if (pin == PinTable::kNone) {
      failure = Error{Code::kBusy, "leases: this process has " + std::to_string(kLeasesPerProcess) +
                                       " objects in use, which is the most; release some first"};
      break;
    }
    const SlotRef where = index_.where(entry->slot);
    Segment* owner = segment(where.segment, &failure);
    const std::uint64_t offset = owner == nullptr ? 0 : owner->slot_offset(where.slot);
    const SegmentName name = name_of(where.segment);
    // Only now: whoever took the slot since the first look may not have seen the lease.
    const Stamp now = index_.stamp(entry->slot);
    if (owner == nullptr || !now.live() || now.generation() != entry->stamp.generation()) {
      index_.end_lease(pin, entry->slot);
      break;
    }
    held->objects.push_back({entry->slot, pin, addresses.of(name, offset), entry->root, entry->stamp.generation(),
                             digests_of(entry->slot, entry->root).address});
  }
  if (held->objects.empty() && failure) return *failure;
  const std::uint64_t used = index_.tick(held->objects.size());
  for (std::size_t i = 0; i < held->objects.size(); ++i) {
    if (const auto entry = index_.read(held->objects[i].slot)) index_.touch(*entry, used + i, /*reuse=*/true);
  }
  return Lease(std::move(held));
}

SegmentAddresses Store::segment_addresses() const { return {folder_.superblock().segment_bytes}; }

Segment* Store::segment_named(SegmentName name) {
  const auto usable = [&](std::uint32_t id) {
    if (name_of(id) != name || path_out(id) < kMaxPaths) return false;
    const SegmentState state = live(id).state.load();
    return state == SegmentState::kReady || state == SegmentState::kDraining || state == SegmentState::kReclassing;
  };
  const std::uint32_t end = table_.header().segments_end.load();
  {
    const std::shared_lock lock(names_mutex_);
    const auto known = ids_by_name_.find(name.word());
    if (known != ids_by_name_.end() && known->second < end && usable(known->second)) return segment(known->second);
  }
  for (std::uint32_t id = 0; id < end; ++id) {
    if (!usable(id)) continue;
    {
      const std::unique_lock lock(names_mutex_);
      ids_by_name_[name.word()] = id;
    }
    return segment(id);
  }
  return nullptr;
}

namespace {

struct Pending {
  AddressRead* read = nullptr;
  std::atomic<std::uint32_t> left{0};
  std::atomic<int> error{0};
};
struct Piece {
  IoRequest request;
  Pending* whole;
  Segment* owner;
  std::vector<iovec> memory;
};

}  // namespace

void Store::read_addresses(std::span<AddressRead> reads, const std::function<void(AddressRead&)>& on_complete) {
  const Call call(*this);
  const SegmentAddresses addresses = segment_addresses();
  std::vector<Pending> pending(reads.size());
  std::deque<Piece> pieces;
  for (std::size_t i = 0; i < reads.size(); ++i) {
    AddressRead& read = reads[i];
    read.error = call ? 0 : ESHUTDOWN;
    pending[i].read = &read;
    const std::uint64_t bytes = total_bytes(read.memory);
    if (read.error == 0 && (bytes > addresses.end() || read.address > addresses.end() - bytes)) read.error = ENXIO;
    const std::size_t before = pieces.size();
    IovecCursor at;
    for (std::uint64_t done = 0; read.error == 0 && done < bytes;) {
      const std::uint64_t address = read.address + done, offset = address % addresses.stride;
      const std::uint64_t step = std::min(bytes - done, addresses.stride - offset);
      Segment* owner = segment_named(addresses.segment_of(address));
      if (owner == nullptr) {
        read.error = ENXIO;
        break;
      }
      Piece& piece = pieces.emplace_back(Piece{{}, &pending[i], owner, {}});
      take(read.memory, at, step, piece.memory);
      piece.request.file = owner->file();
      piece.request.offset = offset;
      piece.request.memory = piece.memory;
      done += step;
    }
    if (read.error != 0) pieces.resize(before);
    pending[i].left.store(static_cast<std::uint32_t>(pieces.size() - before));
    if (pieces.size() == before) on_complete(read);
  }
  if (pieces.empty()) return;
  std::vector<IoRequest> requests;
  for (const Piece& piece : pieces) requests.push_back(piece.request);
  device_->run(requests, [&](IoRequest& request) {
    Pending& whole = *pieces[static_cast<std::size_t>(&request - requests.data())].whole;
    int none = 0;
    if (request.error != 0) whole.error.compare_exchange_strong(none, request.error);
    // acq_rel: who finishes last passes on what the others read.
    if (whole.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    whole.read->error = whole.error.load();
    on_complete(*whole.read);
  });
  PathTally tally;
  for (std::size_t i = 0; i < requests.size(); ++i) tally.add(*pieces[i].owner, IoUse::kRead, requests[i].error);
  tell_paths(tally, IoUse::kRead);
}

int Store::read_at_once(std::uint64_t address, std::span<const iovec> memory) {
  const Call call(*this);
  if (!call) return ESHUTDOWN;
  const SegmentAddresses addresses = segment_addresses();
  const std::uint64_t bytes = total_bytes(memory);
  if (bytes > addresses.end() || address > addresses.end() - bytes) return ENXIO;
  IovecCursor at;
  std::vector<iovec> part;
  int error = 0;
  for (std::uint64_t done = 0; error == 0 && done < bytes;) {
    const std::uint64_t offset = (address + done) % addresses.stride,
                        step = std::min(bytes - done, addresses.stride - offset);
    Segment* owner = segment_named(addresses.segment_of(address + done));
    if (owner == nullptr) return ENXIO;
    part.clear();
    take(memory, at, step, part);
    error = device_->read_at_once(owner->file(), offset, part);
    path_result(*owner, IoUse::kRead, error == 0 ? Status() : errno_error(error, "reading " + owner->path()));
    done += step;
  }
  return error;
}

}  // namespace tardis
