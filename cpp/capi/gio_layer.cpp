// SPDX-License-Identifier: Apache-2.0
// The C ABI of transfers of a layer by the calling thread.
#include "tardis/gio_layer.h"

#include <string>

#include "capi/guarded.h"
#include "gio/host_layer.h"
#include "gio/layer_call.h"

namespace {

using namespace tardis;
using capi::guarded;
using gio::GrantedQueue;

Status refuse(const char* call, const std::string& why) {
  return Error{Code::kInvalidArgument, std::string(call) + ": " + why};
}

const GrantedQueue* queues_of(const void* queues) { return static_cast<const GrantedQueue*>(queues); }

bool are_queues(const void* queues, std::uint32_t rings) {
  return queues != nullptr && rings != 0 && rings <= gio::kMostQueues;
}

}  // namespace

void tardis_gio_layer_sizes(tardis_gio_sizes* sizes) { *sizes = gio::layer_sizes(); }

tardis_code tardis_gio_host_start(const void* queues, uint32_t rings, char** error) {
  return guarded(error, [&]() -> Status {
    if (!are_queues(queues, rings)) return refuse("tardis_gio_host_start", "expected 1 to 16 queues");
    for (std::uint32_t i = 0; i < rings; ++i) {
      const GrantedQueue& queue = queues_of(queues)[i];
      if (queue.state == nullptr || queue.uses == nullptr) {
        return refuse("tardis_gio_host_start", "expected queues with state and uses");
      }
      start_queue(queue);
    }
    return {};
  });
}

size_t tardis_gio_host_work_bytes(const void* queues, uint32_t rings) {
  return are_queues(queues, rings) ? gio::host_work_bytes(queues_of(queues), rings) : 0;
}

tardis_code tardis_gio_host_layer(const tardis_gio_layer* layer, char** error) {
  return guarded(error, [&]() -> Status {
    if (layer == nullptr) return refuse("tardis_gio_host_layer", "expected a layer, found NULL");
    if (const char* complaint = gio::host_complaint_of(*layer)) return refuse("tardis_gio_host_layer", complaint);
    gio::run_host_layer(*layer);
    return {};
  });
}
