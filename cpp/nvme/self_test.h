// SPDX-License-Identifier: Apache-2.0
// Whether a controller really reaches a kind of memory: found out with transfers whose bytes are compared.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "nvme/memory.h"
#include "nvme/nvme_namespace.h"

namespace tardis::nvme {

inline constexpr std::uint64_t kSelfTestBytes = 128 << 10;

// Moves patterns from the provider's memory to the namespace and back, in both cases with host memory at the other end.
// Uses kSelfTestBytes of the namespace from `scratch` on, which nobody else may use meanwhile, and puts back what was
// there. An error says what did not arrive: the provider must not be used then.
Status self_test(MemoryProvider& provider, NvmeNamespace& space, std::uint64_t scratch);

// Of a namespace that can only be read: kSelfTestBytes of it, the first that are there, read into both kinds of memory.
Status self_test_reads(MemoryProvider& provider, NvmeNamespace& space);

}  // namespace tardis::nvme
