// SPDX-License-Identifier: Apache-2.0
// Rings on a GPU. C ABI of libtardis_gpu.so (docs/gio-ring.md). Everything is enqueued on a stream and may be captured
// in a graph; nothing here allocates or waits. Every function returns a cudaError_t.
#pragma once

#include <cstdint>

#include "gio/granted_queue.h"
#include "gio/iocb.h"
#include "gio/link.h"

#define TARDIS_GPU_EXPORT extern "C" __attribute__((visibility("default")))

// Loads the kernels. Once before anything waits on a flag: a kernel that is loaded on its first launch waits for the
// device, and so for ever behind a stream that waits for that kernel.
TARDIS_GPU_EXPORT int tardis_gpu_gio_load();

// Starts `rings` (1 to 16) queue pairs, after they were granted or made anew. `queues` is read before the call returns;
// their state and uses are device memory.
TARDIS_GPU_EXPORT int tardis_gpu_gio_start_queues(const tardis::gio::GrantedQueue* queues, std::uint32_t rings,
                                                  void* cuda_stream);

// Clears the flag, for one use of the IOCB. Before the fork of those that wait for it.
TARDIS_GPU_EXPORT int tardis_gpu_gio_clear(const tardis::gio::IoControlBlock* iocb, void* cuda_stream);

// Works through the IOCB on all the queue pairs, shared between `ctas` (1 to 4) CTAs, at most 12 in each (10 where
// contexts may name digests, which are compared or made while the bytes pass), and ends within its deadline. Both
// arguments are read before the call returns; the contexts and their number when the kernel starts. `flag` and `ended`
// are device memory; contexts, statuses, reports and times may be mapped host memory. At most 15 s: the movers take 20
// s without anything to do for a bug, and end the process.
TARDIS_GPU_EXPORT int tardis_gpu_gio_run(const tardis::gio::GrantedQueue* queues, std::uint32_t rings,
                                         const tardis::gio::IoControlBlock* iocb, std::uint32_t ctas,
                                         void* cuda_stream);

// The same as traffic of a class (docs/gio.md), in the direction of most of its bytes: what goes between bounce slots
// and HBM keeps to the class's budget while it is outranked. The deadline does not wait for that.
TARDIS_GPU_EXPORT int tardis_gpu_gio_run_in_class(const tardis::gio::GrantedQueue* queues, std::uint32_t rings,
                                                  const tardis::gio::IoControlBlock* iocb, std::uint32_t ctas,
                                                  const tardis_gpu_link_traffic* traffic, void* cuda_stream);
