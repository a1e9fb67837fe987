// SPDX-License-Identifier: Apache-2.0
// A board as kernels see it: words in mapped memory that the loader's threads write and read.
#pragma once

#include <cstdint>

#include "tardis/loads.h"

namespace tardis::gio {

static_assert(TARDIS_LOAD_PENDING == 0, "a board is zeroed");

// Acquire: forbids that what the loader wrote before it is read earlier.
__device__ __forceinline__ std::uint32_t read_told(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
// Release: forbids that it is seen before what this thread, and kernels before this one, have written.
__device__ __forceinline__ void tell(std::uint32_t* word, std::uint32_t value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
// No atomic, which the link need not carry: only one thread at a time writes the word.
__device__ __forceinline__ void add_to(std::uint32_t* word, std::uint32_t more) { tell(word, read_told(word) + more); }

// By one thread, with acquire: what the loader told, or TARDIS_LOAD_PENDING when the time is over.
__device__ __forceinline__ std::uint32_t await_told(const std::uint32_t* word, std::uint64_t patience_ns) {
  constexpr unsigned kPauseNs = 500;  // each look is a read over the link
  std::uint64_t begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    if (const std::uint32_t told = read_told(word); told != TARDIS_LOAD_PENDING) return told;
    __nanosleep(kPauseNs);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < patience_ns);
  return read_told(word);
}

// No later kernel of this load waits.
__device__ __forceinline__ void abandon(tardis_load_board* board) {
  add_to(&board->errors, 1);
  tell(&board->abandoned, 1);
}

// By all threads of a block: adds the ids that are not of the pools to *errors.
__device__ __forceinline__ void count_outside(const std::uint32_t* ids, std::uint32_t count, std::uint32_t page_count,
                                              std::uint32_t* errors) {
  __shared__ std::uint32_t outside;
  if (threadIdx.x == 0) outside = 0;
  __syncthreads();
  std::uint32_t mine = 0;
  for (std::uint32_t i = threadIdx.x; i < count; i += blockDim.x) mine += __ldcg(ids + i) >= page_count;
  if (mine != 0) atomicAdd(&outside, mine);
  __syncthreads();
  if (threadIdx.x == 0 && outside != 0) add_to(errors, outside);
}

}  // namespace tardis::gio
