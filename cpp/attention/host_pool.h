/* SPDX-License-Identifier: Apache-2.0 */
/* Host memory for torch's caching allocator: the functions of a CUDAPluggableAllocator, whose blocks kernels read and
 * write in place. C ABI of libtardis_gpu.so. Such functions are given no context and cannot say why they failed: both
 * are kept for the process, under a lock. Any thread. */
#ifndef TARDIS_ATTENTION_HOST_POOL_H_
#define TARDIS_ATTENTION_HOST_POOL_H_

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TARDIS_GPU_HOST_POOL_EXPORT __attribute__((visibility("default")))

typedef struct tardis_gpu_host_pool_settings {
  uint64_t most_bytes;        /* of all blocks together; 0: as many as there are */
  uint64_t step_bytes;        /* of a call that pins; 0: 64 GiB */
  uint32_t threads;           /* that touch new memory; 0: 16 */
  uint32_t unchecked;         /* 1: do not compare with what the machine says is available before taking it */
  uint32_t no_reserved_pages; /* 1: leave huge pages that were set aside to others */
  uint32_t reserved;
} tardis_gpu_host_pool_settings;

typedef struct tardis_gpu_host_pool_usage {
  uint64_t bytes; /* in blocks now */
  uint64_t peak_bytes;
  uint64_t blocks;
  uint64_t reserved_page_bytes; /* of `bytes`: in huge pages that were set aside */
  uint64_t node_bytes;          /* of `bytes`: the kernel was asked for the node of the GPU */
  uint64_t failures;            /* allocations that were refused */
  uint64_t kept_bytes;          /* freed by torch, but kept: a device may still write there */
  int32_t node;                 /* of the device of the last block; -1: the machine has one, or does not say */
  uint32_t reserved;
} tardis_gpu_host_pool_usage;

/* Of blocks to come. A cudaError_t. */
TARDIS_GPU_HOST_POOL_EXPORT int tardis_gpu_host_pool_configure(const tardis_gpu_host_pool_settings* settings);
TARDIS_GPU_HOST_POOL_EXPORT void tardis_gpu_host_pool_usage_of(tardis_gpu_host_pool_usage* usage);
/* Why the last allocation failed, ended by a zero, cut to `bytes`; empty: none has failed since this was last asked. */
TARDIS_GPU_HOST_POOL_EXPORT void tardis_gpu_host_pool_take_error(char* text, size_t bytes);

/* Bytes that this process may still take: of the machine, or of its tightest control group, and huge pages that were
 * set aside. 0: not known. */
TARDIS_GPU_HOST_POOL_EXPORT uint64_t tardis_gpu_host_pool_available(void);

/* torch.cuda.memory.CUDAPluggableAllocator(path, "tardis_gpu_host_pool_allocate", "tardis_gpu_host_pool_free"). NULL:
 * see take_error. The stream is not used: new memory is zero and nobody's. Freeing waits for the device. */
TARDIS_GPU_HOST_POOL_EXPORT void* tardis_gpu_host_pool_allocate(ssize_t bytes, int device, void* stream);
TARDIS_GPU_HOST_POOL_EXPORT void tardis_gpu_host_pool_free(void* memory, ssize_t bytes, int device, void* stream);

#ifdef __cplusplus
}
static_assert(sizeof(tardis_gpu_host_pool_settings) == 32, "ABI");
static_assert(sizeof(tardis_gpu_host_pool_usage) == 64, "ABI");
#endif
#endif
