// SPDX-License-Identifier: Apache-2.0
#include "block/run_scope.h"

#include <algorithm>

#include "base/clock.h"
#include "block/iovec_range.h"

namespace tardis {
namespace {

bool reads(std::span<const IoRequest> requests) {
  return std::any_of(requests.begin(), requests.end(), [](const IoRequest& r) { return r.op == IoRequest::Op::kRead; });
}

}  // namespace

RunScope::RunScope(RunState& state, std::span<const IoRequest> requests)
    : state_(state),
      requests_(requests),
      tuner_(reads(requests) ? state.read_tuner : state.write_tuner),
      measures_(requests.size() >= tuner_.depth()),
      depth_(measures_ ? tuner_.next() : tuner_.depth()),
      began_alone_(state.running.fetch_add(1) == 0),
      number_(state.started.fetch_add(1) + 1),
      began_ns_(monotonic_ns()) {
  if (&tuner_ == &state.read_tuner) {
    reading_.emplace(state.arbiter);
  } else {
    writing_.emplace(state.arbiter);
  }
}

RunScope::~RunScope() {
  const std::uint64_t elapsed = monotonic_ns() - began_ns_;
  const bool alone = began_alone_ && state_.started.load() == number_;
  state_.running.fetch_sub(1);
  if (!alone || !measures_) return;
  std::uint64_t bytes = 0;
  for (const IoRequest& request : requests_) {
    if (request.error != 0) return;
    bytes += total_bytes(request.memory);
  }
  tuner_.finished(depth_, bytes, elapsed);
}

}  // namespace tardis
