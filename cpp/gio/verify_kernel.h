// SPDX-License-Identifier: Apache-2.0
// Digests of what landed directly, which no SM saw passing: read in HBM behind the ring. C ABI of libtardis_gpu.so, as
// ring_kernel.h.
#pragma once

#include <cstdint>

#include "gio/iocb.h"

// Behind tardis_gpu_gio_run() of the same IOCB, on its stream. Of each command that is done and names digests
// (IoContext::digests): compares those of a read with its bytes, and sets its status to kDamaged where they differ;
// makes those of a write. Then raises `flag`: kIoDone if that of the IOCB is and nothing is damaged. Who waits for the
// layer waits for this flag, which was cleared before, and not for the IOCB's. `words`: two of device memory, zeroed
// once; words[1] is the number of damaged commands of the last run. Device memory: flag, words. 1 to 16 CTAs.
extern "C" __attribute__((visibility("default"))) int tardis_gpu_gio_verify(const tardis::gio::IoControlBlock* iocb,
                                                                            std::uint32_t* words, std::uint32_t* flag,
                                                                            std::uint32_t ctas, void* cuda_stream);
extern "C" __attribute__((visibility("default"))) int tardis_gpu_gio_verify_load();
