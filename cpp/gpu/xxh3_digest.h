/* SPDX-License-Identifier: Apache-2.0 */
/* Digests of chunks on the GPU, equal to those of the store (docs/on-disk-format.md). C ABI of libtardis_gpu.so. */
#ifndef TARDIS_GPU_XXH3_DIGEST_H_
#define TARDIS_GPU_XXH3_DIGEST_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Enqueues digests_dev[i] = XXH3-64 of piece_bytes_dev[i] bytes at pieces_dev[i], for i < chunks. The three arrays are
 * device memory (or host memory that the device can reach); a piece is device or mapped pinned host memory of any
 * length and alignment, fastest at a multiple of 16. Everything must stay valid until the stream has passed.
 * `cuda_stream` is a cudaStream_t, NULL for the default stream. Returns a cudaError_t: that of the launch, or
 * cudaErrorInvalidValue for a null array. Does not wait; does not touch the current device. */
__attribute__((visibility("default"))) int tardis_gpu_chunk_digests(const void* const* pieces_dev,
                                                                    const uint64_t* piece_bytes_dev,
                                                                    uint64_t* digests_dev, uint32_t chunks,
                                                                    void* cuda_stream);

#ifdef __cplusplus
}
#endif
#endif
