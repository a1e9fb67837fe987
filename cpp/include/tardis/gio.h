/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI of gio sessions (docs/gio-ring.md): queue pairs that a GPU drives, of a software NVMe controller over
 * memory or a file. The GPU's side is in libtardis_gpu.so (cpp/gio/ring_kernel.h, prepare_kernel.h). Conventions of
 * tardis.h. */
#ifndef TARDIS_GIO_H_
#define TARDIS_GIO_H_

#include "tardis/tardis.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tardis_gio_session tardis_gio_session;

typedef struct tardis_gio_options {
  uint64_t bytes;       /* of the namespace */
  const char* file;     /* where it is kept, made if there is none; NULL: memory, zeroed */
  uint32_t block_bytes; /* 512 or 4096 */
  uint32_t controller_threads;
  uint32_t queues;     /* 1 to 16 */
  uint32_t entries;    /* of each ring */
  uint32_t commands;   /* in flight at most, of a queue; 0: entries - 1 */
  uint32_t slot_bytes; /* most bytes of a command: whole pages of 4096, at most 2 MiB */
} tardis_gio_options;

/* What tardis_gio_queues() writes for each queue: an opaque value that tardis_gpu_gio_run() takes. */
TARDIS_API size_t tardis_gio_queue_bytes(void);

/* How much pinned, mapped, page-aligned, zeroed host memory a session works in; 0: options that make no sense. */
TARDIS_API size_t tardis_gio_memory_bytes(const tardis_gio_options* options);

/* The memory stays until the session is closed. Not thread-safe, from here to close. */
TARDIS_API tardis_code tardis_gio_open(const tardis_gio_options* options, void* memory, tardis_gio_session** session,
                                       char** error);
/* No kernel uses its queues any more. */
TARDIS_API void tardis_gio_close(tardis_gio_session* session);

/* Tables of data pointers, to be copied to the GPU: PRP words and SGL descriptors. Valid until renew, reopen or close.
 */
TARDIS_API tardis_code tardis_gio_tables(tardis_gio_session* session, const void** prp, size_t* prp_bytes,
                                         const void** sgl, size_t* sgl_bytes, char** error);
/* Device memory of the caller: `state` of 32 bytes and `uses` of 2 * commands bytes for each queue, 16-byte aligned,
 * and copies of the tables. `queues`: tardis_gio_queue_bytes() for each. Again after renew, then
 * tardis_gpu_gio_start_queues. */
TARDIS_API tardis_code tardis_gio_queues(tardis_gio_session* session, void* state, void* uses, void* prp, void* sgl,
                                         void* queues, char** error);

/* After a ring's end that says so (RingError 2 to 4), when no kernel uses the queues any more: whatever is in flight
 * ends, and the queues are made anew. */
TARDIS_API tardis_code tardis_gio_renew(tardis_gio_session* session, char** error);

/* The controller's threads look for commands without a pause, which keeps a core busy each. After this, one that has
 * found none for spin_us sleeps between looks, at first shortly, then for up to sleep_us (at most 10,000), and looks
 * without a pause again from the next command on, which may have waited that long. 0 of sleep_us: as at first. */
TARDIS_API tardis_code tardis_gio_rest(tardis_gio_session* session, uint32_t spin_us, uint32_t sleep_us, char** error);

/* Whether commands may come, as at first. While they may not, the controller's threads sleep whatever tardis_gio_rest
 * says; the next call wakes them up. Costs a system call for each thread. */
TARDIS_API void tardis_gio_expect(tardis_gio_session* session, int commands);

/* By the host, on a queue pair of its own: whole blocks. */
TARDIS_API tardis_code tardis_gio_read(tardis_gio_session* session, uint64_t offset, void* memory, size_t bytes,
                                       char** error);
TARDIS_API tardis_code tardis_gio_write(tardis_gio_session* session, uint64_t offset, const void* memory, size_t bytes,
                                        char** error);
TARDIS_API tardis_code tardis_gio_flush(tardis_gio_session* session, char** error);
/* One line: the controller and its queues. Freed with tardis_free. */
TARDIS_API char* tardis_gio_report(tardis_gio_session* session);

#ifdef __cplusplus
}
#endif
#endif
