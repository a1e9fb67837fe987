// SPDX-License-Identifier: Apache-2.0
// A bounded set of aligned buffers for requests whose memory direct I/O cannot use.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"

namespace tardis {

class BouncePool {
 public:
  // One buffer, back in the pool when this goes. data() is null if the memory could not be had.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept : pool_(std::exchange(other.pool_, nullptr)), buffer_(std::move(other.buffer_)) {}
    Lease& operator=(Lease&& other) noexcept {
      if (this != &other) {
        reset();
        pool_ = std::exchange(other.pool_, nullptr);
        buffer_ = std::move(other.buffer_);
      }
      return *this;
    }
    ~Lease() { reset(); }

    explicit operator bool() const { return pool_ != nullptr; }
    std::byte* data() { return buffer_.data(); }
    void reset() {
      if (pool_ != nullptr) std::exchange(pool_, nullptr)->give_back(std::move(buffer_));
    }

   private:
    friend class BouncePool;
    Lease(BouncePool* pool, AlignedBuffer buffer) : pool_(pool), buffer_(std::move(buffer)) {}
    BouncePool* pool_ = nullptr;
    AlignedBuffer buffer_;
  };

  // Memory is allocated on first use: most stores never need it.
  BouncePool(std::size_t buffers, std::size_t bytes, std::size_t alignment)
      : bytes_(bytes), alignment_(alignment), unused_(buffers) {}

  std::size_t buffer_bytes() const { return bytes_; }

  // Waits for a buffer. Whoever waits must hold none, or only such as are given back without its help.
  Lease acquire();
  // Empty if every buffer is out.
  std::optional<Lease> try_acquire();

 private:
  Lease take(std::unique_lock<std::mutex>& lock);
  void give_back(AlignedBuffer buffer);

  const std::size_t bytes_;
  const std::size_t alignment_;
  std::mutex mutex_;
  std::condition_variable returned_;
  std::size_t unused_;  // how many more may be allocated
  std::vector<AlignedBuffer> free_;
};

}  // namespace tardis
