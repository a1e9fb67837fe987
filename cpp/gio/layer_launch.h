// SPDX-License-Identifier: Apache-2.0
// A layer of KV pages in one call of the host, and the stream's wait for it. C ABI of libtardis_gpu.so, as
// ring_kernel.h.
#pragma once

#include <cstdint>

#include "tardis/gio_layer.h"

#define TARDIS_GPU_EXPORT extern "C" __attribute__((visibility("default")))

// Enqueues prepare and the rings: two launches. The flag must be 0 by then, and before the fork of those that wait for
// it. Device addresses throughout; statuses and reports may be mapped host memory. `work` is not looked at.
TARDIS_GPU_EXPORT int tardis_gpu_gio_layer(const tardis_gio_layer* layer, void* cuda_stream);

// Makes the stream wait until *flag_dev is not 0.
TARDIS_GPU_EXPORT int tardis_gpu_gio_wait(const std::uint32_t* flag_dev, void* cuda_stream);

// Loads every kernel that a gio session or an index enqueues, and looks up the wait; see tardis_gpu_gio_load().
TARDIS_GPU_EXPORT int tardis_gpu_load();

// The same struct as libtardis.so tells of: the two must be of one build.
TARDIS_GPU_EXPORT void tardis_gpu_gio_layer_sizes(tardis_gio_sizes* sizes);
// Of a cudaError_t; constant.
TARDIS_GPU_EXPORT const char* tardis_gpu_error_text(int error);
