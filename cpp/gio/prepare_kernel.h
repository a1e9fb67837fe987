// SPDX-License-Identifier: Apache-2.0
// C ABI of libtardis_gpu.so, as ring_kernel.h.
#pragma once

#include <cstdint>

#include "gio/prepare.h"

// Enqueues contexts_dev[...] and *count_dev for `layer`, of which the struct is read before the call returns, the
// arrays and the count that it names when the kernel runs. `contexts_dev` has room for kMostContexts.
extern "C" __attribute__((visibility("default"))) int tardis_gpu_gio_prepare(const tardis::gio::LayerPages* layer,
                                                                             tardis::gio::IoContext* contexts_dev,
                                                                             std::uint32_t* count_dev,
                                                                             void* cuda_stream);
extern "C" __attribute__((visibility("default"))) int tardis_gpu_gio_prepare_load();
