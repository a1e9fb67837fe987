/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI of an NVMe broker (docs/nvmed.md): the process that has a drive, for others that use it. Conventions of
 * tardis.h. */
#ifndef TARDIS_NVMED_H_
#define TARDIS_NVMED_H_

#include "tardis/tardis.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tardis_nvmed tardis_nvmed;

enum { TARDIS_NVMED_NO_GROUP = 0xFFFFFFFF };

typedef struct tardis_nvmed_options {
  uint64_t client_bytes;   /* queues and mapped memory of a client */
  uint32_t group;          /* whose members may be clients, beside the same user; TARDIS_NVMED_NO_GROUP */
  uint32_t clients;        /* at once */
  uint32_t queues;         /* of all clients together; the controller may grant fewer */
  uint32_t client_queues;  /* of a client */
  uint32_t client_ranges;  /* ranges of blocks of a client */
  uint32_t client_regions; /* mapped ranges of memory of a client */
} tardis_nvmed_options;

/* Called by the thread of tardis_nvmed_run with what happens; `line` is gone when it returns. */
typedef void (*tardis_nvmed_log)(void* context, const char* line);

TARDIS_API uint64_t tardis_nvmed_options_bytes(void); /* sizeof, to compare */
TARDIS_API void tardis_nvmed_default_options(tardis_nvmed_options* options);
/* Opens the drive at a PCI address through VFIO and listens at `socket_path`. *report: one line on the drive. `log`, if
 * not null, stays callable until tardis_nvmed_close. */
TARDIS_API tardis_code tardis_nvmed_open(const char* pci_address, const char* socket_path,
                                         const tardis_nvmed_options* options, tardis_nvmed_log log, void* context,
                                         tardis_nvmed** nvmed, char** report, char** error);
/* Of this process, for good: its user and groups become these (group: the primary one, and the only one beside `more`),
 * all capabilities go, and no program that it executes gets any. Files that are open stay. */
TARDIS_API tardis_code tardis_nvmed_drop_privileges(uint32_t user, uint32_t group, uint32_t more, char** error);
/* Serves until tardis_nvmed_stop, which is TARDIS_OK, or until the drive is of no use. Once, by one thread. */
TARDIS_API tardis_code tardis_nvmed_run(tardis_nvmed* nvmed, char** error);
TARDIS_API void tardis_nvmed_stop(tardis_nvmed* nvmed); /* from any thread */
/* Nobody runs it any more. Clients have ended; the drive is shut down in good order and given back. */
TARDIS_API void tardis_nvmed_close(tardis_nvmed* nvmed);

#ifdef __cplusplus
}
#endif
#endif
