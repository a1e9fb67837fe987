// SPDX-License-Identifier: Apache-2.0
// What somebody else may have on a namespace: partition tables, file systems, RAID, encryption, other stores. By their
// marks, none of which is proof; but a namespace with any of them is not to be formatted unasked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "nvme/raw_namespace.h"

namespace tardis::nvme {

inline constexpr std::uint64_t kDiskMarkBytes = 1u << 20;  // at either end: where marks are looked for

struct DiskMark {
  std::uint64_t offset = 0;  // of the mark, in the namespace
  std::string what;          // "an XFS file system"
  bool operator==(const DiskMark&) const = default;
};

// By offset. `first` and `last`: what begins and what ends a namespace of `bytes` bytes.
std::vector<DiskMark> disk_marks(std::span<const std::byte> first, std::span<const std::byte> last,
                                 std::uint64_t bytes);
// "an XFS file system at byte 0, a GPT partition table at byte 512"; empty: no marks.
std::string describe(const std::vector<DiskMark>& marks);

// Reads both ends.
Result<std::vector<DiskMark>> what_is_on(RawNamespace& device);

}  // namespace tardis::nvme
