// SPDX-License-Identifier: Apache-2.0
// Memory that the threads of a controller cannot touch, moved by an engine that they start and do not wait for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/status.h"
#include "nvme/memory.h"
#include "nvme/soft/dma_space.h"
#include "tardis/copy_engine.h"

namespace tardis::nvme {

enum class CopyDirection : std::uint8_t { kToHost, kToRemote };

// Batches of copies, by one thread at a time. Nothing waits but the destructor, which returns when no copy runs.
class CopyLane {
 public:
  virtual ~CopyLane() = default;
  // As tardis_copy_engine::start() and poll().
  virtual bool start(CopyDirection direction, std::span<const tardis_copy> copies, std::uint64_t batch) = 0;
  virtual std::size_t poll(std::span<tardis_copy_end> ends) = 0;
};

// Thread-safe.
class CopyEngine {
 public:
  virtual ~CopyEngine() = default;
  virtual std::string name() const = 0;
  virtual Result<std::unique_ptr<CopyLane>> open_lane() = 0;
  virtual Result<void*> allocate(std::size_t bytes) = 0;  // remote memory, at a multiple of 64 KiB
  virtual void free(void* remote) = 0;
  virtual Status copy(CopyDirection direction, const tardis_copy& copy) = 0;
  // Host memory that lanes may copy from and to.
  virtual Status pin(void* host, std::size_t bytes) = 0;
  virtual void unpin(void* host) = 0;
};

// Whoever filled in `table` must stay loaded, and its context in place, as long as the engine.
std::unique_ptr<CopyEngine> make_copy_engine(const tardis_copy_engine& table);

// Its memory as something that can be registered with a driver of a software controller.
class EngineMemory final : public MemoryProvider {
 public:
  EngineMemory(DmaSpace& space, CopyEngine& engine) : space_(space), engine_(engine) {}

  std::string name() const override { return engine_.name(); }
  Result<std::uint64_t> map(void* base, std::size_t bytes) override { return space_.map(base, bytes, engine_); }
  Status unmap(void* base) override { return space_.unmap(base); }
  bool host_accessible() const override { return false; }
  Result<void*> allocate(std::size_t bytes) override { return engine_.allocate(bytes); }
  void free(void* memory) override { engine_.free(memory); }
  Status copy_to(void* memory, std::span<const std::byte> from) override;
  Status copy_from(const void* memory, std::span<std::byte> to) override;

 private:
  DmaSpace& space_;
  CopyEngine& engine_;
};

// Host memory that an engine can copy from and to.
class PinnedBuffer {
 public:
  static Result<PinnedBuffer> allocate(CopyEngine& engine, std::size_t bytes);
  PinnedBuffer() = default;
  PinnedBuffer(PinnedBuffer&& other) noexcept
      : engine_(std::exchange(other.engine_, nullptr)), buffer_(std::move(other.buffer_)) {}
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept {
    std::swap(engine_, other.engine_);
    std::swap(buffer_, other.buffer_);
    return *this;
  }
  ~PinnedBuffer() {
    if (engine_ != nullptr) engine_->unpin(buffer_.data());
  }
  std::byte* data() { return buffer_.data(); }
  std::size_t bytes() const { return buffer_.size(); }

 private:
  CopyEngine* engine_ = nullptr;
  AlignedBuffer buffer_;
};

}  // namespace tardis::nvme
