// SPDX-License-Identifier: Apache-2.0
// A medium whose power goes at a chosen moment, also in the middle of a write.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "nvme/soft/medium.h"

namespace tardis::nvme::testing {

class PowerSwitch final : public Medium {
 public:
  explicit PowerSwitch(std::shared_ptr<Medium> inner) : inner_(std::move(inner)) {}

  static constexpr std::uint64_t kNever = ~std::uint64_t{0};
  // With the next request after so many. Of a write that is met, `part` of 256 reach the medium, from its beginning.
  void cut_after(std::uint64_t requests, unsigned part) {
    const std::lock_guard lock(mutex_);
    left_ = requests;
    part_ = part;
  }
  void cut() {
    const std::lock_guard lock(mutex_);
    cut_locked();
  }
  bool on() const { return on_.load(); }
  // Called at that moment, by whichever thread meets it.
  std::function<void()> at_cut;
  void ignore_flushes() { ignore_flushes_ = true; }

  std::uint64_t bytes() const override { return inner_->bytes(); }
  std::uint32_t granularity() const override { return inner_->granularity(); }
  bool immediate() const override { return inner_->immediate(); }
  bool needs_flush() const override { return inner_->needs_flush(); }
  void run(std::span<MediumRequest> requests, const Completion& on_complete) override {
    for (MediumRequest& request : requests) {
      {
        const std::lock_guard lock(mutex_);
        serve(request);
      }
      on_complete(request);
    }
  }

 private:
  void serve(MediumRequest& request) {
    request.error = EIO;
    if (!on_.load()) return;
    if (left_ == 0) {
      if (request.op == MediumRequest::Op::kWrite) write_part(request);
      return cut_locked();
    }
    if (left_ != kNever) --left_;
    request.error = 0;
    if (ignore_flushes_ && request.op == MediumRequest::Op::kFlush) return;
    pass(request);
  }
  void pass(MediumRequest& request) {
    inner_->run({&request, 1}, [](MediumRequest&) {});
  }
  void write_part(const MediumRequest& request) {
    std::uint64_t bytes = request.bytes * part_ / 256 / 512 * 512, left = bytes;
    if (bytes == 0) return;
    std::vector<iovec> memory;
    for (const iovec& piece : request.memory) {
      const std::size_t n = std::min<std::uint64_t>(left, piece.iov_len);
      if (n > 0) memory.push_back({piece.iov_base, n});
      left -= n;
    }
    MediumRequest part = request;
    part.memory = memory;
    part.bytes = bytes;
    pass(part);
  }
  void cut_locked() {
    if (!on_.exchange(false)) return;
    if (at_cut) at_cut();
  }

  const std::shared_ptr<Medium> inner_;
  std::mutex mutex_;
  std::atomic<bool> on_{true};
  bool ignore_flushes_ = false;
  std::uint64_t left_ = kNever;
  unsigned part_ = 0;
};

}  // namespace tardis::nvme::testing
