// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/pci_device.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <sstream>

#include "nvme/vfio/text_file.h"

namespace tardis::nvme {
namespace {

namespace fs = std::filesystem;

fs::path devices(const SystemPaths& paths) { return fs::path(paths.sys) / "bus/pci/devices"; }

std::uint32_t hex_in(const fs::path& file) {
  const auto text = read_text(file);
  return text ? static_cast<std::uint32_t>(std::strtoul(text->c_str(), nullptr, 16)) : 0;
}

// Lines of "start end flags"; all zeros: no such BAR.
std::array<std::uint64_t, 6> bars_in(const fs::path& file) {
  std::array<std::uint64_t, 6> bytes{};
  std::istringstream lines(read_text(file).value_or(""));
  for (std::uint64_t& bar : bytes) {
    std::string start, end, flags;
    if (!(lines >> start >> end >> flags)) break;
    const auto first = std::strtoull(start.c_str(), nullptr, 16), last = std::strtoull(end.c_str(), nullptr, 16);
    if (last > first) bar = last - first + 1;
  }
  return bytes;
}

}  // namespace

Result<PciDevice> PciDevice::read(const PciAddress& address, const SystemPaths& paths) {
  const fs::path folder = devices(paths) / address.text();
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    return Error{Code::kNotFound, "PCI device " + address.text() + ": expected " + folder.string() +
                                      ", found nothing there; lspci -D lists what there is"};
  }
  PciDevice device;
  device.address = address;
  device.class_code = hex_in(folder / "class");
  device.vendor = static_cast<std::uint16_t>(hex_in(folder / "vendor"));
  device.device = static_cast<std::uint16_t>(hex_in(folder / "device"));
  device.driver = link_name(folder / "driver");
  device.group = link_name(folder / "iommu_group");
  for (const std::string& name : names_in(folder / "iommu_group/devices")) {
    const auto other = PciAddress::parse(name);  // a group may hold devices of other buses: VFIO itself judges those
    if (other && *other != address) device.group_others.push_back(*other);
  }
  device.bar_bytes = bars_in(folder / "resource");
  if (const auto node = read_text(folder / "numa_node")) device.numa_node = std::atoi(node->c_str());
  const std::string config = read_text(folder / "config").value_or("");
  device.capabilities = read_capabilities(std::as_bytes(std::span(config)));
  return device;
}

Result<std::vector<PciDevice>> PciDevice::list_nvme(const SystemPaths& paths) {
  std::vector<PciDevice> found;
  for (const std::string& name : names_in(devices(paths))) {
    const auto address = PciAddress::parse(name);
    if (!address) continue;
    auto device = read(*address, paths);
    if (device && device->is_nvme()) found.push_back(std::move(*device));
  }
  std::sort(found.begin(), found.end(), [](const PciDevice& a, const PciDevice& b) { return a.address < b.address; });
  return found;
}

}  // namespace tardis::nvme
