// SPDX-License-Identifier: Apache-2.0
// Where objects lie, for who reads them by other means than get(): through a controller, from a GPU.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "store/format.h"

namespace tardis {

// Gives every byte that a segment of a store can have a number, which stays the same for as long as there is the store:
// each number that a segment can have on each path has its place, whether there is such a segment or not.
struct SegmentAddresses {
  std::uint64_t stride = 0;  // bytes of a segment

  // The highest stride of which the end fits.
  static constexpr std::uint64_t kMaxStride = std::uint64_t{1} << 38;

  constexpr std::uint64_t of(SegmentName name, std::uint64_t offset) const { return name.word() * stride + offset; }
  constexpr SegmentName segment_of(std::uint64_t address) const {
    const auto word = static_cast<std::uint32_t>(address / stride);
    return {word >> kSegmentBits, word & (kMaxSegments - 1)};
  }
  constexpr std::uint64_t end() const { return std::uint64_t{kMaxPaths} * kMaxSegments * stride; }
};
static_assert(kMaxPaths * std::uint64_t{kMaxSegments} * SegmentAddresses::kMaxStride == std::uint64_t{1} << 62);

struct Extent {
  std::uint64_t address = 0, bytes = 0;
};

// Objects whose slots are not given to others while this lives, also if they are evicted or deleted meanwhile; what was
// stored there can be read until then. What a crash or a drive may have done to the bytes shows in their digest alone.
// To be gone before the store is closed, which waits for it.
class Lease {
 public:
  class Held;
  Lease() noexcept;  // on nothing
  explicit Lease(std::unique_ptr<Held> held);
  Lease(Lease&&) noexcept;
  Lease& operator=(Lease&&) noexcept;
  ~Lease();

  std::size_t size() const;  // the leading run of the objects that were asked for
  // A layer is bytes [part * part_stride, part * part_stride + part_bytes) of an object.
  const ObjectGeometry& geometry() const;
  std::uint64_t root_digest(std::size_t object) const;
  std::uint64_t generation(std::size_t object) const;
  std::uint64_t digest_address(std::size_t object) const;  // of its chunk digests, geometry().chunks() of them
  // Where bytes [first, first + bytes) of its stored_bytes() are, in their order. Empty: it has no such bytes.
  std::vector<Extent> extents(std::size_t object, std::uint64_t first, std::uint64_t bytes) const;

 private:
  std::unique_ptr<Held> held_;
};

// A read of bytes by their addresses.
struct AddressRead {
  std::uint64_t address = 0;      // a multiple of what the device asks of offsets, as the length is
  std::span<const iovec> memory;  // any alignment and any count
  int error = 0;  // out: 0, or a positive errno; ENXIO: no segment has these addresses, ESHUTDOWN: the store is closed
};

}  // namespace tardis
