// SPDX-License-Identifier: Apache-2.0
// Loads and stores of words that a controller shares, for host and device code. Rings may be in ordinary, pinned,
// write-combined or GPU memory, doorbells in any of them or in a BAR.
#pragma once

#include <cstdint>

#include "nvme/spec.h"

// Before a template that calls a functor of its caller, which is host-only or device-only as the caller is.
#if defined(__CUDACC__)
#define TARDIS_HD_CALLS_BACK _Pragma("nv_exec_check_disable")
#else
#define TARDIS_HD_CALLS_BACK
#endif

namespace tardis::nvme {

// Forbids that a later load or store is done before this load: what a controller wrote before this word is seen.
TARDIS_HD inline std::uint32_t load_acquire(const volatile std::uint32_t* word) {
#if defined(__CUDA_ARCH__)
  std::uint32_t value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#else
  const std::uint32_t value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
#if defined(__aarch64__)
  asm volatile("dmb oshld" ::: "memory");  // an acquire orders what other cores wrote, not what a device did
#endif
  return value;
#endif
}

// Once, and never from a cache that a controller's writes do not reach.
TARDIS_HD inline std::uint32_t load_shared(const volatile std::uint32_t* word) {
#if defined(__CUDA_ARCH__)
  std::uint32_t value;
  asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_RELAXED);
#endif
}

TARDIS_HD inline void store_shared(volatile std::uint32_t* word, std::uint32_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
#endif
}

// Exactly one store. Forbids that an earlier load or store is done after it: a controller that reads the doorbell finds
// the ring entries written, and may overwrite those that were read.
TARDIS_HD inline void store_doorbell(volatile std::uint32_t* doorbell, std::uint32_t value) {
#if defined(__CUDA_ARCH__)
  __threadfence_system();
  // As I/O memory: an ordinary store might be merged with the next one to the same word.
  asm volatile("st.mmio.relaxed.sys.u32 [%0], %1;" ::"l"(doorbell), "r"(value) : "memory");
#else
#if defined(__x86_64__)
  __builtin_ia32_sfence();  // write-combined stores (a ring in a BAR) are not ordered by the store below
#elif defined(__aarch64__)
  asm volatile("dmb osh" ::: "memory");  // a release store orders for other cores only, not for a device
#endif
  __atomic_store_n(doorbell, value, __ATOMIC_RELEASE);
#endif
}

#if !defined(__CUDA_ARCH__)
// A doorbell in memory. Forbids that an earlier load or store is done after it, as store_doorbell() does, and that a
// later load is done before it: either the controller finds this value when it looks once more, or this thread finds
// that it has asked to be told.
inline void store_shadow(volatile std::uint32_t* shadow, std::uint32_t value) {
#if defined(__aarch64__)
  asm volatile("dmb osh" ::: "memory");  // a release store orders for other cores only, not for a device
#endif
#if defined(__SANITIZE_THREAD__)
  (void)__atomic_exchange_n(shadow, value, __ATOMIC_SEQ_CST);  // TSan knows no fences
#else
  __atomic_store_n(shadow, value, __ATOMIC_RELEASE);
#if defined(__aarch64__)
  asm volatile("dmb osh" ::: "memory");
#endif
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}
#endif

// Between two polls.
TARDIS_HD inline void relax() {
#if defined(__CUDA_ARCH__)
  __nanosleep(32);
#elif defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace tardis::nvme
