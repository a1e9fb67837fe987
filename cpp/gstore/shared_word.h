// SPDX-License-Identifier: Apache-2.0
// Words in memory that several threads use, for host and device code. Device: relaxed and past L1, ordered by fence().
// Host: acquire loads and release stores, which give the same order without a fence.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TARDIS_GSTORE_FUNCTION __host__ __device__ __forceinline__
#else
#define TARDIS_GSTORE_FUNCTION inline
#include <thread>
#endif

namespace tardis::gstore {

TARDIS_GSTORE_FUNCTION std::uint64_t load(const std::uint64_t* word) {
#if defined(__CUDA_ARCH__)
  std::uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(word)) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

TARDIS_GSTORE_FUNCTION void store(std::uint64_t* word, std::uint64_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "l"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

TARDIS_GSTORE_FUNCTION bool compare_exchange(std::uint64_t* word, std::uint64_t expected, std::uint64_t desired) {
#if defined(__CUDA_ARCH__)
  std::uint64_t found;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(found)
               : "l"(__cvta_generic_to_global(word)), "l"(expected), "l"(desired)
               : "memory");
  return found == expected;
#else
  return __atomic_compare_exchange_n(word, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
#endif
}

// Forbids that a load or store after it is done before one that stands before it.
TARDIS_GSTORE_FUNCTION void fence() {
#if defined(__CUDA_ARCH__)
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

// Forbids that a load or store after it is done before a load that stands before it.
TARDIS_GSTORE_FUNCTION void acquire_fence() {
#if defined(__CUDA_ARCH__)
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 8)
  asm volatile("fence.acquire.gpu;" ::: "memory");  // waits for no store
#else
  fence();
#endif
#endif
}

// Between two looks at a word that somebody else is about to change.
TARDIS_GSTORE_FUNCTION void relax() {
#if defined(__CUDA_ARCH__)
  __nanosleep(64);
#elif !defined(__CUDACC__)
  std::this_thread::yield();
#endif
}

// Who waits for another gives up after a while, counted from the first question: a device must never hang. On the host,
// where writers may pause for long, a writer waits on and a reader counts its looks.
class Deadline {
 public:
#if defined(__CUDA_ARCH__)
  __device__ __forceinline__ bool passed(std::uint64_t nanoseconds) {
    if (end_ == 0) end_ = now() + nanoseconds;
    return now() > end_;
  }
#else
  bool passed(std::uint64_t nanoseconds) { return nanoseconds < kWriterPatience && ++looks_ > 64; }
#endif
  static constexpr std::uint64_t kWriterPatience = 100'000'000, kReaderPatience = 10'000'000;

 private:
#if defined(__CUDA_ARCH__)
  static __device__ __forceinline__ std::uint64_t now() {
    std::uint64_t value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
  }
  std::uint64_t end_ = 0;
#else
  int looks_ = 0;
#endif
};

}  // namespace tardis::gstore
