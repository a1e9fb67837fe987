// SPDX-License-Identifier: Apache-2.0
// Memory that a controller reaches: the driver's own, and the providers of memory that users register.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "base/status.h"
#include "nvme/dma.h"
#include "nvme/vfio/system_paths.h"

namespace tardis::nvme {

// Whole zeroed pages of the driver itself: rings, lists, bounce buffers.
class DmaMemory {
 public:
  DmaMemory() = default;
  static Result<DmaMemory> allocate(DmaMapper& mapper, std::size_t bytes);
  DmaMemory(DmaMemory&& other) noexcept
      : mapper_(std::exchange(other.mapper_, nullptr)), pages_(std::move(other.pages_)), address_(other.address_) {}
  DmaMemory& operator=(DmaMemory&& other) noexcept;
  ~DmaMemory() { reset(); }

  std::byte* data() { return pages_.memory.get(); }
  const std::byte* data() const { return pages_.memory.get(); }
  std::size_t bytes() const { return pages_.bytes; }
  std::uint64_t address() const { return address_; }  // of the controller
  bool mapped() const { return mapper_ != nullptr; }

  // Takes the memory away from the controller; this process may go on to use it.
  Status revoke();
  // Frees it; but what cannot be taken away from the controller is never used again, and so never freed.
  void reset();

 private:
  DmaMapper* mapper_ = nullptr;  // null once revoked
  DmaPages pages_;
  std::uint64_t address_ = 0;
};

// One kind of memory that may be registered. Thread-safe.
class MemoryProvider {
 public:
  virtual ~MemoryProvider() = default;

  virtual std::string name() const = 0;  // in messages: "host memory"
  // As DmaMapper::map() and unmap(). After unmap() a controller that still tries does not reach the memory.
  virtual Result<std::uint64_t> map(void* base, std::size_t bytes) = 0;
  virtual Status unmap(void* base) = 0;
  // The CPU may read and write it. Other memory is used without copies or not at all.
  virtual bool host_accessible() const = 0;

  // For the self-test: some memory of this kind, a multiple of 64 KiB, and its contents.
  virtual Result<void*> allocate(std::size_t bytes) = 0;
  virtual void free(void* memory) = 0;
  virtual Status copy_to(void* memory, std::span<const std::byte> from) = 0;
  virtual Status copy_from(const void* memory, std::span<std::byte> to) = 0;
};

// Ordinary and pinned host memory.
class HostMemory final : public MemoryProvider {
 public:
  explicit HostMemory(DmaMapper& mapper) : mapper_(mapper) {}

  std::string name() const override { return "host memory"; }
  Result<std::uint64_t> map(void* base, std::size_t bytes) override { return mapper_.map(base, bytes); }
  Status unmap(void* base) override { return mapper_.unmap(base); }
  bool host_accessible() const override { return true; }
  Result<void*> allocate(std::size_t bytes) override;
  void free(void* memory) override;
  Status copy_to(void* memory, std::span<const std::byte> from) override;
  Status copy_from(const void* memory, std::span<std::byte> to) override;

 private:
  DmaMapper& mapper_;
};

// The provider of GPU memory that this machine has, or why there is none: what was looked at (gpu_memory_probe.h).
Result<std::unique_ptr<MemoryProvider>> find_gpu_memory_provider(const SystemPaths& paths = {});

}  // namespace tardis::nvme
