/* SPDX-License-Identifier: Apache-2.0 */
/* A GPU's memory for direct landing (tardis/gio_direct.h), moved by its copy engines. C ABI of libtardis_gpu.so. Every
 * function returns a cudaError_t. */
#ifndef TARDIS_GIO_COPY_ENGINE_MEMORY_H_
#define TARDIS_GIO_COPY_ENGINE_MEMORY_H_

#include "tardis/copy_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

enum tardis_gpu_copy_calls {
  TARDIS_GPU_COPY_CALLS_BEST = 0,   /* cudaMemcpyBatchAsync where runtime and driver have it (12.8), else single ones */
  TARDIS_GPU_COPY_CALLS_SINGLE = 1, /* one cudaMemcpyAsync a piece */
};

/* Which calls it makes was tried out, and is in the engine's name. Lanes are streams of their own, of the highest
 * priority: nothing of the caller's is in them. Opening it, and each call of it, makes `device` the current one of the
 * calling thread. */
__attribute__((visibility("default"))) int tardis_gpu_copy_engine_open(int device, int calls,
                                                                       tardis_copy_engine* engine);
/* After its lanes. */
__attribute__((visibility("default"))) int tardis_gpu_copy_engine_close(tardis_copy_engine* engine);

#ifdef __cplusplus
}
#endif
#endif
