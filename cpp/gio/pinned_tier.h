// SPDX-License-Identifier: Apache-2.0
// Objects of one size in pinned host memory: the tier between HBM and drives, from which movers land pages without a
// command. Who is where, who may go, and what may be served; the memory is the caller's (no CUDA here).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"

namespace tardis::gio {

struct PinnedTierOptions {
  void* memory = nullptr;        // pinned and mapped, as long as the tier
  std::uint64_t bytes = 0;       // the budget: no more is ever used
  std::uint64_t slot_bytes = 0;  // of an object, a multiple of 16
  std::uint64_t reuse_bonus =
      0;  // touches of other objects that one reuse is worth; three reuses count, as in the store
  // An object that was touched fewer touches than this after the one that is worth least, and was used again no more
  // often, goes in its place if its slot is behind the one that was taken last: so runs of slots stay together.
  std::uint64_t neighbour_slack = 0;
};

struct PinnedCounters {
  std::uint64_t slots = 0, published = 0, reserved = 0, pinned = 0;  // now
  std::uint64_t hits = 0, misses = 0;                                // objects asked for by pin()
  std::uint64_t stored = 0, aborted = 0, evicted = 0, erased = 0;
  std::uint64_t refused_full = 0;  // reservations: every slot is pinned or reserved
};

// Thread-safe; no function waits for another thread but for one mutex, under which nothing is copied.
class PinnedTier {
 public:
  using Hash = std::array<std::uint8_t, 32>;
  struct Name {
    Hash hash{};
    std::uint32_t space = 0;
    bool operator==(const Name& other) const { return hash == other.hash && space == other.space; }
  };
  enum class Reserved { kYes, kThere, kBusy, kFull };
  static constexpr std::uint32_t kNoSlot = UINT32_MAX;

  static Result<std::unique_ptr<PinnedTier>> create(const PinnedTierOptions& options);

  // there[i]: whether it is published. Returns the length of the leading run of them. Nothing is pinned, no use is
  // counted.
  std::size_t find(const Name* names, std::size_t n, std::uint8_t* there) const;
  // Pins the leading run of these objects that are there: they stay where slots[i] is until unpin(). Returns its
  // length.
  std::size_t pin(const Name* names, std::size_t n, std::uint32_t* slots);
  // The same for each that is there; slots[i] is kNoSlot for the others. Returns how many are pinned.
  std::size_t pin_each(const Name* names, std::size_t n, std::uint32_t* slots);
  // An error: one of them is not pinned; nothing was given back from there on.
  Status unpin(const std::uint32_t* slots, std::size_t n);
  // A slot for an object, in place of the one that is worth least if there is no other. It is found by nobody until
  // publish(). kThere: it is published; kBusy: somebody else fills it; kFull.
  // `spare`: in place of one that was never used again, or kFull.
  Reserved reserve(const Name& name, std::uint32_t& slot, bool spare = false);
  // The same for each in turn; slots[i] is set where results[i] is kYes. They ascend (from the last slot on with the
  // first), and follow each other where they can: copy engines move such runs with one command.
  void reserve_each(const Name* names, std::size_t n, Reserved* results, std::uint32_t* slots, bool spare = false);
  // By who reserved it, once each: its bytes are there, and stay until unpin() if `pinned`; or will not be. An error:
  // nobody fills it.
  Status publish(std::uint32_t slot, bool pinned = false);
  Status abort(std::uint32_t slot);
  // Not found from now on; its slot is free when its last pin ends. False: it was not there. One that is being filled
  // is given up when it is to be published.
  bool erase(const Name& name);
  // The same for every object. Returns how many were there.
  std::size_t clear();

  std::uint64_t address(std::uint32_t slot) const { return base_ + slot * options_.slot_bytes; }
  std::uint32_t slots() const { return static_cast<std::uint32_t>(slots_.size()); }
  PinnedCounters counters() const;

 private:
  enum class State : std::uint8_t { kFree, kFilling, kPublished, kDying };
  struct Slot {
    Name name;
    State state = State::kFree;
    std::uint32_t pins = 0, reuses = 0;
    std::uint64_t score = 0;
    bool erased = false;  // while it is filled
  };
  struct NameHash {
    std::size_t operator()(const Name& name) const;
  };
  static constexpr std::uint32_t kMostReuses = 3;

  explicit PinnedTier(const PinnedTierOptions& options);
  bool erase_one(const Name& name);
  bool pin_one(const Name& name, std::uint32_t& slot);
  std::optional<std::uint32_t> take_slot(bool spare);
  std::uint32_t victim() const;
  Reserved reserve_one(const Name& name, std::uint32_t& slot, bool spare);
  void drop(std::uint32_t slot);
  void release(std::uint32_t slot);
  void touch(std::uint32_t slot, bool reuse);

  const PinnedTierOptions options_;
  const std::uint64_t base_;
  mutable std::mutex mutex_;
  std::vector<Slot> slots_;
  std::set<std::uint32_t> free_;
  std::uint32_t next_ = 0;  // behind the slot that was taken last: the next one if it is free
  std::unordered_map<Name, std::uint32_t, NameHash> names_;      // of slots that are filled or published
  std::set<std::pair<std::uint64_t, std::uint32_t>> evictable_;  // (score, slot): published and not pinned
  std::uint64_t clock_ = 0;
  PinnedCounters counters_;
};

}  // namespace tardis::gio
