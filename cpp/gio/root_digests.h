/* SPDX-License-Identifier: Apache-2.0 */
/* Whether chunk digests are those of an object (docs/on-disk-format.md): to be asked of digests that come from a drive,
 * before any chunk is judged by them. C ABI of libtardis_gpu.so; can be captured in a graph. */
#ifndef TARDIS_GIO_ROOT_DIGESTS_H_
#define TARDIS_GIO_ROOT_DIGESTS_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum tardis_gpu_root_status {
  TARDIS_GPU_ROOT_GOOD = 0,
  TARDIS_GPU_ROOT_MISMATCH = 1, /* the digests are not those of the object with that root */
  TARDIS_GPU_ROOT_REFUSED = 2,  /* no address, or no multiple of 8: nothing was read */
};

/* An object's chunk digests are [layer][chunk] 8-byte integers without gaps, each object's at an address of its own.
 * A layer's digest is XXH3-64 of its chunk digests, the root XXH3-64 of the layers' digests. All of it is read when
 * the call's turn comes, from device or mapped host memory, and may change between replays; the struct itself is fixed
 * at capture. */
struct tardis_gpu_root_args {
  const uint64_t* objects;      /* [object]: address of its digests; NULL: object_base + object * object_stride */
  uint64_t object_base;         /* multiples of 8 */
  uint64_t object_stride;       /* bytes */
  const uint32_t* object_count; /* one word; more than max_objects counts as max_objects */
  uint32_t max_objects;
  uint32_t layers;                /* 1 or more */
  uint32_t chunks_per_layer;      /* 1 or more */
  uint32_t reserved;              /* 0 */
  const uint64_t* expected_roots; /* [object], of the index entries */
  uint64_t* layer_digests;        /* out, [object][layer]; those of an object that is not good prove nothing */
  uint32_t* status;               /* out, [object]: enum tardis_gpu_root_status */
  uint32_t* errors;               /* one word, increased by one for each object not good */
};

/* Enqueues it, one warp an object. `cuda_stream` is a cudaStream_t, NULL the default stream. Returns a cudaError_t:
 * cudaErrorInvalidValue for a null pointer (but objects) or a zero, else that of the launch. Does not wait. */
__attribute__((visibility("default"))) int tardis_gpu_check_roots(const struct tardis_gpu_root_args* args,
                                                                  void* cuda_stream);

/* Loads the kernel: once before anything waits for a flag (docs/gio-ring.md). */
__attribute__((visibility("default"))) int tardis_gpu_check_roots_load(void);

#ifdef __cplusplus
}
#endif
#endif
