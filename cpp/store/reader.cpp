// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>

#include "base/clock.h"
#include "store/counters.h"
#include "store/store.h"

namespace tardis {

Status Store::get(NamespaceId space, const Hash256* hashes, const std::uint64_t* pieces, std::size_t n,
                  std::uint8_t* ok) {
  std::fill(ok, ok + n, std::uint8_t{0});
  const Call call(*this);
  if (!call) return Call::closed();
  auto geometry = geometry_of(space);
  if (!geometry) return geometry.error();
  const std::uint64_t started = monotonic_ns();

  struct Read {
    SlotRef where;
    std::uint64_t generation;
    std::uint64_t root;
  };
  std::vector<Read> reads;  // of pages 0 .. reads.size(): after the first absent page nothing can be used
  Transfer payload(*device_, IoRequest::Op::kRead);
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < n; ++i) {
      const IndexEntry* entry = index_.find({space, hashes[i]});
      if (entry == nullptr || entry->payload_bytes != geometry->payload_bytes()) break;
      ++slot(entry->where).leases;
      reads.push_back({entry->where, entry->generation, entry->root});
      const Segment& owner = segment(entry->where.segment);
      payload.add(owner.file(), owner.geometry().slot_offset(entry->where.slot), *geometry,
                  pieces + i * geometry->pieces());
    }
  }
  if (!reads.empty()) payload.run(options_.verify_reads);

  std::uint64_t hits = 0;
  std::optional<Error> failure;
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < reads.size(); ++i) {
      const Read& read = reads[i];
      IndexEntry* entry = index_.find({space, hashes[i]});
      if (entry != nullptr && entry->generation != read.generation) entry = nullptr;
      const int error = payload.error(i);
      if (error != 0) {
        counters_->get_pages_failed += 1;
        failure = errno_error(error, segment(read.where.segment).path() + ": reading a page");
        // The medium or the file lost these bytes; other errors (memory, signals) say nothing about them.
        if (entry != nullptr && (error == EIO || error == ENODATA)) {
          quarantine(*entry);
        }
      } else if (options_.verify_reads && payload.root(i) != read.root) {
        if (entry == nullptr) {
          counters_->get_pages_raced += 1;
        } else if (entry->suspect) {
          counters_->get_pages_torn += 1;  // a write that the last crash cut short
          unpublish(*entry);
        } else {
          counters_->get_pages_corrupt += 1;
          failure =
              Error{Code::kCorrupt, segment(read.where.segment).path() + ": slot " + std::to_string(read.where.slot) +
                                        " fails its digest; the page is a miss and its slot is quarantined"};
          quarantine(*entry);
          quarantines_.push_back({read.where, read.generation});
          flusher_wake_.notify_all();
        }
      } else {
        ok[i] = 1;
        ++hits;
        if (entry != nullptr) {
          if (options_.verify_reads) entry->suspect = false;
          index_.touch(*entry, /*reuse=*/true);
        }
      }
      end_lease(read.where);
    }
  }
  counters_->get_calls += 1;
  counters_->get_pages += n;
  counters_->get_pages_hit += hits;
  counters_->get_pages_missed += n - reads.size();
  counters_->get_bytes += hits * geometry->payload_bytes();
  counters_->get_nanoseconds += monotonic_ns() - started;
  if (failure) return *failure;
  return {};
}

}  // namespace tardis
