// SPDX-License-Identifier: Apache-2.0
// The addresses of one controller, as the kernel lets a process fill them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nvme/vfio/iova_space.h"

namespace tardis::nvme {

// Thread-safe.
class IommuDomain {
 public:
  virtual ~IommuDomain() = default;

  virtual std::string name() const = 0;  // in messages: "VFIO type1v2"
  virtual std::vector<IovaRange> ranges() const = 0;
  virtual std::size_t page_bytes() const = 0;  // everything below is in whole pages of it
  // Mappings that can be made still; nothing: not known.
  virtual std::optional<std::uint64_t> entries_left() = 0;

  // The memlock limit is for all processes of the user together.
  virtual bool limit_of_user() const { return false; }

  // 0, or a positive errno. Pins the memory, readable and writable by the controller.
  virtual int map(std::uint64_t address, void* memory, std::size_t bytes) = 0;
  // Of whole ranges that were mapped. Afterwards a controller that tries does not reach the memory.
  virtual int unmap(std::uint64_t address, std::size_t bytes) = 0;
};

}  // namespace tardis::nvme
