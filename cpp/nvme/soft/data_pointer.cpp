// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/data_pointer.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

namespace tardis::nvme {
namespace {

constexpr std::uint64_t kMaxDescriptors = 1 << 18;  // of one SGL: a chain that is a circle ends here

class Walker {
 public:
  Walker(const Blame& blame, const DataPointerRules& rules, std::uint64_t bytes, bool reads, DmaSpace::Reader& reader,
         std::vector<DmaPiece>& out)
      : blame_(blame), rules_(rules), left_(bytes), bytes_(bytes), reads_(reads), reader_(reader), out_(out) {}

  Sc prp();
  Sc sgl();

 private:
  Sc add(std::uint64_t address, std::uint64_t bytes, bool discard, const char* what);
  Sc prp_list(std::uint64_t list);
  Sc sgl_segment(SglDescriptor& segment, bool& last);
  Sc sgl_data(const SglDescriptor& descriptor);
  bool fetch(std::uint64_t address, void* to, std::size_t bytes);
  std::uint64_t page_bytes() const { return std::uint64_t{1} << rules_.page_shift; }
  std::uint64_t offset_in_page(std::uint64_t address) const { return address & (page_bytes() - 1); }
  Sc bad_prp(const std::string& text) const { return blame_.refuse(kScPrpOffsetInvalid, ViolationKind::kPrp, text); }

  const Blame& blame_;
  const DataPointerRules& rules_;
  std::uint64_t left_;         // of the transfer
  const std::uint64_t bytes_;  // the transfer
  const bool reads_;
  DmaSpace::Reader& reader_;
  std::vector<DmaPiece>& out_;
  std::uint64_t described_ = 0;  // by SGL descriptors, beyond the transfer too
  std::uint32_t blocks_ = 0;     // SGL data blocks and bit buckets so far
  std::uint64_t descriptors_ = 0;
};

bool Walker::fetch(std::uint64_t address, void* to, std::size_t bytes) {
  auto* at = static_cast<std::byte*>(to);
  while (bytes > 0) {
    const DmaSpace::Range* range = reader_.find(address);
    if (range == nullptr) return false;
    const std::uint64_t offset = address - range->address;
    const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(bytes, range->bytes - offset));
    if (range->host()) {
      std::memcpy(at, range->memory + offset, n);
    } else if (range->mover == nullptr || !range->mover->to_host(at, range->memory + offset, n)) {
      return false;
    }
    at += n;
    address += n;
    bytes -= n;
  }
  return true;
}

// The range may lie in several mapped ranges if they are neighbours on the bus.
Sc Walker::add(std::uint64_t address, std::uint64_t bytes, bool discard, const char* what) {
  left_ -= bytes;
  if (!discard) {
    for (std::uint64_t done = 0; done < bytes;) {
      const DmaSpace::Range* range = reader_.find(address + done);
      if (range == nullptr) return refuse_address(blame_, reader_, address + done, what);
      done += range->bytes - (address + done - range->address);
    }
  }
  if (!out_.empty() && out_.back().discard == discard && out_.back().address + out_.back().bytes == address) {
    out_.back().bytes += bytes;
  } else {
    out_.push_back({address, bytes, discard});
  }
  return kScSuccess;
}

Sc Walker::prp() {
  const std::uint64_t first = blame_.command.prp.prp1, second = blame_.command.prp.prp2;
  if ((first & 3) != 0) return bad_prp("PRP1 is expected to be a multiple of 4, found " + hex_address(first));
  if (const Sc bad = add(first, std::min(left_, page_bytes() - offset_in_page(first)), false, "PRP1")) return bad;
  if (left_ == 0) {
    if (second != 0) {
      blame_.log.add(ViolationKind::kPrp, blame_.queue, &blame_.command,
                     "PRP2 is expected to be 0 if the data lies in one page, found " + hex_address(second));
    }
    return kScSuccess;
  }
  if (left_ > page_bytes()) return prp_list(second);
  if (second == 0 || offset_in_page(second) != 0) {
    return bad_prp("PRP2 is expected to be the second page, without an offset, found " + hex_address(second));
  }
  return add(second, left_, false, "PRP2");
}

Sc Walker::prp_list(std::uint64_t list) {
  if (list == 0 || (list & 7) != 0) {
    return bad_prp("the PRP list is expected at a multiple of 8, found " + hex_address(list));
  }
  constexpr std::size_t kChunk = 512;
  std::array<std::uint64_t, kChunk> entries;
  while (true) {
    // A list ends with its memory page.
    const std::uint64_t slots = (page_bytes() - offset_in_page(list)) / 8;
    const std::uint64_t pages = (left_ + page_bytes() - 1) / page_bytes();
    const std::uint64_t used = std::min(slots, pages);
    const bool chained = pages > slots;
    for (std::uint64_t at = 0; at < used; at += kChunk) {
      const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(kChunk, used - at));
      if (!fetch(list + at * 8, entries.data(), n * 8)) {
        return refuse_address(blame_, reader_, list + at * 8, "the PRP list");
      }
      for (std::size_t i = 0; i < n; ++i) {
        const std::uint64_t entry = entries[i];
        const std::uint64_t index = at + i;
        if (chained && index == slots - 1) {
          if (entry == 0 || offset_in_page(entry) != 0) {
            return bad_prp("the last entry of a page of the PRP list, at " + hex_address(list + index * 8) +
                           ", is expected to name the next page of the list, found " + hex_address(entry));
          }
          list = entry;
          break;
        }
        if (entry == 0 || offset_in_page(entry) != 0) {
          return bad_prp("the entry of the PRP list at " + hex_address(list + index * 8) +
                         " is expected to be a page without an offset, found " + hex_address(entry));
        }
        if (const Sc bad = add(entry, std::min(left_, page_bytes()), false, "an entry of the PRP list")) return bad;
      }
    }
    if (!chained) return kScSuccess;
  }
}

Sc Walker::sgl_data(const SglDescriptor& descriptor) {
  const auto refuse = [&](Sc status, const std::string& text) {
    return blame_.refuse(status, ViolationKind::kSgl, text);
  };
  if (rules_.sgl_blocks != 0 && ++blocks_ > rules_.sgl_blocks) {
    return refuse(kScInvalidSglCount,
                  "at most " + std::to_string(rules_.sgl_blocks) + " data blocks are allowed (MSDBD)");
  }
  const bool bucket = descriptor.kind() == SglType::kBitBucket;
  if (descriptor.subtype() != 0) {
    return refuse(kScSglTypeInvalid,
                  "subtype of a descriptor: expected 0, found " + std::to_string(descriptor.subtype()));
  }
  if (bucket && !rules_.sgl_bit_bucket) return refuse(kScSglTypeInvalid, "bit buckets are not supported (SGLS bit 16)");
  if (!bucket && descriptor.address + descriptor.length < descriptor.address) {
    return refuse(kScDataTransferError, "a data block runs over the end of the address space");
  }
  if (!bucket && rules_.sgl == kSglDword && ((descriptor.address | descriptor.length) & 3) != 0) {
    return refuse(kScSglGranularity, "address and length of a data block are expected to be multiples of 4, found " +
                                         hex_address(descriptor.address) + " and " + std::to_string(descriptor.length));
  }
  if (bucket && !reads_) return kScSuccess;  // its length does not count in a write (4.3.2)
  described_ += descriptor.length;
  const std::uint64_t used = std::min<std::uint64_t>(descriptor.length, left_);
  return used == 0 ? kScSuccess : add(descriptor.address, used, bucket, "an SGL data block");
}

// Its data; then `segment` is the next one, or `last` is set.
Sc Walker::sgl_segment(SglDescriptor& segment, bool& last) {
  const auto refuse = [&](Sc status, const std::string& text) {
    return blame_.refuse(status, ViolationKind::kSgl, text);
  };
  last = segment.kind() == SglType::kLastSegment;
  if (segment.subtype() != 0) {
    return refuse(kScSglTypeInvalid, "subtype of a segment: expected 0, found " + std::to_string(segment.subtype()));
  }
  if (segment.length == 0 || segment.length % sizeof(SglDescriptor) != 0) {
    return refuse(kScInvalidSglSegment,
                  "length of a segment: expected a multiple of 16 above 0, found " + std::to_string(segment.length));
  }
  if ((segment.address & 7) != 0 || segment.address + segment.length < segment.address) {
    return refuse(kScInvalidSglSegment,
                  "address of a segment: expected a multiple of 8, found " + hex_address(segment.address));
  }
  constexpr std::uint64_t kChunk = 256;
  std::array<SglDescriptor, kChunk> chunk;
  const SglDescriptor current = segment;
  const std::uint64_t count = current.length / sizeof(SglDescriptor);
  if ((descriptors_ += count) > kMaxDescriptors) {
    return refuse(kScInvalidSglSegment,
                  "the segments do not end after " + std::to_string(kMaxDescriptors) + " descriptors");
  }
  for (std::uint64_t at = 0; at < count; at += kChunk) {
    const std::uint64_t n = std::min(kChunk, count - at);
    const std::uint64_t from = current.address + at * sizeof(SglDescriptor);
    if (!fetch(from, chunk.data(), static_cast<std::size_t>(n) * sizeof(SglDescriptor))) {
      return refuse_address(blame_, reader_, from, "an SGL segment");
    }
    for (std::uint64_t i = 0; i < n; ++i) {
      const SglDescriptor& descriptor = chunk[static_cast<std::size_t>(i)];
      const auto where = [&] { return "the descriptor at " + hex_address(from + i * sizeof(SglDescriptor)); };
      const bool final = at + i == count - 1;
      switch (descriptor.kind()) {
        case SglType::kDataBlock:
        case SglType::kBitBucket:
          if (final && !last) {
            return refuse(kScInvalidSglSegment, where() +
                                                    ", the last of a segment that is not the last one, is expected "
                                                    "to name the next segment");
          }
          if (const Sc bad = sgl_data(descriptor)) return bad;
          break;
        case SglType::kSegment:
        case SglType::kLastSegment:
          if (!final) return refuse(kScInvalidSglCount, where() + " names a segment, but is not the last of its own");
          if (last) return refuse(kScInvalidSglSegment, where() + " names a segment, but is in the last one");
          segment = descriptor;
          break;
        default:
          return refuse(kScSglTypeInvalid,
                        where() + " has type " + std::to_string(descriptor.type >> 4) + ", which is not for PCIe");
      }
    }
  }
  return kScSuccess;
}

Sc Walker::sgl() {
  SglDescriptor segment = blame_.command.sgl;
  bool last = true;
  switch (segment.kind()) {
    case SglType::kDataBlock:
    case SglType::kBitBucket:
      if (const Sc bad = sgl_data(segment)) return bad;
      break;
    case SglType::kSegment:
    case SglType::kLastSegment:
      do {
        if (const Sc bad = sgl_segment(segment, last)) return bad;
      } while (!last);
      break;
    default:
      return blame_.refuse(kScSglTypeInvalid, ViolationKind::kSgl,
                           "SGL1 has type " + std::to_string(segment.type >> 4) + ", which is not for PCIe");
  }
  if (described_ < bytes_ || (described_ > bytes_ && !rules_.sgl_longer_than_data)) {
    return blame_.refuse(
        kScSglLengthInvalid, ViolationKind::kSgl,
        "the SGL describes " + std::to_string(described_) + " bytes, the command moves " + std::to_string(bytes_));
  }
  return kScSuccess;
}

}  // namespace

Sc walk_data_pointer(const Blame& blame, const DataPointerRules& rules, std::uint64_t bytes, bool reads,
                     DmaSpace::Reader& reader, std::vector<DmaPiece>& out) {
  Walker walker(blame, rules, bytes, reads, reader, out);
  if (blame.command.data_pointer() == DataPointer::kPrp) return walker.prp();
  if (rules.sgl == kSglNone || blame.command.data_pointer() != DataPointer::kSgl) {
    return blame.refuse(kScInvalidField, ViolationKind::kField,
                        "PSDT " + std::to_string(blame.command.flags >> 6) + " is not supported here");
  }
  return walker.sgl();
}

Sc refuse_address(const Blame& blame, const DmaSpace::Reader& reader, std::uint64_t address, const char* what) {
  const bool was_mapped = reader.was_mapped(address);
  return blame.refuse(
      kScDataTransferError, was_mapped ? ViolationKind::kDmaAfterUnmap : ViolationKind::kDma,
      std::string(what) + ": " + hex_address(address) + (was_mapped ? " is not mapped any more" : " is not mapped"));
}

std::string hex_address(std::uint64_t value) {
  char text[20];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace tardis::nvme
