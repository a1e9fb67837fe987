// SPDX-License-Identifier: Apache-2.0
#include "nvme/nvme_namespace.h"

#include <cerrno>

#include "nvme/io_run.h"

namespace tardis::nvme {

Result<std::unique_ptr<NvmeNamespace>> NvmeNamespace::open(std::shared_ptr<Driver> driver, std::uint32_t id) {
  const NamespaceInfo* const space = driver->find_namespace(id);
  if (space == nullptr) {
    std::string found;
    for (const NamespaceInfo& info : driver->namespaces()) found += " " + std::to_string(info.id);
    std::string message = "NVMe controller '" + driver->controller().model + "': expected namespace " +
                          std::to_string(id) + ", found" + (found.empty() ? " none" : found);
    for (const std::string& reason : driver->refused_namespaces()) message += "; " + reason;
    return Error{Code::kNotFound, std::move(message)};
  }
  return std::unique_ptr<NvmeNamespace>(new NvmeNamespace(std::move(driver), *space));
}

NvmeNamespace::NvmeNamespace(std::shared_ptr<Driver> driver, const NamespaceInfo& space)
    : driver_(std::move(driver)),
      space_(space),
      limits_(plan_limits(driver_->controller(), space_, driver_->options().max_command_bytes,
                          driver_->options().split_at_boundary, driver_->bounce_bytes())) {
  name_ = "NVMe namespace " + std::to_string(space_.id) + " of '" + driver_->controller().model + "' " +
          driver_->controller().serial;
}

void NvmeNamespace::run(std::span<NamespaceRequest> requests, const Completion& on_complete) {
  if (requests.empty()) return;
  const Driver::QueueLease queue(*driver_);
  IoRun(*driver_, *queue, space_, limits_).execute(requests, on_complete, false);
}

void NvmeNamespace::run_durably(std::span<NamespaceRequest> requests, const Completion& on_complete) {
  if (requests.empty()) return;
  const Driver::QueueLease queue(*driver_);
  IoRun(*driver_, *queue, space_, limits_).execute(requests, on_complete, true);
}

Status NvmeNamespace::flush() {
  if (driver_->state() != DriverState::kLive) return errno_error(driver_->closed_error(), name_ + ": flush");
  // Without a volatile cache what has completed is durable.
  if (!driver_->controller().volatile_cache) return {};
  int error = 0;
  {
    const Driver::QueueLease queue(*driver_);
    error = IoRun(*driver_, *queue, space_, limits_).flush();
  }
  // After the command: what was lost meanwhile, it did not make durable.
  if (driver_->cache_lost()) {
    return errno_error(EIO, name_ +
                                ": the controller failed or lost power with data in its volatile cache; what was "
                                "written since the last flush may be lost: open the store anew");
  }
  if (error != 0) return errno_error(error, name_ + ": flush");
  return {};
}

}  // namespace tardis::nvme
