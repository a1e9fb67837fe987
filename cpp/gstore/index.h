/* SPDX-License-Identifier: Apache-2.0 */
/* A hash index in GPU memory over the objects of a store: a copy of what the store's own index says, that kernels can
 * ask (docs/gstore.md). C ABI of libtardis_gpu.so.
 *
 * Every function that takes a stream only enqueues: it neither waits nor allocates, and may be captured in a CUDA
 * graph. Counts are read from memory when the kernel runs, so that a replay may find other ones. All pointers are
 * device memory or mapped pinned host memory; they must stay valid until the stream has passed. `cuda_stream` is a
 * cudaStream_t, NULL for the default stream. Functions return a cudaError_t: that of the launch, or
 * cudaErrorInvalidValue. */
#ifndef TARDIS_GSTORE_INDEX_H_
#define TARDIS_GSTORE_INDEX_H_

#include <stdint.h>

#define TARDIS_GPU_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Where the parts of an index lie. Filled in by tardis_gpu_index_place; passed by pointer, copied at the call. */
typedef struct tardis_gpu_index {
  uint64_t* words;   /* 32 a bucket */
  uint64_t* records; /* 8 words a record, a record for each word */
  uint32_t buckets;
  uint32_t patience; /* how many times as long as usual one waits for another, under tools that slow kernels; 0: once */
} tardis_gpu_index;

/* An object, and what to do with it in a batch of changes. */
typedef struct tardis_gpu_index_entry {
  uint64_t key[4]; /* the 32 bytes of the block hash */
  uint64_t location;
  uint64_t generation; /* grows with every object that the store writes */
  uint64_t root;       /* digest over the payload's chunk digests: proves the bytes */
  uint32_t payload_bytes;
  uint16_t space; /* namespace */
  uint8_t op;     /* tardis_gpu_index_op */
  uint8_t reserved;
} tardis_gpu_index_entry;

enum tardis_gpu_index_op {
  TARDIS_GPU_INDEX_PUT = 0,    /* insert, or replace what is not newer */
  TARDIS_GPU_INDEX_ADD = 1,    /* insert; leave what is there */
  TARDIS_GPU_INDEX_ERASE = 2,  /* remove what is not newer */
  TARDIS_GPU_INDEX_FORGET = 3, /* remove what has this location, of whatever generation */
};

/* What became of a change. Only the first three changed anything. */
enum tardis_gpu_index_status {
  TARDIS_GPU_INDEX_INSERTED = 0,
  TARDIS_GPU_INDEX_REPLACED = 1,
  TARDIS_GPU_INDEX_ERASED = 2,
  TARDIS_GPU_INDEX_EXISTS = 3, /* ADD of a key that is there */
  TARDIS_GPU_INDEX_STALE = 4,  /* what is there is newer; or, to FORGET, elsewhere */
  TARDIS_GPU_INDEX_ABSENT = 5, /* ERASE or FORGET of a key that is not there */
  TARDIS_GPU_INDEX_FULL = 6,   /* both buckets of the key are full */
  TARDIS_GPU_INDEX_BUSY = 7,   /* another writer held the bucket beyond the deadline, or the operation is unknown */
  TARDIS_GPU_INDEX_STATUSES = 8,
};

enum tardis_gpu_index_found {
  TARDIS_GPU_INDEX_MISS = 0,
  TARDIS_GPU_INDEX_FOUND = 1,
  TARDIS_GPU_INDEX_UNKNOWN = 2, /* a writer was replacing the entry for longer than a lookup waits: treat as a miss */
};

typedef struct tardis_gpu_index_answer {
  uint64_t location; /* all ones unless found */
  uint64_t generation;
  uint64_t root;
  uint32_t payload_bytes;
  uint32_t status; /* tardis_gpu_index_found */
} tardis_gpu_index_answer;

/* Working memory of a batch: device memory, zero before the first use, one for each place that may run at once. */
typedef struct tardis_gpu_ticket {
  uint32_t finished;
  uint32_t run;
  uint32_t totals[TARDIS_GPU_INDEX_STATUSES];
  uint64_t epoch;
  uint64_t reserved[2];
} tardis_gpu_ticket;

/* Told when a batch has ended, in device or mapped host memory. `epoch` is written last, and after everything else that
 * the batch wrote is visible to the whole system: 1 after the ticket's first batch, 2 after its second, ... */
typedef struct tardis_gpu_report {
  uint64_t epoch;
  uint32_t count;
  uint32_t run;                               /* lookups: length of the leading run of keys that were found */
  uint32_t totals[TARDIS_GPU_INDEX_STATUSES]; /* answers or changes by status */
} tardis_gpu_report;

/* Bytes of device memory for so many entries at a load of at most 0.8. */
TARDIS_GPU_API uint64_t tardis_gpu_index_memory_bytes(uint64_t entries);

/* Lays an index out in `memory`, which must be aligned to 256 bytes and zeroed before use (an empty index is zeros). */
TARDIS_GPU_API int tardis_gpu_index_place(tardis_gpu_index* index, void* memory, uint64_t memory_bytes);

/* Enqueues answers[i] for keys[i] (32 bytes each, aligned to 16) in namespace `space`, for i < min(*count, max_count).
 * All max_count keys must be readable.
 * `ctas` bounds the thread blocks of 256 threads, 0: as many as the batch can use. `report` may be NULL. */
TARDIS_GPU_API int tardis_gpu_index_lookup(const tardis_gpu_index* index, const void* keys, const uint32_t* count,
                                           uint32_t max_count, uint16_t space, tardis_gpu_index_answer* answers,
                                           tardis_gpu_ticket* ticket, tardis_gpu_report* report, uint32_t ctas,
                                           void* cuda_stream);

/* Enqueues the changes in no order: at most one of a key in a batch (tardis::gstore::IndexBatch sees to that).
 * `statuses` (tardis_gpu_index_status, one byte each) and `report` may be NULL. */
TARDIS_GPU_API int tardis_gpu_index_apply(const tardis_gpu_index* index, const tardis_gpu_index_entry* changes,
                                          const uint32_t* count, uint32_t max_count, uint8_t* statuses,
                                          tardis_gpu_ticket* ticket, tardis_gpu_report* report, uint32_t ctas,
                                          void* cuda_stream);

/* Load the kernels of the two calls above: a kernel that is loaded on its first launch waits for the device, and so for
 * ever behind a stream that waits for that kernel. */
TARDIS_GPU_API int tardis_gpu_index_load_lookup(void);
TARDIS_GPU_API int tardis_gpu_index_load_apply(void);

#ifdef __cplusplus
}
#endif
#endif
