// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/vfio_controller.h"

#include <utility>

#include "nvme/vfio/drive_refusal.h"
#include "nvme/vfio/physical_mapper.h"
#include "nvme/vfio/vfio_mapper.h"

namespace tardis::nvme {

Result<std::shared_ptr<VfioController>> VfioController::open(const std::string& text, VfioOptions options) {
  const auto address = PciAddress::parse(text);
  if (!address) return address.error();
  auto pci = PciDevice::read(*address, options.paths);
  if (!pci) return pci.error();
  if (auto fits = check_drive(*pci, options.paths); !fits) return fits.error();
  auto opened = open_vfio(*pci, options.way, options.paths);
  if (!opened) return opened.error();

  auto controller = std::make_shared<VfioController>(Passkey());
  controller->pci_ = std::move(*pci);
  auto device = VfioDevice::create(opened->files, *address);
  if (!device) return device.error();
  controller->device_ = std::move(*device);
  auto window = controller->device_->map_registers();
  if (!window) return window.error();
  controller->window_ = std::move(*window);
  if (opened->domain) {
    controller->way_ = opened->domain->name();
    controller->mapper_ = std::make_unique<VfioMapper>(std::move(opened->domain));
  } else {
    controller->way_ = "VFIO without an IOMMU";
    options.driver.zero_copy = false;  // nothing could end the controller's access
    controller->mapper_ = std::make_unique<PhysicalMapper>();
  }
  // Before any memory is mapped, and before it can reach any.
  if (auto silent = silence(*controller->device_, *controller->window_, options.driver.ready_timeout_ms); !silent) {
    return silent.error();
  }
  if (auto on = controller->device_->set_bus_mastering(true); !on) return on.error();
  options.driver.function_reset = [device = controller->device_.get()] { return device->reset(); };
  auto driver = Driver::open(*controller->window_, *controller->mapper_, std::move(options.driver));
  if (!driver) return driver.error();
  controller->driver_ = std::move(*driver);
  return controller;
}

Status silence(VfioDevice& device, RegisterWindow& window, std::uint32_t ready_timeout_ms) {
  if (auto off = device.set_bus_mastering(false); !off) return off;
  ControllerRegisters registers(window, ready_timeout_ms);
  const bool works = (window.read32(kRegCc) & kCcEnable) != 0 || (window.read32(kRegCsts) & kCstsReady) != 0;
  if (!works || registers.health() == Health::kGone || registers.disable()) return {};
  return device.reset();
}

VfioController::~VfioController() {
  if (!device_) return;
  const bool gone = driver_ && driver_->state() == DriverState::kGone;
  driver_.reset();
  if (gone || !device_->set_bus_mastering(false)) device_->declare_gone();
}

Result<std::shared_ptr<NvmeNamespace>> VfioController::open_namespace(std::uint32_t id) {
  auto space = NvmeNamespace::open(driver(), id);
  if (!space) return space.error();
  return std::shared_ptr<NvmeNamespace>(std::move(*space));
}

std::string VfioController::report() const { return pci_.address.text() + " by " + way_ + ": " + driver_->report(); }

Result<std::shared_ptr<RawNamespace>> open_vfio_namespace(const std::string& address, std::uint32_t id,
                                                          VfioOptions options) {
  auto controller = VfioController::open(address, std::move(options));
  if (!controller) return controller.error();
  auto space = (*controller)->open_namespace(id);
  if (!space) return space.error();
  return std::shared_ptr<RawNamespace>(std::move(*space));
}

}  // namespace tardis::nvme
