// SPDX-License-Identifier: Apache-2.0
// Which process may write in a segment: the one that holds it, for the length of a call. What a process held when it
// died goes to whoever comes across it.
#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "store/counters.h"
#include "store/store.h"

namespace tardis {
namespace {

constexpr auto kClaimPatience = std::chrono::seconds(30);
constexpr auto kClaimPause = std::chrono::microseconds(200);

constexpr std::uint32_t kPlaceBits = 8;
static_assert(kMaxProcesses < (1u << kPlaceBits));

constexpr Owner owner_word(std::uint64_t registration, std::uint32_t place) {
  return registration << kPlaceBits | (place + 1);
}

void forget_pins(LiveProcess& process) {
  for (auto& pin : process.leases) pin.store(0);
  for (auto& pin : process.parents) pin.store(0);
  for (auto& pin : process.writing) pin.store(0);
}

constexpr std::uint32_t place_of(Owner owner) { return (owner & ((1u << kPlaceBits) - 1)) - 1; }

}  // namespace

// Under the setup lock, after the own place's lock was taken.
void Store::join() {
  LiveHeader& h = table_.header();
  LiveProcess& own = table_.process(self_);
  std::uint32_t end = h.processes_end.load();
  while (end <= self_ && !h.processes_end.compare_exchange_weak(end, self_ + 1)) {
  }
  const Owner before = own.owner.load();
  forget_pins(own);
  own.oldest_read.store(0);
  device_->share_turns(std::make_unique<FlushTurns>(FlushTurns::Shared{
      h.flush_turn, own.oldest_read, self_, [this](std::uint32_t place) { return folder_.process_alive(place); },
      [this](std::uint64_t mark) { return all_reads_since(mark); }}));
  owner_ = owner_word(h.registrations.fetch_add(1) + 1, self_);
  own.owner.store(owner_);
  reap(before);
}

bool Store::all_reads_since(std::uint64_t mark) const {
  const std::uint32_t end = table_.header().processes_end.load();
  for (std::uint32_t place = 0; place < end; ++place) {
    const LiveProcess& process = table_.process(place);
    const std::uint64_t oldest = process.owner.load() == 0 ? 0 : process.oldest_read.load();
    if (oldest != 0 && oldest < mark && (place == self_ || folder_.process_alive(place))) return false;
  }
  return true;
}

bool Store::owner_alive(Owner owner) const {
  if (owner == owner_) return true;
  const std::uint32_t place = place_of(owner);
  if (table_.process(place).owner.load() != owner) return false;
  return place != self_ && folder_.process_alive(place);
}

// Under the setup lock: nobody joins or leaves meanwhile. `before`: who was registered in the own place, 0 for nobody.
void Store::reap(Owner before) {
  std::vector<Owner> dead;
  if (before != 0) dead.push_back(before);
  const std::uint32_t end = table_.header().processes_end.load();
  for (std::uint32_t place = 0; place < end; ++place) {
    const Owner owner = table_.process(place).owner.load();
    if (owner != 0 && !owner_alive(owner)) dead.push_back(owner);
  }
  if (dead.empty()) return;
  for (const Owner owner : dead) {
    for_each_segment([&](std::uint32_t id, SegmentState) {
      Owner waiting = owner, holder = owner;
      live(id).wanted.compare_exchange_strong(waiting, 0);
      if (!live(id).owner.compare_exchange_strong(holder, owner_)) return;
      settle_abandoned(id);
      live(id).owner.store(0);
    });
  }
  // What they published and did not flush is in the files: once it is durable their groups hold no one up.
  bool durable = true;
  for_each_segment([&](std::uint32_t id, SegmentState state) {
    if (state != SegmentState::kReady) return;
    recount(id);
    if ((live(id).flags.load() & kSegmentDirty) == 0) return;
    Segment* own = segment(id);
    if (own == nullptr) {
      durable = false;
    } else if (!own->flush()) {
      // Nobody knows which of its pages are lost, and a second flush would claim success: all of them go.
      table_.header().flush_failures.fetch_add(1);
      live(id).doubtful.store(1);
      index_.for_each_in(id, [&](const IndexEntry& entry) { index_.unpublish(entry); });
    }
  });
  for (const Owner owner : dead) {
    LiveProcess& process = table_.process(place_of(owner));
    if (durable) process.oldest_group.store(0);
    if (process.owner.load() != owner) continue;  // the own place
    forget_pins(process);
    if (durable) process.owner.store(0);
  }
  // The sum follows from the records; a process killed between two steps left it a little off.
  std::uint64_t payload = 0;
  index_.for_each([&](const IndexEntry& entry) { payload += entry.payload_bytes; });
  table_.header().payload_bytes.store(payload);
}

// A segment whose holder died: its tickets go, and what it wrote in part is like after a crash.
void Store::settle_abandoned(std::uint32_t id) {
  LiveSegment& s = live(id);
  switch (s.state.load()) {
    case SegmentState::kCreating:
      (void)folder_.remove_segment(name_of(id));
      s.state.store(SegmentState::kNone);
      return;
    case SegmentState::kReclassing: {
      // It was empty, and part of it may be written: what was begun is done again, whatever class the numbers make.
      const SlotClass slot_class = index_.class_of(id);
      const std::uint64_t unit = StripeMap::of(s.stripe_map.load(), 1).unit;
      Segment* own = segment(id);
      const std::uint32_t slots = own == nullptr ? 0 : own->room_for(slot_class, unit).slots;
      const bool possible = slots > 0 && table_.reserve_records(id, slots);
      if (!possible || !reclass(*own, slot_class, unit)) s.state.store(SegmentState::kUnreadable);
      return;
    }
    case SegmentState::kDraining:
      s.state.store(SegmentState::kReady);
      break;
    case SegmentState::kReady:
      break;
    case SegmentState::kNone:
    case SegmentState::kUnreadable:
      return;
  }
  s.doubtful.store(1);
  s.table_version.fetch_add(1);
  for (std::uint32_t slot = 0; slot < s.slots.load(); ++slot) {
    const GlobalSlot global = index_.global({id, slot});
    const Stamp stamp = index_.stamp(global);
    if (stamp.state() == SlotState::kWriting) index_.change(global, stamp, stamp.with(SlotState::kFree));
  }
  recount(id);
}

void Store::recount(std::uint32_t id) {
  LiveSegment& s = live(id);
  for (int attempt = 0; attempt < 3; ++attempt) {  // others may change slots while this counts
    std::array<std::uint32_t, kSlotStates> before{}, counts{};
    for (std::size_t i = 0; i < kSlotStates; ++i) before[i] = s.counts[i].load();
    for (std::uint32_t slot = 0; slot < s.slots.load(); ++slot) {
      ++counts[static_cast<std::size_t>(index_.stamp(index_.global({id, slot})).state())];
    }
    bool still = true;
    for (std::size_t i = 0; i < kSlotStates; ++i) still = still && before[i] == s.counts[i].load();
    if (!still) continue;
    for (std::size_t i = 0; i < kSlotStates; ++i) s.counts[i].fetch_add(counts[i] - before[i]);
    return;
  }
}

bool Store::claim(Segment& segment) {
  LiveSegment& s = segment.live();
  const std::lock_guard lock(segment.claim_mutex);
  const Owner waiting = s.wanted.load();
  if (waiting != 0 && waiting != owner_) {
    if (owner_alive(waiting)) return false;
    Owner gone = waiting;
    s.wanted.compare_exchange_strong(gone, 0);
  }
  if (segment.alone) return false;
  if (segment.claims > 0) {
    ++segment.claims;
    return true;
  }
  Owner holder = 0;
  if (!s.owner.compare_exchange_strong(holder, owner_)) {
    if (owner_alive(holder) || !s.owner.compare_exchange_strong(holder, owner_)) return false;
    settle_abandoned(segment.id());
  }
  segment.claims = 1;
  return true;
}

bool Store::claim_alone(Segment& segment) {
  if (!claim(segment)) return false;
  {
    const std::lock_guard lock(segment.claim_mutex);
    segment.alone = segment.claims == 1;
    if (segment.alone) return true;
  }
  release(segment);
  return false;
}

Status Store::claim_waiting(Segment& segment) {
  const auto give_up = std::chrono::steady_clock::now() + kClaimPatience;
  Owner nobody = 0;
  bool asked = false;
  while (!claim(segment)) {
    nobody = 0;
    asked = segment.live().wanted.compare_exchange_strong(nobody, owner_) || asked;
    if (std::chrono::steady_clock::now() >= give_up) {
      Owner own = owner_;
      if (asked) segment.live().wanted.compare_exchange_strong(own, 0);
      return Error{Code::kBusy,
                   segment.path() + ": another process writes in it and does not stop (" + folder_.owner() + ")"};
    }
    std::this_thread::sleep_for(kClaimPause);
  }
  Owner own = owner_;
  segment.live().wanted.compare_exchange_strong(own, 0);
  return {};
}

void Store::release(Segment& segment) {
  const std::lock_guard lock(segment.claim_mutex);
  segment.alone = false;
  if (--segment.claims == 0) segment.live().owner.store(0);
}

// Every group up to this one is durable, or failed and said so.
std::uint64_t Store::durable_group() const {
  // Before the others are asked: a group that begins later does not count.
  std::uint64_t durable = table_.header().next_group.load() - 1;
  const std::uint32_t end = table_.header().processes_end.load();
  for (std::uint32_t place = 0; place < end; ++place) {
    const LiveProcess& process = table_.process(place);
    const std::uint64_t oldest = process.owner.load() == 0 ? 0 : process.oldest_group.load();
    if (oldest != 0) durable = std::min(durable, oldest - 1);
  }
  return durable;
}

// A page that set() found stored may have been stored by another process, and not be durable yet. `failures`: the
// table's count of failed flushes before the page was looked for.
void Store::note_others(std::uint64_t failures) {
  const std::uint64_t group = table_.header().next_group.load() - 1;
  const std::lock_guard lock(others_mutex_);
  others_.add({group, failures});
}

void Store::Others::add(const Others& more) {
  failures = group == 0 ? more.failures : std::min(failures, more.failures);
  group = std::max(group, more.group);
}

Status Store::await_others() {
  Others others;
  {
    const std::lock_guard lock(others_mutex_);
    others = std::exchange(others_, {});
  }
  if (others.group == 0) return {};
  if (Status status = await_group(others.group); !status) {
    const std::lock_guard lock(others_mutex_);  // the next flush() must not say that it is done
    others_.add(others);
    return status;
  }
  if (table_.header().flush_failures.load() == others.failures) return {};
  return Error{Code::kIo, folder_.path() +
                              ": a flush failed, perhaps of another process and of pages that were taken for stored; "
                              "what was lost is no longer found"};
}

// Until every group up to this one is durable, of whichever process; they are asked not to wait for their groups' age.
Status Store::await_group(std::uint64_t group) {
  const auto give_up = std::chrono::steady_clock::now() + kClaimPatience;
  while (durable_group() < group) {
    bool dead = false;
    for (std::uint32_t place = 0; place < table_.header().processes_end.load(); ++place) {
      LiveProcess& process = table_.process(place);
      const std::uint64_t oldest = process.oldest_group.load();
      const Owner owner = process.owner.load();
      if (owner == 0 || oldest == 0 || oldest > group) continue;
      dead = dead || !owner_alive(owner);
      process.flush_asked.store(1);
    }
    if (dead) {
      const std::lock_guard describe(describe_mutex_);  // the setup lock is the process's
      if (Status status = folder_.lock_setup(); !status) return status;
      reap(0);
      folder_.unlock_setup();
    }
    if (std::chrono::steady_clock::now() >= give_up) {
      return Error{Code::kBusy,
                   folder_.path() + ": another process holds pages that it does not flush (" + folder_.owner() + ")"};
    }
    std::this_thread::sleep_for(kClaimPause);
  }
  return {};
}

std::uint64_t Store::begin_group() {
  std::atomic<std::uint64_t>& oldest = table_.process(self_).oldest_group;
  // Before the number is taken: who sees the number taken sees that something is not durable yet.
  if (oldest.load() == 0) oldest.store(table_.header().next_group.load());
  return table_.header().next_group.fetch_add(1);
}

}  // namespace tardis
