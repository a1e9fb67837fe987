/* SPDX-License-Identifier: Apache-2.0 */
/* The index of docs/gstore.md in memory of this process, by the code that runs on a GPU (whose C ABI is
 * cpp/gstore/index.h, with the same structs). Conventions of tardis.h. Lookups may run beside changes. */
#ifndef TARDIS_HOST_INDEX_H_
#define TARDIS_HOST_INDEX_H_

#include "tardis/tardis.h"

#ifdef __cplusplus
extern "C" {
#endif

struct tardis_gpu_index;
struct tardis_gpu_index_answer;
struct tardis_gpu_index_entry;

/* Bytes of memory for so many entries at a load of at most 0.8. */
TARDIS_API uint64_t tardis_index_memory_bytes(uint64_t entries);

/* Lays an index out in `memory`, which must be aligned to 256 bytes and zeroed before use. */
TARDIS_API tardis_code tardis_index_place(struct tardis_gpu_index* index, void* memory, uint64_t bytes, char** error);

/* answers[i] for keys[i] (32 bytes each, aligned to 8) in namespace `space`, for i < min(*count, max_count). */
TARDIS_API tardis_code tardis_index_lookup(const struct tardis_gpu_index* index, const void* keys,
                                           const uint32_t* count, uint32_t max_count, uint16_t space,
                                           struct tardis_gpu_index_answer* answers, char** error);

/* The changes in their order; a status (enum tardis_gpu_index_status) of each, or NULL. */
TARDIS_API tardis_code tardis_index_apply(const struct tardis_gpu_index* index,
                                          const struct tardis_gpu_index_entry* changes, uint32_t count,
                                          uint8_t* statuses, char** error);

#ifdef __cplusplus
}
#endif
#endif
