/* SPDX-License-Identifier: Apache-2.0 */
/* Who moves bytes between host memory and memory that host threads cannot touch, such as a GPU's. libtardis_gpu.so
 * fills this in (cpp/gio/copy_engine_memory.h), libtardis.so calls it (tardis/gio_direct.h). Functions that return int
 * return 0 or an error number of the engine's own; no function throws. */
#ifndef TARDIS_COPY_ENGINE_H_
#define TARDIS_COPY_ENGINE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tardis_copy {
  void* host;   /* pinned */
  void* remote; /* of the engine's memory */
  uint64_t bytes;
} tardis_copy;

/* How a batch ended: all of its bytes are where they belong, seen by everybody, or (error other than 0) some may not
 * be. In both cases none of its copies runs any more. */
typedef struct tardis_copy_end {
  uint64_t batch;
  int32_t error;
  uint32_t reserved;
} tardis_copy_end;

typedef struct tardis_copy_engine {
  void* context;
  const char* name; /* "copy engines of GPU 0 (cudaMemcpyBatchAsync)" */

  /* At start and at the end, and for the self-test; these may wait. */
  int (*allocate)(void* context, uint64_t bytes, void** remote); /* at a multiple of 64 KiB */
  int (*release)(void* context, void* remote);
  int (*copy)(void* context, const tardis_copy* copy, int to_remote); /* done when it returns */
  int (*pin)(void* context, void* host, uint64_t bytes);
  int (*unpin)(void* context, void* host);

  /* A lane is used by one thread at a time. close_lane returns when none of its copies runs. */
  int (*open_lane)(void* context, void** lane);
  void (*close_lane)(void* lane);
  /* Neither waits. start: a batch of copies in one direction, in any order; not 0: none of them runs or will. poll: the
   * ends of batches since the last one, at most `most`, in any order; each batch that was started ends once. */
  int (*start)(void* lane, int to_remote, const tardis_copy* copies, size_t count, uint64_t batch);
  size_t (*poll)(void* lane, tardis_copy_end* ends, size_t most);
} tardis_copy_engine;

#ifdef __cplusplus
}
static_assert(sizeof(tardis_copy) == 24 && sizeof(tardis_copy_end) == 16 && sizeof(tardis_copy_engine) == 88,
              "between two libraries");
#endif
#endif
