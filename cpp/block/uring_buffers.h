// SPDX-License-Identifier: Apache-2.0
// Memory registered with io_uring, so that the kernel need not look up and pin its pages for every request.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"

namespace tardis {

class UringRing;

// What a ring has registered. Immutable.
struct UringBufferTable {
  struct Chunk {
    std::uintptr_t begin, end;
    unsigned slot;
  };
  std::vector<Chunk> chunks;  // by address; they do not overlap
  bool vectored = false;      // the kernel takes several ranges of one chunk in a request (Linux 6.15)

  // The slot whose chunk holds all of `memory`, if one request may name it.
  std::optional<unsigned> slot_of(std::span<const iovec> memory) const;
};

// The registered memory of a device. A ring that does no I/O holds it, and the rings that do clone it when they are
// next used: pinning is paid and counted against RLIMIT_MEMLOCK once. Kernels before 6.12 cannot clone; there each of
// the first rings registers it again. Thread-safe.
class UringBuffers {
 public:
  struct Options {
    std::size_t chunk_bytes = std::size_t{1} << 30;  // at most, as the kernel has it
    bool clone = true;
    std::size_t rings_without_clone = 4;
  };

  UringBuffers();
  explicit UringBuffers(Options options);
  ~UringBuffers();
  UringBuffers(const UringBuffers&) = delete;
  UringBuffers& operator=(const UringBuffers&) = delete;

  // An error only if the range is empty or overlaps one that was added. What the kernel refuses is counted. Pinning
  // takes about half a second per GiB; attach() does not wait for it.
  Status add(void* base, std::size_t bytes);
  // The pages stay pinned until every ring that has them was attached again.
  void remove(void* base);

  // Gives `ring`, which has nothing in flight, the present buffers; afterwards ring.buffers is what it has (or null).
  // Pins all of them where the kernel cannot clone: not to be called with a lock held.
  void attach(UringRing& ring);
  // Nothing was added or removed since `ring` was attached.
  bool up_to_date(const UringRing& ring) const;

  std::uint64_t registered_bytes() const { return registered_bytes_.load(std::memory_order_relaxed); }
  std::uint64_t refused_bytes() const { return refused_bytes_.load(std::memory_order_relaxed); }

 private:
  struct Region {
    std::size_t bytes = 0;
    std::vector<UringBufferTable::Chunk> chunks;
    std::uint64_t registered_bytes = 0;
  };

  bool open_holder();  // registration_ held; false: no ring can be had, or none with buffers
  std::unique_ptr<UringRing> copy_of_holder();
  void publish(std::unique_ptr<UringRing> holder, std::span<const UringBufferTable::Chunk> gone);
  bool clone_to(UringRing& ring);         // mutex_ held
  bool may_register_in(UringRing& ring);  // mutex_ held

  const Options options_;
  // Held by add() and remove() from beginning to end. Taken before mutex_.
  std::mutex registration_;
  std::map<std::uintptr_t, Region> regions_;
  std::vector<unsigned> free_slots_;
  bool no_holder_ = false;  // it was tried
  bool vectored_ = false;
  // Never held while memory is pinned: every ring in use takes it. holder_ and table_ change under both.
  std::mutex mutex_;
  std::unique_ptr<UringRing> holder_;
  bool may_clone_;
  std::size_t rings_without_clone_ = 0;
  std::shared_ptr<const UringBufferTable> table_;  // null: no memory is registered
  std::atomic<std::uint64_t> version_{0};          // of table_
  std::atomic<std::uint64_t> registered_bytes_{0}, refused_bytes_{0};
};

}  // namespace tardis
