// SPDX-License-Identifier: Apache-2.0
// Who may use the link how fast: the words that users share, and the rules, for host and device (C++17). Kernels are
// gio/link_pacer.cuh, host threads gio/link_host.h.
#pragma once

#include <cstdint>

#include "gio/link.h"
#include "gio/pieces.h"

namespace tardis::gio {

constexpr std::uint32_t kLinkClasses = TARDIS_GPU_LINK_CLASSES;
constexpr std::uint32_t kLinkDirections = TARDIS_GPU_LINK_DIRECTIONS;

// What host threads say. Kernels fetch it over the link in one go.
struct LinkHostLine {
  std::uint64_t active[kLinkDirections];
  std::uint64_t budgets[kLinkClasses];
};
static_assert(sizeof(LinkHostLine) == 48, "a bulk copy");

// In HBM: counted by kernels. A word of users has 16 bits a class, so that one look sees all of them. Kernels look here
// all the time, and nowhere else: reads of host memory wait behind all that is on the link, and cost others far more
// than their bytes.
struct alignas(64) LinkDeviceWords {
  std::uint64_t active[kLinkDirections];
  LinkHostLine host;        // a copy
  std::uint64_t copied_ns;  // when somebody last went to fetch it
  std::uint64_t errors;
  std::uint64_t reserved[2];
  std::uint64_t bytes[kLinkClasses];
  std::uint64_t budget_bytes[kLinkClasses];
  std::uint64_t held_ns[kLinkClasses];
};
static_assert(sizeof(LinkDeviceWords) == 192);

constexpr std::uint32_t kUserBits = 16;
constexpr std::uint64_t kMostUsers = (1u << kUserBits) - 1;

TARDIS_GIO_FUNCTION std::uint64_t one_user(std::uint32_t link_class) {
  return std::uint64_t{1} << (link_class * kUserBits);
}
TARDIS_GIO_FUNCTION std::uint64_t users_of(std::uint64_t active, std::uint32_t link_class) {
  return active >> (link_class * kUserBits) & kMostUsers;
}
// False, and nothing changed: a user too many to be counted, or an end without begin.
TARDIS_GIO_FUNCTION bool add_user(std::uint64_t& active, std::uint32_t link_class) {
  if (users_of(active, link_class) == kMostUsers) return false;
  active += one_user(link_class);
  return true;
}
TARDIS_GIO_FUNCTION bool remove_user(std::uint64_t& active, std::uint32_t link_class) {
  if (users_of(active, link_class) == 0) return false;
  active -= one_user(link_class);
  return true;
}

// Users that nobody else can tell from a hang must go on: kernels hold SMs, and their waits end after 20 s.
constexpr std::uint64_t kLeastShare = 1 << 20;  // bytes a second of one user

// Layers of a restore are calls with gaps between them, which are no reason to start at full rate.
constexpr std::uint64_t kLingerNs = 100'000;
// What was not moved in time may be made up for so far back, no further: a budget is no allowance to be saved up.
constexpr std::uint64_t kCatchUpNs = 20'000;

// The words at one moment, as one class sees them.
struct LinkLook {
  bool outranked;       // somebody of a higher class is active, in either direction: both share the link's queues
  std::uint64_t users;  // of this class, at least one
  std::uint64_t budget;

  // active: the words of both sides and directions, in any order.
  static TARDIS_GIO_FUNCTION LinkLook of(const std::uint64_t (&active)[2 * kLinkDirections], std::uint64_t budget,
                                         std::uint32_t link_class) {
    LinkLook look = {false, 0, budget};
    for (const std::uint64_t word : active) {
      look.outranked |= (word & (one_user(link_class) - 1)) != 0;
      look.users += users_of(word, link_class);
    }
    if (look.users == 0) look.users = 1;  // itself, not counted yet
    return look;
  }
};

// When one user may move. Each look at the words is handed to it; times are in ns of one clock.
class LinkTurn {
 public:
  TARDIS_GIO_FUNCTION void look(const LinkLook& look, std::uint64_t now) {
    if (look.outranked && look.budget != 0) {
      if (!on_budget_) next_ = now;
      on_budget_ = true;
      until_ = now + kLingerNs;
    } else if (on_budget_ && (now >= until_ || look.budget == 0)) {
      on_budget_ = false;
    }
    share_ = look.budget / look.users;
    if (share_ < kLeastShare) share_ = kLeastShare;
  }
  TARDIS_GIO_FUNCTION bool on_budget() const { return on_budget_; }

  // On a budget: from when on these bytes may move. They are paid for before they move, so that many short calls get no
  // more than a long one.
  TARDIS_GIO_FUNCTION std::uint64_t ready(std::uint64_t now, std::uint64_t bytes) {
    if (next_ + kCatchUpNs < now) next_ = now - kCatchUpNs;
    next_ += bytes * 1'000'000'000 / share_;
    return next_;
  }

 private:
  bool on_budget_ = false;
  std::uint64_t until_ = 0;            // it stays on its budget if nobody is seen that outranks it
  std::uint64_t next_ = 0;             // when what was allowed so far has been moved at the budget's rate
  std::uint64_t share_ = kLeastShare;  // bytes a second
};

}  // namespace tardis::gio

// In mapped pinned host memory.
struct alignas(64) tardis_gpu_link_words {
  tardis::gio::LinkHostLine host;                             // users counted by host threads
  std::uint64_t device_active[tardis::gio::kLinkDirections];  // what kernels counted, as they tell the host

  tardis::gio::LinkDeviceWords* device;
  std::uint64_t errors;  // of host threads, as all below
  std::uint64_t reserved[2];
  std::uint64_t bytes[tardis::gio::kLinkClasses];
  std::uint64_t budget_bytes[tardis::gio::kLinkClasses];
  std::uint64_t held_ns[tardis::gio::kLinkClasses];
  std::uint64_t reserved_end[4];
};
static_assert(sizeof(tardis_gpu_link_words) == 256);
