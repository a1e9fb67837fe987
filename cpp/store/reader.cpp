// SPDX-License-Identifier: Apache-2.0
// Loading takes no lock: what the index says is copied before the I/O, a lease keeps the slot from being reused during
// it, and the digest decides after it.
#include <algorithm>

#include "base/clock.h"
#include "store/counters.h"
#include "store/store.h"

namespace tardis {
namespace {

struct Read {
  IndexEntry entry;
  Segment* owner;
  std::uint32_t pin;
};

}  // namespace

Status Store::get(NamespaceId space, const Hash256* hashes, const std::uint64_t* pieces, std::size_t n,
                  std::uint8_t* ok) {
  std::fill(ok, ok + n, std::uint8_t{0});
  const Call call(*this);
  if (!call) return Call::closed();
  auto geometry = geometry_of(space);
  if (!geometry) return geometry.error();
  const std::uint64_t started = monotonic_ns();

  std::vector<Read> reads;  // of pages 0 .. reads.size(): after the first absent page nothing can be used
  reads.reserve(n);
  std::optional<Error> failure;
  Transfer payload(*device_, IoRequest::Op::kRead, paths_in_use() > 1);
  for (std::size_t i = 0; i < n; ++i) {
    auto entry = index_.find(space, hashes[i]);
    if (!entry || entry->payload_bytes != (*geometry)->payload_bytes()) break;
    const std::uint32_t pin = index_.lease(entry->slot);
    const SlotRef where = index_.where(entry->slot);
    Segment* owner = segment(where.segment, &failure);
    const std::uint64_t offset = owner == nullptr ? 0 : owner->slot_offset(where.slot);
    // Only now: whoever took the slot since the first look may not have seen the lease.
    const Stamp now = index_.stamp(entry->slot);
    if (owner == nullptr || !now.live() || now.generation() != entry->stamp.generation()) {
      index_.end_lease(pin, entry->slot);
      (owner == nullptr ? counters_->get_pages_failed : counters_->get_pages_raced) += 1;
      break;
    }
    reads.push_back({*entry, owner, pin});
    payload.add(owner->file(), offset, **geometry, pieces + i * (*geometry)->pieces());
  }
  if (!reads.empty()) payload.run(options_.verify_reads);

  std::uint64_t hits = 0;
  PathTally tally;
  const std::uint64_t used = index_.tick(reads.size());
  for (std::size_t i = 0; i < reads.size(); ++i) {
    const IndexEntry& entry = reads[i].entry;
    const std::uint32_t slot = index_.where(entry.slot).slot;
    const Stamp now = index_.stamp(entry.slot);
    const bool same = now.generation() == entry.stamp.generation();
    const bool live = same && now.live();
    const int error = payload.error(i);
    tally.add(*reads[i].owner, IoUse::kRead, error);
    if (error != 0) {
      counters_->get_pages_failed += 1;
      failure = errno_error(error, reads[i].owner->path() + ": reading a page");
      if (live && bytes_are_lost(error)) index_.quarantine(entry, /*recorded=*/false);
    } else if (options_.verify_reads ? payload.root(i) != entry.root : !same) {
      if (!live) {
        counters_->get_pages_raced += 1;
      } else if (now.suspect()) {
        counters_->get_pages_torn += 1;  // a write that the last crash cut short
        index_.unpublish(entry);
      } else if (index_.quarantine(entry, /*recorded=*/true)) {
        counters_->get_pages_corrupt += 1;
        failure = Error{Code::kCorrupt, reads[i].owner->path() + ": slot " + std::to_string(slot) +
                                            " fails its digest; the page is a miss and its slot is quarantined"};
        const std::lock_guard lock(mutex_);
        quarantines_.push_back({entry.slot, entry.stamp.generation()});
        flusher_wake_.notify_all();
      }
    } else {
      ok[i] = 1;
      ++hits;
      if (live) {
        if (options_.verify_reads && now.suspect()) index_.trust(entry);
        index_.touch(entry, used + i, /*reuse=*/true);
      }
    }
    index_.end_lease(reads[i].pin, entry.slot);
  }
  tell_paths(tally, IoUse::kRead);
  counters_->get_calls += 1;
  counters_->get_pages += n;
  counters_->get_pages_hit += hits;
  counters_->get_pages_missed += n - reads.size();
  counters_->get_bytes += hits * (*geometry)->payload_bytes();
  counters_->get_nanoseconds += monotonic_ns() - started;
  if (failure) return *failure;
  return {};
}

}  // namespace tardis
