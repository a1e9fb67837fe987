// SPDX-License-Identifier: Apache-2.0
// A PCI function that VFIO has opened: its regions, configuration space, reset and interrupts.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/status.h"
#include "base/unique_fd.h"
#include "nvme/vfio/bar_window.h"
#include "nvme/vfio/pci_address.h"
#include "nvme/vfio/pci_config.h"
#include "nvme/vfio/vfio_files.h"

namespace tardis::nvme {

// Thread-safe.
class VfioDevice {
 public:
  static Result<std::unique_ptr<VfioDevice>> create(std::shared_ptr<VfioFiles> files, const PciAddress& address);

  const PciCapabilities& capabilities() const { return capabilities_; }
  Result<std::unique_ptr<BarWindow>> map_registers();
  // What map_registers() maps, for another process that does so. The file is this object's.
  struct RegisterFile {
    int fd = -1;
    std::uint64_t offset = 0, bytes = 0;
  };
  Result<RegisterFile> register_file() const;

  // Whether the function may reach memory at all.
  Status set_bus_mastering(bool enabled);
  // Of the whole function (FLR, or what the kernel has instead). It touches no memory meanwhile and afterwards, until
  // its controller is brought up again. An error leaves bus mastering off. Returns within kResetWait.
  Status reset();
  bool can_reset() const { return can_reset_; }
  static constexpr std::chrono::seconds kResetWait{10};

  // MSI-X vectors [0, size) signal these eventfds from now on; none: no vector is enabled. The driver polls and needs
  // none. Queues that are made while interrupts are off may never interrupt (QEMU's do not).
  Status set_vectors(std::span<const int> eventfds);
  std::uint32_t vectors() const { return vectors_; }

  // Whether this kernel gives out the function's BARs as dma-bufs (Linux 6.19). Asks, and makes none.
  bool exports_dma_buf() const;

  // It was unplugged: nobody waits for its end.
  void declare_gone() { files_->gone = true; }

  // The kernel asks for the device back: somebody unbinds it, or the machine is about to unplug it.
  bool release_requested();
  // The kernel reported an error of the link or the function that it could not correct (AER).
  bool error_reported();

 private:
  VfioDevice(std::shared_ptr<VfioFiles> files, const PciAddress& address)
      : files_(std::move(files)), address_(address) {}
  Status read_config(std::uint32_t offset, std::span<std::byte> out) const;
  Status write_command(std::uint16_t value);
  std::uint32_t irq_count(std::uint32_t index) const;
  Status set_irqs(std::uint32_t index, std::span<const int> eventfds, const char* what);
  // Nothing where the kernel has no such interrupt.
  UniqueFd watch(std::uint32_t index);

  const std::shared_ptr<VfioFiles> files_;
  const PciAddress address_;
  bool can_reset_ = false;
  std::uint64_t config_offset_ = 0, config_bytes_ = 0;
  PciCapabilities capabilities_;
  std::uint32_t vectors_ = 0;
  UniqueFd release_event_, error_event_;
};

}  // namespace tardis::nvme
