// SPDX-License-Identifier: Apache-2.0
// Checks a store that is in use, changing nothing.
#pragma once

#include <functional>
#include <string>

#include "base/status.h"
#include "store/tools.h"

namespace tardis {

// Reads every header and payload without any lock. A page that fails is read again later, and judged only if its header
// stayed the same; a segment that was written since the store was last closed may hold what evictions and writers that
// gave up left behind, so that in it a failing page counts as `torn`, elsewhere as bad. `progress(done, total)` returns
// false to stop.
Result<VerifyResult> verify_live_store(const std::string& folder,
                                       const std::function<bool(std::uint64_t, std::uint64_t)>& progress);

}  // namespace tardis
