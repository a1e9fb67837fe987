/* SPDX-License-Identifier: Apache-2.0 */
/* Registers of PCI devices, mapped for a GPU: the doorbells that a kernel rings. C ABI of libtardis_gpu.so; every
 * function returns a cudaError_t. */
#ifndef TARDIS_GPU_IO_MEMORY_H_
#define TARDIS_GPU_IO_MEMORY_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TARDIS_GPU_IO_MEMORY_EXPORT __attribute__((visibility("default")))

/* Makes whole pages of a BAR, as this process has them mapped, reachable for kernels of the current device, with
 * cudaHostRegisterIoMemory. `*device` is their address for kernels. The mapping of the BAR must outlive it. */
TARDIS_GPU_IO_MEMORY_EXPORT int tardis_gpu_io_memory_map(void* memory, uint64_t bytes, void** device);
TARDIS_GPU_IO_MEMORY_EXPORT int tardis_gpu_io_memory_unmap(void* memory);

/* Self-test: maps, loads values[i] from `offsets[i]` (multiples of 4, below `bytes`) by a kernel, in their order, and
 * unmaps. Waits. At most 64 words. A tardis_nvme_reader (tardis/nvme.h). */
TARDIS_GPU_IO_MEMORY_EXPORT int tardis_gpu_io_memory_read(void* memory, uint64_t bytes, const uint32_t* offsets,
                                                          uint32_t* values, uint32_t count);

/* What the driver says of the current device; -1: it does not say. */
struct tardis_gpu_peer_facts {
  int32_t devices;         /* how many there are */
  int32_t direct_rdma;     /* its memory can be given to other devices' drivers (nvidia-peermem) */
  int32_t dma_buf;         /* its memory can be given out as a dma-buf */
  int32_t register_memory; /* cudaHostRegister() works */
};
TARDIS_GPU_IO_MEMORY_EXPORT int tardis_gpu_peer_facts_of(struct tardis_gpu_peer_facts* facts);

#ifdef __cplusplus
}
#endif
#endif
