// SPDX-License-Identifier: Apache-2.0
// The C ABI of transfers of a layer by the calling thread: the ring that a GPU runs, with 32 lanes in turn.
#include "tardis/gio_layer.h"

#include <algorithm>
#include <string>

#include "base/clock.h"
#include "capi/guarded.h"
#include "gio/host_mover.h"
#include "gio/lanes.h"
#include "gio/layer_call.h"
#include "gio/ring.h"

namespace {

using namespace tardis;
using capi::guarded;
using gio::GrantedQueue;
using Lanes = gio::HostLanes<32>;

Status refuse(const char* call, const std::string& why) {
  return Error{Code::kInvalidArgument, std::string(call) + ": " + why};
}

const GrantedQueue* queues_of(const void* queues) { return static_cast<const GrantedQueue*>(queues); }

bool are_queues(const void* queues, std::uint32_t rings) {
  return queues != nullptr && rings != 0 && rings <= gio::kMostQueues;
}

void prepare(const gio::LayerPages& pages, gio::IoContext* contexts, std::uint32_t* count) {
  const std::uint32_t wanted = pages.commands(*pages.count), commands = pages.commands_per_page();
  *count = wanted;
  if (wanted > gio::kMostContexts) return;
  for (std::uint32_t i = 0; i < wanted; ++i) contexts[i] = pages.context(i / commands, i % commands);
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
  std::size_t most = 0;
  for (std::uint32_t i = 0; are_queues(queues, rings) && i < rings; ++i) {
    most = std::max(most, gio::RingWork::bytes(queues_of(queues)[i].commands, Lanes::kWidth));
  }
  return most;
}

tardis_code tardis_gio_host_layer(const tardis_gio_layer* layer, char** error) {
  return guarded(error, [&]() -> Status {
    if (layer == nullptr) return refuse("tardis_gio_host_layer", "expected a layer, found NULL");
    if (const char* complaint = gio::complaint_of(*layer)) return refuse("tardis_gio_host_layer", complaint);
    if (layer->work == nullptr) return refuse("tardis_gio_host_layer", "expected working memory, found NULL");
    prepare(gio::pages_of(*layer), static_cast<gio::IoContext*>(layer->contexts), layer->context_count);
    gio::IoControlBlock iocb = gio::control_block_of(*layer);
    const std::uint64_t begin = monotonic_ns();
    for (std::uint32_t i = 0; i < layer->rings; ++i) {
      const std::uint64_t gone = monotonic_ns() - begin;  // the deadline is of all of them together
      iocb.deadline_ns = layer->deadline_ns - std::min(gone, layer->deadline_ns);
      const GrantedQueue& queue = queues_of(layer->queues)[i];
      const gio::RingWork work = gio::RingWork::in(layer->work, queue.commands, Lanes::kWidth);
      gio::HostMover mover(queue, work);
      gio::Ring<Lanes, gio::HostMover>(Lanes(), mover, queue, work).run(iocb, i, layer->rings);
    }
    return {};
  });
}
