// SPDX-License-Identifier: Apache-2.0
#include "gio/host_layer.h"

#include <algorithm>

#include "base/clock.h"
#include "gio/host_mover.h"
#include "gio/lanes.h"
#include "gio/layer_call.h"
#include "gio/ring.h"

namespace tardis::gio {
namespace {

using Lanes = HostLanes<32>;

void prepare(const LayerPages& pages, IoContext* contexts, std::uint32_t* count) {
  const std::uint32_t wanted = pages.commands(*pages.count), commands = pages.commands_per_page();
  *count = wanted;
  if (wanted > kMostContexts) return;
  for (std::uint32_t i = 0; i < wanted; ++i) contexts[i] = pages.context(i / commands, i % commands);
}

}  // namespace

std::size_t host_work_bytes(const GrantedQueue* queues, std::uint32_t rings) {
  std::size_t most = 0;
  for (std::uint32_t i = 0; i < rings; ++i) {
    most = std::max(most, RingWork::bytes(queues[i].commands, Lanes::kWidth));
  }
  return most;
}

const char* host_complaint_of(const tardis_gio_layer& layer) {
  if (const char* complaint = complaint_of(layer)) return complaint;
  return layer.work == nullptr ? "expected working memory, found NULL" : nullptr;
}

void run_host_layer(const tardis_gio_layer& layer) {
  prepare(pages_of(layer), static_cast<IoContext*>(layer.contexts), layer.context_count);
  IoControlBlock iocb = control_block_of(layer);
  const std::uint64_t begin = monotonic_ns();
  for (std::uint32_t i = 0; i < layer.rings; ++i) {
    const std::uint64_t gone = monotonic_ns() - begin;  // the deadline is of all of them together
    iocb.deadline_ns = layer.deadline_ns - std::min(gone, layer.deadline_ns);
    const GrantedQueue& queue = static_cast<const GrantedQueue*>(layer.queues)[i];
    const RingWork work = RingWork::in(layer.work, queue.commands, Lanes::kWidth);
    HostMover mover(queue, work);
    Ring<Lanes, HostMover>(Lanes(), mover, queue, work).run(iocb, i, layer.rings);
  }
}

}  // namespace tardis::gio
