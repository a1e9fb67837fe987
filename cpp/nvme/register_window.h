// SPDX-License-Identifier: Apache-2.0
// A controller's registers and doorbells (BAR0).
#pragma once

#include <cstdint>

namespace tardis::nvme {

// What the owner of a queue needs.
class Doorbells {
 public:
  virtual ~Doorbells() = default;

  // Where doorbells are stored to directly, by this process and by a GPU: the start of the window in memory.
  virtual volatile std::uint32_t* doorbells() = 0;  // the word at kRegDoorbells
  virtual std::uint32_t bytes() const = 0;          // of the window; doorbells beyond it do not exist

  // A controller of which nobody polls the doorbells is told that some were stored to. Nothing for hardware.
  virtual void notify() {}
};

class RegisterWindow : public Doorbells {
 public:
  virtual std::uint32_t read32(std::uint32_t offset) = 0;
  virtual std::uint64_t read64(std::uint32_t offset) = 0;
  virtual void write32(std::uint32_t offset, std::uint32_t value) = 0;
  virtual void write64(std::uint32_t offset, std::uint64_t value) = 0;
};

}  // namespace tardis::nvme
