// SPDX-License-Identifier: Apache-2.0
// The link arbiter for host threads: who uses the link, and how fast it may.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>

#include "base/clock.h"
#include "gio/link_arbiter.h"

namespace tardis::gio {

// The words decide how fast, never whether bytes are right: no order is needed between them.
inline std::uint64_t load_link_word(const std::uint64_t& word) { return __atomic_load_n(&word, __ATOMIC_RELAXED); }
inline void add_to_link_word(std::uint64_t& word, std::uint64_t value) {
  __atomic_fetch_add(&word, value, __ATOMIC_RELAXED);
}

// While it lives, its class counts as active. Any thread.
class LinkUse {
 public:
  LinkUse(tardis_gpu_link_words& words, std::uint32_t link_class, std::uint32_t direction)
      : words_(words), class_(link_class), direction_(direction), counted_(change(&add_user)) {}
  ~LinkUse() {
    if (counted_) change(&remove_user);
  }
  LinkUse(const LinkUse&) = delete;
  LinkUse& operator=(const LinkUse&) = delete;

 private:
  bool change(bool (*step)(std::uint64_t&, std::uint32_t)) {
    std::uint64_t& word = words_.host.active[direction_];
    std::uint64_t seen = load_link_word(word), wanted;
    do {
      wanted = seen;
      if (!step(wanted, class_)) {
        add_to_link_word(words_.errors, 1);
        return false;
      }
    } while (!__atomic_compare_exchange_n(&word, &seen, wanted, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return true;
  }

  tardis_gpu_link_words& words_;
  const std::uint32_t class_, direction_;
  const bool counted_;
};

// A thread that moves much, and asks before each bit of it. Counts as a user of its class from its making on. One
// thread at a time.
class HostPacer {
 public:
  HostPacer(tardis_gpu_link_words& words, std::uint32_t link_class, std::uint32_t direction)
      : words_(words), class_(link_class), use_(words, link_class, direction) {}

  // Returns when these bytes may move: at once, unless the class is outranked.
  void pace(std::uint64_t bytes) {
    pace(bytes, &monotonic_ns, [](std::uint64_t ns) { std::this_thread::sleep_for(std::chrono::nanoseconds(ns)); });
  }
  // With a clock of the caller's.
  template <class Now, class Sleep>
  void pace(std::uint64_t bytes, Now&& now, Sleep&& sleep) {
    const std::uint64_t start = now();
    add_to_link_word(words_.bytes[class_], bytes);
    turn_.look(look(), start);
    if (!turn_.on_budget()) return;
    const std::uint64_t ready = turn_.ready(start, bytes);
    std::uint64_t at = start;
    while (at < ready && turn_.on_budget()) {
      sleep(std::min(ready - at, kLookNs));
      at = now();
      turn_.look(look(), at);
    }
    add_to_link_word(words_.budget_bytes[class_], bytes);
    add_to_link_word(words_.held_ns[class_], at - start);
  }

 private:
  static constexpr std::uint64_t kLookNs = 200'000;  // a thread that sleeps less does hardly anything else

  LinkLook look() const {
    const std::uint64_t active[] = {load_link_word(words_.host.active[0]), load_link_word(words_.host.active[1]),
                                    load_link_word(words_.device_active[0]), load_link_word(words_.device_active[1])};
    return LinkLook::of(active, load_link_word(words_.host.budgets[class_]), class_);
  }

  tardis_gpu_link_words& words_;
  const std::uint32_t class_;
  const LinkUse use_;
  LinkTurn turn_;
};

}  // namespace tardis::gio
