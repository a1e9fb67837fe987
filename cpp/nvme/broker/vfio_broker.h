// SPDX-License-Identifier: Apache-2.0
// A broker of a controller of this machine.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "nvme/broker/broker.h"
#include "nvme/vfio/vfio_controller.h"

namespace tardis::nvme::broker {

struct VfioBrokerOptions {
  BrokerOptions broker;
  std::uint32_t client_queues = 32;  // asked for, of all clients together; the controller may grant fewer
  std::uint32_t admin_timeout_ms = 5'000;
  SystemPaths paths;
};

class VfioBroker {
 public:
  // Opens the controller and listens. Nothing that is refused is touched (docs/vfio.md). Needs an IOMMU.
  static Result<std::unique_ptr<VfioBroker>> open(const std::string& address, const VfioBrokerOptions& options);

  Broker& broker() { return *broker_; }
  VfioController& controller() { return *controller_; }

 private:
  // In the order of making; they go in the reverse order.
  std::shared_ptr<VfioController> controller_;
  std::unique_ptr<Broker> broker_;
};

}  // namespace tardis::nvme::broker
