// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/drive_facts.h"

#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "nvme/vfio/drive_refusal.h"
#include "nvme/vfio/nvme_users.h"
#include "nvme/vfio/text_file.h"
#include "nvme/vfio/vfio_nodes.h"

namespace tardis::nvme {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kSectorBytes = 512;  // in which sysfs counts

// Without the padding, and without what no terminal or JSON should get.
std::string line_of(const fs::path& file) {
  std::string text = first_line(read_text(file).value_or(""));
  for (char& c : text) c = c >= 0x20 && c < 0x7f ? c : '?';
  text.resize(text.find_last_not_of(' ') + 1);
  return text;
}

std::optional<std::uint64_t> number_of(const fs::path& file) {
  const std::string text = line_of(file);
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// "16.0 GT/s PCIe" in MT/s; "Unknown": 0.
std::uint32_t speed_of(const fs::path& file) {
  const std::string text = line_of(file);
  return static_cast<std::uint32_t>(std::strtod(text.c_str(), nullptr) * 1000.0 + 0.5);
}

PcieLink link_of(const fs::path& folder, const PcieLink& otherwise) {
  constexpr std::uint64_t kMostLanes = 32;  // what is not known is 255
  PcieLink link;
  link.speed_mts = speed_of(folder / "current_link_speed");
  link.most_speed_mts = speed_of(folder / "max_link_speed");
  const auto lanes = [&](const char* name) {
    const auto count = number_of(folder / name);
    return count && *count <= kMostLanes ? static_cast<std::uint32_t>(*count) : 0u;
  };
  link.lanes = lanes("current_link_width");
  link.most_lanes = lanes("max_link_width");
  return link.speed_mts != 0 && link.lanes != 0 ? link : otherwise;
}

DriveNamespace namespace_of(const std::string& name, const SystemPaths& paths) {
  const fs::path block = fs::path(paths.sys) / "block" / name;
  DriveNamespace space;
  space.name = name;
  if (const auto sectors = number_of(block / "size")) space.bytes = *sectors * kSectorBytes;
  space.block_bytes = number_of(block / "queue/logical_block_size");
  space.metadata_bytes = number_of(block / "metadata_bytes");
  if (const auto kib = number_of(block / "queue/max_hw_sectors_kb")) space.max_transfer_bytes = *kib << 10;
  space.power_fail_bytes = number_of(block / "queue/atomic_write_max_bytes");
  const std::string cache = line_of(block / "queue/write_cache");
  if (!cache.empty()) space.volatile_cache = cache == "write back";
  return space;
}

std::string vfio_file_of(const PciDevice& pci, const SystemPaths& paths) {
  const auto files = VfioNodes::find(pci, paths).all();
  if (!files.empty()) return files.front();
  const VfioNodes names = VfioNodes::names(pci, paths);
  return names.device_file.empty() ? names.group : names.device_file;
}

// As check_drive(), but opens nothing.
std::string refusal_of(const DriveFacts& drive, const SystemPaths& paths) {
  if (drive.pci.driver == "nvme") {
    std::string all;
    for (const std::string& user : drive.users) all += (all.empty() ? "" : ", ") + user;
    return all.empty() ? "the kernel's driver has it" : "in use: " + all;
  }
  const Status checked = check_drive(drive.pci, paths);
  if (!checked) return checked.error().message;
  if (VfioNodes::find(drive.pci, paths).only_without_iommu()) return no_iommu_error(drive.pci).message;
  if (!drive.vfio_file_usable) return drive.vfio_file + " may not be opened by this user, or is not there";
  return {};
}

std::string class_text(std::uint32_t class_code) {
  char text[16];
  std::snprintf(text, sizeof text, "%06x", class_code);
  return text;
}

void write_namespaces(JsonWriter& json, const DriveFacts& drive) {
  json.begin_array("namespaces");
  for (const DriveNamespace& space : drive.namespaces) {
    json.begin_object();
    json.field("name", space.name);
    json.field("bytes", space.bytes);
    json.field("block_bytes", space.block_bytes);
    json.field("metadata_bytes", space.metadata_bytes);
    json.field("max_transfer_bytes", space.max_transfer_bytes);
    json.field("power_fail_bytes", space.power_fail_bytes);
    json.field("volatile_cache", space.volatile_cache);
    json.end_object();
  }
  json.end_array();
  json.begin_array("users");
  for (const std::string& user : drive.users) json.value(user);
  json.end_array();
}

}  // namespace

DriveFacts DriveFacts::read(const PciDevice& pci, const SystemPaths& paths) {
  DriveFacts drive;
  drive.pci = pci;
  const fs::path folder = fs::path(paths.sys) / "bus/pci/devices" / pci.address.text();
  drive.link = link_of(folder, pci.capabilities.link);
  for (const PciAddress& address : pci.group_others) {
    const auto other = PciDevice::read(address, paths);
    if (other) drive.group_others.push_back({address, other->class_code, other->driver});
  }
  const auto controllers = names_in(folder / "nvme");
  if (!controllers.empty()) {
    drive.controller = controllers.front();
    const fs::path at = folder / "nvme" / drive.controller;
    drive.model = line_of(at / "model");
    drive.serial = line_of(at / "serial");
    drive.firmware = line_of(at / "firmware_rev");
    if (const auto all = number_of(at / "queue_count"); all && *all > 0) drive.queues = *all - 1;  // one is admin
  }
  for (const std::string& name : namespaces_of(pci.address, paths)) {
    drive.namespaces.push_back(namespace_of(name, paths));
  }
  drive.users = known_users_of(pci.address, paths);
  if (pci.driver == kVfioPciDriver) {
    drive.vfio_file = vfio_file_of(pci, paths);
    drive.vfio_file_usable = ::access(drive.vfio_file.c_str(), R_OK | W_OK) == 0;
  }
  drive.refusal = refusal_of(drive, paths);
  return drive;
}

void write_drive(JsonWriter& json, const DriveFacts& drive) {
  json.begin_object();
  json.field("address", drive.pci.address.text());
  json.field("class", class_text(drive.pci.class_code));
  json.field("vendor", drive.pci.vendor);
  json.field("device", drive.pci.device);
  json.field("driver", drive.pci.driver);
  json.field("iommu_group", drive.pci.group);
  json.begin_array("group_others");
  for (const DriveNeighbour& other : drive.group_others) {
    json.begin_object();
    json.field("address", other.address.text());
    json.field("class", class_text(other.class_code));
    json.field("driver", other.driver);
    json.end_object();
  }
  json.end_array();
  json.field("numa_node", drive.pci.numa_node);  // -1: the machine has none, or does not say
  json.field("bar_bytes", drive.pci.bar_bytes[0]);
  json.field("link_speed_mts", drive.link.speed_mts);  // 0: not known
  json.field("link_lanes", drive.link.lanes);
  json.field("link_most_speed_mts", drive.link.most_speed_mts);
  json.field("link_most_lanes", drive.link.most_lanes);
  json.field("controller", drive.controller);
  json.field("model", drive.model);
  json.field("serial", drive.serial);
  json.field("firmware", drive.firmware);
  json.field("queues", drive.queues);
  write_namespaces(json, drive);
  json.field("vfio_file", drive.vfio_file);
  json.field("vfio_file_usable", drive.vfio_file_usable);
  json.field("refusal", drive.refusal);
  json.end_object();
}

}  // namespace tardis::nvme
