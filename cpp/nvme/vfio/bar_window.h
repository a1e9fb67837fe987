// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "nvme/register_window.h"
#include "nvme/spec.h"

namespace tardis::nvme {

// BAR0 of a controller in the memory of this process. A function that is unplugged reads as all ones there, or as zeros
// behind some hypervisors.
class BarWindow final : public RegisterWindow {
 public:
  // `bytes` of the file from `offset` on, or the first kMostBytes of them. `fd` need not stay open.
  static constexpr std::size_t kMostBytes = std::size_t{1} << 30;
  static Result<std::unique_ptr<BarWindow>> map(int fd, std::uint64_t offset, std::size_t bytes);
  ~BarWindow() override;
  BarWindow(const BarWindow&) = delete;
  BarWindow& operator=(const BarWindow&) = delete;

  std::uint32_t read32(std::uint32_t offset) override;
  // Two accesses, the low half first: some controllers do not answer to one of 64 bits.
  std::uint64_t read64(std::uint32_t offset) override;
  void write32(std::uint32_t offset, std::uint32_t value) override;
  void write64(std::uint32_t offset, std::uint64_t value) override;
  volatile std::uint32_t* doorbells() override { return word(kRegDoorbells); }
  std::uint32_t bytes() const override { return static_cast<std::uint32_t>(bytes_); }

 private:
  BarWindow(std::byte* memory, std::size_t bytes) : memory_(memory), bytes_(bytes) {}
  volatile std::uint32_t* word(std::uint32_t offset) const {
    return reinterpret_cast<volatile std::uint32_t*>(memory_ + offset);
  }

  std::byte* const memory_;
  const std::size_t bytes_;
};

}  // namespace tardis::nvme
