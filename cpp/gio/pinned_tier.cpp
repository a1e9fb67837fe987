// SPDX-License-Identifier: Apache-2.0
#include "gio/pinned_tier.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace tardis::gio {
namespace {

Error not_held(const char* what, std::uint32_t slot) {
  return {Code::kInvalidArgument, "pinned tier: " + std::string(what) + " of slot " + std::to_string(slot) +
                                      ", which the caller does not hold"};
}

}  // namespace

std::size_t PinnedTier::NameHash::operator()(const Name& name) const {
  std::uint64_t word;  // keys are SHA-256 values
  std::memcpy(&word, name.hash.data(), sizeof word);
  return static_cast<std::size_t>(word ^ name.space * 0x9E3779B97F4A7C15u);
}

Result<std::unique_ptr<PinnedTier>> PinnedTier::create(const PinnedTierOptions& options) {
  const std::uint64_t slots = options.slot_bytes == 0 ? 0 : options.bytes / options.slot_bytes;
  if (options.memory == nullptr || reinterpret_cast<std::uintptr_t>(options.memory) % 16 != 0 ||
      options.slot_bytes % 16 != 0 || slots == 0 || slots >= UINT32_MAX) {
    return Error{Code::kInvalidArgument,
                 "pinned tier: expected memory at a multiple of 16 for at least one object of whole 16 bytes, found " +
                     std::to_string(options.bytes) + " bytes for objects of " + std::to_string(options.slot_bytes) +
                     "; raise the tier's budget"};
  }
  return std::unique_ptr<PinnedTier>(new PinnedTier(options));
}

PinnedTier::PinnedTier(const PinnedTierOptions& options)
    : options_(options),
      base_(reinterpret_cast<std::uint64_t>(options.memory)),
      slots_(options.bytes / options.slot_bytes) {
  for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) free_.insert(free_.end(), slot);
  counters_.slots = slots_.size();
}

void PinnedTier::touch(std::uint32_t slot, bool reuse) {
  Slot& s = slots_[slot];
  if (reuse) s.reuses = std::min(kMostReuses, s.reuses + 1);
  s.score = ++clock_ + s.reuses * options_.reuse_bonus;
}

void PinnedTier::release(std::uint32_t slot) {
  slots_[slot] = {};
  free_.insert(slot);
}

std::size_t PinnedTier::find(const Name* names, std::size_t n, std::uint8_t* there) const {
  const std::lock_guard lock(mutex_);
  std::size_t run = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto known = names_.find(names[i]);
    there[i] = known != names_.end() && slots_[known->second].state == State::kPublished;
    if (there[i] != 0 && run == i) ++run;
  }
  return run;
}

bool PinnedTier::pin_one(const Name& name, std::uint32_t& slot) {
  const auto known = names_.find(name);
  if (known == names_.end() || slots_[known->second].state != State::kPublished) return false;
  slot = known->second;
  if (slots_[slot].pins++ == 0) {
    evictable_.erase({slots_[slot].score, slot});
    ++counters_.pinned;
  }
  touch(slot, true);
  ++counters_.hits;
  return true;
}

std::size_t PinnedTier::pin(const Name* names, std::size_t n, std::uint32_t* slots) {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < n; ++i) {
    if (!pin_one(names[i], slots[i])) {
      counters_.misses += n - i;
      return i;
    }
  }
  return n;
}

std::size_t PinnedTier::pin_each(const Name* names, std::size_t n, std::uint32_t* slots) {
  const std::lock_guard lock(mutex_);
  std::size_t pinned = 0;
  for (std::size_t i = 0; i < n; ++i) {
    slots[i] = kNoSlot;
    if (pin_one(names[i], slots[i])) {
      ++pinned;
    } else {
      ++counters_.misses;
    }
  }
  return pinned;
}

Status PinnedTier::unpin(const std::uint32_t* slots, std::size_t n) {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < n; ++i) {
    if (slots[i] >= slots_.size() || slots_[slots[i]].pins == 0) return not_held("unpin", slots[i]);
    Slot& slot = slots_[slots[i]];
    if (--slot.pins > 0) continue;
    --counters_.pinned;
    if (slot.state == State::kDying) {
      release(slots[i]);
    } else {
      evictable_.insert({slot.score, slots[i]});
    }
  }
  return {};
}

// There is an object that can go.
std::uint32_t PinnedTier::victim() const {
  const auto [score, least] = *evictable_.begin();
  if (next_ < slots_.size()) {
    const Slot& next = slots_[next_];
    if (next.state == State::kPublished && next.pins == 0 && next.reuses <= slots_[least].reuses &&
        next.score - score < options_.neighbour_slack) {
      return next_;
    }
  }
  return least;
}

std::optional<std::uint32_t> PinnedTier::take_slot(bool spare) {
  if (free_.empty()) {
    if (evictable_.empty()) return std::nullopt;
    const std::uint32_t gone = victim();
    if (spare && slots_[gone].reuses > 0) return std::nullopt;
    evictable_.erase({slots_[gone].score, gone});
    names_.erase(slots_[gone].name);
    --counters_.published;
    ++counters_.evicted;
    release(gone);
  }
  auto taken = free_.lower_bound(next_);
  if (taken == free_.end()) taken = free_.begin();
  const std::uint32_t slot = *taken;
  free_.erase(taken);
  next_ = slot + 1;
  return slot;
}

PinnedTier::Reserved PinnedTier::reserve_one(const Name& name, std::uint32_t& slot, bool spare) {
  if (const auto known = names_.find(name); known != names_.end()) {
    return slots_[known->second].state == State::kPublished ? Reserved::kThere : Reserved::kBusy;
  }
  const auto taken = take_slot(spare);
  if (!taken) {
    ++counters_.refused_full;
    return Reserved::kFull;
  }
  slot = *taken;
  slots_[slot].name = name;
  slots_[slot].state = State::kFilling;
  names_[name] = slot;
  ++counters_.reserved;
  return Reserved::kYes;
}

PinnedTier::Reserved PinnedTier::reserve(const Name& name, std::uint32_t& slot, bool spare) {
  const std::lock_guard lock(mutex_);
  return reserve_one(name, slot, spare);
}

void PinnedTier::reserve_each(const Name* names, std::size_t n, Reserved* results, std::uint32_t* slots, bool spare) {
  const std::lock_guard lock(mutex_);
  const std::uint32_t first = next_;
  std::vector<std::uint32_t> taken;
  for (std::size_t i = 0; i < n; ++i) {
    results[i] = reserve_one(names[i], slots[i], spare);
    if (results[i] == Reserved::kYes) taken.push_back(slots[i]);
  }
  // Nobody knows of them yet. Objects that make room come in the order of their worth, in which several prompts' mix.
  std::sort(taken.begin(), taken.end());
  std::rotate(taken.begin(), std::lower_bound(taken.begin(), taken.end(), first), taken.end());
  auto next = taken.begin();
  for (std::size_t i = 0; i < n; ++i) {
    if (results[i] != Reserved::kYes) continue;
    slots[i] = *next++;
    slots_[slots[i]].name = names[i];
    names_[names[i]] = slots[i];
  }
}

Status PinnedTier::publish(std::uint32_t slot, bool pinned) {
  const std::lock_guard lock(mutex_);
  if (slot >= slots_.size() || slots_[slot].state != State::kFilling) return not_held("publish", slot);
  if (slots_[slot].erased) {
    if (!pinned) {
      drop(slot);
      return {};
    }
    names_.erase(slots_[slot].name);
    slots_[slot].state = State::kDying;
    slots_[slot].pins = 1;
    --counters_.reserved;
    ++counters_.aborted;
    ++counters_.pinned;
    return {};
  }
  slots_[slot].state = State::kPublished;
  touch(slot, false);
  if (pinned) {
    slots_[slot].pins = 1;
    ++counters_.pinned;
  } else {
    evictable_.insert({slots_[slot].score, slot});
  }
  --counters_.reserved;
  ++counters_.published;
  ++counters_.stored;
  return {};
}

Status PinnedTier::abort(std::uint32_t slot) {
  const std::lock_guard lock(mutex_);
  if (slot >= slots_.size() || slots_[slot].state != State::kFilling) return not_held("abort", slot);
  drop(slot);
  return {};
}

void PinnedTier::drop(std::uint32_t slot) {
  names_.erase(slots_[slot].name);
  release(slot);
  --counters_.reserved;
  ++counters_.aborted;
}

bool PinnedTier::erase(const Name& name) {
  const std::lock_guard lock(mutex_);
  return erase_one(name);
}

std::size_t PinnedTier::clear() {
  const std::lock_guard lock(mutex_);
  std::vector<Name> names;
  names.reserve(names_.size());
  for (const auto& [name, slot] : names_) names.push_back(name);
  std::size_t there = 0;
  for (const Name& name : names) there += erase_one(name) ? 1 : 0;
  return there;
}

bool PinnedTier::erase_one(const Name& name) {
  const auto known = names_.find(name);
  if (known == names_.end()) return false;
  const std::uint32_t slot = known->second;
  if (slots_[slot].state == State::kFilling) {
    slots_[slot].erased = true;
    return false;
  }
  names_.erase(known);
  --counters_.published;
  ++counters_.erased;
  if (slots_[slot].pins > 0) {
    slots_[slot].state = State::kDying;
  } else {
    evictable_.erase({slots_[slot].score, slot});
    release(slot);
  }
  return true;
}

PinnedCounters PinnedTier::counters() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

}  // namespace tardis::gio
