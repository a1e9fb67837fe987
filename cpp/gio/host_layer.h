// SPDX-License-Identifier: Apache-2.0
// A layer of KV pages by the calling thread: the ring that a GPU runs, with 32 lanes in turn.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "gio/granted_queue.h"
#include "tardis/gio_layer.h"

namespace tardis::gio {

// Of working memory, for rings of these queues in turn.
std::size_t host_work_bytes(const GrantedQueue* queues, std::uint32_t rings);
// Null: run_host_layer() can run it; else what is expected of it.
const char* host_complaint_of(const tardis_gio_layer& layer);
// Prepares the contexts and works through them, one queue pair after the other. `layer` is one that can be run.
void run_host_layer(const tardis_gio_layer& layer);

}  // namespace tardis::gio
