// SPDX-License-Identifier: Apache-2.0
#include "block/uring_buffers.h"

#include <algorithm>
#include <cerrno>

#include "block/uring_ring.h"

namespace tardis {
namespace {

constexpr unsigned kSlots = 1024;  // chunks at once; the kernel allows 16384

int set_slot(UringRing& ring, unsigned slot, void* base, std::size_t bytes) {
  const iovec range{base, bytes};
  const __u64 no_tag = 0;
  const int result = io_uring_register_buffers_update_tag(ring.raw(), slot, &range, &no_tag, 1);
  return result == 1 ? 0 : result < 0 ? -result : EIO;
}

bool register_in(UringRing& ring, const UringBufferTable& table) {
  if (io_uring_register_buffers_sparse(ring.raw(), kSlots) != 0) return false;
  for (const UringBufferTable::Chunk& chunk : table.chunks) {
    if (set_slot(ring, chunk.slot, reinterpret_cast<void*>(chunk.begin), chunk.end - chunk.begin) != 0) {
      io_uring_unregister_buffers(ring.raw());
      return false;
    }
  }
  return true;
}

// IORING_OP_READV_FIXED is of Linux 6.15.
bool knows_vectored(UringRing& ring) {
  struct Free {
    void operator()(io_uring_probe* probe) const { io_uring_free_probe(probe); }
  };
  const std::unique_ptr<io_uring_probe, Free> probe(io_uring_get_probe_ring(ring.raw()));
  return probe != nullptr && io_uring_opcode_supported(probe.get(), IORING_OP_READV_FIXED) != 0 &&
         io_uring_opcode_supported(probe.get(), IORING_OP_WRITEV_FIXED) != 0;
}

}  // namespace

std::optional<unsigned> UringBufferTable::slot_of(std::span<const iovec> memory) const {
  if (memory.empty() || (memory.size() > 1 && !vectored)) return std::nullopt;
  const auto first = reinterpret_cast<std::uintptr_t>(memory.front().iov_base);
  auto it = std::upper_bound(chunks.begin(), chunks.end(), first,
                             [](std::uintptr_t address, const Chunk& chunk) { return address < chunk.begin; });
  if (it == chunks.begin()) return std::nullopt;
  --it;
  for (const iovec& range : memory) {
    const auto begin = reinterpret_cast<std::uintptr_t>(range.iov_base);
    // An empty range is an error to the kernel here, unlike in a plain request.
    if (range.iov_len == 0 || begin < it->begin || begin >= it->end || range.iov_len > it->end - begin)
      return std::nullopt;
  }
  return it->slot;
}

UringBuffers::UringBuffers() : UringBuffers(Options{}) {}
UringBuffers::UringBuffers(Options options) : options_(options), may_clone_(options.clone) {}
UringBuffers::~UringBuffers() = default;

bool UringBuffers::open_holder() {
  if (holder_ != nullptr || no_holder_) return holder_ != nullptr;
  UringRing::Failure failure;
  auto ring = UringRing::create(1, -1, &failure);
  if (ring == nullptr || io_uring_register_buffers_sparse(ring->raw(), kSlots) != 0) {
    no_holder_ = true;  // no ring, or a kernel before 5.19
    return false;
  }
  vectored_ = knows_vectored(*ring);
  {
    const std::lock_guard lock(mutex_);
    holder_ = std::move(ring);
  }
  for (unsigned slot = kSlots; slot > 0; --slot) free_slots_.push_back(slot - 1);
  return true;
}

// To be changed in place of the holder: the kernel locks a ring while it pins memory for it, and whoever clones the
// ring then waits. Null: nobody clones the holder, or no copy can be had.
std::unique_ptr<UringRing> UringBuffers::copy_of_holder() {
  if (table_ == nullptr) return nullptr;
  UringRing::Failure failure;
  auto copy = UringRing::create(1, -1, &failure);
  if (copy == nullptr) return nullptr;
  const std::lock_guard lock(mutex_);
  return clone_to(*copy) ? std::move(copy) : nullptr;
}

Status UringBuffers::add(void* base, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(base);
  if (base == nullptr || bytes == 0) {
    return Error{Code::kInvalidArgument, "register_memory: expected a range of memory, found an empty one"};
  }
  const std::lock_guard lock(registration_);
  const auto after = regions_.lower_bound(begin);
  const bool into_next = after != regions_.end() && after->first - begin < bytes;
  const bool into_previous =
      after != regions_.begin() && begin - std::prev(after)->first < std::prev(after)->second.bytes;
  if (into_next || into_previous) {
    return Error{Code::kInvalidArgument,
                 "register_memory: expected memory that is not registered, found a range that overlaps one; "
                 "unregister that first"};
  }
  Region& region = regions_[begin];
  region.bytes = bytes;
  std::unique_ptr<UringRing> copy;
  if (open_holder()) {
    copy = copy_of_holder();
    UringRing& ring = copy != nullptr ? *copy : *holder_;
    for (std::size_t at = 0; at < bytes && !free_slots_.empty(); at += options_.chunk_bytes) {
      const std::size_t length = std::min(options_.chunk_bytes, bytes - at);
      // EPERM, ENOMEM: RLIMIT_MEMLOCK. EFAULT: memory of a device. The chunks before stay.
      if (set_slot(ring, free_slots_.back(), static_cast<std::byte*>(base) + at, length) != 0) break;
      region.chunks.push_back({begin + at, begin + at + length, free_slots_.back()});
      region.registered_bytes += length;
      free_slots_.pop_back();
    }
  }
  registered_bytes_.fetch_add(region.registered_bytes, std::memory_order_relaxed);
  refused_bytes_.fetch_add(bytes - region.registered_bytes, std::memory_order_relaxed);
  if (!region.chunks.empty()) publish(std::move(copy), {});
  return {};
}

void UringBuffers::remove(void* base) {
  const std::lock_guard lock(registration_);
  const auto it = regions_.find(reinterpret_cast<std::uintptr_t>(base));
  if (it == regions_.end()) return;
  const Region region = std::move(it->second);
  regions_.erase(it);
  registered_bytes_.fetch_sub(region.registered_bytes, std::memory_order_relaxed);
  refused_bytes_.fetch_sub(region.bytes - region.registered_bytes, std::memory_order_relaxed);
  if (region.chunks.empty()) return;
  publish(copy_of_holder(), region.chunks);
  for (const UringBufferTable::Chunk& chunk : region.chunks) free_slots_.push_back(chunk.slot);
}

// Makes a new table of the regions; registration_ is held. `holder` (or null: the one there is) has what they need and
// the chunks that are `gone`: no ring may clone those and count as up to date.
void UringBuffers::publish(std::unique_ptr<UringRing> holder, std::span<const UringBufferTable::Chunk> gone) {
  auto table = std::make_shared<UringBufferTable>();
  table->vectored = vectored_;
  for (const auto& [begin, region] : regions_) {
    table->chunks.insert(table->chunks.end(), region.chunks.begin(), region.chunks.end());
  }
  const bool empty = table->chunks.empty();
  {
    const std::lock_guard lock(mutex_);
    if (holder != nullptr) std::swap(holder_, holder);
    // Cheap if there was another holder: that one still has the pages pinned.
    for (const UringBufferTable::Chunk& chunk : gone) (void)set_slot(*holder_, chunk.slot, nullptr, 0);
    table_ = empty ? nullptr : std::move(table);
    version_.fetch_add(1, std::memory_order_release);
  }
  // Now, not when the kernel gets round to the closed ring: the pages count against RLIMIT_MEMLOCK.
  if (holder != nullptr) io_uring_unregister_buffers(holder->raw());
}

bool UringBuffers::up_to_date(const UringRing& ring) const {
  return version_.load(std::memory_order_acquire) == ring.buffers_version;
}

void UringBuffers::attach(UringRing& ring) {
  if (up_to_date(ring)) return;
  if (ring.buffers != nullptr) {
    ring.buffers = nullptr;
    io_uring_unregister_buffers(ring.raw());
  }
  std::shared_ptr<const UringBufferTable> table;
  {
    const std::lock_guard lock(mutex_);
    ring.buffers_version = version_.load(std::memory_order_relaxed);
    if (table_ == nullptr) return;
    if (clone_to(ring)) {
      ring.buffers = table_;
      return;
    }
    if (!may_register_in(ring)) return;
    table = table_;
  }
  // A part of it that is removed meanwhile is none that this ring's next requests use, and the ring counts as outdated.
  if (register_in(ring, *table)) ring.buffers = std::move(table);
}

bool UringBuffers::clone_to(UringRing& ring) {
  if (!may_clone_) return false;
  const int result = io_uring_clone_buffers(ring.raw(), holder_->raw());
  if (result == -EINVAL || result == -EOPNOTSUPP) may_clone_ = false;
  return result == 0;
}

bool UringBuffers::may_register_in(UringRing& ring) {
  if (may_clone_) return false;  // a failure of this one clone
  if (ring.holds_own_buffers) return true;
  if (rings_without_clone_ == options_.rings_without_clone) return false;
  ++rings_without_clone_;
  return ring.holds_own_buffers = true;
}

}  // namespace tardis
