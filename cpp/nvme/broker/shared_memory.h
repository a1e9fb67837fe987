// SPDX-License-Identifier: Apache-2.0
// Memory of two processes: a memfd that cannot shrink, so that whoever maps it may touch all of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "base/status.h"
#include "base/unique_fd.h"

namespace tardis::nvme::broker {

// A part of a file in the memory of this process.
class Mapping {
 public:
  Mapping() = default;
  static Result<Mapping> map(int fd, std::uint64_t offset, std::size_t bytes, const std::string& what);
  Mapping(Mapping&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping() { reset(); }

  std::byte* data() const { return memory_; }
  std::size_t bytes() const { return bytes_; }
  void reset();

 private:
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

// Zeroed.
Result<UniqueFd> make_shared_memory(const std::string& name, std::uint64_t bytes);
// Of a file that another process sent: an error unless it is such memory and has [offset, offset + bytes).
Status check_shared_memory(int fd, std::uint64_t offset, std::uint64_t bytes);

}  // namespace tardis::nvme::broker
