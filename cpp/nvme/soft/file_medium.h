// SPDX-License-Identifier: Apache-2.0
// A namespace on files of a BlockDevice, laid end to end: any file system serves it, through the engine that the device
// chose.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "block/block_device.h"
#include "nvme/soft/medium.h"

namespace tardis::nvme {

class FileMedium final : public Medium {
 public:
  struct Part {
    FileId file = 0;
    std::uint64_t bytes = 0;  // a multiple of granularity()
  };
  // The files are open for writing, have their size already, and stay open; `device` outlives the medium.
  static Result<std::unique_ptr<FileMedium>> create(BlockDevice& device, std::vector<Part> parts);

  std::uint64_t bytes() const override { return ends_.back(); }
  std::uint32_t granularity() const override { return granularity_; }
  bool immediate() const override { return false; }
  bool needs_flush() const override { return true; }
  void memory_mapped(void* base, std::size_t bytes) override;
  void memory_unmapped(void* base) override { device_.unregister_memory(base); }
  void run(std::span<MediumRequest> requests, const Completion& on_complete) override;

 private:
  struct Batch;
  FileMedium(BlockDevice& device, std::vector<Part> parts, std::uint32_t granularity);
  void split(const MediumRequest& request, std::size_t index, Batch& batch) const;

  BlockDevice& device_;
  const std::vector<Part> parts_;
  const std::uint32_t granularity_;
  std::vector<std::uint64_t> ends_;  // of the parts, in bytes of the medium
  // Of a flush that failed; later ones fail alike, as the next fdatasync would report success for data that is lost.
  std::atomic<int> flush_error_{0};
};

}  // namespace tardis::nvme
