// SPDX-License-Identifier: Apache-2.0
// What the tests of RawVolume share.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "nvme/raw_volume.h"
#include "nvme_support_memory_namespace.h"

namespace tardis::nvme::testing {

inline constexpr std::uint64_t kNamespace = 16 * kMiB;
inline const Uuid kUuid{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
inline const Uuid kOther{0xFF};

inline std::uint64_t campaign() {
  const char* text = std::getenv("TARDIS_NVME_CAMPAIGN");
  return text != nullptr ? std::max<std::uint64_t>(1, std::strtoull(text, nullptr, 10)) : 1;
}

template <class T>
T read_at(const BlockFile& file, std::uint64_t offset) {
  T value{};
  file.read(offset, &value, sizeof value);
  return value;
}
template <class T>
void write_at(BlockFile& file, std::uint64_t offset, const T& value) {
  file.write(offset, &value, sizeof value);
}

inline void poison(BlockFile& file, std::uint64_t offset, std::uint64_t bytes) {
  const std::vector<std::uint8_t> poison(bytes, 0xA5);
  file.write(offset, poison.data(), bytes);
}
// Stale data everywhere but where check_blank() looks.
inline void poison_data(MemoryNamespace& device) { poison(device.contents, kMiB, device.bytes() - 2 * kMiB); }

inline bool reads_zero(const BlockFile& file, std::uint64_t offset, std::uint64_t bytes) {
  std::vector<std::uint8_t> found(bytes);
  file.read(offset, found.data(), bytes);
  return all_zero(found.data(), bytes);
}

inline std::unique_ptr<RawVolume> open(MemoryNamespace& device, const std::optional<Uuid>& expected = kUuid) {
  auto volume = RawVolume::open(device, expected);
  if (volume) return std::move(*volume);
  ADD_FAILURE() << volume.error().message;
  return nullptr;
}
inline std::unique_ptr<RawVolume> make(MemoryNamespace& device) {
  const Status status = RawVolume::format(device, kUuid);
  EXPECT_TRUE(status) << status.error().message;
  return open(device);
}
using Files = std::map<std::string, VolumeExtent>;
inline Files files_of(const RawVolume& volume) {
  Files files;
  for (const std::string& name : volume.names()) {
    if (const auto extent = volume.find(name)) files[name] = *extent;
  }
  return files;
}

}  // namespace tardis::nvme::testing
