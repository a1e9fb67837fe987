// SPDX-License-Identifier: Apache-2.0
// How the scripted controller finds a command's memory, written from the specification alone, and what data it serves.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "nvme/spec.h"
#include "nvme_fuzz_engine.h"

namespace tardis::nvme::fuzz {

// What is at `at` of a namespace, as its only client writes it.
inline void fill_pattern(std::uint64_t at, std::uint8_t* to, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i, ++at) {
    to[i] = static_cast<std::uint8_t>((at / 8 + 1) * 0x9e3779b97f4a7c15u >> at % 8 * 8);
  }
}

// The memory of one command, piece by piece. `Memory` has reach(address, bytes): the memory at an address, or null.
template <class Memory>
class CommandMemory {
 public:
  static constexpr std::uint64_t kPage = 4096;  // CC.MPS is 0

  CommandMemory(const Memory& memory, const SubmissionEntry& command, std::size_t bytes, const Findings& findings)
      : memory_(memory), findings_(findings), left_(bytes) {
    switch (command.data_pointer()) {
      case DataPointer::kPrp:
        prp(command.prp);
        break;
      case DataPointer::kSgl:
        sgl(command.sgl);
        break;
      default:
        findings.expect(false, "a command has a data pointer of no known kind");
    }
    findings.expect(left_ == 0, "a data pointer does not reach as far as the data");
  }

  void write(const std::uint8_t* from) const {
    for (const Piece& piece : pieces_) {
      std::memcpy(piece.memory, from, piece.bytes);
      from += piece.bytes;
    }
  }
  bool holds(const std::uint8_t* expected) const {
    for (const Piece& piece : pieces_) {
      if (std::memcmp(piece.memory, expected, piece.bytes) != 0) return false;
      expected += piece.bytes;
    }
    return true;
  }

 private:
  struct Piece {
    std::byte* memory;
    std::size_t bytes;
  };

  std::byte* reach(std::uint64_t address, std::size_t bytes) const {
    std::byte* at = memory_.reach(address, bytes);
    findings_.expect(at != nullptr, "a command names memory that is not mapped");
    return at;
  }
  void take(std::uint64_t address, std::uint64_t most) {
    const auto bytes = static_cast<std::size_t>(std::min<std::uint64_t>(most, left_));
    pieces_.push_back({reach(address, bytes), bytes});
    left_ -= bytes;
  }

  void prp(const PrpPair& pair) {
    findings_.expect(pair.prp1 % 4 == 0, "PRP1 is no multiple of 4");
    take(pair.prp1, kPage - pair.prp1 % kPage);
    if (left_ == 0) return;
    if (left_ <= kPage) {
      findings_.expect(pair.prp2 % kPage == 0, "PRP2 has an offset");
      return take(pair.prp2, kPage);
    }
    findings_.expect(pair.prp2 % 8 == 0, "a PRP list is at no multiple of 8");
    for (std::uint64_t list = pair.prp2; left_ != 0; list += sizeof(std::uint64_t)) {
      std::uint64_t entry;
      std::memcpy(&entry, reach(list, sizeof entry), sizeof entry);
      findings_.expect(entry % kPage == 0, "an entry of a PRP list has an offset");
      if (list % kPage == kPage - sizeof entry && left_ > kPage) {
        list = entry - sizeof entry;  // names the next page of the list
      } else {
        take(entry, kPage);
      }
    }
  }

  void sgl(SglDescriptor descriptor) {
    if (descriptor.kind() == SglType::kDataBlock) return take(descriptor.address, descriptor.length);
    for (bool last = false; !last;) {
      last = descriptor.kind() == SglType::kLastSegment;
      findings_.expect(last || descriptor.kind() == SglType::kSegment, "an SGL has a descriptor of no known kind");
      const std::size_t count = descriptor.length / sizeof descriptor;
      findings_.expect(count > 0 && descriptor.length % sizeof descriptor == 0, "an SGL segment has a wrong length");
      std::vector<SglDescriptor> segment(count);
      std::memcpy(segment.data(), reach(descriptor.address, descriptor.length), descriptor.length);
      for (std::size_t i = 0; i < count - (last ? 0 : 1); ++i) {
        findings_.expect(segment[i].kind() == SglType::kDataBlock, "an SGL segment has something else than data");
        take(segment[i].address, segment[i].length);
      }
      descriptor = segment.back();
    }
  }

  const Memory& memory_;
  const Findings& findings_;
  std::uint64_t left_;
  std::vector<Piece> pieces_;
};

}  // namespace tardis::nvme::fuzz
