/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI of objects in pinned host memory (docs/restore.md): which are there, which may go. The memory is the
 * caller's, pinned and mapped where a GPU lands from it (tardis_gpu_page_pieces takes addresses). Conventions of
 * tardis.h; every function is thread-safe. */
#ifndef TARDIS_PINNED_TIER_H_
#define TARDIS_PINNED_TIER_H_

#include "tardis/tardis.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tardis_pinned_tier tardis_pinned_tier;

typedef struct tardis_pinned_counters {
  uint64_t slots, published, reserved, pinned; /* now */
  uint64_t hits, misses;                       /* objects asked for by tardis_pinned_pin */
  uint64_t stored, aborted, evicted, erased, refused_full;
} tardis_pinned_counters;

typedef enum tardis_pinned_reserved {
  TARDIS_PINNED_RESERVED = 0,
  TARDIS_PINNED_THERE = 1, /* it is published */
  TARDIS_PINNED_BUSY = 2,  /* somebody else fills it */
  TARDIS_PINNED_FULL = 3,  /* every slot is pinned or being filled */
} tardis_pinned_reserved;

/* `bytes` of memory, of which no more is ever used, for objects of slot_bytes. `reuse_bonus`: how many uses of other
 * objects a reuse is worth, three at most, when the least valuable one goes. */
TARDIS_API tardis_code tardis_pinned_open(void* memory, uint64_t bytes, uint64_t slot_bytes, uint64_t reuse_bonus,
                                          tardis_pinned_tier** tier, char** error);
/* Nothing is pinned or reserved any more. */
TARDIS_API void tardis_pinned_close(tardis_pinned_tier* tier);

enum { TARDIS_PINNED_NO_SLOT = 0xFFFFFFFF };

/* there[i]: 1 if it is there; *run: the leading run of them. Nothing is pinned, no use is counted. */
TARDIS_API tardis_code tardis_pinned_find(tardis_pinned_tier* tier, uint32_t name_space, const uint8_t* hashes,
                                          size_t n, uint8_t* there, size_t* run);

/* Pins the leading run of these objects that are there (*run of them): slots[i], and their addresses, are theirs until
 * tardis_pinned_unpin. */
TARDIS_API tardis_code tardis_pinned_pin(tardis_pinned_tier* tier, uint32_t name_space, const uint8_t* hashes, size_t n,
                                         uint32_t* slots, uint64_t* addresses, size_t* run);
/* The same for each that is there, *pinned of them; slots[i] is TARDIS_PINNED_NO_SLOT for the others. */
TARDIS_API tardis_code tardis_pinned_pin_each(tardis_pinned_tier* tier, uint32_t name_space, const uint8_t* hashes,
                                              size_t n, uint32_t* slots, uint64_t* addresses, size_t* pinned);
TARDIS_API tardis_code tardis_pinned_unpin(tardis_pinned_tier* tier, const uint32_t* slots, size_t n);

/* Slots to be filled, found by nobody until they are published: results[i] is a tardis_pinned_reserved; slots[i] and
 * addresses[i] are set where it is TARDIS_PINNED_RESERVED. Each is ended once: TARDIS_PINNED_PUBLISH (its bytes are
 * there), _PUBLISH_PINNED (and stay until tardis_pinned_unpin) or _ABORT. TARDIS_INVALID_ARGUMENT from unpin and end: a
 * slot that the caller does not hold. */
TARDIS_API tardis_code tardis_pinned_reserve(tardis_pinned_tier* tier, uint32_t name_space, const uint8_t* hashes,
                                             size_t n, uint8_t* results, uint32_t* slots, uint64_t* addresses);
/* The same for objects that are worth less than any that was used again: they take a free slot, or that of an object
 * which never was. */
TARDIS_API tardis_code tardis_pinned_reserve_spare(tardis_pinned_tier* tier, uint32_t name_space, const uint8_t* hashes,
                                                   size_t n, uint8_t* results, uint32_t* slots, uint64_t* addresses);
enum { TARDIS_PINNED_ABORT = 0, TARDIS_PINNED_PUBLISH = 1, TARDIS_PINNED_PUBLISH_PINNED = 2 };
TARDIS_API tardis_code tardis_pinned_end(tardis_pinned_tier* tier, const uint32_t* slots, size_t n, int how);

/* Not found from now on. *erased: how many were there. */
TARDIS_API tardis_code tardis_pinned_erase(tardis_pinned_tier* tier, uint32_t name_space, const uint8_t* hashes,
                                           size_t n, size_t* erased);
/* The same for every object. */
TARDIS_API tardis_code tardis_pinned_clear(tardis_pinned_tier* tier, size_t* erased);
TARDIS_API tardis_code tardis_pinned_get_counters(tardis_pinned_tier* tier, tardis_pinned_counters* counters);

#ifdef __cplusplus
}
#endif
#endif
