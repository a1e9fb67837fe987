// SPDX-License-Identifier: Apache-2.0
#include "store/digest.h"

#include <algorithm>
#include <vector>

#include "base/checksum.h"

namespace tardis {

void digest_chunks(const ObjectGeometry& geometry, const std::uint64_t* pieces, std::uint32_t first, std::uint32_t last,
                   std::uint64_t* out) {
  std::uint32_t region = 0;
  std::uint64_t region_start = 0;  // offset of `region` in the part
  for (std::uint32_t chunk = first; chunk < last; ++chunk) {
    std::uint64_t at = chunk * kChunkBytes;
    const std::uint64_t end = std::min(at + kChunkBytes, geometry.part_bytes);
    while (at >= region_start + geometry.region_bytes[region]) region_start += geometry.region_bytes[region++];
    const auto address = [&] { return reinterpret_cast<const void*>(pieces[region] + (at - region_start)); };
    if (end <= region_start + geometry.region_bytes[region]) {
      *out++ = xxh3_64(address(), end - at);
      continue;
    }
    Xxh3Stream stream;
    while (at < end) {
      const std::uint64_t stop = std::min(end, region_start + geometry.region_bytes[region]);
      stream.update(address(), stop - at);
      at = stop;
      if (at < end) region_start += geometry.region_bytes[region++];
    }
    *out++ = stream.digest();
  }
}

std::uint64_t digest_root(const ObjectGeometry& geometry, const std::uint64_t* chunk_digests,
                          std::uint64_t* part_digests) {
  std::vector<std::uint64_t> own;
  if (part_digests == nullptr) {
    own.resize(geometry.parts);
    part_digests = own.data();
  }
  for (std::uint32_t part = 0; part < geometry.parts; ++part) {
    part_digests[part] = xxh3_64(chunk_digests + std::size_t{part} * geometry.chunks_per_part,
                                 geometry.chunks_per_part * sizeof(std::uint64_t));
  }
  return xxh3_64(part_digests, geometry.parts * sizeof(std::uint64_t));
}

}  // namespace tardis
