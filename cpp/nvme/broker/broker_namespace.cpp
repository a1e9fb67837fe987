// SPDX-License-Identifier: Apache-2.0
#include "nvme/broker/broker_namespace.h"

#include <cerrno>
#include <utility>

#include "nvme/io_run.h"

namespace tardis::nvme::broker {

Result<std::unique_ptr<BrokerNamespace>> BrokerNamespace::open(std::shared_ptr<BrokerClient> client,
                                                               const BrokerRange& range) {
  OpenRangeRequest request;
  request.namespace_id = range.namespace_id;
  request.first_block = range.first_block;
  request.blocks = range.blocks;
  if (range.name.size() >= sizeof request.name) {
    return Error{Code::kInvalidArgument, "range '" + range.name + "': expected a name of less than " +
                                             std::to_string(sizeof request.name) + " bytes"};
  }
  put_text(request.name, range.name);
  OpenRangeReply reply;
  if (auto done = client->link().call(Kind::kOpenRange, request, reply); !done) return done.error();
  return std::unique_ptr<BrokerNamespace>(new BrokerNamespace(std::move(client), range, reply));
}

BrokerNamespace::BrokerNamespace(std::shared_ptr<BrokerClient> client, const BrokerRange& range,
                                 const OpenRangeReply& reply)
    : client_(std::move(client)),
      range_(reply.range),
      first_block_(range.first_block),
      space_(info_of(reply.space)),
      limits_(plan_limits(client_->controller(), space_, client_->options().max_command_bytes,
                          client_->options().split_at_boundary, client_->bounce_bytes())) {
  space_.blocks = reply.blocks;
  // What is written whole has its place in the namespace, not in the range.
  if (space_.atomic_blocks == 0 || first_block_ % space_.atomic_blocks != 0) space_.atomic_blocks = 1;
  name_ = "range '" + range.name + "' of NVMe namespace " + std::to_string(space_.id) + " of '" +
          client_->controller().model + "' " + client_->controller().serial;
}

BrokerNamespace::~BrokerNamespace() {
  CloseRangeRequest request;
  request.range = range_;
  Answer answer;
  (void)client_->link().call(Kind::kCloseRange, request, answer);  // the end of a client closes its ranges too
}

void BrokerNamespace::run(std::span<NamespaceRequest> requests, const Completion& on_complete) {
  if (requests.empty()) return;
  const BrokerClient::QueueLease queue(*client_);
  IoRun(*client_, *queue, space_, limits_, first_block_).execute(requests, on_complete, false);
}

Status BrokerNamespace::flush() {
  if (client_->closed()) return errno_error(client_->closed_error(), name_ + ": flush");
  if (!client_->controller().volatile_cache) return {};
  int error = 0;
  {
    const BrokerClient::QueueLease queue(*client_);
    error = IoRun(*client_, *queue, space_, limits_, first_block_).flush();
  }
  // After the command: what was lost meanwhile, it did not make durable. Who made the queue again was told of the loss.
  if (client_->cache_lost()) {
    return errno_error(EIO, name_ +
                                ": the controller failed or lost power with data in its volatile cache; what was "
                                "written since the last flush may be lost: open the store anew");
  }
  if (error != 0) return errno_error(error, name_ + ": flush");
  return {};
}

}  // namespace tardis::nvme::broker
