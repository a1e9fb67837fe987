// SPDX-License-Identifier: Apache-2.0
#include "nvme/broker/vfio_broker.h"

#include <utility>

namespace tardis::nvme::broker {

Result<std::unique_ptr<VfioBroker>> VfioBroker::open(const std::string& address, const VfioBrokerOptions& options) {
  VfioOptions vfio;
  vfio.paths = options.paths;
  // One queue pair that is hardly used; the others are the clients'.
  vfio.driver.queues = 1;
  vfio.driver.queue_entries = 8;
  vfio.driver.bounce_buffers = 1;
  vfio.driver.external_queues = options.client_queues;
  vfio.driver.admin_timeout_ms = options.admin_timeout_ms;
  auto controller = VfioController::open(address, std::move(vfio));
  if (!controller) return controller.error();
  const auto file = (*controller)->device().register_file();
  if (!file) return file.error();
  auto made = std::make_unique<VfioBroker>();
  made->controller_ = std::move(*controller);
  auto broker = Broker::open(*made->controller_->driver(), made->controller_->mapper(),
                             {file->fd, DoorbellKind::kVfio, file->offset, file->bytes}, options.broker);
  if (!broker) return broker.error();
  made->broker_ = std::move(*broker);
  return made;
}

}  // namespace tardis::nvme::broker
