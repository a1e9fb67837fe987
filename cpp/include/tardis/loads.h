/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI of loads: objects of a store to pages of KV pools, layer by layer (docs/loads.md). The host's side: where
 * objects are and the digests that prove them, parts that are read again when a ring could not, and the whole load by a
 * thread where there is no GPU. The GPU's side is in libtardis_gpu.so (cpp/gio/load_launch.h). Whoever runs the layers
 * and the loader's threads talk through a board in mapped memory only, so that no host thread calls CUDA while a stream
 * waits for it. Conventions of tardis.h. */
#ifndef TARDIS_LOADS_H_
#define TARDIS_LOADS_H_

#include "tardis/gio_layer.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { TARDIS_LOAD_PENDING = 0, TARDIS_LOAD_GOOD = 1, TARDIS_LOAD_BAD = 2 };

/* The beginning of a board; arrays follow (tardis_load_board_layout). Every word is written by one side, once a load;
 * words of the other side are read with acquire, one's own written last with release, both at system scope. */
typedef struct tardis_load_board {
  /* By the loader. */
  uint32_t ready;      /* TARDIS_LOAD_GOOD: blocks, digests and ring_pages are there */
  uint32_t ring_pages; /* pages from files that rings shall read: all that were asked for, or 0: none can be (then every
                          layer is TARDIS_LOAD_BAD in `repaired`) */
  /* By who runs the layers. */
  uint32_t
      errors; /* pages outside of the pools, and waits for the loader that had no end: what landed is not to be used */
  uint32_t abandoned; /* 1: it waits for the loader no more in this load */
  uint32_t reserved[12];
} tardis_load_board;

/* A part that the loader read again: `address` has the layer's bytes (K, then V) of page `page` of the load's files. */
typedef struct tardis_load_repair {
  uint64_t address;
  uint32_t page;
  uint32_t reserved;
} tardis_load_repair;

/* Offsets in a board, each a multiple of 64. Words of layers are uint32_t. */
typedef struct tardis_load_board_layout {
  uint64_t bytes;  /* of the board */
  uint64_t landed; /* [layers], by who runs them: TARDIS_LOAD_GOOD, or BAD: see statuses */
  uint64_t
      repaired; /* [layers], by the loader after BAD: GOOD, `repairs` of the list are the parts that failed; or BAD */
  uint64_t repairs;  /* [layers] */
  uint64_t done;     /* [layers], by tardis_load_run only: GOOD or BAD */
  uint64_t list;     /* tardis_load_repair[most_repairs]: of the layer that waits */
  uint64_t blocks;   /* uint64_t[most_pages]: first block of each page's object */
  uint64_t digests;  /* uint64_t[most_pages][layers][chunks] */
  uint64_t statuses; /* uint32_t[sizes.most_contexts]: of the layer that was read last */
  uint64_t reports;  /* [layers][rings] reports of rings */
} tardis_load_board_layout;

typedef struct tardis_load_shape {
  uint32_t layers, chunks;    /* of an object; digests of a layer */
  uint32_t most_pages;        /* from files, of a load: with commands_per_page at most sizes.most_contexts */
  uint32_t most_repairs;      /* parts of one layer that can be read again */
  uint32_t commands_per_page; /* of a layer: how many statuses in turn are one page's */
  uint32_t rings;
} tardis_load_shape;
TARDIS_API tardis_code tardis_load_board_layout_of(const tardis_load_shape* shape, tardis_load_board_layout* layout,
                                                   char** error);

typedef struct tardis_loader tardis_loader;

/* `staging`: most_repairs parts of part_bytes rounded up to 4096 each, for `loads` loads at once; mapped where a GPU
 * runs them, as long as the loader. The store is closed after the loader. Starts its threads. */
typedef struct tardis_loader_options {
  tardis_load_shape shape;
  uint32_t name_space;
  uint32_t block_bytes; /* of the session that reads */
  uint32_t loads;       /* at once: 1 to 16 */
  void* staging;
  uint64_t staging_bytes;
} tardis_loader_options;
TARDIS_API tardis_code tardis_loader_open(tardis_store* store, const tardis_loader_options* options,
                                          tardis_loader** loader, char** error);
/* Every load has ended. */
TARDIS_API void tardis_loader_close(tardis_loader* loader);

/* Objects asked for and what became of them, since the loader was opened. */
typedef struct tardis_loader_counters {
  uint64_t loads, pages, missing, unproven, repaired_parts, failed_pages, damaged_pages, abandoned;
} tardis_loader_counters;
TARDIS_API void tardis_loader_get_counters(tardis_loader* loader, tardis_loader_counters* counters);

typedef struct tardis_load tardis_load;

/* Returns at once; no I/O by the caller. A thread of the loader takes the lease, reads and proves the digests, fills
 * the board, zeroed and at a multiple of 64, and says ready; then looks after layers that are told BAD: reads the
 * failed parts by the host, compares them, and answers. Objects that are gone or whose digests prove nothing make the
 * whole load BAD. `use_rings` 0: the queue pairs are of no use; every page is read by the host. TARDIS_BUSY: `loads`
 * are under way. */
TARDIS_API tardis_code tardis_load_begin(tardis_loader* loader, const uint8_t* hashes, uint32_t n, int use_rings,
                                         void* board, tardis_load** load, char** error);

typedef struct tardis_load_result {
  uint32_t good;  /* 1: every byte of every page is there and proven */
  uint32_t renew; /* 1: a ring's end says that its queue pair is of no use */
  uint32_t pages, repaired_parts;
} tardis_load_result;
/* After the last layer's end (a GPU: the stream has passed it; or it was never enqueued: then `cancelled` 1). Waits for
 * the loader's thread to let go of board and staging, which takes as long as one read at most; ends the lease. Objects
 * whose bytes were wrong twice, or whose digests prove nothing, are read by the store itself, which quarantines them,
 * before it returns. Frees the load. */
TARDIS_API tardis_code tardis_load_end(tardis_load* load, int cancelled, tardis_load_result* result, char** error);

/* The layers by a thread of the loader, where pools are memory of this process. */
typedef struct tardis_host_load {
  const tardis_gio_layer* ring; /* as for tardis_gpu_load_enqueue, but pool_pages are the ids of the load's pages in the
                                 * pools; NULL: no pages from files. Of a load with use_rings 0 only they are used. */
  const uint64_t* layers[2];    /* addresses of each layer's K and V (or one buffer); the second may be NULL */
  uint32_t page_bytes[2];
  uint32_t pool_page_count;
  uint32_t pinned_pages;
  const uint32_t* pinned_ids;     /* pages of the pools */
  const uint64_t* pinned_objects; /* addresses of [layer][K,V] without padding */
} tardis_host_load;
/* Begins them, behind earlier ones; `load` may be NULL (no pages from files) if `board` is given instead. Everything
 * named stays until tardis_load_wait of the last layer returned. */
TARDIS_API tardis_code tardis_load_run(tardis_loader* loader, tardis_load* load, void* board,
                                       const tardis_host_load* run, char** error);
/* Returns when board.done[layer] is not 0. */
TARDIS_API tardis_code tardis_load_wait(tardis_loader* loader, const void* board, uint32_t layer, char** error);

/* What a caller that declares the structs in another language compares with: sizeof of each, in the order above. */
typedef struct tardis_load_sizes {
  uint32_t board, repair, layout, shape, options, counters, result, host_load;
} tardis_load_sizes;
TARDIS_API void tardis_load_sizes_of(tardis_load_sizes* sizes);

#ifdef __cplusplus
}
#endif
#endif
