// SPDX-License-Identifier: Apache-2.0
// Makes groups of stored pages durable: one fdatasync per file touched, by size and by age.
#include <algorithm>
#include <chrono>

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
      const std::shared_ptr<FlushGroup> ended = group_;
      group_ = std::make_shared<FlushGroup>();  // later pages go here
      group_->id = ended->id + 1;
      writers_done_.wait(lock, [&] { return ended->writers == 0; });
      lock.unlock();
      flush_group(*ended);
      lock.lock();
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
  std::optional<Error> failure;
  for (Segment* segment : ended.segments) {
    if (Status status = segment->flush(); !status) failure = status.error();
  }
  const std::lock_guard lock(mutex_);
  counters_->flush_groups += 1;
  if (!failure) {
    durable_group_ = ended.id;
  } else {
    // After a failed fdatasync nobody knows which pages reached the medium, and a second one would claim success.
    counters_->flush_failures += 1;
    flush_error_ = failure;
    failed_group_ = ended.id;
    for (const Published& page : ended.pages) {
      IndexEntry* entry = index_.find(page.key);
      if (entry == nullptr || entry->generation != page.generation) continue;
      counters_->flush_unpublished_pages += 1;
      unpublish(*entry, SlotState::kFree);
    }
  }
  finished_group_ = ended.id;
  flush_done_.notify_all();
}

Status Store::flush() {
  const Call call(*this);
  if (!call) return Call::closed();
  std::unique_lock lock(mutex_);
  const bool empty = group_->pages.empty() && group_->writers == 0;
  const std::uint64_t target = empty ? group_->id - 1 : group_->id;
  flush_wanted_ = std::max(flush_wanted_, target);
  flusher_wake_.notify_all();
  flush_done_.wait(lock, [&] { return finished_group_ >= target; });
  if (failed_group_ == target && flush_error_) return *flush_error_;
  return {};
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
  std::vector<Segment*> all;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, segment] : segments_) all.push_back(segment.get());
  }
  std::uint64_t kept = 0;
  std::sort(all.begin(), all.end(), [](const Segment* a, const Segment* b) { return a->table_used_ns() > b->table_used_ns(); });
  for (Segment* segment : all) {
    const std::unique_lock io(segment->io_mutex(), std::try_to_lock);
    if (!io) continue;  // in use, so among the last to go
    kept += segment->table_bytes();
    if (kept > kCachedTableBytes) segment->drop_table();
  }
}

}  // namespace tardis
