// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/paced_medium.h"

#include <algorithm>
#include <vector>

#include "base/clock.h"

namespace tardis::nvme {

std::uint64_t PacedMedium::due(const MediumRequest& request, std::uint64_t now) {
  const auto transfer = [&](double rate, double factor) {
    return static_cast<std::uint64_t>(static_cast<double>(request.bytes) / rate * factor);
  };
  const std::lock_guard lock(mutex_);
  switch (request.op) {
    case MediumRequest::Op::kRead: {
      const double factor = writes_until_ > now ? model_.read_slowdown : 1;
      reads_until_ = std::max(reads_until_, now) + transfer(model_.read_bytes_per_ns, factor);
      return reads_until_ + static_cast<std::uint64_t>(static_cast<double>(model_.read_ns) * factor);
    }
    case MediumRequest::Op::kWrite:
      writes_until_ = std::max(writes_until_, now) + transfer(model_.write_bytes_per_ns, 1);
      return writes_until_ + model_.write_ns;
    case MediumRequest::Op::kWriteZeroes:
    case MediumRequest::Op::kDeallocate:
      return now + model_.write_ns;
    case MediumRequest::Op::kFlush:
      return std::max(writes_until_, now) + model_.flush_ns;
  }
  return now;
}

void PacedMedium::run(std::span<MediumRequest> requests, const Completion& on_complete) {
  const std::uint64_t now = monotonic_ns();
  std::vector<std::uint64_t> at;
  for (const MediumRequest& request : requests) at.push_back(due(request, now));
  base_->run(requests, [&](MediumRequest& request) {
    request.not_before = std::max(request.not_before, at[static_cast<std::size_t>(&request - requests.data())]);
    on_complete(request);
  });
}

}  // namespace tardis::nvme
