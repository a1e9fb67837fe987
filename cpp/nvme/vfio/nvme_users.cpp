// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/nvme_users.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <sstream>
#include <utility>

#include "nvme/vfio/block_users.h"
#include "nvme/vfio/text_file.h"

namespace tardis::nvme {
namespace {

namespace fs = std::filesystem;

bool starts_with_number(const std::string& text, std::size_t at) {
  return at < text.size() && std::isdigit(static_cast<unsigned char>(text[at])) != 0;
}

// "nvme0n1" and, with several paths to a namespace, "nvme0c1n1", which stands for nvme0n1. Empty: neither.
std::string block_name(const std::string& name) {
  if (name.compare(0, 4, "nvme") != 0 || !starts_with_number(name, 4)) return {};
  const std::size_t n = name.rfind('n');
  if (n < 5 || !starts_with_number(name, n + 1)) return {};
  const std::size_t c = name.find('c', 4);
  return c == std::string::npos || c > n ? name : name.substr(0, c) + name.substr(n);
}

std::vector<DeviceNode> with_partitions(const std::string& name, const SystemPaths& paths) {
  const fs::path folder = fs::path(paths.sys) / "block" / name;
  std::vector<DeviceNode> nodes;
  const auto add = [&](const std::string& node, const fs::path& at) {
    nodes.push_back({node, first_line(read_text(at / "dev").value_or("")), at});
  };
  add(name, folder);
  std::error_code error;
  for (const std::string& part : names_in(folder)) {
    if (fs::exists(folder / part / "partition", error)) add(part, folder / part);
  }
  return nodes;
}

// The character device through which programs send commands of their own: "ng0n1" of "nvme0n1".
DeviceNode generic_node(const std::string& name, const SystemPaths& paths) {
  const std::string generic = "ng" + name.substr(4);
  const fs::path folder = fs::path(paths.sys) / "class/nvme-generic" / generic;
  return {generic, first_line(read_text(folder / "dev").value_or("")), folder};
}

// Octal escapes of mountinfo: "\040" is a space.
std::string unescaped(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size() && text[i + 1] >= '0' && text[i + 1] <= '3') {
      out.push_back(static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0')));
      i += 3;
    } else {
      out.push_back(text[i]);
    }
  }
  return out;
}

struct Mount {
  std::string number, where, source;
};

std::vector<Mount> mounts(const SystemPaths& paths) {
  std::vector<Mount> found;
  std::istringstream lines(read_text(fs::path(paths.proc) / "self/mountinfo").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string id, parent, root, word, type;
    Mount mount;
    words >> id >> parent >> mount.number >> root >> mount.where;
    while (words >> word && word != "-") {
    }
    words >> type >> mount.source;
    mount.where = unescaped(mount.where);
    found.push_back(std::move(mount));
  }
  return found;
}

std::vector<std::string> swaps(const SystemPaths& paths) {
  std::vector<std::string> found;
  std::istringstream lines(read_text(fs::path(paths.proc) / "swaps").value_or(""));
  std::string line;
  std::getline(lines, line);  // the heading
  while (std::getline(lines, line)) found.push_back(unescaped(line.substr(0, line.find_first_of(" \t"))));
  return found;
}

bool is_node(const std::string& path, const DeviceNode& node) {
  std::error_code error;
  const fs::path real = fs::weakly_canonical(path, error);  // links of /dev/disk and /dev/mapper
  return fs::path(path).filename() == node.name || (!error && real.filename() == node.name);
}

}  // namespace

std::vector<std::string> namespaces_of(const PciAddress& address, const SystemPaths& paths) {
  std::vector<std::string> found;
  const fs::path controllers = fs::path(paths.sys) / "bus/pci/devices" / address.text() / "nvme";
  for (const std::string& controller : names_in(controllers)) {
    for (const std::string& entry : names_in(controllers / controller)) {
      std::string name = block_name(entry);
      if (!name.empty() && std::find(found.begin(), found.end(), name) == found.end()) found.push_back(std::move(name));
    }
  }
  return found;
}

namespace {

// Of one namespace and its partitions, as the kernel shows it.
std::vector<std::string> known_users(const std::vector<DeviceNode>& nodes, const std::vector<Mount>& mounted,
                                     const std::vector<std::string>& swapped) {
  std::vector<std::string> users;
  for (const DeviceNode& node : nodes) {
    for (const Mount& mount : mounted) {
      // btrfs has device numbers of its own: there the source tells.
      if ((!node.number.empty() && mount.number == node.number) || is_node(mount.source, node)) {
        users.push_back(node.name + " is mounted on " + mount.where);
      }
    }
    for (const std::string& swap : swapped) {
      if (is_node(swap, node)) users.push_back(node.name + " is in use as swap");
    }
    for (const std::string& holder : names_in(node.sysfs / "holders")) {
      users.push_back(node.name + " is held by " + holder);
    }
  }
  return users;
}

std::vector<std::string> all_users(const PciAddress& address, const SystemPaths& paths, bool open_nodes) {
  std::vector<std::string> users;
  const auto mounted = mounts(paths);
  const auto swapped = swaps(paths);
  for (const std::string& name : namespaces_of(address, paths)) {
    std::vector<DeviceNode> nodes = with_partitions(name, paths);
    const DeviceNode disk = nodes.front();
    const auto known = known_users(nodes, mounted, swapped);
    users.insert(users.end(), known.begin(), known.end());
    if (!known.empty()) continue;
    nodes.push_back(generic_node(name, paths));
    const auto openers = openers_of(nodes, paths);
    users.insert(users.end(), openers.begin(), openers.end());
    if (!open_nodes) continue;
    if (auto opener = exclusive_opener_of(disk, paths)) users.push_back(std::move(*opener));
  }
  return users;
}

}  // namespace

std::vector<std::string> users_of(const PciAddress& address, const SystemPaths& paths) {
  return all_users(address, paths, true);
}

std::vector<std::string> known_users_of(const PciAddress& address, const SystemPaths& paths) {
  return all_users(address, paths, false);
}

}  // namespace tardis::nvme
