/* SPDX-License-Identifier: Apache-2.0 */
/* Restores of pages that the GPU drives by itself (docs/restore.md): keys in device memory, and from the index and the
 * block table what of them is in HBM, is landed from pinned memory, is read from a drive, or gets a page to be computed
 * into. C ABI of libtardis_gpu.so.
 *
 *   begin, layer 0, layer 1, ..., end, [the model computes], commit
 *
 * As in gstore/index.h: everything is enqueued, in one stream or as a part of a graph; nothing allocates or waits; the
 * structs are read before a call returns, counts and arrays when the kernels run. Launches: a fixed number, and a fixed
 * number a layer. Restores that share a workspace follow each other in one stream. */
#ifndef TARDIS_GSTORE_RESTORE_H_
#define TARDIS_GSTORE_RESTORE_H_

#include "gstore/blocks.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tardis_gpu_restore_shape {
  uint32_t max_pages; /* of a restore: with command_bytes below, at most 2,048 commands a layer */
  uint32_t layers;
  uint32_t sides;         /* 2: K and V; 1: one buffer, as MLA has it */
  uint32_t page_bytes;    /* of one side of a page in one layer, without a gap to the next page */
  uint32_t command_bytes; /* most of a command: whole blocks, and multiples of 16 KiB if a page needs several */
  uint32_t block_shift;   /* of the drive */
  uint32_t layer_digests; /* digests of one layer of a page, one for each 16 KiB; 0: none are compared */
  uint32_t reserved;
} tardis_gpu_restore_shape;

/* What a restore moves between. HBM block i of the block table is page i of every layer's pool. */
typedef struct tardis_gpu_restore_places {
  tardis_gpu_index index; /* locations are handles of rows */
  tardis_gpu_blocks blocks;
  const uint64_t* key_layers;    /* pinned and mapped: address of page 0 of each layer's K (or its one buffer) */
  const uint64_t* value_layers;  /* of its V; NULL: one side */
  uint64_t dram;                 /* address of pinned block 0 */
  uint64_t dram_stride;          /* from one to the next */
  uint64_t layer_stride;         /* of an object in pinned memory and on the drive; bytes [layer][K,V] */
  const uint64_t* page_blocks;   /* first block on the drive of each file block */
  uint64_t* digests;             /* of each file block [layer][digest]; NULL if layer_digests is 0 */
  tardis_gpu_index_entry* names; /* device memory, one for each row: what pages are called that no file has */
  uint32_t space;                /* namespace of the keys */
  uint32_t reserved;
} tardis_gpu_restore_places;

typedef struct tardis_gpu_restore {
  tardis_gpu_restore_shape shape;
  tardis_gpu_restore_places places;
  void* memory; /* the workspace */
} tardis_gpu_restore;

enum tardis_gpu_restore_outcome {
  TARDIS_GPU_RESTORE_HIT = 0,     /* was in HBM */
  TARDIS_GPU_RESTORE_LANDED = 1,  /* is there now; between begin and end: will be */
  TARDIS_GPU_RESTORE_NEW = 2,     /* unknown: the page is to be computed */
  TARDIS_GPU_RESTORE_LATER = 3,   /* on its way elsewhere, or used while it cannot be read: ask again */
  TARDIS_GPU_RESTORE_NO_ROOM = 4, /* no free page in HBM */
  TARDIS_GPU_RESTORE_DAMAGED = 5, /* what was read is not what was stored: the page is unknown from now on */
  TARDIS_GPU_RESTORE_FAILED = 6,  /* could not be read, for now */
  TARDIS_GPU_RESTORE_OUTCOMES = 7,
};

/* Of each key. The first three have a page, and hold a reference on its row that is the caller's to give back. */
typedef struct tardis_gpu_restore_result {
  uint64_t page; /* of the pools, all ones: none */
  uint64_t handle;
  uint32_t source;  /* tardis_gpu_source */
  uint32_t outcome; /* tardis_gpu_restore_outcome */
} tardis_gpu_restore_result;

typedef struct tardis_gpu_restore_counts {
  uint64_t sources[TARDIS_GPU_SOURCES];           /* of classify */
  uint64_t outcomes[TARDIS_GPU_RESTORE_OUTCOMES]; /* counted by end */
  uint64_t written;                               /* new pages that have a file block by write_end */
  uint64_t late; /* file blocks that a write without an end may come to yet: taken until the table is reset */
} tardis_gpu_restore_counts;

/* Of device memory, aligned to 256 bytes and zeroed; 0: a shape that makes no sense. */
TARDIS_GPU_API uint64_t tardis_gpu_restore_memory_bytes(const tardis_gpu_restore_shape* shape);

/* In device memory: counts since it was zeroed; a word for each layer, enum IoFlag (gio/iocb.h), raised when the
 * layer's pages from pinned memory and from the drive have landed, or some of them have not; its ring reports,
 * kMostQueues of them. */
TARDIS_GPU_API tardis_gpu_restore_counts* tardis_gpu_restore_counts_of(const tardis_gpu_restore* restore);
TARDIS_GPU_API uint32_t* tardis_gpu_restore_flag(const tardis_gpu_restore* restore, uint32_t layer);
TARDIS_GPU_API void* tardis_gpu_restore_reports(const tardis_gpu_restore* restore, uint32_t layer);

/* Loads the kernels, before anything waits for a flag. */
TARDIS_GPU_API int tardis_gpu_restore_load(void);

/* Looks the keys up (32 bytes each, no key twice), takes pages for them and lowers the layers' flags. All of results
 * but the outcomes of what is landed is there when this has run. */
TARDIS_GPU_API int tardis_gpu_restore_begin(const tardis_gpu_restore* restore, const void* keys, const uint32_t* count,
                                            tardis_gpu_restore_result* results, void* cuda_stream);

/* Lands one layer. `queues`: `rings` of them, as tardis_gio_queues wrote them, and where there are digests not changed
 * by tardis_gio_direct_queues (cudaErrorInvalidValue: nobody would compare them); `mover_ctas` 1 to 4 for each of the
 * two kernels that move bytes, one after the other. */
TARDIS_GPU_API int tardis_gpu_restore_layer(const tardis_gpu_restore* restore, uint32_t layer, const void* queues,
                                            uint32_t rings, uint32_t mover_ctas, uint64_t deadline_ns,
                                            void* cuda_stream);

/* Ends the moves: a page of which every layer is good is in HBM; another one (all of them, if a layer was not enqueued)
 * is where it was, its outcome says why, and it has no page and no reference. Damaged ones leave index and block table.
 * `keys`, `count`, `results` as in begin. */
TARDIS_GPU_API int tardis_gpu_restore_end(const tardis_gpu_restore* restore, const void* keys, const uint32_t* count,
                                          tardis_gpu_restore_result* results, void* cuda_stream);

/* After what computes the new pages: other restores find them from now on. */
TARDIS_GPU_API int tardis_gpu_restore_commit(const tardis_gpu_restore* restore, const void* keys, void* cuda_stream);

/* One layer of the new pages to pinned memory, so that the host can store them: object k, in the order of their keys,
 * at staging + k * stride. */
TARDIS_GPU_API int tardis_gpu_restore_copy_new(const tardis_gpu_restore* restore, uint32_t layer, uint64_t staging,
                                               uint64_t stride, uint32_t mover_ctas, void* cuda_stream);

/* The new pages to a drive that the block table's file blocks are of (a raw namespace; a store is written by the host):
 * write_begin behind commit, every layer, write_end. Until then the pages are as others without a file block; where the
 * write fails, or there is no free block, they stay so. A block whose write has no end by the deadline is given to
 * nobody any more (`late`). Rings make the digests. The references on the pages are given back behind it: one that
 * leaves HBM meanwhile stays without a file block. */
TARDIS_GPU_API int tardis_gpu_restore_write_begin(const tardis_gpu_restore* restore, void* cuda_stream);
TARDIS_GPU_API int tardis_gpu_restore_write_layer(const tardis_gpu_restore* restore, uint32_t layer, const void* queues,
                                                  uint32_t rings, uint32_t mover_ctas, uint64_t deadline_ns,
                                                  void* cuda_stream);
TARDIS_GPU_API int tardis_gpu_restore_write_end(const tardis_gpu_restore* restore, void* cuda_stream);

/* Moves the *want (at most max_pages) least valuable pages without a reference from HBM to pinned memory, as far as
 * there is room, or (to_files) out of HBM or pinned memory: to their file block, or, where they have none, out of the
 * table and the index. `scratch` and `bonus` as for tardis_gpu_blocks_candidates. */
TARDIS_GPU_API int tardis_gpu_restore_to_dram(const tardis_gpu_restore* restore, const uint32_t* want, uint32_t bonus,
                                              void* scratch, uint32_t mover_ctas, void* cuda_stream);
TARDIS_GPU_API int tardis_gpu_restore_to_files(const tardis_gpu_restore* restore, uint32_t tier, const uint32_t* want,
                                               uint32_t bonus, void* scratch, void* cuda_stream);

#ifdef __cplusplus
}
#endif
#endif
