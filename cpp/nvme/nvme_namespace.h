// SPDX-License-Identifier: Apache-2.0
// A namespace of a driven controller.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "nvme/driver.h"
#include "nvme/io_plan.h"
#include "nvme/raw_namespace.h"

namespace tardis::nvme {

class NvmeNamespace final : public RawNamespace {
 public:
  // An error if the driver has no such namespace or refused it.
  static Result<std::unique_ptr<NvmeNamespace>> open(std::shared_ptr<Driver> driver, std::uint32_t id);

  std::string name() const override { return name_; }
  std::uint64_t bytes() const override { return space_.blocks * space_.block_bytes; }
  std::uint32_t block_bytes() const override { return space_.block_bytes; }
  std::uint32_t atomic_bytes() const override { return space_.atomic_blocks * space_.block_bytes; }

  // On a queue pair of its own; with more callers than queue pairs they take turns.
  void run(std::span<NamespaceRequest> requests, const Completion& on_complete) override;
  // The same; what was written is durable when its request completes.
  void run_durably(std::span<NamespaceRequest> requests, const Completion& on_complete);
  Status flush() override;

  Status register_memory(void* base, std::size_t bytes) override { return driver_->register_memory(base, bytes); }
  void unregister_memory(void* base) override { driver_->unregister_memory(base); }

  Driver& driver() { return *driver_; }

 private:
  NvmeNamespace(std::shared_ptr<Driver> driver, const NamespaceInfo& space);

  const std::shared_ptr<Driver> driver_;
  const NamespaceInfo space_;
  const PlanLimits limits_;
  std::string name_;
};

}  // namespace tardis::nvme
