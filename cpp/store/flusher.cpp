// SPDX-License-Identifier: Apache-2.0
// Makes groups of stored pages durable: one fdatasync per file touched, by size and by age.
#include <algorithm>
#include <chrono>
#include <functional>
#include <set>

#include "base/clock.h"
#include "store/counters.h"
#include "store/store.h"

namespace tardis {
namespace {

constexpr std::uint64_t kCachedTableBytes = 256u << 20;

}  // namespace

void Store::flusher_main() {
  std::unique_lock lock(mutex_);
  const std::uint64_t age_limit = std::uint64_t{options_.flush_milliseconds} * 1'000'000;
  while (true) {
    if (!quarantines_.empty()) {
      std::vector<Quarantine> pending;
      pending.swap(quarantines_);
      lock.unlock();
      persist_quarantines(std::move(pending));
      lock.lock();
      continue;
    }
    const bool used = !group_->pages.empty() || group_->writers > 0;
    const std::uint64_t now = monotonic_ns(), end_of_life = group_->opened_ns + age_limit;
    const bool due = !group_->pages.empty() && (group_->bytes >= options_.flush_bytes || now >= end_of_life);
    if (due || (used && (stopping_ || flush_wanted_ >= group_->id))) {
      ended_ = group_;
      group_ = std::make_shared<FlushGroup>();  // later pages go here
      group_->id = ended_->id + 1;
      writers_done_.wait(lock, [&] { return ended_->writers == 0; });
      lock.unlock();
      flush_group(*ended_);
      lock.lock();
      ended_.reset();
    } else if (stopping_) {
      return;
    } else if (group_->pages.empty()) {
      flusher_wake_.wait(lock);
    } else {
      flusher_wake_.wait_for(lock, std::chrono::nanoseconds(end_of_life - now));
    }
  }
}

void Store::flush_group(const FlushGroup& ended) {
  std::set<Segment*> segments;
  for (const Published& page : ended.pages) segments.insert(page.owner);
  std::vector<std::pair<Segment*, Error>> failed;
  for (Segment* segment : segments) {
    if (Status status = segment->flush(); !status) failed.emplace_back(segment, status.error());
  }
  const std::lock_guard lock(mutex_);
  counters_->flush_groups += 1;
  for (const auto& [segment, error] : failed) flush_failed(*segment, error);
  if (failed.empty()) {
    durable_group_ = ended.id;
  } else {
    for (const Published& page : ended.pages) unpublish_page(page);
  }
  finished_group_ = ended.id;
  flush_done_.notify_all();
}

// After a failed fdatasync nobody knows which of the bytes written to that file before it reached the medium, and a
// second one would claim success. So every page in it that is not durable goes, of whichever group; set() looks at
// flush_failures for pages that are being written just now.
void Store::flush_failed(Segment& segment, const Error& error) {
  counters_->flush_failures += 1;
  ++flush_failures_;
  flush_error_ = error;
  ++segment.flush_failures;
  segment.doubtful = true;
  for (const auto& group : {ended_, group_}) {
    if (group == nullptr) continue;
    for (const Published& page : group->pages) {
      if (page.owner == &segment) unpublish_page(page);
    }
  }
}

void Store::unpublish_page(const Published& page) {
  IndexEntry* entry = index_.find(page.key);
  if (entry == nullptr || entry->generation != page.generation) return;
  counters_->flush_unpublished_pages += 1;
  unpublish(*entry);
}

Status Store::flush() {
  const Call call(*this);
  if (!call) return Call::closed();
  std::unique_lock lock(mutex_);
  const bool empty = group_->pages.empty() && group_->writers == 0;
  const std::uint64_t target = empty ? group_->id - 1 : group_->id;
  flush_wanted_ = std::max(flush_wanted_, target);
  flusher_wake_.notify_all();
  const std::uint64_t told = flush_failures_told_;
  flush_done_.wait(lock, [&] { return finished_group_ >= target; });
  // Also of a group that ended by itself before the call: what it held was set before the call and is gone.
  if (flush_failures_ == told) return {};
  flush_failures_told_ = flush_failures_;
  return *flush_error_;
}

void Store::persist_quarantines(std::vector<Quarantine> pending) {
  for (const Quarantine& item : pending) {
    Segment* owner = nullptr;
    {
      const std::lock_guard lock(mutex_);
      const auto it = segments_.find(item.where.segment);
      if (it == segments_.end() || it->second->reclassing) continue;
      owner = it->second.get();
    }
    const std::lock_guard io(owner->io_mutex());
    if (item.where.slot >= owner->geometry().slots) continue;  // cleared and re-classed meanwhile
    auto table = owner->table();
    if (!table) continue;  // the slot stays quarantined in this process; the next read of the page finds out again
    SlotHeader& header = (*table)->header(item.where.slot);
    if (!sealed(header) || header.generation != item.generation) continue;
    header.flags |= kSlotQuarantined;
    seal(header);
    std::set<std::uint64_t> blocks;
    (*table)->blocks_of(item.where.slot, blocks);
    (void)owner->write_table(blocks);
  }
  limit_cached_tables();
}

void Store::limit_cached_tables() {
  std::vector<std::pair<std::uint64_t, Segment*>> all;  // the times as they were once: others go on while this sorts
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, segment] : segments_) all.emplace_back(segment->table_used_ns(), segment.get());
  }
  std::uint64_t kept = 0;
  std::sort(all.begin(), all.end(), std::greater<>());
  for (const auto& [used, segment] : all) {
    const std::unique_lock io(segment->io_mutex(), std::try_to_lock);
    if (!io) continue;  // in use, so among the last to go
    kept += segment->table_bytes();
    if (kept > kCachedTableBytes) segment->drop_table();
  }
}

}  // namespace tardis
