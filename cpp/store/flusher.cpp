// SPDX-License-Identifier: Apache-2.0
// Makes groups of stored pages durable: one fdatasync per file touched, by size and by age.
#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <set>

#include "base/clock.h"
#include "store/counters.h"
#include "store/store.h"

namespace tardis {
namespace {

constexpr std::uint64_t kCachedTableBytes = 256u << 20;
// How often a process with an open group looks whether another one waits for it.
constexpr std::chrono::milliseconds kAskedPause{10};

}  // namespace

void Store::flusher_main() {
  std::unique_lock lock(mutex_);
  const std::uint64_t age_limit = std::uint64_t{options_.flush_milliseconds} * 1'000'000;
  const std::uint64_t checkpoint_every = std::uint64_t{options_.checkpoint_seconds} * 1'000'000'000;
  std::uint64_t next_checkpoint = monotonic_ns() + checkpoint_every;
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
    const bool asked = table_.process(self_).flush_asked.exchange(0) != 0;
    if (asked) flush_wanted_ = std::max(flush_wanted_, group_->serial);
    const bool due = !group_->pages.empty() && (group_->bytes >= options_.flush_bytes || now >= end_of_life);
    // Nothing came of it, and others must not wait for it.
    const bool void_group = group_->id != 0 && group_->pages.empty() && group_->writers == 0;
    if (due || void_group || (used && (stopping_ || flush_wanted_ >= group_->serial))) {
      ended_ = group_;
      group_ = std::make_shared<FlushGroup>();  // later pages go here
      group_->serial = ended_->serial + 1;
      writers_done_.wait(lock, [&] { return ended_->writers == 0; });
      lock.unlock();
      flush_group(*ended_);
      lock.lock();
      ended_.reset();
    } else if (stopping_) {
      return;
    } else if (checkpoint_every > 0 && now >= next_checkpoint) {
      lock.unlock();
      // One of the processes is enough. What fails is tried again later; closing the store reports what is still wrong.
      if (written_since_checkpoint()) (void)checkpoint_now();
      lock.lock();
      next_checkpoint = monotonic_ns() + checkpoint_every;
    } else if (group_->pages.empty()) {
      if (checkpoint_every == 0) {
        flusher_wake_.wait(lock);
      } else {
        flusher_wake_.wait_for(lock, std::chrono::nanoseconds(next_checkpoint - now));
      }
    } else {
      flusher_wake_.wait_for(
          lock, std::min<std::chrono::nanoseconds>(std::chrono::nanoseconds(end_of_life - now), kAskedPause));
    }
  }
}

// By any process.
bool Store::written_since_checkpoint() const {
  bool dirty = false;
  for_each_segment([&](std::uint32_t id, SegmentState state) {
    dirty = dirty || (state == SegmentState::kReady && (live(id).flags.load() & kSegmentDirty) != 0);
  });
  return dirty;
}

void Store::flush_group(const FlushGroup& ended) {
  std::map<FileId, Segment*> segments;
  for (const Published& page : ended.pages) segments.emplace(page.owner->file(), page.owner);
  std::vector<FileId> files;
  for (const auto& [file, segment] : segments) files.push_back(file);
  const std::vector<Status> flushed = device_->flush_files(files);
  for (std::size_t i = 0; i < files.size(); ++i) {
    path_result(*segments[files[i]], IoUse::kFlush, flushed[i]);
  }
  const std::lock_guard lock(mutex_);
  counters_->flush_groups += 1;
  bool failed = false;
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (flushed[i]) continue;
    flush_failed(*segments[files[i]], flushed[i].error());
    failed = true;
  }
  if (failed) {
    for (const Published& page : ended.pages) unpublish_page(page);
  }
  table_.process(self_).oldest_group.store(group_->id);  // the open group's, or none
  finished_group_ = ended.serial;
  flush_done_.notify_all();
}

// After a failed fdatasync nobody knows which of the bytes written to that file before it reached the medium, and a
// second one would claim success. So every page in it that is not durable goes, of whichever group; set() looks at
// flush_failures for pages that are being written just now.
void Store::flush_failed(Segment& segment, const Error& error) {
  counters_->flush_failures += 1;
  table_.header().flush_failures.fetch_add(1);
  ++flush_failures_;
  flush_error_ = error;
  ++segment.flush_failures;
  segment.live().doubtful.store(1);
  for (const auto& group : {ended_, group_}) {
    if (group == nullptr) continue;
    for (const Published& page : group->pages) {
      if (page.owner == &segment) unpublish_page(page);
    }
  }
}

void Store::unpublish_page(const Published& page) {
  const auto entry = index_.read(page.slot);
  if (entry && entry->stamp.generation() == page.generation && index_.unpublish(*entry)) {
    counters_->flush_unpublished_pages += 1;
  }
}

Status Store::flush() {
  const Call call(*this);
  if (!call) return Call::closed();
  std::unique_lock lock(mutex_);
  const bool empty = group_->pages.empty() && group_->writers == 0;
  const std::uint64_t target = empty ? group_->serial - 1 : group_->serial;
  flush_wanted_ = std::max(flush_wanted_, target);
  flusher_wake_.notify_all();
  const std::uint64_t told = flush_failures_told_;
  flush_done_.wait(lock, [&] { return finished_group_ >= target; });
  lock.unlock();
  const Status others = await_others();
  lock.lock();
  // Also of a group that ended by itself before the call: what it held was set before the call and is gone.
  if (flush_failures_ == told) return others;
  flush_failures_told_ = flush_failures_;
  return *flush_error_;
}

void Store::persist_quarantines(std::vector<Quarantine> pending) {
  for (const Quarantine& item : pending) {
    const SlotRef where = index_.where(item.slot);
    Segment* owner = segment(where.segment);
    // If any of this fails the slot stays quarantined in the index; the next recovery's first read finds out again.
    if (owner == nullptr || !claim_waiting(*owner)) continue;
    {
      const std::lock_guard io(owner->io_mutex());
      persist_quarantine(*owner, where.slot, item.generation);
    }
    release(*owner);
  }
  limit_cached_tables();
}

void Store::persist_quarantine(Segment& owner, std::uint32_t slot, std::uint64_t generation) {
  if (slot >= owner.geometry().slots) return;  // cleared and re-classed meanwhile
  auto table = owner.table();
  if (!table) return;
  SlotHeader& header = (*table)->header(slot);
  if (!sealed(header) || header.generation != generation || !owner.make_dirty()) return;
  header.flags |= kSlotQuarantined;
  seal(header);
  std::set<std::uint64_t> blocks;
  (*table)->blocks_of(slot, blocks);
  (void)owner.write_table(blocks);
}

void Store::limit_cached_tables() {
  std::vector<std::pair<std::uint64_t, Segment*>> all;  // the times as they were once: others go on while this sorts
  {
    const std::lock_guard lock(open_mutex_);
    for (const auto& segment : segments_) {
      if (segment->table_used_ns() > 0) all.emplace_back(segment->table_used_ns(), segment.get());
    }
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
