/* SPDX-License-Identifier: Apache-2.0 */
/* Loads and offloads of KV pages by a GPU, all layers in one call of the host (docs/loads.md). C ABI of
 * libtardis_gpu.so. Everything is enqueued; nothing allocates or waits, and after the call the host's part is done by
 * the loader's threads (tardis/loads.h) through the board, without CUDA. Every function returns a cudaError_t. */
#ifndef TARDIS_GIO_LOAD_LAUNCH_H_
#define TARDIS_GIO_LOAD_LAUNCH_H_

#include <stdint.h>

#include "gio/link.h"
#include "tardis/loads.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Pools of a server, and what their pages are in objects of pinned memory: [layer][K,V], without padding. */
struct tardis_gpu_pools {
  const uint64_t* layers[2]; /* device: addresses of each layer's K and V (or one buffer); the second may be NULL */
  const uint64_t* host_layers[2]; /* the same in host memory, read before a call returns */
  uint32_t page_bytes[2];         /* of a page in one layer; the second may be 0 */
  uint32_t layer_count;
  uint32_t page_count; /* of the pools: an id beyond is refused, and counted */
};

/* Device memory that a load or an offload works in, for `most_pages` pages. One user at a time. */
struct tardis_gpu_transfer_work {
  struct tardis_gpu_piece* pieces; /* [layer_count + 1][2 * most_pages]; in the last row a load keeps its words */
  uint32_t* counts;                /* [layer_count + 1] */
  uint64_t* digests;               /* [most_pages][layers][chunks]: of loads with pages from files */
  uint32_t* flags;                 /* [layer_count]: of the rings */
  uint32_t most_pages;
  uint32_t reserved;
};

struct tardis_gpu_load {
  struct tardis_gpu_pools pools;
  struct tardis_gpu_transfer_work work;
  /* From pinned memory; device or mapped memory. */
  const uint32_t* pinned_ids;     /* pages of the pools; NULL: none */
  const uint64_t* pinned_objects; /* addresses */
  uint32_t pinned_pages;
  /* From files, after the board says ready. */
  uint32_t file_pages;
  const uint32_t* file_ids; /* device or mapped: pages of the pools */
  const tardis_gio_layer*
      ring; /* what is the same for each layer: all but pool_pages, slots, count, slot_blocks, pools, most_pages,
               slot_count, first_block, digests, digest_stride, statuses, reports, flag. NULL: no files */
  const uint32_t* slots; /* device or mapped: 0, 1, 2 ... file_pages - 1 */
  uint64_t layer_blocks; /* from a layer to the next in an object on the drive */
  void* board;           /* zeroed; mapped, at the same address for the device */
  tardis_load_board_layout layout;
  tardis_load_shape shape;
  uint64_t patience_ns; /* how long it waits for the loader each time */
  struct tardis_gpu_link_traffic traffic;
  uint32_t ctas;
  uint32_t reserved;
  void* const* events; /* cudaEvent_t[layer_count], recorded behind each layer's last byte */
};

/* Enqueues it all. A layer's event is recorded when its bytes are there, or it is known that they will not be: then the
 * board's `errors` is not 0, or a word of `repaired` is TARDIS_LOAD_BAD, and the layer of each page from files is right
 * or zeros. */
TARDIS_GPU_API int tardis_gpu_load_enqueue(const struct tardis_gpu_load* load, void* stream);

/* Pages that follow each other in the pools, and whose objects do in pinned memory. */
struct tardis_gpu_load_run {
  uint64_t object; /* address of the first */
  uint32_t page;   /* the first */
  uint32_t pages;
};

/* A load of pages from pinned memory by copy engines: no SM, and more of the link than a mover takes, but a command for
 * each run of each layer's K and V. Beyond about 1,000 commands under way the call waits until they have become fewer.
 */
struct tardis_gpu_load_runs {
  struct tardis_gpu_pools pools;          /* layers are not used */
  const struct tardis_gpu_load_run* runs; /* host memory, read before the call returns */
  uint64_t object_stride;                 /* from an object of a run to the next */
  struct tardis_gpu_link* link;           /* NULL: nobody is told */
  void* const* events;                    /* cudaEvent_t[layer_count], recorded behind each layer's last byte */
  uint32_t run_count;
  uint32_t link_class; /* enum tardis_gpu_link_class, active meanwhile */
};

/* Enqueues it all, layer by layer. cudaErrorInvalidValue: a run without pages or beyond the pools, or objects that
 * overlap; nothing was enqueued. After another error a part may be. */
TARDIS_GPU_API int tardis_gpu_load_runs_enqueue(const struct tardis_gpu_load_runs* load, void* stream);

/* Pages of the pools to objects in pinned memory, all layers. */
struct tardis_gpu_offload {
  struct tardis_gpu_pools pools;
  struct tardis_gpu_transfer_work work; /* digests and flags are not used */
  const uint32_t* ids;                  /* device or mapped */
  const uint64_t* objects;              /* device or mapped: addresses */
  uint32_t pages;
  uint32_t ctas;
  uint32_t* errors; /* mapped: increased by one for each id outside of the pools */
  struct tardis_gpu_link_traffic traffic;
};
TARDIS_GPU_API int tardis_gpu_offload_enqueue(const struct tardis_gpu_offload* offload, void* stream);

/* Loads the kernels, as tardis_gpu_load(). */
TARDIS_GPU_API int tardis_gpu_load_prepare(void);

/* sizeof of pools, transfer_work, load, offload, load_run, load_runs: compared by callers that declare them in another
 * language. */
struct tardis_gpu_load_sizes {
  uint32_t pools, work, load, offload, run, runs;
};
TARDIS_GPU_API void tardis_gpu_load_sizes_of(struct tardis_gpu_load_sizes* sizes);

#ifdef __cplusplus
}
#endif
#endif
