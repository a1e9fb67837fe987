// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/bar_window.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "nvme/ordering.h"

namespace tardis::nvme {

Result<std::unique_ptr<BarWindow>> BarWindow::map(int fd, std::uint64_t offset, std::size_t bytes) {
  constexpr std::size_t kLeast = kRegDoorbells + 2 * sizeof(std::uint32_t);  // the doorbells of the admin queue
  if (bytes < kLeast) {
    return Error{Code::kUnsupportedFormat, "NVMe controller: expected at least " + std::to_string(kLeast) +
                                               " bytes of BAR0 that can be mapped, found " + std::to_string(bytes) +
                                               "; is it an NVMe controller?"};
  }
  // What lies behind the doorbells, as a memory buffer of the controller may, is of no use here.
  bytes = std::min(bytes, kMostBytes);
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (memory == MAP_FAILED) return errno_error(errno, "mmap of " + std::to_string(bytes) + " bytes of BAR0");
  return std::unique_ptr<BarWindow>(new BarWindow(static_cast<std::byte*>(memory), bytes));
}

BarWindow::~BarWindow() { (void)::munmap(memory_, bytes_); }

std::uint32_t BarWindow::read32(std::uint32_t offset) { return load_acquire(word(offset)); }

std::uint64_t BarWindow::read64(std::uint32_t offset) {
  const std::uint64_t low = read32(offset);
  return low | std::uint64_t{read32(offset + 4)} << 32;
}

void BarWindow::write32(std::uint32_t offset, std::uint32_t value) { store_doorbell(word(offset), value); }

void BarWindow::write64(std::uint32_t offset, std::uint64_t value) {
  write32(offset, static_cast<std::uint32_t>(value));
  write32(offset + 4, static_cast<std::uint32_t>(value >> 32));
}

}  // namespace tardis::nvme
