// SPDX-License-Identifier: Apache-2.0
// The link arbiter for kernels: a warp that starts loads says that it does, and asks before each group of them.
#pragma once

#include <cstdint>

#include "gio/bulk_copy.cuh"
#include "gio/link_arbiter.h"

namespace tardis::gio {

// A kernel's argument.
struct LinkTraffic {
  tardis_gpu_link_words* words;  // in host memory; null: everything below does nothing
  LinkDeviceWords* device;
  std::uint32_t link_class;
  std::uint32_t direction;
  std::uint32_t in_flight;

  static LinkTraffic of(const tardis_gpu_link_traffic& traffic) {
    return {traffic.words, traffic.words == nullptr ? nullptr : traffic.words->device, traffic.link_class,
            traffic.direction, traffic.in_flight};
  }
};

inline bool is_valid(const tardis_gpu_link_traffic* traffic) {
  return traffic != nullptr && traffic->link_class < kLinkClasses && traffic->direction < kLinkDirections;
}

__device__ __forceinline__ std::uint64_t load_shared_word(const std::uint64_t* word) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(word)) : "memory");
  return value;
}
__device__ __forceinline__ void store_shared_word(std::uint64_t* word, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "l"(value) : "memory");
}
__device__ __forceinline__ void add_shared_word(std::uint64_t* word, std::uint64_t value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "l"(value) : "memory");
}

// One thread. Tells the host what kernels have counted. Several may do so at once: each stores until what it stored is
// what is counted, so the last one to store has seen the changes of all.
__device__ __forceinline__ void tell_host(const LinkTraffic& traffic) {
  if (traffic.words == nullptr) return;
  const std::uint64_t* const counted = &traffic.device->active[traffic.direction];
  std::uint64_t now = load_shared_word(counted), told;
  do {
    told = now;
    store_shared_word(&traffic.words->device_active[traffic.direction], told);
    __threadfence_system();  // forbids that the look below is taken before the store is there
    now = load_shared_word(counted);
  } while (now != told);
}

// In shared memory: the host's line on its way.
struct alignas(16) LinkGlance {
  LinkHostLine line;
  std::uint64_t arrived;
  std::uint64_t reserved;
};
static_assert(sizeof(LinkGlance) == 64);

// Of the warp that starts a CTA's loads: all 32 lanes call these together, lane 0 keeps the state. Each CTA is a user.
class LinkPacer {
 public:
  // The host is told by another warp (tell_host()) that has nothing else to do yet.
  __device__ LinkPacer(const LinkTraffic& traffic, LinkGlance& glance)
      : traffic_(traffic),
        glance_(glance),
        lane_(threadIdx.x % 32),
        heeds_(traffic.words != nullptr && traffic.link_class != 0) {}

  // One thread, before a __syncthreads() that comes before tell_host() and end().
  static __device__ __forceinline__ void begin(const LinkTraffic& traffic, LinkGlance& glance) {
    if (traffic.words == nullptr) return;
    barrier_init(&glance.arrived, 1);
    fence_barrier_init();
    add_shared_word(&traffic.device->active[traffic.direction], one_user(traffic.link_class));
  }

  // How many chunks to start together at most.
  __device__ __forceinline__ int most_chunks() const { return on_budget_ ? 4 : 32; }

  // Before the loads of these bytes (as lane 0 has them).
  __device__ __forceinline__ void before(std::uint32_t bytes) {
    if (traffic_.words == nullptr) return;
    if (lane_ == 0) {
      bytes_ += bytes;
      unseen_ += bytes;
      if (heeds_ && unseen_ >= kLookBytes) {
        unseen_ = 0;
        look(nanoseconds());
      }
      if (turn_.on_budget()) hold(bytes);
    }
    on_budget_ = __shfl_sync(0xffffffff, turn_.on_budget(), 0);
  }

  // When the last load was started: what is on its way still is not much.
  __device__ __forceinline__ void end() {
    if (traffic_.words == nullptr || lane_ != 0) return;
    add_shared_word(&traffic_.device->active[traffic_.direction], -one_user(traffic_.link_class));
    tell_host(traffic_);
    if (fetching_) {
      barrier_wait(&glance_.arrived, parity_);  // shared memory may go to another CTA afterwards
      take();                                   // short calls look once: nobody else would hand the line on
    }
    add_shared_word(&traffic_.device->bytes[traffic_.link_class], bytes_);
    if (budget_bytes_ == 0) return;
    add_shared_word(&traffic_.device->budget_bytes[traffic_.link_class], budget_bytes_);
    add_shared_word(&traffic_.device->held_ns[traffic_.link_class], held_ns_);
  }

 private:
  static constexpr std::uint32_t kLookBytes = 256 << 10;
  static constexpr std::uint64_t kLookNs = 2'000;
  static constexpr std::uint64_t kCopyNs = 100'000;   // the host's line is fetched as often, by one CTA for all
  static constexpr std::uint64_t kStaleNs = 300'000;  // nobody has fetched it: a call waits for it before it begins

  __device__ __forceinline__ void look(std::uint64_t now) {
    LinkDeviceWords& words = *traffic_.device;
    if (fetching_ && barrier_test(&glance_.arrived, parity_)) take();
    const std::uint64_t copied =
        load_shared_word(&words.copied_ns);  // used behind the others, so that all are one wait
    LinkLook seen = read(words);
    const bool stale = !seen_ && now > copied + kStaleNs;
    if (!fetching_ && (stale || (now > copied + kCopyNs && claim(copied, now)))) {
      fetch();
      if (stale) {
        store_shared_word(&words.copied_ns, now);
        barrier_wait(&glance_.arrived, parity_);
        take();
        seen = read(words);
      }
    }
    seen_ = true;
    turn_.look(seen, now);
  }
  __device__ __forceinline__ LinkLook read(const LinkDeviceWords& words) const {
    const std::uint64_t active[] = {load_shared_word(&words.active[0]), load_shared_word(&words.active[1]),
                                    load_shared_word(&words.host.active[0]), load_shared_word(&words.host.active[1])};
    return LinkLook::of(active, load_shared_word(&words.host.budgets[traffic_.link_class]), traffic_.link_class);
  }
  __device__ __forceinline__ bool claim(std::uint64_t copied, std::uint64_t now) {
    return atomicCAS(reinterpret_cast<unsigned long long*>(&traffic_.device->copied_ns), copied, now) == copied;
  }
  __device__ __forceinline__ void fetch() {
    barrier_arrive_expecting(&glance_.arrived, sizeof(LinkHostLine));
    bulk_load(&glance_.line, reinterpret_cast<std::uint64_t>(&traffic_.words->host), sizeof(LinkHostLine),
              &glance_.arrived);
    fetching_ = true;
  }
  __device__ __forceinline__ void take() {
    fetching_ = false;
    parity_ ^= 1;
    LinkHostLine& copy = traffic_.device->host;
#pragma unroll
    for (std::uint32_t i = 0; i < kLinkDirections; ++i) store_shared_word(&copy.active[i], glance_.line.active[i]);
#pragma unroll
    for (std::uint32_t i = 0; i < kLinkClasses; ++i) store_shared_word(&copy.budgets[i], glance_.line.budgets[i]);
    // Forbids that the next fetch overwrites the line before it was read.
    fence_proxy_async();
  }

  __device__ __forceinline__ void hold(std::uint32_t bytes) {
    const std::uint64_t start = nanoseconds(), ready = turn_.ready(start, bytes);
    std::uint64_t now = start;
    while (now < ready && turn_.on_budget()) {
      const std::uint64_t left = ready - now;
      __nanosleep(static_cast<unsigned>(left < kLookNs ? left : kLookNs));
      now = nanoseconds();
      look(now);
    }
    budget_bytes_ += bytes;
    held_ns_ += now - start;
  }

  const LinkTraffic traffic_;
  LinkGlance& glance_;
  const unsigned lane_;
  const bool heeds_;
  bool on_budget_ = false;             // as all lanes know it
  std::uint32_t unseen_ = kLookBytes;  // bytes since the last look; the first group has one
  bool seen_ = false;                  // has looked before
  bool fetching_ = false;
  std::uint32_t parity_ = 0;  // of the fetch
  LinkTurn turn_;
  std::uint64_t bytes_ = 0, budget_bytes_ = 0, held_ns_ = 0;
};

}  // namespace tardis::gio
