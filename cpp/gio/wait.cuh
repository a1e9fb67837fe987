// SPDX-License-Identifier: Apache-2.0
// The wait for an IOCB inside a kernel. (On a stream it is cuStreamWaitValue32(flag, 1, CU_STREAM_WAIT_VALUE_GEQ).)
#pragma once

#include <cstdint>

#include "gio/iocb.h"

namespace tardis::gio {

// By one thread. kIoDone or kIoError; kIoPending if the deadline (ns from now) passed first. What the rings landed is
// seen afterwards by this thread, and by those that it synchronises with.
__device__ __forceinline__ std::uint32_t wait_cqe(const std::uint32_t* flag, std::uint64_t deadline_ns) {
  std::uint64_t begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  while (true) {
    std::uint32_t value;
    // Acquire: forbids that landed bytes are read before the flag.
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    if (value != kIoPending) return value;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (now - begin >= deadline_ns) return kIoPending;
    __nanosleep(100);
  }
}

}  // namespace tardis::gio
