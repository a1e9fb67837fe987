/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI of the core. Everything above it (the Python binding, tests, tools) uses only this header.
 * Strings are UTF-8. Functions return a tardis_code; on failure *error (if not NULL) receives a message that the caller
 * frees with tardis_free. All functions are thread-safe except where a function says otherwise. */
#ifndef TARDIS_TARDIS_H_
#define TARDIS_TARDIS_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define TARDIS_API __attribute__((visibility("default")))
#else
#define TARDIS_API
#endif

enum { TARDIS_ABI_VERSION = 1, TARDIS_FORMAT_VERSION = 1, TARDIS_HASH_BYTES = 32, TARDIS_FINGERPRINT_BYTES = 16 };

typedef enum tardis_code {
  TARDIS_OK = 0,
  TARDIS_INVALID_ARGUMENT = 1,
  TARDIS_NOT_FOUND = 2,
  TARDIS_IO = 3,
  TARDIS_CORRUPT = 4,
  TARDIS_BUSY = 5,
  TARDIS_NO_SPACE = 6,
  TARDIS_UNSUPPORTED_FORMAT = 7,
  TARDIS_PERMISSION = 8,
  TARDIS_CLOSED = 9,
  TARDIS_INTERNAL = 10
} tardis_code;

typedef struct tardis_store tardis_store;

typedef enum tardis_engine { TARDIS_ENGINE_AUTO = 0, TARDIS_ENGINE_IO_URING = 1, TARDIS_ENGINE_SYNC = 2 } tardis_engine;
/* Where there are several folders: whether an object lies whole in one of them, or its parts in all. */
typedef enum tardis_placement { TARDIS_PLACEMENT_OBJECTS = 0, TARDIS_PLACEMENT_LAYERS = 1 } tardis_placement;
typedef enum tardis_direct { TARDIS_DIRECT_AUTO = 0, TARDIS_DIRECT_ON = 1, TARDIS_DIRECT_OFF = 2 } tardis_direct;

typedef struct tardis_options {
  uint32_t abi_version; /* TARDIS_ABI_VERSION */
  uint32_t engine;      /* tardis_engine */
  uint32_t direct;      /* tardis_direct */
  uint32_t queue_depth; /* 0: what the device gains from, found while it works */
  uint32_t io_workers;  /* 0: twice the CPUs, 8 to 16 */
  uint32_t bounce_buffers;
  uint64_t capacity_bytes;    /* 0: the smaller of 100 GiB and half the free space; of an existing store: what it has */
  uint64_t segment_bytes;     /* 0: capacity/256 clamped to 4 MiB .. 1 GiB (more where one object would not fit) */
  uint64_t object_bytes_hint; /* largest object that will be stored; sizes the segments of a new store */
  uint64_t free_space_floor;  /* bytes that stay free on the file system */
  uint64_t flush_bytes;       /* a flush group ends at this many bytes ... */
  uint32_t flush_milliseconds; /* ... or this age */
  uint32_t verify_reads;       /* 1. 0 is for measurement and negative controls only */
  uint32_t
      checkpoint_seconds;    /* how often the index is saved while something is written; 0: when the store is closed */
  const char* shared_memory; /* a tmpfs, the same for every process of the store; NULL: /dev/shm */
  /* Further folders, best on other drives, over which the store spreads its segments (at most 15, absolute names).
   * NULL: those that the store has. What it has and is not named here is forgotten, with the objects there. */
  const char* const* more_paths;
  uint32_t more_paths_count;
  uint32_t placement; /* tardis_placement, of what is made from now on */
} tardis_options;

/* How one object lies in memory and on disk (docs/on-disk-format.md). An object is `parts` parts ("layers" in the
 * layer-major layout, else 1); a part is `regions` data blocks of region_bytes[r] bytes; on disk the regions of a part
 * follow each other and the part is padded to the store's block. */
typedef struct tardis_object_layout {
  uint32_t parts;
  uint32_t regions; /* 1 .. 4 */
  uint64_t region_bytes[4];
} tardis_object_layout;

/* clang-format off */
/* Sums since the store was opened. set_nanoseconds and get_nanoseconds: wall time inside the calls. */
#define TARDIS_STATS_SUMS(FIELD) \
  FIELD(set_calls) FIELD(set_pages) FIELD(set_pages_written) FIELD(set_pages_present) FIELD(set_pages_dropped) \
  FIELD(set_pages_failed) FIELD(set_bytes) FIELD(set_nanoseconds) \
  FIELD(get_calls) FIELD(get_pages) FIELD(get_pages_hit) FIELD(get_pages_missed) FIELD(get_pages_raced) \
  FIELD(get_pages_torn) FIELD(get_pages_corrupt) FIELD(get_pages_failed) FIELD(get_bytes) FIELD(get_nanoseconds) \
  FIELD(lookups) FIELD(lookup_pages) FIELD(lookup_hit_pages) \
  FIELD(evicted_pages) FIELD(evicted_bytes) FIELD(cleared_pages) \
  FIELD(flush_groups) FIELD(flush_failures) FIELD(flush_unpublished_pages) \
  FIELD(recovered_pages) FIELD(recovered_verified) FIELD(recovered_rejected) FIELD(recovered_scanned) \
  FIELD(checkpoints) FIELD(paths_taken_out)
/* The state now (zero after tardis_close): allocated_bytes of the segments, payload_bytes of live pages. */
#define TARDIS_STATS_LEVELS(FIELD) \
  FIELD(capacity_bytes) FIELD(allocated_bytes) FIELD(payload_bytes) \
  FIELD(slots_total) FIELD(slots_live) FIELD(slots_free) FIELD(slots_quarantined) FIELD(slots_writing) \
  FIELD(segments) FIELD(segments_unreadable) FIELD(paths) FIELD(paths_out) FIELD(durable_group) FIELD(processes) FIELD(index_bytes) \
  FIELD(io_reads) FIELD(io_writes) FIELD(io_read_bytes) FIELD(io_written_bytes) FIELD(io_errors) \
  FIELD(io_peak_in_flight) FIELD(bounced_requests) FIELD(bounced_bytes) \
  FIELD(read_batches) FIELD(read_batches_delayed) FIELD(read_batches_delayed_again) FIELD(max_flushes_per_read_batch) \
  FIELD(writes_yielded) FIELD(flushes_postponed) \
  FIELD(registered_bytes) FIELD(not_registered_bytes) FIELD(registered_requests) FIELD(read_depth) FIELD(write_depth)
/* clang-format on */

typedef struct tardis_stats {
#define TARDIS_STATS_FIELD(name) uint64_t name;
  TARDIS_STATS_SUMS(TARDIS_STATS_FIELD)
  TARDIS_STATS_LEVELS(TARDIS_STATS_FIELD)
#undef TARDIS_STATS_FIELD
} tardis_stats;

typedef struct tardis_verify_report {
  uint64_t segments, slots, objects, bytes, bad_headers, bad_payloads, torn, unreadable_segments, free_slots,
      quarantined;
} tardis_verify_report;

/* One object as its header describes it. */
typedef struct tardis_object_info {
  uint8_t key[TARDIS_HASH_BYTES];
  uint8_t fingerprint[TARDIS_FINGERPRINT_BYTES];
  uint64_t parent; /* first 8 bytes of the parent's key as a little-endian integer; 0: none known */
  uint64_t generation, payload_bytes, root_digest, flush_group;
  uint32_t parts; /* each of payload_bytes / parts */
  uint32_t segment, slot;
  uint32_t quarantined; /* 0 or 1 */
} tardis_object_info;

/* Return 0 to go on, anything else to stop. done and total are bytes. */
typedef int (*tardis_progress)(void* context, uint64_t done, uint64_t total);

TARDIS_API const char* tardis_version(void);
TARDIS_API void tardis_free(void* memory);
TARDIS_API void tardis_default_options(tardis_options* options);

/* Opens `folder`, creating the folder and the store where there is none (create != 0). Several processes may have a
 * store open; they share one index, in a tmpfs that all of them must see (TARDIS_BUSY otherwise), and one capacity. The
 * first rebuilds the index from the checkpoint and the header tables. Starts the flush thread. */
TARDIS_API tardis_code tardis_open(const char* folder, const tardis_options* options, int create, tardis_store** store,
                                   char** error);
/* Flushes; the last process marks segments clean and writes a checkpoint. Waits for calls in flight; later calls answer
 * TARDIS_CLOSED. */
TARDIS_API tardis_code tardis_close(tardis_store* store, char** error);
/* Frees the handle; closes first if need be. No call may be in flight. */
TARDIS_API void tardis_destroy(tardis_store* store);

/* Registers a namespace: writes `description` (readable JSON) beside the data, and returns its handle.
 * TARDIS_INVALID_ARGUMENT if the same fingerprint is already described by another text or layout. */
TARDIS_API tardis_code tardis_namespace_open(tardis_store* store, const uint8_t fingerprint[TARDIS_FINGERPRINT_BYTES],
                                             const char* description, const tardis_object_layout* layout,
                                             uint32_t* handle, char** error);

/* Length of the leading run of `hashes` (n x 32 bytes) that is stored. No I/O; no lock held during I/O. */
TARDIS_API tardis_code tardis_lookup(tardis_store* store, uint32_t handle, const uint8_t* hashes, size_t n,
                                     size_t* run);

/* Stores n objects. `pieces`: n x (parts*regions) addresses, [object][part][region]. `parent_of_first`: 32 bytes, or
 * NULL: the hash that precedes hashes[0] in its prefix; object i > 0 has parent hashes[i-1]. ok[i] = 1: stored (or
 * already present) and visible; the memory may be reused when the call returns. ok is 1...1 0...0: a suffix is dropped,
 * never a hole made. Durable after its flush group. */
TARDIS_API tardis_code tardis_set(tardis_store* store, uint32_t handle, const uint8_t* hashes,
                                  const uint8_t* parent_of_first, const uint64_t* pieces, size_t n, uint8_t* ok,
                                  char** error);

/* Loads n objects into memory and verifies them. ok[i] = 1: every byte arrived and matches its digest. Pages after the
 * first absent one are not read. The memory of a page that failed has undefined contents. */
TARDIS_API tardis_code tardis_get(tardis_store* store, uint32_t handle, const uint8_t* hashes, const uint64_t* pieces,
                                  size_t n, uint8_t* ok, char** error);

/* Tells the store of memory that many calls will use, such as a pool of host pages, so that the kernel need not look
 * its pages up for each. A hint: what cannot be registered works as before, and registered_bytes in tardis_stats says
 * how much was. TARDIS_INVALID_ARGUMENT if it overlaps memory that is registered. The memory must be unregistered, with
 * no call using it, or the store be closed, before it is freed. */
TARDIS_API tardis_code tardis_register_memory(tardis_store* store, void* base, uint64_t bytes, char** error);
TARDIS_API tardis_code tardis_unregister_memory(tardis_store* store, void* base);

/* Ends the current flush group and waits until everything that this process set before the call is durable, also pages
 * that set() found present because another process had stored them: that process is asked to flush. */
TARDIS_API tardis_code tardis_flush(tardis_store* store, char** error);

/* Deletes the objects of one namespace (opened or not), or of all (fingerprint = NULL), durably before it returns.
 * TARDIS_CORRUPT: done, but a segment that cannot be read may hold more. */
TARDIS_API tardis_code tardis_clear(tardis_store* store, const uint8_t* fingerprint, uint64_t* pages, char** error);

/* Deletes, as tardis_clear, the objects whose key begins with the first `key_nibbles` half bytes (hexadecimal digits)
 * of `key`; 0: all. fingerprint NULL: of every namespace. */
TARDIS_API tardis_code tardis_remove(tardis_store* store, const uint8_t* fingerprint, const uint8_t* key,
                                     uint32_t key_nibbles, uint64_t* pages, char** error);
/* Evicts the least valuable objects until at most target_bytes of payload are stored, in one namespace or (fingerprint
 * = NULL) in all. As with every eviction, a crash may bring an object back. */
TARDIS_API tardis_code tardis_prune(tardis_store* store, const uint8_t* fingerprint, uint64_t target_bytes,
                                    uint64_t* pages, char** error);

/* Frees the slots whose headers fail their checks, durably; the pages in them, if any, are misses from then on. */
TARDIS_API tardis_code tardis_repair_headers(tardis_store* store, uint64_t* slots, char** error);

/* Counters; no I/O and no lock held during I/O. */
TARDIS_API tardis_code tardis_get_stats(tardis_store* store, tardis_stats* stats);
/* One line of JSON about the path in use (engine, direct, alignments, filesystem, reason). Free with tardis_free. */
TARDIS_API tardis_code tardis_path_report(tardis_store* store, char** json);

/* Tools; none needs an open store. tardis_probe runs the self-test in `folder` without a store. */
TARDIS_API tardis_code tardis_probe(const char* folder, const tardis_options* options, char** json, char** error);
/* JSON description of the store in `folder` without taking its lock: superblock, owner, namespaces, segments, live
 * objects. */
TARDIS_API tardis_code tardis_inspect(const char* folder, char** json, char** error);
/* Reads every header and payload. TARDIS_BUSY while a process has the store open. `torn`: what a crash cut short before
 * it was flushed, no fault. With repair != 0 corrupt objects are quarantined, broken headers and torn objects become
 * free slots, and the segments count as whole again. `problems`: JSON array of readable lines (at most 1000). */
TARDIS_API tardis_code tardis_verify(const char* folder, int repair, tardis_progress progress, void* context,
                                     tardis_verify_report* report, char** problems, char** error);

/* Calls `visit` for each object, by segment and slot, until it returns other than 0; what cannot be read is left out.
 * Takes no lock: in a store that is in use it tells of a moment that has passed, and of evicted objects until their
 * slot is used again. */
TARDIS_API tardis_code tardis_list(const char* folder, int (*visit)(void* context, const tardis_object_info* object),
                                   void* context, char** error);
/* tardis_verify without a lock and without repair, for a store that is in use. A page that fails is read again later,
 * and judged only if nobody wrote its segment in between and since the store was last closed; otherwise it counts as
 * `torn`. */
TARDIS_API tardis_code tardis_verify_live(const char* folder, tardis_progress progress, void* context,
                                          tardis_verify_report* report, char** problems, char** error);

/* Digest of one object as docs/on-disk-format.md defines it; for tests and tools. chunk_digests may be NULL. */
TARDIS_API tardis_code tardis_digest(const tardis_object_layout* layout, const uint64_t* pieces,
                                     uint64_t* chunk_digests, uint64_t* part_digests, uint64_t* root);

#ifdef __cplusplus
}
#endif
#endif
