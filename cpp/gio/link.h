/* SPDX-License-Identifier: Apache-2.0 */
/* The arbiter of a GPU's link to its host (docs/gio.md): who uses the link says so, and who is outranked keeps to a
 * budget. C ABI of libtardis_gpu.so. One arbiter a device, made at start, in one process. Nothing is ever stopped: a
 * class that is outranked goes on at its budget, so that a use whose end never comes slows others down and no more. */
#ifndef TARDIS_GIO_LINK_H_
#define TARDIS_GIO_LINK_H_

#include <stdint.h>

#include "gio/mover.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The first has the highest priority. */
enum tardis_gpu_link_class {
  TARDIS_GPU_LINK_RESTORE = 0,   /* objects to HBM that a request waits for */
  TARDIS_GPU_LINK_LOAD_BACK = 1, /* host tier to HBM, by whatever means */
  TARDIS_GPU_LINK_ATTENTION = 2, /* attention that reads its keys and values where they lie, in host memory */
  TARDIS_GPU_LINK_WRITE_BEHIND = 3,
  TARDIS_GPU_LINK_CLASSES = 4,
};

enum tardis_gpu_link_direction {
  TARDIS_GPU_LINK_IN = 0,  /* host to HBM */
  TARDIS_GPU_LINK_OUT = 1, /* HBM to host */
  TARDIS_GPU_LINK_DIRECTIONS = 2,
};

struct tardis_gpu_link;       /* the arbiter */
struct tardis_gpu_link_words; /* what kernels and host threads share (gio/link_arbiter.h) */

/* What a call moves over the link, and whom it heeds. */
struct tardis_gpu_link_traffic {
  struct tardis_gpu_link_words* words; /* of tardis_gpu_link_words_of(); NULL: it heeds nobody and tells nobody */
  uint32_t link_class;                 /* enum tardis_gpu_link_class */
  uint32_t direction;                  /* enum tardis_gpu_link_direction */
  uint32_t in_flight; /* of a mover without digests: chunks of 16 KiB that a CTA holds at once, 3 to 12; 0: 12. With
                       * fewer it disturbs compute beside it less, and loses rate with small pages (docs/gio.md) */
};

/* On the current device, with the budgets that docs/gio.md names. Allocates; not for capture. */
TARDIS_GPU_API int tardis_gpu_link_create(struct tardis_gpu_link** link);
/* No call that was given its words is still under way. NULL is accepted. */
TARDIS_GPU_API int tardis_gpu_link_destroy(struct tardis_gpu_link* link);
/* The device sees them at this address as well. */
TARDIS_GPU_API struct tardis_gpu_link_words* tardis_gpu_link_words_of(const struct tardis_gpu_link* link);

/* Bytes a second that a class may move, all of its users together, while one above it is active; 0: as many as it can.
 * At least TARDIS_GPU_LINK_LEAST_BUDGET otherwise, else cudaErrorInvalidValue. Kernels that run already get to know
 * within a millisecond. */
enum { TARDIS_GPU_LINK_LEAST_BUDGET = 64 << 20 };
TARDIS_GPU_API int tardis_gpu_link_set_budget(struct tardis_gpu_link* link, uint32_t link_class, uint64_t budget);

/* For traffic of other kinds (copy engines, kernels that know of no arbiter): from begin to end, in the order of the
 * stream, the class counts as active. Can be captured. Each begin needs its end; an end too many is counted as an error
 * and changes nothing. */
TARDIS_GPU_API int tardis_gpu_link_begin(struct tardis_gpu_link* link, uint32_t link_class, uint32_t direction,
                                         void* stream);
TARDIS_GPU_API int tardis_gpu_link_end(struct tardis_gpu_link* link, uint32_t link_class, uint32_t direction,
                                       void* stream);

/* tardis_gpu_move() and tardis_gpu_move_digested() of a class: it counts as active while it runs, and keeps to its
 * budget while outranked. It keeps its SMs meanwhile: calls of lower classes should be short, or run where those above
 * them do not. */
TARDIS_GPU_API int tardis_gpu_move_in_class(const struct tardis_gpu_move_args* move,
                                            const struct tardis_gpu_link_traffic* traffic, void* stream);
TARDIS_GPU_API int tardis_gpu_move_digested_in_class(const struct tardis_gpu_move_args* move,
                                                     const struct tardis_gpu_digest_args* digests,
                                                     const struct tardis_gpu_link_traffic* traffic, void* stream);

/* For a host thread that starts copies of a class, asking before each: pace() returns when these bytes may move, at
 * once unless the class is outranked. From create to destroy it counts as a user; one thread at a time. */
struct tardis_gpu_link_pacer;
TARDIS_GPU_API int tardis_gpu_link_pacer_create(struct tardis_gpu_link* link, uint32_t link_class, uint32_t direction,
                                                struct tardis_gpu_link_pacer** pacer);
TARDIS_GPU_API void tardis_gpu_link_pacer_destroy(struct tardis_gpu_link_pacer* pacer); /* NULL is accepted */
TARDIS_GPU_API void tardis_gpu_link_pace(struct tardis_gpu_link_pacer* pacer, uint64_t bytes);

/* Since creation, of one class. Waits for the device. */
struct tardis_gpu_link_counters {
  uint64_t bytes;        /* that its kernels and paced host threads moved */
  uint64_t budget_bytes; /* those of them that were moved on a budget */
  uint64_t held_ns;      /* how long its users waited for that, summed up */
  uint64_t active;       /* users at this moment */
  uint64_t errors;       /* ends without begin, of all classes */
};
TARDIS_GPU_API int tardis_gpu_link_count(const struct tardis_gpu_link* link, uint32_t link_class,
                                         struct tardis_gpu_link_counters* counters);

#ifdef __cplusplus
}
#endif
#endif
