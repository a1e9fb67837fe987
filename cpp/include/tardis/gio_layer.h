/* SPDX-License-Identifier: Apache-2.0 */
/* One layer of KV pages between a pool and a gio session, in one call: by the calling thread (libtardis.so), or
 * enqueued for a GPU (libtardis_gpu.so: cpp/gio/layer_launch.h, which takes the same struct). Conventions of tardis.h.
 */
#ifndef TARDIS_GIO_LAYER_H_
#define TARDIS_GIO_LAYER_H_

#include "tardis/gio.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { TARDIS_GIO_WRITE = 1, TARDIS_GIO_READ = 2 };

/* Addresses are those of whoever runs it: of this process, or of the device. The arrays and counts are read when it
 * runs, the struct itself before the call returns. Zero in every field that is not named in a comment as optional is
 * an error. */
typedef struct tardis_gio_layer {
  /* Page i of the transfer: which page of the pools, which slot on the drive. */
  const uint32_t* pool_pages;
  const uint32_t* slots;
  const uint32_t* count;       /* one word: pages of this transfer */
  const uint64_t* slot_blocks; /* the first block of each slot; NULL: slot * blocks_per_slot */
  uint64_t pools[2];           /* page 0 of K and of V, multiples of 16; the second may be 0 */
  uint64_t page_stride[2];
  uint32_t page_bytes[2]; /* multiples of 16; together whole blocks. The second may be 0. */
  uint32_t most_pages;    /* ids in pool_pages and slots; a larger count is refused as a whole */
  uint32_t pool_page_count;
  uint32_t slot_count;  /* entries of slot_blocks, or slots of the drive */
  uint32_t op;          /* TARDIS_GIO_WRITE or TARDIS_GIO_READ */
  uint64_t first_block; /* of this layer in its slot; may be 0 */
  uint64_t blocks_per_slot;
  uint64_t digests; /* of this layer of page 0 of the transfer, 8 bytes for each 16 KiB; 0: none. Not with
                     * queues that land directly: an error */
  uint64_t digest_stride;
  uint32_t block_bytes;
  uint32_t most_bytes; /* of a command: whole blocks */
  /* Working memory, whose contents do not matter but for `ended`, 0 before the first use. */
  void* contexts; /* tardis_gio_sizes.most_contexts of them, 16-byte aligned */
  uint32_t* context_count;
  uint32_t* ended;
  void* work; /* host only: tardis_gio_host_work_bytes(), 64-byte aligned */
  /* What became of it: of each context, of each queue, and of all; the flag is written last. */
  uint32_t* statuses;
  void* reports; /* 16-byte aligned */
  uint32_t* flag;
  uint64_t deadline_ns; /* from its start to its end; at most 15 s */
  const void* queues;   /* of tardis_gio_queues(), started */
  uint32_t rings;       /* how many of them */
  uint32_t ctas;        /* GPU only: 1 to 4 */
} tardis_gio_layer;

/* What a caller that declares the struct in another language compares with. */
typedef struct tardis_gio_sizes {
  uint32_t layer, layer_statuses, layer_ctas; /* sizeof, and offsets of two fields */
  uint32_t context, report, queue, state;     /* bytes of each */
  uint32_t most_contexts, most_queues;
} tardis_gio_sizes;
TARDIS_API void tardis_gio_layer_sizes(tardis_gio_sizes* sizes);

/* Starts queue pairs whose state and uses are memory of this process, after they were granted or made anew. */
TARDIS_API tardis_code tardis_gio_host_start(const void* queues, uint32_t rings, char** error);
TARDIS_API size_t tardis_gio_host_work_bytes(const void* queues, uint32_t rings);

/* Prepares the contexts and works through them by the calling thread, one queue pair after the other. That commands
 * were refused or failed, or that the deadline passed, is no error of the call: flag, statuses and reports say so. */
TARDIS_API tardis_code tardis_gio_host_layer(const tardis_gio_layer* layer, char** error);

#ifdef __cplusplus
}
#endif
#endif
