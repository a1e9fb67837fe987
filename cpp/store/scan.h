// SPDX-License-Identifier: Apache-2.0
// What a slot header alone tells: used by recovery, verify and inspect.
#pragma once

#include <string>
#include <vector>

#include "block/block_device.h"
#include "store/format.h"
#include "store/segment.h"

namespace tardis {

enum class Belief {
  kFree,         // never used, or left by an earlier class of the segment
  kObject,       // proves itself
  kQuarantined,  // an object that failed its digest once, or of a kind that this release does not know
  kBad,          // not free, and not to be believed
};

struct SegmentFacts {
  std::uint32_t segment;
  std::uint32_t epoch;
  SegmentGeometry geometry;
  std::uint64_t file_bytes;
  std::uint32_t block_bytes;
};

Belief judge(const SlotHeader& header, std::uint32_t slot, const SegmentFacts& facts);

// An object to be read and compared with the root digest in its header.
struct Claim {
  FileId file;
  std::uint64_t offset;
  SlotHeader header;
  bool verified = false;
  int error = 0;
};

// Reads the payload of each claim (bounded memory, many in flight) and sets `verified`. Returns early when `progress`
// asks to stop (it gets the bytes read so far).
void verify_claims(BlockDevice& device, std::vector<Claim>& claims, const std::function<bool(std::uint64_t)>& progress);

}  // namespace tardis
