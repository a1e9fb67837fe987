// SPDX-License-Identifier: Apache-2.0
// Payload digests: XXH3-64 per 16 KiB chunk of a part, of a part's chunk digests, of an object's part digests.
#pragma once

#include <cstdint>

#include "store/format.h"

namespace tardis {

// Digests of chunks [first, last) of one part whose regions lie at pieces[0..regions). A chunk may straddle regions.
void digest_chunks(const ObjectGeometry& geometry, const std::uint64_t* pieces, std::uint32_t first, std::uint32_t last,
                   std::uint64_t* out);

// Root of an object from its chunk digests ([part][chunk]). part_digests may be null.
std::uint64_t digest_root(const ObjectGeometry& geometry, const std::uint64_t* chunk_digests,
                          std::uint64_t* part_digests = nullptr);

}  // namespace tardis
