// SPDX-License-Identifier: Apache-2.0
#include "attention/memory_limits.h"

#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace tardis::attention {
namespace {

namespace fs = std::filesystem;

std::optional<std::uint64_t> number(const std::string& text) {
  std::uint64_t value = 0;
  const char* const begin = text.data() + std::min(text.find_first_not_of(" \t"), text.size());
  const auto [end, error] = std::from_chars(begin, text.data() + text.size(), value);
  if (error != std::errc() || end == begin) return std::nullopt;
  return value;
}

std::optional<std::uint64_t> number_in(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return number(line);  // "max": none
}

// The value behind `name` in lines of "name value".
std::uint64_t field(const fs::path& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, name.size() + 1, name + " ") == 0) return number(line.substr(name.size())).value_or(0);
  }
  return 0;
}

struct Names {
  const char *limit, *used, *droppable;
};
constexpr Names kV1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
constexpr Names kV2{"memory.max", "memory.current", "inactive_file"};

// The groups of `path` below `root`, itself first: each of them limits.
void look_at(const fs::path& root, const std::string& path, const Names& names, MemoryLimits& limits) {
  fs::path folder = root / fs::path(path).relative_path();
  while (true) {
    const auto most = number_in(folder / names.limit);
    const auto used = number_in(folder / names.used);
    if (most && used && *most < (1ULL << 62)) {
      const std::uint64_t kept = *used - std::min(*used, field(folder / "memory.stat", names.droppable));
      const std::uint64_t left = *most - std::min(*most, kept);
      if (!limits.group_left || left < *limits.group_left) {
        limits.group_left = left;
        limits.group = (folder / names.limit).string();
      }
    }
    if (folder == root || !folder.has_relative_path()) return;
    folder = folder.parent_path();
  }
}

void look_at_groups(const fs::path& proc, const fs::path& cgroup, MemoryLimits& limits) {
  std::ifstream file(proc / "self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "hierarchy:controllers:path"
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    if (controllers.empty()) {
      look_at(cgroup, path, kV2, limits);
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      look_at(cgroup / "memory", path, kV1, limits);
    }
  }
}

}  // namespace

std::string size_text(std::uint64_t bytes) {
  char text[64];
  std::snprintf(text, sizeof text, "%.2f GiB (%llu bytes)", static_cast<double>(bytes) / (1ULL << 30),
                static_cast<unsigned long long>(bytes));
  return text;
}

Result<MemoryLimits> memory_limits(const std::string& proc, const std::string& cgroup) {
  MemoryLimits limits;
  const fs::path path = fs::path(proc) / "meminfo";
  std::ifstream file(path);
  std::optional<std::uint64_t> total, available;
  std::uint64_t huge_pages = 0, huge_kib = 0;
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::string name = line.substr(0, colon);
    const auto value = number(line.substr(colon + 1));
    if (!value) continue;
    if (name == "MemTotal") total = *value << 10;
    if (name == "MemAvailable") available = *value << 10;
    if (name == "HugePages_Free") huge_pages += *value;
    if (name == "HugePages_Rsvd") huge_pages -= std::min(huge_pages, *value);  // promised to others; comes behind Free
    if (name == "Hugepagesize") huge_kib = *value;
  }
  if (!total || !available) {
    return Error{Code::kIo, path.string() + ": expected MemTotal and MemAvailable, found none; is /proc mounted?"};
  }
  limits.total = *total;
  limits.available = *available;
  limits.free_huge = huge_pages * (huge_kib << 10);
  look_at_groups(proc, cgroup, limits);
  rlimit locked{};
  if (::getrlimit(RLIMIT_MEMLOCK, &locked) == 0 && locked.rlim_cur != RLIM_INFINITY) limits.locked = locked.rlim_cur;
  return limits;
}

Status check_limits(const MemoryLimits& limits, std::uint64_t bytes) {
  const std::string asked = "expected " + size_text(bytes) + " of host memory for a KV pool, found ";
  if (limits.group_left && bytes > *limits.group_left && *limits.group_left <= limits.available) {
    return Error{Code::kNoSpace, asked + size_text(*limits.group_left) +
                                     " left in the control group of this process (" + limits.group +
                                     "); raise its limit, or make the pool smaller"};
  }
  if (bytes > limits.available) {
    return Error{Code::kNoSpace, asked + size_text(limits.available) + " available of " + size_text(limits.total) +
                                     "; make the pool smaller, or free memory"};
  }
  return {};
}

}  // namespace tardis::attention
