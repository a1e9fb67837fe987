// SPDX-License-Identifier: Apache-2.0
// A medium that takes the time of a drive. It waits for nothing itself: its requests say when a drive would have
// finished them, and the controller posts their completions then.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "nvme/soft/medium.h"

namespace tardis::nvme {

struct DriveModel {
  double read_bytes_per_ns = 6.8;   // GB/s
  double write_bytes_per_ns = 3.5;  // GB/s
  std::uint64_t read_ns = 70'000;   // of one request on an idle drive, beside the transfer
  std::uint64_t write_ns = 15'000;
  std::uint64_t flush_ns = 1'000'000;
  double read_slowdown = 2.0;  // of transfers and latency of reads while writes are under way
};

class PacedMedium final : public Medium {
 public:
  PacedMedium(std::shared_ptr<Medium> base, const DriveModel& model) : base_(std::move(base)), model_(model) {}

  std::uint64_t bytes() const override { return base_->bytes(); }
  std::uint32_t granularity() const override { return base_->granularity(); }
  bool immediate() const override { return base_->immediate(); }
  bool needs_flush() const override { return base_->needs_flush(); }
  bool deallocates_to_zero() const override { return base_->deallocates_to_zero(); }
  void run(std::span<MediumRequest> requests, const Completion& on_complete) override;

 private:
  std::uint64_t due(const MediumRequest& request, std::uint64_t now);

  const std::shared_ptr<Medium> base_;
  const DriveModel model_;
  std::mutex mutex_;
  // When the transfers that were asked for so far are over.
  std::uint64_t reads_until_ = 0, writes_until_ = 0;
};

}  // namespace tardis::nvme
