// SPDX-License-Identifier: Apache-2.0
// The file NVME in a store's folder: which volume holds the store's segments, and the lock of the process that uses it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "base/status.h"
#include "base/unique_fd.h"
#include "store/format.h"

namespace tardis::nvme {

inline constexpr std::uint32_t kBindingVersion = 1;

// First 512 bytes of NVME; behind it stands who holds the lock.
struct VolumeBinding {
  static constexpr std::array<char, 8> kMagic{'T', 'A', 'R', 'D', 'I', 'S', 'N', 'H'};
  std::array<char, 8> magic;
  std::uint32_t format_version;
  std::uint32_t reserved0;
  Uuid volume;
  std::array<std::uint8_t, 472> reserved;
  std::uint32_t reserved1;
  std::uint32_t crc;
};
static_assert(sizeof(VolumeBinding) == 512 && offsetof(VolumeBinding, crc) == 508);
static_assert(offsetof(VolumeBinding, volume) == 16);
static_assert(std::is_trivially_copyable_v<VolumeBinding>);

class VolumeHome {
 public:
  // Code::kBusy: another process has it, or another device of this one.
  static Result<VolumeHome> lock(const std::string& folder);

  const std::string& folder() const { return folder_; }
  // Nothing: the folder has no volume.
  Result<std::optional<VolumeBinding>> read() const;
  Status write(const Uuid& volume);  // durable when it returns

 private:
  VolumeHome(std::string folder, UniqueFd fd) : folder_(std::move(folder)), fd_(std::move(fd)) {}
  std::string file() const;

  std::string folder_;
  UniqueFd fd_;  // the lock ends with it
};

}  // namespace tardis::nvme
