/* SPDX-License-Identifier: Apache-2.0 */
/* A few SMs set apart for movers, so that they neither wait for compute nor take more from it than they were given. C
 * ABI of libtardis_gpu.so. Where the driver cannot set SMs apart there is a stream of lowest priority instead, and the
 * partition says so. Not for graph capture: create it at start. */
#ifndef TARDIS_GIO_SM_PARTITION_H_
#define TARDIS_GIO_SM_PARTITION_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct tardis_gpu_partition;

enum tardis_gpu_partition_type {
  TARDIS_GPU_PRIORITY_STREAM = 0, /* any SM that compute leaves free, kernel by kernel */
  TARDIS_GPU_GREEN_CONTEXT = 1,   /* these SMs and no others */
};

/* On the current device. `sms`: how many to set apart (the driver may give more: it has a granularity); 0 asks for the
 * priority stream. Returns a cudaError_t; a fallback is a success, told by _kind() and _reason(). */
__attribute__((visibility("default"))) int tardis_gpu_partition_create(uint32_t sms,
                                                                       struct tardis_gpu_partition** partition);
/* Its streams must be idle. NULL is accepted. */
__attribute__((visibility("default"))) int tardis_gpu_partition_destroy(struct tardis_gpu_partition* partition);

/* The cudaStream_t for movers. */
__attribute__((visibility("default"))) void* tardis_gpu_partition_stream(const struct tardis_gpu_partition* partition);
/* A stream for compute on all the other SMs, or NULL with a priority stream. Compute on any other stream may still take
 * the partition's SMs. */
__attribute__((visibility("default"))) void* tardis_gpu_partition_rest_stream(
    const struct tardis_gpu_partition* partition);

__attribute__((visibility("default"))) uint32_t tardis_gpu_partition_kind(const struct tardis_gpu_partition* partition);
/* SMs that were set apart, and that are left; 0 and 0 with a priority stream. */
__attribute__((visibility("default"))) uint32_t tardis_gpu_partition_sms(const struct tardis_gpu_partition* partition);
__attribute__((visibility("default"))) uint32_t tardis_gpu_partition_rest_sms(
    const struct tardis_gpu_partition* partition);
/* Why it is of this kind, for people. Valid as long as the partition. */
__attribute__((visibility("default"))) const char* tardis_gpu_partition_reason(
    const struct tardis_gpu_partition* partition);

#ifdef __cplusplus
}
#endif
#endif
