// SPDX-License-Identifier: Apache-2.0
// The memory that software controllers may reach, and the bus addresses under which they do.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "nvme/dma.h"
#include "nvme/soft/turn_lock.h"

namespace tardis::nvme {

struct DmaSpaceOptions {
  enum class Addresses : std::uint8_t {
    kIdentity,    // a bus address is the pointer
    kTranslated,  // from a range of their own, with gaps: who takes one for the other is caught
  };
  Addresses addresses = Addresses::kIdentity;
  std::uint64_t first_address = std::uint64_t{0x51} << 40;  // of translated addresses; never a pointer of user space
  std::uint64_t gap = std::uint64_t{1} << 20;               // between translated ranges
  std::size_t page_bytes = 4096;
};

// Memory that the threads of a controller cannot touch themselves, such as a GPU's: moved by who can.
class MemoryMover {
 public:
  virtual ~MemoryMover() = default;
  virtual bool to_host(void* to, const void* from, std::size_t bytes) = 0;
  virtual bool from_host(void* to, const void* from, std::size_t bytes) = 0;
};

class CopyEngine;  // copy_engine.h: the same without waiting

// Thread-safe. Must outlive its controllers.
class DmaSpace final : public DmaMapper {
 public:
  struct Range {
    std::uint64_t address;
    std::size_t bytes;
    std::byte* memory;
    MemoryMover* mover;  // both null: host memory
    CopyEngine* engine;
    std::atomic<std::uint32_t> pins{0};  // transfers of drives into it
    Range(std::uint64_t a, std::size_t n, std::byte* m, MemoryMover* by, CopyEngine* or_by)
        : address(a), bytes(n), memory(m), mover(by), engine(or_by) {}
    bool host() const { return mover == nullptr && engine == nullptr; }
  };

  explicit DmaSpace(const DmaSpaceOptions& options = {});
  ~DmaSpace() override;

  Result<std::uint64_t> map(void* memory, std::size_t bytes) override { return map(memory, bytes, nullptr, nullptr); }
  // `mover` must stay until unmap().
  Result<std::uint64_t> map(void* memory, std::size_t bytes, MemoryMover* mover) {
    return map(memory, bytes, mover, nullptr);
  }
  // `engine` too. Only controllers that it is attached to move data there; no list of data pointers may lie in it.
  Result<std::uint64_t> map(void* memory, std::size_t bytes, CopyEngine& engine) {
    return map(memory, bytes, nullptr, &engine);
  }
  // Returns when no controller touches the range any more. A controller that comes later reports kDmaAfterUnmap.
  Status unmap(void* memory) override;
  std::size_t page_bytes() const override { return options_.page_bytes; }

  // Told of host memory that is mapped, after it is, and that is not any more, before unmap() returns. One call at a
  // time; it must not call back.
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void mapped(void* memory, std::size_t bytes) = 0;
    virtual void unmapped(void* memory) = 0;
  };
  // Also of what is mapped already, and of that again when it goes.
  void add_listener(Listener& listener);
  void remove_listener(Listener& listener);

  std::size_t mapped_ranges() const;
  std::size_t mapped_bytes() const;

  // One thread of a controller. While it is locked nothing is unmapped, so its translations hold.
  class Reader {
   public:
    explicit Reader(DmaSpace& space);
    ~Reader();
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

    void lock() { lock_.lock(); }
    void unlock() { lock_.unlock(); }
    // The range that holds `address`, or null.
    Range* find(std::uint64_t address);
    // The memory of [address, address + bytes) if one range of host memory holds it all, or null.
    std::byte* translate(std::uint64_t address, std::size_t bytes);
    // Of translations made under an earlier lock: they hold still if this has not changed.
    std::uint64_t generation() const { return space_.generation_.load(std::memory_order_acquire); }
    // Whether the address was mapped a while ago and is not any more.
    bool was_mapped(std::uint64_t address) const;

   private:
    friend class DmaSpace;
    DmaSpace& space_;
    TurnLock lock_;
    Range* last_ = nullptr;  // what find() found last
    std::uint64_t last_generation_ = 0;
  };

 private:
  Result<std::uint64_t> map(void* memory, std::size_t bytes, MemoryMover* mover, CopyEngine* engine);
  // Index of the first range that ends above `address`.
  std::size_t range_above(std::uint64_t address) const;
  void lock_readers();
  void unlock_readers();
  std::vector<std::pair<void*, std::size_t>> host_ranges() const;

  const DmaSpaceOptions options_;
  // Order: listeners_mutex_, mutex_, the locks of readers.
  std::mutex listeners_mutex_;
  std::vector<Listener*> listeners_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Range>> ranges_;  // by address; changed only while all readers are locked out
  std::vector<std::pair<std::uint64_t, std::uint64_t>> unmapped_;  // [begin, end) of recent ones
  std::vector<Reader*> readers_;                                   // in the order in which they are locked
  std::uint64_t next_address_;
  std::atomic<std::uint64_t> generation_{1};
};

}  // namespace tardis::nvme
