/* SPDX-License-Identifier: Apache-2.0 */
/* Direct landing of gio sessions (docs/gio-ring.md): commands name memory of a copy engine, such as KV pools in HBM,
 * and the controller moves their bytes there. Conventions of tardis.h. */
#ifndef TARDIS_GIO_DIRECT_H_
#define TARDIS_GIO_DIRECT_H_

#include "tardis/copy_engine.h"
#include "tardis/gio.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How much pinned, mapped, page-aligned, zeroed host memory direct landing takes besides. */
TARDIS_API size_t tardis_gio_direct_list_bytes(tardis_gio_session* session);
/* Attaches the engine and tests it, with the last 128 KiB of the namespace, which are put back (one that can only be
 * read: by reads); before kernels run. On an error the session is as before, and tardis_gio_report() says why. The
 * engine and `lists` stay until the session is closed. */
TARDIS_API tardis_code tardis_gio_use_direct(tardis_gio_session* session, const tardis_copy_engine* engine, void* lists,
                                             char** error);

/* Memory of the engine, e.g. a KV pool of a layer. While no kernel uses the session's queues; memory goes away only
 * when nothing is in flight that names it: after a ring that ended badly, after tardis_gio_renew(). */
TARDIS_API tardis_code tardis_gio_register_region(tardis_gio_session* session, void* base, uint64_t bytes,
                                                  char** error);
TARDIS_API tardis_code tardis_gio_unregister_region(tardis_gio_session* session, void* base, char** error);

/* The registered regions, to be copied to the GPU. Valid until the next call that registers, unregisters, or closes. */
TARDIS_API tardis_code tardis_gio_direct_table(tardis_gio_session* session, const void** table, size_t* bytes,
                                               char** error);
/* Changes all queues that tardis_gio_queues() wrote: all their commands land directly from then on; those with memory
 * outside of the regions are refused. `table`: where the GPU has its copy. */
TARDIS_API tardis_code tardis_gio_direct_queues(tardis_gio_session* session, const void* table, void* queues,
                                                char** error);

#ifdef __cplusplus
}
#endif
#endif
