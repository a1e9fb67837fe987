// SPDX-License-Identifier: Apache-2.0
#include "block/numa.h"

#include <sys/sysmacros.h>

#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>

namespace tardis {
namespace {

std::optional<std::string> first_line(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

// The device's own folder and those it lies in: a partition's disk, its controller, the PCIe function, which has it.
std::optional<int> node_of(std::filesystem::path folder, const std::filesystem::path& sysfs) {
  while (folder.has_relative_path() && folder != sysfs && folder != folder.parent_path()) {
    for (const char* name : {"numa_node", "device/numa_node"}) {
      const auto text = first_line(folder / name);
      if (!text) continue;
      char* end = nullptr;
      const long node = std::strtol(text->c_str(), &end, 10);
      if (end != text->c_str()) return node < 0 ? std::nullopt : std::optional<int>(static_cast<int>(node));
    }
    folder = folder.parent_path();
  }
  return std::nullopt;
}

// Of the device that a link names; nothing where there is one node only.
std::optional<int> node_of_link(const std::filesystem::path& link, const std::filesystem::path& sysfs) {
  std::error_code error;
  const std::filesystem::path root = std::filesystem::canonical(sysfs, error);
  if (error) return std::nullopt;
  const auto online = first_line(root / "devices/system/node/online");
  if (!online) return std::nullopt;
  const auto nodes = parse_cpu_list(*online);
  if (!nodes || CPU_COUNT(&*nodes) < 2) return std::nullopt;
  const auto folder = std::filesystem::canonical(link, error);
  return error ? std::nullopt : node_of(folder, root);
}

}  // namespace

std::optional<cpu_set_t> parse_cpu_list(const std::string& text) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  const char* at = text.c_str();
  while (*at != '\0' && *at != '\n') {
    char* end = nullptr;
    const unsigned long first = std::strtoul(at, &end, 10);
    if (end == at) return std::nullopt;
    unsigned long last = first;
    if (*end == '-') {
      at = end + 1;
      last = std::strtoul(at, &end, 10);
      if (end == at || last < first) return std::nullopt;
    }
    if (last >= CPU_SETSIZE) return std::nullopt;
    for (unsigned long cpu = first; cpu <= last; ++cpu) CPU_SET(cpu, &cpus);
    at = *end == ',' ? end + 1 : end;
    if (at == end && *end != '\0' && *end != '\n') return std::nullopt;
  }
  return cpus;
}

std::optional<NumaPlace> numa_place(dev_t device, const std::string& sysfs) {
  const std::filesystem::path root = sysfs;
  const auto node =
      node_of_link(root / "dev/block" / (std::to_string(major(device)) + ":" + std::to_string(minor(device))), root);
  if (!node) return std::nullopt;
  const auto list = first_line(root / "devices/system/node" / ("node" + std::to_string(*node)) / "cpulist");
  if (!list) return std::nullopt;
  const auto cpus = parse_cpu_list(*list);
  cpu_set_t allowed;
  if (!cpus || ::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return std::nullopt;
  NumaPlace place{*node, {}};
  CPU_AND(&place.cpus, &*cpus, &allowed);
  if (CPU_COUNT(&place.cpus) == 0) return std::nullopt;
  return place;
}

std::optional<int> numa_node_of_pci(const std::string& address, const std::string& sysfs) {
  std::string lower = address;
  for (char& letter : lower) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  const std::filesystem::path root = sysfs;
  return node_of_link(root / "bus/pci/devices" / lower, root);
}

}  // namespace tardis
