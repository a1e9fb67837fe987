// SPDX-License-Identifier: Apache-2.0
// A volatile write cache over another medium: what was not flushed is lost in a power cut, or not, or in part.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "nvme/soft/medium.h"

namespace tardis::nvme {

struct CacheOptions {
  std::uint64_t most_bytes = 64u << 20;  // held back; then all is written to the medium, as a drive would
  std::uint32_t atomic_bytes = 512;      // writes of up to this are kept or lost as a whole
  std::uint32_t torn_bytes = 512;  // of larger ones, each aligned piece of this; a power of two, 512 at least. Pieces
                                   // are no smaller than the medium's granularity.
};

class CachedMedium final : public Medium {
 public:
  explicit CachedMedium(std::shared_ptr<Medium> base, const CacheOptions& options = {});

  std::uint64_t bytes() const override { return base_->bytes(); }
  std::uint32_t granularity() const override { return base_->granularity(); }
  bool immediate() const override { return base_->immediate(); }
  bool needs_flush() const override { return true; }
  bool deallocates_to_zero() const override { return base_->deallocates_to_zero(); }
  void run(std::span<MediumRequest> requests, const Completion& on_complete) override;

  struct Cut {
    std::uint64_t kept = 0, lost = 0, torn = 0;  // writes
  };
  // Of the writes that were not flushed, some reach the medium, in any order: as a whole, in part, or not at all. No
  // request may run meanwhile: the controller's power is cut first.
  Cut power_cut(std::mt19937_64& random);
  std::uint64_t unflushed_bytes() const;

 private:
  struct Write {
    std::uint64_t offset;
    std::uint64_t bytes;
    std::vector<std::byte> data;  // empty: zeros
  };
  using WritePtr = std::shared_ptr<const Write>;

  int read(MediumRequest& request);
  int write(MediumRequest& request);
  int flush(MediumRequest& request);
  int write_back(MediumRequest& above);
  // `above`: the request that this is for, and that takes as long.
  int to_base(MediumRequest below, MediumRequest& above);

  const std::shared_ptr<Medium> base_;
  const CacheOptions options_;
  mutable std::mutex mutex_;
  // Sectors of 512 bytes, by number, and the writes that changed them since the last flush, oldest first.
  std::map<std::uint64_t, std::vector<WritePtr>> sectors_;
  std::uint64_t held_bytes_ = 0;
};

}  // namespace tardis::nvme
