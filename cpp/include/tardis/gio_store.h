/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI of gio sessions over an open store (docs/restore.md): the store's data files as a namespace that a GPU
 * reads, and where on it objects and the digests that prove them are. Conventions of tardis.h. */
#ifndef TARDIS_GIO_STORE_H_
#define TARDIS_GIO_STORE_H_

#include "tardis/gio.h"

#ifdef __cplusplus
extern "C" {
#endif

/* As tardis_gio_open, but the namespace is the store's data files, as read-only (tardis_gio_write fails with
 * TARDIS_PERMISSION). `bytes` and `file` of the options are 0 and NULL; block_bytes is at least what the files ask for.
 * The store is closed after the session. tardis_gio_store_memory_bytes: as tardis_gio_memory_bytes. */
TARDIS_API size_t tardis_gio_store_memory_bytes(const tardis_gio_options* options);
TARDIS_API tardis_code tardis_gio_open_store(const tardis_gio_options* options, tardis_store* store, void* memory,
                                             tardis_gio_session** session, char** error);

/* Objects whose slots stay theirs until tardis_lease_end. */
typedef struct tardis_lease tardis_lease;

typedef struct tardis_lease_layout {
  uint64_t part_bytes;  /* of a layer */
  uint64_t part_stride; /* from a layer to the next: whole blocks of the store */
  uint32_t parts;
  uint32_t chunks_per_part; /* digests of a layer */
} tardis_lease_layout;

/* On the leading run of these keys that can be found: *n of them, 0 or more. An error only where there is one to tell;
 * a process has at most 16,384 objects in use. */
TARDIS_API tardis_code tardis_lease_acquire(tardis_store* store, uint32_t name_space, const uint8_t* hashes,
                                            size_t count, tardis_lease** lease, size_t* n, char** error);
TARDIS_API void tardis_lease_end(tardis_lease* lease);
TARDIS_API tardis_code tardis_lease_layout_of(const tardis_lease* lease, tardis_lease_layout* layout, char** error);

/* For each object of the lease, where it begins: blocks[i] of block_bytes bytes on a session's namespace, and its root
 * digest and generation. `roots` and `generations` may be NULL. An error: layers do not begin at whole blocks. */
TARDIS_API tardis_code tardis_lease_blocks(const tardis_lease* lease, uint32_t block_bytes, uint64_t* blocks,
                                           uint64_t* roots, uint64_t* generations, char** error);

/* Their chunk digests, [object][layer][chunk], read from the store by the host. proven[i] is 1 where they fit the
 * object's root; elsewhere they prove nothing, and the object is not to be served. `name_space` is the
 * lease's; TARDIS_INVALID_ARGUMENT: its objects have other layers or chunks. */
TARDIS_API tardis_code tardis_lease_digests(tardis_store* store, uint32_t name_space, const tardis_lease* lease,
                                            uint64_t* digests, uint8_t* proven, char** error);

#ifdef __cplusplus
}
#endif
#endif
