// SPDX-License-Identifier: Apache-2.0
#include "nvme/gpu_memory_probe.h"

#include <cstdint>
#include <filesystem>

#include "nvme/vfio/pci_address.h"
#include "nvme/vfio/pci_device.h"
#include "nvme/vfio/text_file.h"

namespace tardis::nvme {
namespace {

namespace fs = std::filesystem;

constexpr std::uint16_t kVendorNvidia = 0x10de;
constexpr std::uint32_t kClassDisplay = 0x030000, kClassDisplayMask = 0xff0000;
constexpr std::size_t kBar1 = 1;

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

std::string size_text(std::uint64_t bytes) {
  return bytes >= 1u << 30 ? std::to_string(bytes >> 30) + " GiB" : std::to_string(bytes >> 20) + " MiB";
}

GpuMemoryProbe driver(const SystemPaths& paths) {
  const bool here = is_there(fs::path(paths.proc) / "driver/nvidia/version");
  return {"NVIDIA driver", here,
          here ? "loaded; it tells bus addresses to kernel modules only" : "none is loaded here"};
}

GpuMemoryProbe peermem(const SystemPaths& paths) {
  const bool here = is_there(fs::path(paths.sys) / "module/nvidia_peermem");
  return {"nvidia-peermem", here,
          here ? "loaded; it serves RDMA adapters in the kernel and has no interface for a process"
               : "the module is not loaded"};
}

GpuMemoryProbe dma_buf(const SystemPaths& paths) {
  const bool iommufd = is_there(fs::path(paths.dev) / "iommu");
  return {"dma-buf into VFIO", false,
          std::string(iommufd ? "/dev/iommu is there" : "no /dev/iommu") +
              "; not tried: it takes a kernel that maps the dma-buf of a GPU's driver for a VFIO device "
              "(VFIO_DEVICE_FEATURE_DMA_BUF is the other direction: it gives out the BARs of a VFIO device)"};
}

GpuMemoryProbe direct_storage(const SystemPaths& paths) {
  const bool here =
      is_there(fs::path(paths.sys) / "module/nvidia_fs") || is_there(fs::path(paths.proc) / "driver/nvidia-fs");
  return {"GPUDirect Storage", here,
          here ? "nvidia-fs is loaded; it serves files and block devices of the kernel's driver, and not a drive that "
                 "VFIO has"
               : "the module nvidia-fs is not loaded"};
}

GpuMemoryProbe bar1(const SystemPaths& paths) {
  std::string found;
  for (const std::string& name : names_in(fs::path(paths.sys) / "bus/pci/devices")) {
    const auto address = PciAddress::parse(name);
    if (!address) continue;
    const auto device = PciDevice::read(*address, paths);
    if (!device || device->vendor != kVendorNvidia || (device->class_code & kClassDisplayMask) != kClassDisplay) {
      continue;
    }
    const auto& bars = device->bar_bytes;
    // A BAR of 64 bits takes two places, but BAR1 of these GPUs follows one of 32.
    found += (found.empty() ? "" : ", ") + address->text() + " has " +
             (bars[kBar1] != 0 ? size_text(bars[kBar1]) : std::string("none that sysfs shows"));
  }
  if (found.empty()) return {"GPU memory in BAR1", false, "no NVIDIA GPU on this machine's PCI bus"};
  return {"GPU memory in BAR1", true, found + "; which allocation lies where in it, only NVIDIA's kernel driver knows"};
}

}  // namespace

std::vector<GpuMemoryProbe> probe_gpu_memory(const SystemPaths& paths) {
  return {driver(paths), peermem(paths), dma_buf(paths), direct_storage(paths), bar1(paths)};
}

}  // namespace tardis::nvme
