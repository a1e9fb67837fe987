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
  holder_ = std::move(ring);
  for (unsigned slot = kSlots; slot > 0; --slot) free_slots_.push_back(slot - 1);
  return true;
}

Status UringBuffers::add(void* base, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(base);
  if (base == nullptr || bytes == 0) {
    return Error{Code::kInvalidArgument, "register_memory: expected a range of memory, found an empty one"};
  }
  const std::lock_guard lock(mutex_);
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
  if (open_holder()) {
    for (std::size_t at = 0; at < bytes && !free_slots_.empty(); at += options_.chunk_bytes) {
      const std::size_t length = std::min(options_.chunk_bytes, bytes - at);
      // EPERM, ENOMEM: RLIMIT_MEMLOCK. EFAULT: memory of a device. The chunks before stay.
      if (set_slot(*holder_, free_slots_.back(), static_cast<std::byte*>(base) + at, length) != 0) break;
      region.chunks.push_back({begin + at, begin + at + length, free_slots_.back()});
      region.registered_bytes += length;
      free_slots_.pop_back();
    }
  }
  registered_bytes_.fetch_add(region.registered_bytes, std::memory_order_relaxed);
  refused_bytes_.fetch_add(bytes - region.registered_bytes, std::memory_order_relaxed);
  if (!region.chunks.empty()) publish();
  return {};
}

void UringBuffers::remove(void* base) {
  const std::lock_guard lock(mutex_);
  const auto it = regions_.find(reinterpret_cast<std::uintptr_t>(base));
  if (it == regions_.end()) return;
  const Region& region = it->second;
  for (const UringBufferTable::Chunk& chunk : region.chunks) {
    (void)set_slot(*holder_, chunk.slot, nullptr, 0);
    free_slots_.push_back(chunk.slot);
  }
  registered_bytes_.fetch_sub(region.registered_bytes, std::memory_order_relaxed);
  refused_bytes_.fetch_sub(region.bytes - region.registered_bytes, std::memory_order_relaxed);
  const bool had_chunks = !region.chunks.empty();
  regions_.erase(it);
  if (had_chunks) publish();
}

void UringBuffers::publish() {
  auto table = std::make_shared<UringBufferTable>();
  table->vectored = vectored_;
  for (const auto& [begin, region] : regions_) {
    table->chunks.insert(table->chunks.end(), region.chunks.begin(), region.chunks.end());
  }
  const bool empty = table->chunks.empty();
  table_ = empty ? nullptr : std::move(table);
  version_.fetch_add(1, std::memory_order_release);
}

void UringBuffers::attach(UringRing& ring) {
  if (version_.load(std::memory_order_acquire) == ring.buffers_version) return;
  const std::lock_guard lock(mutex_);
  if (ring.buffers != nullptr) {
    ring.buffers = nullptr;
    io_uring_unregister_buffers(ring.raw());
  }
  ring.buffers_version = version_.load(std::memory_order_relaxed);
  if (table_ != nullptr && (clone_to(ring) || register_in(ring))) ring.buffers = table_;
}

bool UringBuffers::clone_to(UringRing& ring) {
  if (!may_clone_) return false;
  const int result = io_uring_clone_buffers(ring.raw(), holder_->raw());
  if (result == -EINVAL || result == -EOPNOTSUPP) may_clone_ = false;
  return result == 0;
}

bool UringBuffers::register_in(UringRing& ring) {
  if (may_clone_) return false;  // a failure of this one clone
  if (!ring.holds_own_buffers) {
    if (rings_without_clone_ == options_.rings_without_clone) return false;
    ++rings_without_clone_;
    ring.holds_own_buffers = true;
  }
  if (io_uring_register_buffers_sparse(ring.raw(), kSlots) != 0) return false;
  for (const UringBufferTable::Chunk& chunk : table_->chunks) {
    if (set_slot(ring, chunk.slot, reinterpret_cast<void*>(chunk.begin), chunk.end - chunk.begin) != 0) {
      io_uring_unregister_buffers(ring.raw());
      return false;
    }
  }
  return true;
}

}  // namespace tardis
