// SPDX-License-Identifier: Apache-2.0
// The lanes that run a ring together. On a GPU they are a warp (warp_lanes.cuh). Here they are steps of one host
// thread: the same ring, of any width, without a GPU.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>

#include "base/clock.h"
#include "gio/iocb.h"
#include "nvme/ordering.h"

namespace tardis::gio {

template <std::uint32_t kLanes>
class HostLanes {
 public:
  static_assert(kLanes >= 1 && kLanes <= 32);
  static constexpr std::uint32_t kWidth = kLanes;

  // A variable of which every lane has its own.
  template <class T>
  struct Each {
    T& operator[](std::uint32_t lane) { return values[lane]; }
    const T& operator[](std::uint32_t lane) const { return values[lane]; }
    std::array<T, kLanes> values{};
  };

  // body(lane), by each lane; what one lane wrote, all see afterwards.
  template <class Body>
  void each(Body&& body) const {
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) body(lane);
  }
  std::uint32_t ballot(const Each<bool>& votes) const {
    std::uint32_t mask = 0;
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) mask |= std::uint32_t{votes[lane]} << lane;
    return mask;
  }
  template <class T>
  T pick(const Each<T>& values, std::uint32_t lane) const {
    return values[lane];
  }
  // Each lane gets what the lane before it has; lane 0 gets `first`.
  Each<std::uint32_t> from_previous(const Each<std::uint32_t>& values, std::uint32_t first) const {
    Each<std::uint32_t> out;
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) out[lane] = lane == 0 ? first : values[lane - 1];
    return out;
  }
  // The lowest lane with the same value.
  Each<std::uint32_t> first_with_same(const Each<std::uint32_t>& values) const {
    Each<std::uint32_t> out;
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
      while (values[out[lane]] != values[lane]) ++out[lane];
    }
    return out;
  }
  static std::uint32_t count(std::uint32_t mask) { return static_cast<std::uint32_t>(__builtin_popcount(mask)); }
  static std::uint32_t lowest(std::uint32_t mask) { return static_cast<std::uint32_t>(__builtin_ctz(mask)); }  // not 0

  // For one lane, in each().
  static nvme::CompletionEntry load_completion(const nvme::CompletionEntry* entry) {
    const auto* const words = reinterpret_cast<const volatile std::uint32_t*>(entry);
    // The phase is in the last word; the others must not be read before it.
    const std::uint32_t last = nvme::load_acquire(words + 3);
    const std::uint32_t heads = nvme::load_shared(words + 2);
    return {nvme::load_shared(words),          0,
            static_cast<std::uint16_t>(heads), static_cast<std::uint16_t>(heads >> 16),
            static_cast<std::uint16_t>(last),  static_cast<std::uint16_t>(last >> 16)};
  }
  static std::uint32_t load_word(const std::uint32_t* word) { return nvme::load_acquire(word); }
  static void store_word(std::uint32_t* word, std::uint32_t value) { nvme::store_shared(word, value); }

  // By all lanes together. The submission entries of `from` into the ring, from `at` on.
  static void store_entries(nvme::SubmissionEntry* ring, std::uint32_t entries, std::uint32_t at,
                            const nvme::SubmissionEntry* from, std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) ring[at + i < entries ? at + i : at + i - entries] = from[i];
  }
  // Forbids that a doorbell's store is seen before anything that a lane stored earlier, or before its loads are done.
  void fence() const {}  // in doorbell()
  void doorbell(volatile std::uint32_t* word, std::uint32_t value) const { nvme::store_doorbell(word, value); }
  // True for the last of `rings` to call it, which then sees what the others stored before.
  bool last_to_end(std::uint32_t* ended, std::uint32_t rings) const {
    if (__atomic_add_fetch(ended, 1, __ATOMIC_ACQ_REL) != rings) return false;
    __atomic_store_n(ended, 0, __ATOMIC_RELAXED);
    return true;
  }
  // Forbids that the flag is seen before what all lanes, and who they waited for, stored earlier.
  void raise(std::uint32_t* flag, std::uint32_t value) const { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
  std::uint64_t now() const { return monotonic_ns(); }
  void relax() const { nvme::relax(); }
  [[noreturn]] void give_up() const { std::abort(); }  // rather than wait for ever
};

}  // namespace tardis::gio
