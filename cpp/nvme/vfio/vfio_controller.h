// SPDX-License-Identifier: Apache-2.0
// An NVMe controller of this machine, driven by this process (docs/vfio.md).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "nvme/driver.h"
#include "nvme/nvme_namespace.h"
#include "nvme/vfio/pci_device.h"
#include "nvme/vfio/vfio_device.h"
#include "nvme/vfio/vfio_open.h"

namespace tardis::nvme {

struct VfioOptions {
  DriverOptions driver;  // function_reset is set here
  VfioWay way = VfioWay::kAuto;
  SystemPaths paths;
};

class VfioController : public std::enable_shared_from_this<VfioController> {
  struct Passkey {
    explicit Passkey() = default;
  };

 public:
  // Touches the device only if check_drive() finds nothing against it.
  static Result<std::shared_ptr<VfioController>> open(const std::string& address, VfioOptions options = {});
  // Shuts the controller down in good order, switches bus mastering off, gives the device back. Takes as long as the
  // controller's shutdown, and VfioFiles::kCloseWait at most for what follows.
  ~VfioController();
  explicit VfioController(Passkey) {}
  VfioController(const VfioController&) = delete;
  VfioController& operator=(const VfioController&) = delete;

  // The namespace keeps the controller.
  Result<std::shared_ptr<NvmeNamespace>> open_namespace(std::uint32_t id);
  // It too.
  std::shared_ptr<Driver> driver() { return {shared_from_this(), driver_.get()}; }

  const PciDevice& pci() const { return pci_; }
  VfioDevice& device() { return *device_; }
  RegisterWindow& window() { return *window_; }
  DmaMapper& mapper() { return *mapper_; }
  // One line: the drive, and how it and its memory are reached.
  std::string report() const;

 private:
  PciDevice pci_;
  std::string way_;
  // In the order of making; they go in the reverse order.
  std::unique_ptr<VfioDevice> device_;
  std::unique_ptr<BarWindow> window_;
  std::unique_ptr<DmaMapper> mapper_;
  std::unique_ptr<Driver> driver_;
};

// Switches bus mastering off, and then the controller, if it is on. The kernel resets a function when it is opened; one
// that it cannot reset still works for whoever had it before, at addresses that are others' now.
Status silence(VfioDevice& device, RegisterWindow& window, std::uint32_t ready_timeout_ms);

// A namespace of a controller that nobody else in this process needs. What is given keeps the controller.
Result<std::shared_ptr<RawNamespace>> open_vfio_namespace(const std::string& address, std::uint32_t id,
                                                          VfioOptions options = {});

}  // namespace tardis::nvme
