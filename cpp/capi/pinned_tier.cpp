// SPDX-License-Identifier: Apache-2.0
// The C ABI over the pinned tier.
#include "tardis/pinned_tier.h"

#include <cstring>
#include <memory>
#include <vector>

#include "capi/guarded.h"
#include "gio/pinned_tier.h"

struct tardis_pinned_tier {
  std::unique_ptr<tardis::gio::PinnedTier> tier;
};

namespace {

using namespace tardis;
using capi::guarded;
using gio::PinnedTier;

static_assert(sizeof(PinnedTier::Hash) == TARDIS_HASH_BYTES);
static_assert(PinnedTier::kNoSlot == static_cast<uint32_t>(TARDIS_PINNED_NO_SLOT));
static_assert(static_cast<int>(PinnedTier::Reserved::kFull) == TARDIS_PINNED_FULL &&
              static_cast<int>(PinnedTier::Reserved::kThere) == TARDIS_PINNED_THERE);

PinnedTier::Name name_of(uint32_t space, const uint8_t* hashes, std::size_t i) {
  PinnedTier::Name name;
  std::memcpy(name.hash.data(), hashes + i * TARDIS_HASH_BYTES, TARDIS_HASH_BYTES);
  name.space = space;
  return name;
}

std::vector<PinnedTier::Name> names_of(uint32_t space, const uint8_t* hashes, std::size_t n) {
  std::vector<PinnedTier::Name> names;
  names.reserve(n);
  for (std::size_t i = 0; i < n; ++i) names.push_back(name_of(space, hashes, i));
  return names;
}

// Of the touches that it takes to use every slot once.
constexpr uint64_t kNeighbourShare = 4;

void reserve(PinnedTier& tier, uint32_t space, const uint8_t* hashes, std::size_t n, uint8_t* results, uint32_t* slots,
             uint64_t* addresses, bool spare) {
  std::vector<PinnedTier::Reserved> reserved(n);
  tier.reserve_each(names_of(space, hashes, n).data(), n, reserved.data(), slots, spare);
  for (std::size_t i = 0; i < n; ++i) {
    results[i] = static_cast<uint8_t>(reserved[i]);
    if (reserved[i] == PinnedTier::Reserved::kYes) addresses[i] = tier.address(slots[i]);
  }
}

}  // namespace

tardis_code tardis_pinned_open(void* memory, uint64_t bytes, uint64_t slot_bytes, uint64_t reuse_bonus,
                               tardis_pinned_tier** tier, char** error) {
  return guarded(error, [&]() -> Status {
    auto made = PinnedTier::create(
        {memory, bytes, slot_bytes, reuse_bonus, slot_bytes == 0 ? 0 : bytes / slot_bytes / kNeighbourShare});
    if (!made) return made.error();
    auto handle = std::make_unique<tardis_pinned_tier>();
    handle->tier = std::move(*made);
    *tier = handle.release();
    return {};
  });
}

void tardis_pinned_close(tardis_pinned_tier* tier) { std::unique_ptr<tardis_pinned_tier>(tier).reset(); }

tardis_code tardis_pinned_pin(tardis_pinned_tier* tier, uint32_t name_space, const uint8_t* hashes, size_t n,
                              uint32_t* slots, uint64_t* addresses, size_t* run) {
  return guarded(nullptr, [&]() -> Status {
    *run = tier->tier->pin(names_of(name_space, hashes, n).data(), n, slots);
    for (std::size_t i = 0; i < *run; ++i) addresses[i] = tier->tier->address(slots[i]);
    return {};
  });
}

tardis_code tardis_pinned_find(tardis_pinned_tier* tier, uint32_t name_space, const uint8_t* hashes, size_t n,
                               uint8_t* there, size_t* run) {
  return guarded(nullptr, [&]() -> Status {
    *run = tier->tier->find(names_of(name_space, hashes, n).data(), n, there);
    return {};
  });
}

tardis_code tardis_pinned_pin_each(tardis_pinned_tier* tier, uint32_t name_space, const uint8_t* hashes, size_t n,
                                   uint32_t* slots, uint64_t* addresses, size_t* pinned) {
  return guarded(nullptr, [&]() -> Status {
    *pinned = tier->tier->pin_each(names_of(name_space, hashes, n).data(), n, slots);
    for (std::size_t i = 0; i < n; ++i) {
      if (slots[i] != PinnedTier::kNoSlot) addresses[i] = tier->tier->address(slots[i]);
    }
    return {};
  });
}

tardis_code tardis_pinned_unpin(tardis_pinned_tier* tier, const uint32_t* slots, size_t n) {
  return guarded(nullptr, [&] { return tier->tier->unpin(slots, n); });
}

tardis_code tardis_pinned_reserve(tardis_pinned_tier* tier, uint32_t name_space, const uint8_t* hashes, size_t n,
                                  uint8_t* results, uint32_t* slots, uint64_t* addresses) {
  return guarded(nullptr, [&]() -> Status {
    reserve(*tier->tier, name_space, hashes, n, results, slots, addresses, false);
    return {};
  });
}

tardis_code tardis_pinned_reserve_spare(tardis_pinned_tier* tier, uint32_t name_space, const uint8_t* hashes, size_t n,
                                        uint8_t* results, uint32_t* slots, uint64_t* addresses) {
  return guarded(nullptr, [&]() -> Status {
    reserve(*tier->tier, name_space, hashes, n, results, slots, addresses, true);
    return {};
  });
}

tardis_code tardis_pinned_end(tardis_pinned_tier* tier, const uint32_t* slots, size_t n, int how) {
  return guarded(nullptr, [&]() -> Status {
    for (std::size_t i = 0; i < n; ++i) {
      Status ended = how == TARDIS_PINNED_ABORT ? tier->tier->abort(slots[i])
                                                : tier->tier->publish(slots[i], how == TARDIS_PINNED_PUBLISH_PINNED);
      if (!ended) return ended;
    }
    return {};
  });
}

tardis_code tardis_pinned_erase(tardis_pinned_tier* tier, uint32_t name_space, const uint8_t* hashes, size_t n,
                                size_t* erased) {
  return guarded(nullptr, [&]() -> Status {
    *erased = 0;
    for (std::size_t i = 0; i < n; ++i) *erased += tier->tier->erase(name_of(name_space, hashes, i));
    return {};
  });
}

tardis_code tardis_pinned_clear(tardis_pinned_tier* tier, size_t* erased) {
  return guarded(nullptr, [&]() -> Status {
    *erased = tier->tier->clear();
    return {};
  });
}

tardis_code tardis_pinned_get_counters(tardis_pinned_tier* tier, tardis_pinned_counters* counters) {
  return guarded(nullptr, [&]() -> Status {
    const gio::PinnedCounters now = tier->tier->counters();
    *counters = {now.slots,  now.published, now.reserved, now.pinned, now.hits,        now.misses,
                 now.stored, now.aborted,   now.evicted,  now.erased, now.refused_full};
    return {};
  });
}
