// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "base/status.h"

namespace tardis {

// Owned, zeroed memory at an address that is a multiple of `alignment` (a power of two).
class AlignedBuffer {
 public:
  AlignedBuffer() = default;

  // Throws std::bad_alloc, for callers below an edge that turns exceptions into errors (as containers do).
  explicit AlignedBuffer(std::size_t bytes, std::size_t alignment = 4096)
      : memory_(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{alignment})), Free(alignment)),
        bytes_(bytes) {
    std::memset(memory_.get(), 0, bytes);
  }

  static Result<AlignedBuffer> allocate(std::size_t bytes, std::size_t alignment = 4096) {
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
      return Error{Code::kInternal,
                   "alignment of a buffer: expected a power of two, found " + std::to_string(alignment)};
    }
    void* memory = ::operator new (bytes, std::align_val_t{alignment}, std::nothrow);
    if (memory == nullptr) {
      return Error{Code::kInternal, "out of memory: " + std::to_string(bytes) + " bytes for an aligned buffer"};
    }
    std::memset(memory, 0, bytes);
    AlignedBuffer buffer;
    buffer.memory_ = std::unique_ptr<std::byte, Free>(static_cast<std::byte*>(memory), Free(alignment));
    buffer.bytes_ = bytes;
    return buffer;
  }

  std::byte* data() { return memory_.get(); }
  const std::byte* data() const { return memory_.get(); }
  std::size_t size() const { return memory_ ? bytes_ : 0; }

 private:
  struct Free {
    Free() : alignment(1) {}
    explicit Free(std::size_t a) : alignment(a) {}
    void operator()(std::byte* memory) const { ::operator delete (memory, std::align_val_t{alignment}); }
    std::size_t alignment;
  };

  std::unique_ptr<std::byte, Free> memory_;
  std::size_t bytes_ = 0;
};

}  // namespace tardis
