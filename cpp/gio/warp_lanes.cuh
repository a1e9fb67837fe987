// SPDX-License-Identifier: Apache-2.0
// The lanes of a ring as a warp, all 32 of it. As HostLanes in lanes.h, where each member is described.
#pragma once

#include <cstdint>
#include <cstring>

#include "gio/iocb.h"
#include "nvme/ordering.h"

namespace tardis::gio {

class WarpLanes {
 public:
  static constexpr std::uint32_t kWidth = 32;

  template <class T>
  struct Each {
    __device__ __forceinline__ T& operator[](std::uint32_t) { return value; }
    __device__ __forceinline__ const T& operator[](std::uint32_t) const { return value; }
    T value;
  };

  __device__ __forceinline__ WarpLanes() : lane_(threadIdx.x % kWidth) {}

  template <class Body>
  __device__ __forceinline__ void each(Body&& body) const {
    body(lane_);
    __syncwarp();
  }
  __device__ __forceinline__ std::uint32_t ballot(const Each<bool>& votes) const {
    return __ballot_sync(kAll, votes.value);
  }
  template <class T>
  __device__ __forceinline__ T pick(const Each<T>& values, std::uint32_t lane) const {
    static_assert(sizeof(T) % 2 == 0);
    if constexpr (sizeof(T) <= 4) {
      return static_cast<T>(__shfl_sync(kAll, values.value, static_cast<int>(lane)));
    } else {
      std::uint32_t words[sizeof(T) / 4];
      std::memcpy(words, &values.value, sizeof words);
#pragma unroll
      for (std::uint32_t& word : words) word = __shfl_sync(kAll, word, static_cast<int>(lane));
      T out;
      std::memcpy(&out, words, sizeof out);
      return out;
    }
  }
  __device__ __forceinline__ Each<std::uint32_t> from_previous(const Each<std::uint32_t>& values,
                                                               std::uint32_t first) const {
    const std::uint32_t before = __shfl_up_sync(kAll, values.value, 1);
    return {lane_ == 0 ? first : before};
  }
  __device__ __forceinline__ Each<std::uint32_t> first_with_same(const Each<std::uint32_t>& values) const {
    return {lowest(__match_any_sync(kAll, values.value))};
  }
  __device__ __forceinline__ static std::uint32_t count(std::uint32_t mask) {
    return static_cast<std::uint32_t>(__popc(mask));
  }
  __device__ __forceinline__ static std::uint32_t lowest(std::uint32_t mask) {
    return static_cast<std::uint32_t>(__ffs(static_cast<int>(mask)) - 1);
  }

  // The whole entry with one request, since the next would take a microsecond or more. 128 bits are read at once.
  __device__ __forceinline__ static nvme::CompletionEntry load_completion(const nvme::CompletionEntry* entry) {
    std::uint32_t words[4];
    // Acquire: forbids that a later load, such as that of the command's data, or a store is done before it.
    asm volatile(
        "{\n"
        " .reg .b128 entry;\n"
        " .reg .b64 low, high;\n"
        " ld.acquire.sys.b128 entry, [%4];\n"
        " mov.b128 {low, high}, entry;\n"
        " mov.b64 {%0, %1}, low;\n"
        " mov.b64 {%2, %3}, high;\n"
        "}"
        : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
        : "l"(entry)
        : "memory");
    // With the reserved word, or the assembler takes the load apart.
    return {words[0],
            words[1],
            static_cast<std::uint16_t>(words[2]),
            static_cast<std::uint16_t>(words[2] >> 16),
            static_cast<std::uint16_t>(words[3]),
            static_cast<std::uint16_t>(words[3] >> 16)};
  }
  __device__ __forceinline__ static std::uint32_t load_word(const std::uint32_t* word) {
    return nvme::load_acquire(word);
  }
  __device__ __forceinline__ static void store_word(std::uint32_t* word, std::uint32_t value) {
    nvme::store_shared(word, value);
  }

  // Neighbouring lanes write neighbouring 16 bytes: full lines go over the link.
  __device__ __forceinline__ void store_entries(nvme::SubmissionEntry* ring, std::uint32_t entries, std::uint32_t at,
                                                const nvme::SubmissionEntry* from, std::uint32_t count) const {
    constexpr std::uint32_t kParts = sizeof(nvme::SubmissionEntry) / sizeof(uint4);
    for (std::uint32_t i = lane_; i < count * kParts; i += kWidth) {
      const std::uint32_t entry = at + i / kParts;
      reinterpret_cast<uint4*>(ring + (entry < entries ? entry : entry - entries))[i % kParts] =
          reinterpret_cast<const uint4*>(from)[i];
    }
    __syncwarp();
  }
  __device__ __forceinline__ void fence() const {
    __syncwarp();
    // Forbids that the tail's store overtakes the entries' of all lanes, or the head's store: it is cumulative over
    // what the warp's barrier ordered before it.
    if (lane_ == 0) __threadfence_system();
  }
  __device__ __forceinline__ void doorbell(volatile std::uint32_t* word, std::uint32_t value) const {
    // As I/O memory: one store, merged with no other.
    if (lane_ == 0) asm volatile("st.mmio.relaxed.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
  }
  __device__ __forceinline__ bool last_to_end(std::uint32_t* ended, std::uint32_t rings) const {
    std::uint32_t before = 0;
    __syncwarp();
    if (lane_ == 0) {
      __threadfence();  // forbids that this ring counts as ended before its report is seen
      before = atomicAdd(ended, 1);
      if (before + 1 == rings) *ended = 0;
      __threadfence();  // forbids that the others' reports are read before the count
    }
    return __shfl_sync(kAll, before, 0) + 1 == rings;
  }
  __device__ __forceinline__ void raise(std::uint32_t* flag, std::uint32_t value) const {
    if (lane_ != 0) return;
    // Forbids that whoever sees the flag misses reports, statuses or landed bytes: those of other warps and rings are
    // ordered before it by what this warp waited for.
    __threadfence_system();
    nvme::store_shared(flag, value);
  }
  __device__ __forceinline__ std::uint64_t now() const {
    std::uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return __shfl_sync(kAll, ns, 0);  // the lanes must agree on what is too late
  }
  __device__ __forceinline__ void relax() const { __nanosleep(20); }
  // A kernel that hangs would take the device from everybody.
  __device__ __forceinline__ void give_up() const { __trap(); }

 private:
  static constexpr unsigned kAll = 0xffffffff;
  const std::uint32_t lane_;
};

}  // namespace tardis::gio
