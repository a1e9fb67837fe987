// SPDX-License-Identifier: Apache-2.0
// What a namespace of the software controller keeps its bytes on.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "base/status.h"

namespace tardis::nvme {

struct MediumRequest {
  enum class Op : std::uint8_t { kRead, kWrite, kWriteZeroes, kDeallocate, kFlush };
  Op op = Op::kRead;
  bool durable = false;           // of a write: on the medium itself before it completes (FUA)
  std::uint64_t offset = 0;       // bytes; a multiple of granularity(), as the length is
  std::uint64_t bytes = 0;        // of a read or write: the sum of `memory`
  std::span<const iovec> memory;  // any alignment and any count; owned by the caller until the request completes
  void* owner = nullptr;          // the caller's own
  int error = 0;                  // out: 0, or a positive errno
  std::uint64_t not_before = 0;   // out, monotonic_ns(): a slower drive would not have finished it earlier; 0: it would
};

// Thread-safe.
class Medium {
 public:
  virtual ~Medium() = default;

  virtual std::uint64_t bytes() const = 0;
  virtual std::uint32_t granularity() const { return 512; }  // of offsets and lengths
  // run() never waits for a drive: the thread that serves the queues may call it itself.
  virtual bool immediate() const = 0;
  virtual bool needs_flush() const = 0;  // what was written is not durable before kFlush
  virtual bool deallocates_to_zero() const { return false; }
  virtual bool read_only() const { return false; }  // then run() gets reads and flushes alone
  // How many of bytes() there can be at a time; reads of others fail with ENXIO.
  virtual std::uint64_t capacity() const { return bytes(); }

  // Its bytes, where they lie in memory at their offsets, and reads and writes are no more than copies there; null:
  // they do not, or are. In place as long as the medium, the same pages, from the first call on.
  virtual std::byte* in_memory() { return nullptr; }

  // Host memory that many requests may name, from now on until memory_unmapped(): only a hint.
  virtual void memory_mapped(void* /*base*/, std::size_t /*bytes*/) {}
  // No request names it; it may be freed next.
  virtual void memory_unmapped(void* /*base*/) {}

  // Called once per finished request, one of those given to run(), from any thread. Must not wait or call run().
  using Completion = std::function<void(MediumRequest& request)>;

  // Executes all requests, in any order and many at a time, and returns when every completion has returned. Requests
  // are in range: the controller has checked them.
  virtual void run(std::span<MediumRequest> requests, const Completion& on_complete) = 0;
};

// Zeroed memory of this process.
class MemoryMedium final : public Medium {
 public:
  static Result<std::unique_ptr<MemoryMedium>> create(std::uint64_t bytes);
  ~MemoryMedium() override;
  MemoryMedium(const MemoryMedium&) = delete;
  MemoryMedium& operator=(const MemoryMedium&) = delete;

  std::uint64_t bytes() const override { return bytes_; }
  bool immediate() const override { return true; }
  bool needs_flush() const override { return false; }
  bool deallocates_to_zero() const override { return true; }
  void run(std::span<MediumRequest> requests, const Completion& on_complete) override;

  std::byte* in_memory() override {
    if (!in_place_.load(std::memory_order_relaxed)) in_place_.store(true, std::memory_order_relaxed);
    return data_;
  }
  std::byte* data() { return data_; }  // for tests that compare or damage bytes

 private:
  void zero(std::byte* at, std::uint64_t bytes) const;
  MemoryMedium(std::byte* data, std::uint64_t bytes) : data_(data), bytes_(bytes) {}
  std::byte* const data_;
  const std::uint64_t bytes_;
  std::atomic<bool> in_place_{false};  // an engine may have pinned its pages: no other ones take their place
};

}  // namespace tardis::nvme
