/* SPDX-License-Identifier: Apache-2.0 */
/* NVMe drives of this machine, for tools (docs/vfio.md). Conventions of tardis.h; answers are JSON objects, freed with
 * tardis_free. `address` is that of a PCI function: "0000:81:00.0", or without the domain. */
#ifndef TARDIS_NVME_H_
#define TARDIS_NVME_H_

#include "tardis/tardis.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where a machine's facts are read; NULL: /sys, /proc, /dev. */
typedef struct tardis_nvme_machine {
  const char* sys;
  const char* proc;
  const char* dev;
} tardis_nvme_machine;

/* Every NVMe controller, and who has it. Opens none of them; needs no root. `machine` may be NULL, here and below. */
TARDIS_API tardis_code tardis_nvme_list(const tardis_nvme_machine* machine, char** json, char** error);

/* These three open the drive with VFIO, which resets its controller, and give it back before they return. */

/* What the controller and its namespaces say of themselves. */
TARDIS_API tardis_code tardis_nvme_identify(const tardis_nvme_machine* machine, const char* address, char** json,
                                            char** error);
/* Log page 02h. */
TARDIS_API tardis_code tardis_nvme_health(const tardis_nvme_machine* machine, const char* address, char** json,
                                          char** error);
/* Makes the namespace the place of the segments of a store in the folder `home`, which is made if it is not there.
 * `erase`: whatever is on the namespace is lost; else an error says what was found. A namespace that is the volume of
 * this home already stays as it is. */
TARDIS_API tardis_code tardis_nvme_format_store(const tardis_nvme_machine* machine, const char* address,
                                                uint32_t namespace_id, const char* home, int erase, char** json,
                                                char** error);

/* Gives a drive to the driver `to`, "vfio-pci" or "nvme". carry_out 0: says what would be done; else does it, which
 * needs root. A drive in use is refused. */
TARDIS_API tardis_code tardis_nvme_release(const tardis_nvme_machine* machine, const char* address, const char* to,
                                           int carry_out, char** json, char** error);

/* The ways in which a drive could reach GPU memory, and how far each is there. */
TARDIS_API tardis_code tardis_nvme_gpu_memory(const tardis_nvme_machine* machine, char** json, char** error);

/* Loads `count` words of 32 bits at `offsets` in `bytes` bytes of I/O memory, mapped for a device meanwhile. 0, or an
 * error of its own: tardis_gpu_io_memory_read() of libtardis_gpu.so. */
typedef int (*tardis_nvme_reader)(void* memory, uint64_t bytes, const uint32_t* offsets, uint32_t* values,
                                  uint32_t count);
/* Whether `reader` reaches the registers and doorbells of a drive, which is opened for it as above. */
TARDIS_API tardis_code tardis_nvme_check_doorbells(const tardis_nvme_machine* machine, const char* address,
                                                   tardis_nvme_reader reader, char** json, char** error);

#ifdef __cplusplus
}
#endif
#endif
