// SPDX-License-Identifier: Apache-2.0
// A controller's reading of SGLs, written from the specification alone: what sgl.h is measured by.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "nvme/spec.h"
#include "nvme_pointers.h"

namespace tardis::nvme::testing::pointers {

// Reads a command's SGL as a controller does (4.3.2).
struct SglReader {
  std::uint32_t sgls = kSglAnyAlignment;
  std::uint32_t msdbd = 0;
  std::vector<Piece> pieces;
  std::vector<SglDescriptor*> read;  // in the order of reading
  const char* untidy = nullptr;      // what a controller need not mind, but a driver must not do

  // What the controller answers.
  std::uint16_t walk(const BusMemory<SglDescriptor>& memory, const SglDescriptor& first, std::uint64_t transfer) {
    pieces.clear();
    read.clear();
    untidy = nullptr;
    blocks_ = 0;
    left_ = transfer;
    const std::uint16_t status = is_pointer(first) ? walk_segments(memory, first) : take(first);
    if (status != kScSuccess) return status;
    if (msdbd != 0 && blocks_ > msdbd) untidy = "more data blocks than MSDBD";
    return left_ > 0 ? kScSglLengthInvalid : kScSuccess;
  }

 private:
  static bool is_pointer(const SglDescriptor& descriptor) { return descriptor.type == 0x20 || descriptor.type == 0x30; }
  static bool over_the_top(const SglDescriptor& descriptor) {
    return descriptor.length > 0 && descriptor.address + (descriptor.length - 1) < descriptor.address;
  }

  std::uint16_t walk_segments(const BusMemory<SglDescriptor>& memory, SglDescriptor pointer) {
    for (bool more = true; more;) {
      more = false;
      if (pointer.length == 0 || pointer.length % 16 != 0 || pointer.address % 8 != 0) return kScInvalidSglSegment;
      if (over_the_top(pointer)) return kScSglLengthInvalid;
      check_reserved(pointer);
      const bool last = pointer.type == 0x30;
      const std::uint32_t count = pointer.length / 16;
      for (std::uint32_t i = 0; i < count; ++i) {
        SglDescriptor* descriptor = memory.at(pointer.address + i * std::uint64_t{16});
        if (descriptor == nullptr) return kScDataTransferError;
        read.push_back(descriptor);
        if (is_pointer(*descriptor)) {
          if (last) return kScInvalidSglSegment;
          if (i + 1 != count) return kScInvalidSglCount;
          pointer = *descriptor;
          more = true;
          break;
        }
        if (const std::uint16_t status = take(*descriptor); status != kScSuccess) return status;
      }
      if (!more && !last) untidy = "the last segment is not pointed to by a Last Segment descriptor";
    }
    return kScSuccess;
  }

  std::uint16_t take(const SglDescriptor& block) {
    if (block.type != 0) return kScSglTypeInvalid;  // what Identify offers here: no bit buckets, no keys, no offsets
    if (over_the_top(block)) return kScSglLengthInvalid;
    if ((sgls & 3) == kSglDword && (block.address % 4 != 0 || block.length % 4 != 0)) return kScSglGranularity;
    check_reserved(block);
    if (block.length == 0) {
      untidy = "an empty data block";
      return kScSuccess;
    }
    if (block.length > left_) {
      if ((sgls & kSglLongerThanData) == 0) return kScSglLengthInvalid;
      untidy = "more described than moved";
    }
    const std::uint64_t length = std::min<std::uint64_t>(block.length, left_);
    if (length > 0) pieces.push_back({block.address, length});
    left_ -= length;
    ++blocks_;
    return kScSuccess;
  }
  void check_reserved(const SglDescriptor& descriptor) {
    if ((descriptor.reserved[0] | descriptor.reserved[1] | descriptor.reserved[2]) != 0) untidy = "reserved bytes";
  }

  std::uint64_t left_ = 0;
  std::uint64_t blocks_ = 0;
};

}  // namespace tardis::nvme::testing::pointers
