// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/vfio_mapper.h"

#include <algorithm>
#include <cerrno>

#include "nvme/vfio/memlock.h"

namespace tardis::nvme {
namespace {

constexpr std::uint64_t kLargePage = std::uint64_t{2} << 20;

std::string kib(std::uint64_t bytes) { return std::to_string(bytes >> 10) + " KiB"; }

}  // namespace

VfioMapper::VfioMapper(std::unique_ptr<IommuDomain> domain)
    : domain_(std::move(domain)), page_bytes_(domain_->page_bytes()), free_(domain_->ranges()) {}

VfioMapper::~VfioMapper() {
  for (const auto& [memory, range] : ranges_) (void)unmap_pieces(range.address, range.bytes);
}

Error VfioMapper::refused(int error, std::size_t asked) {
  const std::string what = domain_->name() + ": mapping of " + kib(asked) + " for the NVMe controller: ";
  if (error == ENOMEM) {
    return {Code::kNoSpace, what + memlock_text(Memlock::read(), pinned_, domain_->limit_of_user()), error};
  }
  if (error == ENOSPC) {
    return {Code::kNoSpace,
            what + "expected a free mapping, found " + std::to_string(ranges_.size()) +
                " ranges mapped and none left; raise dma_entry_limit of the module vfio_iommu_type1, or register "
                "fewer, larger ranges",
            error};
  }
  return errno_error(error, what + "expected memory that can be pinned");
}

Result<std::uint64_t> VfioMapper::map(void* memory, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  if (bytes == 0 || begin + bytes < begin) {
    return Error{Code::kInvalidArgument,
                 "memory to map: expected a range of at least one byte, found " + std::to_string(bytes) + " bytes"};
  }
  const std::uint64_t skip = begin % page_bytes_;
  const std::uint64_t whole = (skip + bytes + page_bytes_ - 1) / page_bytes_ * page_bytes_;
  const std::uint64_t first = begin - skip;
  const std::lock_guard lock(mutex_);
  if (ranges_.contains(memory)) {
    return Error{Code::kInvalidArgument, "memory to map: expected a range that is not mapped, found one that is"};
  }
  // The same place in a large page as in memory, so that the IOMMU may use large pages where memory has them.
  const std::uint64_t align = whole >= kPieceBytes ? kPieceBytes : whole >= kLargePage ? kLargePage : page_bytes_;
  const auto address = free_.take(whole, align, first);
  if (!address) {
    return Error{Code::kNoSpace,
                 domain_->name() + ": expected " + kib(whole) + " of addresses that lie side by side, found " +
                     kib(free_.largest()) + " of the " + kib(free_.free_bytes()) + " that are free",
                 ENOSPC};
  }
  for (std::uint64_t done = 0; done < whole;) {
    const std::uint64_t piece = std::min(kPieceBytes, whole - done);
    const int error = domain_->map(*address + done, reinterpret_cast<void*>(first + done), piece);
    if (error != 0) {
      // No controller was told of it. What cannot be unmapped even so is not given out again.
      if (unmap_pieces(*address, done) == 0) free_.give_back(*address, whole);
      return refused(error, bytes);
    }
    done += piece;
  }
  ranges_.emplace(memory, Range{*address, whole});
  pinned_ += whole;
  return *address + skip;
}

int VfioMapper::unmap_pieces(std::uint64_t address, std::uint64_t bytes) {
  int first_error = 0;
  for (std::uint64_t done = 0; done < bytes;) {
    const std::uint64_t piece = std::min(kPieceBytes, bytes - done);
    const int error = domain_->unmap(address + done, piece);
    if (first_error == 0) first_error = error;
    done += piece;
  }
  return first_error;
}

Status VfioMapper::unmap(void* memory) {
  const std::lock_guard lock(mutex_);
  const auto at = ranges_.find(memory);
  if (at == ranges_.end()) {
    return Error{Code::kInvalidArgument, "memory to unmap: expected the beginning of a range that is mapped"};
  }
  const Range range = at->second;
  if (const int error = unmap_pieces(range.address, range.bytes); error != 0) {
    return errno_error(error, domain_->name() + ": expected to unmap " + kib(range.bytes) + " of the NVMe controller");
  }
  ranges_.erase(at);
  pinned_ -= range.bytes;
  free_.give_back(range.address, range.bytes);
  return {};
}

std::size_t VfioMapper::mapped_ranges() const {
  const std::lock_guard lock(mutex_);
  return ranges_.size();
}

std::uint64_t VfioMapper::pinned_bytes() const {
  const std::lock_guard lock(mutex_);
  return pinned_;
}

}  // namespace tardis::nvme
