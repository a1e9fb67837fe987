/* SPDX-License-Identifier: Apache-2.0 */
/* A table of logical blocks in GPU memory (docs/gstore.md). Blocks are numbered through over three tiers: below `hbm`
 * lies GPU memory, then `dram` blocks of pinned host memory, then `file` blocks. A logical block is a row [BlockId,
 * Ref, Count]; moving it to another tier changes its BlockId and nothing else, so whoever knows its handle (the hash
 * index does) need not be told.
 *
 * As in gstore/index.h: functions that take a stream only enqueue, counts are read when the kernel runs, pointers are
 * device or mapped host memory, each element of a batch gets a status, every batch may run beside every other one. */
#ifndef TARDIS_GSTORE_BLOCKS_H_
#define TARDIS_GSTORE_BLOCKS_H_

#include "gstore/index.h"

#ifdef __cplusplus
extern "C" {
#endif

enum tardis_gpu_tier { TARDIS_GPU_HBM = 0, TARDIS_GPU_DRAM = 1, TARDIS_GPU_FILE = 2, TARDIS_GPU_TIERS = 3 };

/* Numbers that are taken or free. */
typedef struct tardis_gpu_pool {
  uint32_t* bits;    /* 1: taken */
  uint32_t* control; /* how many are free; where to look next */
  uint32_t size;
  uint32_t reserved;
} tardis_gpu_pool;

typedef struct tardis_gpu_blocks {
  uint64_t* rows;                         /* 2 words each */
  uint64_t* home;                         /* the row's file block, all ones: none */
  uint32_t* used;                         /* the clock when it was last used */
  uint32_t* clock;                        /* ticks with every batch of uses */
  tardis_gpu_pool pool[TARDIS_GPU_TIERS]; /* of blocks */
  tardis_gpu_pool row_pool;
} tardis_gpu_blocks;

/* What became of an element. Only OK changed anything. */
enum tardis_gpu_blocks_status {
  TARDIS_GPU_BLOCKS_OK = 0,
  TARDIS_GPU_BLOCKS_STALE = 1,          /* no such row any more */
  TARDIS_GPU_BLOCKS_REFERENCED = 2,     /* more references than the operation bears */
  TARDIS_GPU_BLOCKS_NOT_REFERENCED = 3, /* unref without ref */
  TARDIS_GPU_BLOCKS_MOVING = 4,         /* between swap_begin and swap_end; or swap_end without swap_begin */
  TARDIS_GPU_BLOCKS_NO_BLOCK = 5,       /* the tier is full, or the block is taken */
  TARDIS_GPU_BLOCKS_NO_ROW = 6,         /* the table is full */
  TARDIS_GPU_BLOCKS_THERE = 7,          /* it is in that tier already */
};

enum tardis_gpu_source {
  TARDIS_GPU_SOURCE_HBM = 0,
  TARDIS_GPU_SOURCE_DRAM = 1,
  TARDIS_GPU_SOURCE_FILE = 2,
  TARDIS_GPU_SOURCE_MISS = 3,
  TARDIS_GPU_SOURCE_MOVING = 4, /* there, but on its way: ask again after the swap */
  TARDIS_GPU_SOURCES = 5,
};

enum tardis_gpu_use { TARDIS_GPU_REF = 0, TARDIS_GPU_UNREF = 1 };

TARDIS_GPU_API uint64_t tardis_gpu_blocks_memory_bytes(uint32_t hbm, uint32_t dram, uint32_t file, uint32_t rows);

/* Lays a table out in device memory that is aligned to 256 bytes. tardis_gpu_blocks_reset makes it empty. */
TARDIS_GPU_API int tardis_gpu_blocks_place(tardis_gpu_blocks* blocks, void* memory, uint64_t memory_bytes, uint32_t hbm,
                                           uint32_t dram, uint32_t file, uint32_t rows);
TARDIS_GPU_API int tardis_gpu_blocks_reset(const tardis_gpu_blocks* blocks, void* cuda_stream);

/* New rows with a block of this tier, Ref 1 and Count 0. handles[i] and ids[i] (BlockId) are all ones where there is
 * none. `ids`, `statuses` and `report` may be NULL. */
TARDIS_GPU_API int tardis_gpu_blocks_alloc(const tardis_gpu_blocks* blocks, uint32_t tier, const uint32_t* count,
                                           uint32_t max_count, uint64_t* handles, uint64_t* ids, uint8_t* statuses,
                                           tardis_gpu_ticket* ticket, tardis_gpu_report* report, void* cuda_stream);

/* New rows for file blocks that hold something already, Ref 0 and Count 0: file_blocks[i] counts from the first one. */
TARDIS_GPU_API int tardis_gpu_blocks_adopt(const tardis_gpu_blocks* blocks, const uint32_t* file_blocks,
                                           const uint32_t* count, uint32_t max_count, uint64_t* handles,
                                           uint8_t* statuses, tardis_gpu_ticket* ticket, tardis_gpu_report* report,
                                           void* cuda_stream);

/* HBM blocks that no row has and that somebody else takes (`taken` 1: alloc and swap_begin give none of them away) or
 * gives back (0); ids[i] as SGLang numbers pages. NO_BLOCK: it is taken, or free, already. The caller sees to it that
 * only those are given back that were taken by it. */
TARDIS_GPU_API int tardis_gpu_blocks_mark(const tardis_gpu_blocks* blocks, uint32_t taken, const int64_t* ids,
                                          const uint32_t* count, uint32_t max_count, uint8_t* statuses,
                                          tardis_gpu_ticket* ticket, tardis_gpu_report* report, void* cuda_stream);

/* File blocks that hold what rows in memory hold by now: file_blocks[i] is where handles[i] goes, when it goes back to
 * files. THERE: it has one already. */
TARDIS_GPU_API int tardis_gpu_blocks_attach(const tardis_gpu_blocks* blocks, const uint64_t* handles,
                                            const uint32_t* file_blocks, const uint32_t* count, uint32_t max_count,
                                            uint8_t* statuses, tardis_gpu_ticket* ticket, tardis_gpu_report* report,
                                            void* cuda_stream);

/* Ref and Count each one more, or Ref one less (`use`: tardis_gpu_use). ids[i], if not NULL: where the row is; it stays
 * there until the last reference is given back. */
TARDIS_GPU_API int tardis_gpu_blocks_use(const tardis_gpu_blocks* blocks, uint32_t use, const uint64_t* handles,
                                         const uint32_t* count, uint32_t max_count, uint64_t* ids, uint8_t* statuses,
                                         tardis_gpu_ticket* ticket, tardis_gpu_report* report, void* cuda_stream);

/* Rows with Ref 0 go, and their blocks are free. */
TARDIS_GPU_API int tardis_gpu_blocks_free(const tardis_gpu_blocks* blocks, const uint64_t* handles,
                                          const uint32_t* count, uint32_t max_count, uint8_t* statuses,
                                          tardis_gpu_ticket* ticket, tardis_gpu_report* report, void* cuda_stream);

/* A block in `tier` for each row that has at most `holders` references (those of the caller): the caller copies from
 * from[i] to to[i] and ends the swap. Until then nobody else gets a reference. A row that has a file block already
 * gets that one again (from[i] need not be copied there). */
TARDIS_GPU_API int tardis_gpu_blocks_swap_begin(const tardis_gpu_blocks* blocks, uint32_t tier, uint32_t holders,
                                                const uint64_t* handles, const uint32_t* count, uint32_t max_count,
                                                uint64_t* from, uint64_t* to, uint8_t* statuses,
                                                tardis_gpu_ticket* ticket, tardis_gpu_report* report,
                                                void* cuda_stream);

/* The row is at to[i] and its former block is free (a file block stays the row's), or, where good[i] is 0, it is where
 * it was and to[i] is free. `good` NULL: all are good. Elements whose to[i] is all ones are passed over. */
TARDIS_GPU_API int tardis_gpu_blocks_swap_end(const tardis_gpu_blocks* blocks, const uint64_t* handles,
                                              const uint64_t* to, const uint8_t* good, const uint32_t* count,
                                              uint32_t max_count, uint8_t* statuses, tardis_gpu_ticket* ticket,
                                              tardis_gpu_report* report, void* cuda_stream);

/* Where each answer of a lookup (its location is a handle) is to come from. A row that is found gets a reference and
 * Count one more, as by tardis_gpu_blocks_use. lists[source * max_count ...] gets the positions of its answers, in no
 * order, and taken[source * max_count ...], if not NULL, their handles beside them (a miss has none), so that
 * swap_begin and alloc can be told of them in the same graph; list_counts[source] how many; sources[source], which the
 * caller zeroes once, grows by that number; both are device memory. ids[i] is where the row is, all ones for misses and
 * rows on their way. */
TARDIS_GPU_API int tardis_gpu_blocks_classify(const tardis_gpu_blocks* blocks, const tardis_gpu_index_answer* answers,
                                              const uint32_t* count, uint32_t max_count, uint64_t* ids, uint32_t* lists,
                                              uint64_t* taken, uint32_t* list_counts, uint64_t* sources,
                                              void* cuda_stream);

/* The min(*want, max_count) rows of a tier with Ref 0 that are worth least: longest not used, where a use before the
 * last is worth `bonus` ticks of the clock (three at most). handles in no order, *found (device memory) how many.
 * `scratch`: device memory of tardis_gpu_blocks_scratch_bytes(). Rows may be taken or freed meanwhile: swap_begin or
 * free tells. */
TARDIS_GPU_API uint64_t tardis_gpu_blocks_scratch_bytes(void);
TARDIS_GPU_API int tardis_gpu_blocks_candidates(const tardis_gpu_blocks* blocks, uint32_t tier, uint32_t bonus,
                                                const uint32_t* want, uint32_t max_count, uint64_t* handles,
                                                uint32_t* found, void* scratch, void* cuda_stream);

#ifdef __cplusplus
}
#endif
#endif
