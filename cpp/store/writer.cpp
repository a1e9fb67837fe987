// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>

#include "base/clock.h"
#include "store/counters.h"
#include "store/store.h"

namespace tardis {
namespace {

// Tickets are in prefix order: once one fails, the pages after it could not be reached and fail too.
template <class Tickets>
void fail_from(Tickets& tickets, std::size_t first) {
  for (std::size_t i = first; i < tickets.size(); ++i) tickets[i].failed = true;
}

template <class Tickets>
std::size_t first_failed(const Tickets& tickets) {
  const auto it = std::find_if(tickets.begin(), tickets.end(), [](const auto& ticket) { return ticket.failed; });
  return static_cast<std::size_t>(it - tickets.begin());
}

}  // namespace

Status Store::set(NamespaceId space, const Hash256* hashes, const Hash256* parent_of_first, const std::uint64_t* pieces,
                  std::size_t n, std::uint8_t* ok) {
  std::fill(ok, ok + n, std::uint8_t{0});
  const Call call(*this);
  if (!call) return Call::closed();
  auto geometry = geometry_of(space);
  if (!geometry) return geometry.error();
  const std::uint64_t started = monotonic_ns();
  std::unique_lock turn(clear_turn_);
  const std::shared_lock gate(clear_gate_);
  turn.unlock();

  const auto parent_of = [&](std::size_t i) -> std::uint64_t {
    const Hash256* parent = i > 0 ? &hashes[i - 1] : parent_of_first;
    return parent == nullptr || *parent == hashes[i] ? 0 : short_key(*parent);
  };
  std::vector<Ticket> tickets;
  std::vector<std::size_t> wanted;
  {
    const std::lock_guard lock(mutex_);
    std::set<Hash256> in_call;
    for (std::size_t i = 0; i < n; ++i) {
      IndexEntry* entry = index_.find({space, hashes[i]});
      if (entry != nullptr) index_.touch(*entry, /*reuse=*/false);
      // What a crash may have torn is not taken for stored: the caller may flush and rely on it. The bytes are at hand.
      if (entry != nullptr && !entry->suspect) continue;
      if (in_call.insert(hashes[i]).second) {  // given twice, the second needs no slot of its own
        wanted.push_back(i);
        index_.hold_parent(space, parent_of(i));
      }
    }
  }
  std::optional<Error> failure;  // why a page was not stored
  const std::vector<SlotRef> slots = reserve(geometry->slot_class(), wanted.size(), failure);
  std::size_t end = n;  // pages from here on are not stored
  std::shared_ptr<FlushGroup> group;
  std::uint64_t durable = 0;
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t k = 0; k < slots.size(); ++k) {
      tickets.push_back(
          {wanted[k], slots[k], parent_of(wanted[k]), next_generation_++, segment(slots[k].segment).flush_failures});
    }
    for (std::size_t k = slots.size(); k < wanted.size(); ++k) index_.release_parent(space, parent_of(wanted[k]));
    if (slots.size() < wanted.size()) {
      end = wanted[slots.size()];
      if (!failure) {
        failure = Error{Code::kNoSpace, "no slot free: capacity " + human_bytes(folder_.superblock().capacity_bytes) +
                                            " of " + folder_.path() + " is held by pages in use"};
      }
    }
  }
  counters_->set_pages_dropped += n - end;

  Transfer payload(*device_, IoRequest::Op::kWrite);
  if (!tickets.empty()) {
    make_dirty(tickets, failure);
    for (const Ticket& ticket : tickets) {
      if (ticket.failed) break;
      const Segment& owner = [&]() -> Segment& {
        const std::lock_guard lock(mutex_);
        return segment(ticket.where.segment);
      }();
      payload.add(owner.file(), owner.geometry().slot_offset(ticket.where.slot), *geometry,
                  pieces + ticket.index * geometry->pieces());
    }
    if (payload.size() > 0) payload.run(/*digests=*/true);
    for (std::size_t k = 0; k < tickets.size() && !tickets[k].failed; ++k) {
      if (payload.error(k) == 0) continue;
      failure = errno_error(payload.error(k), "writing a page");
      fail_from(tickets, k);
    }
    {
      const std::lock_guard lock(mutex_);
      group = group_;
      ++group->writers;  // the group is not flushed before these headers are written and published
      durable = durable_group_;
    }
    write_headers(tickets, payload, space, hashes, *geometry, group->id, durable, failure);
    const std::lock_guard lock(mutex_);
    for (std::size_t k = 0; k < tickets.size() && !tickets[k].failed; ++k) {
      if (segment(tickets[k].where.segment).flush_failures == tickets[k].flush_failures) continue;
      failure = *flush_error_;
      fail_from(tickets, k);
    }
    const std::size_t published = first_failed(tickets);
    for (std::size_t k = 0; k < tickets.size(); ++k) {
      const Ticket& ticket = tickets[k];
      const ObjectKey key{space, hashes[ticket.index]};
      if (k >= published) {
        end = std::min(end, ticket.index);
        segment(ticket.where.segment).doubtful = true;
        release_slot(ticket.where);
        index_.release_parent(space, ticket.parent);
        continue;
      }
      IndexEntry* present = index_.find(key);
      if (present != nullptr && present->suspect) {
        unpublish(*present, SlotState::kFree);
        present = nullptr;
      }
      if (present != nullptr) {  // another call stored it meanwhile
        release_slot(ticket.where);
      } else {
        IndexEntry& entry = index_.insert({.key = key,
                                           .where = ticket.where,
                                           .slot_class = geometry->slot_class(),
                                           .parent = ticket.parent,
                                           .generation = ticket.generation,
                                           .root = payload.root(k),
                                           .payload_bytes = geometry->payload_bytes()});
        slot(ticket.where).entry = &entry;
        set_state(ticket.where, SlotState::kLive);
        payload_bytes_ += entry.payload_bytes;
        if (group->pages.empty()) group->opened_ns = monotonic_ns();
        group->pages.push_back({key, ticket.generation, ticket.where.segment});
        Segment* owner = &segment(ticket.where.segment);
        if (std::find(group->segments.begin(), group->segments.end(), owner) == group->segments.end()) {
          group->segments.push_back(owner);
        }
        group->bytes += geometry->stored_bytes();
      }
      index_.release_parent(space, ticket.parent);
    }
    --group->writers;
    writers_done_.notify_all();
    flusher_wake_.notify_all();
    counters_->set_pages_written += published;
    counters_->set_pages_failed += tickets.size() - published;
    counters_->set_bytes += published * geometry->payload_bytes();
  }
  limit_cached_tables();
  std::fill(ok, ok + end, std::uint8_t{1});
  counters_->set_calls += 1;
  counters_->set_pages += n;
  counters_->set_pages_present += n - wanted.size();
  counters_->set_nanoseconds += monotonic_ns() - started;
  if (end == n) return {};
  return failure ? *failure : Error{Code::kInternal, "a page was not stored for an unknown reason"};
}

void Store::make_dirty(std::vector<Ticket>& tickets, std::optional<Error>& failure) {
  std::set<std::uint32_t> ids;
  for (std::size_t k = 0; k < tickets.size(); ++k) {
    if (!ids.insert(tickets[k].where.segment).second) continue;
    Segment* owner = nullptr;
    {
      const std::lock_guard lock(mutex_);
      owner = &segment(tickets[k].where.segment);
    }
    const std::lock_guard io(owner->io_mutex());
    const std::uint32_t flags = kSegmentDirty | (owner->suspect() ? kSegmentSuspect : 0u);
    if (Status status = owner->set_flags(flags); !status) {
      failure = status.error();
      fail_from(tickets, k);
      return;
    }
  }
}

void Store::write_headers(std::vector<Ticket>& tickets, const Transfer& payload, NamespaceId space,
                          const Hash256* hashes, const ObjectGeometry& geometry, std::uint64_t group,
                          std::uint64_t durable, std::optional<Error>& failure) {
  std::map<std::uint32_t, std::vector<std::size_t>> by_segment;
  for (std::size_t k = 0; k < tickets.size() && !tickets[k].failed; ++k)
    by_segment[tickets[k].where.segment].push_back(k);
  for (const auto& [id, own] : by_segment) {
    Segment* owner = nullptr;
    Fingerprint fingerprint;
    {
      const std::lock_guard lock(mutex_);
      owner = &segment(id);
      fingerprint = namespaces_[space].fingerprint;
    }
    const std::lock_guard io(owner->io_mutex());
    auto table = owner->table();
    if (!table) {
      failure = table.error();
      fail_from(tickets, own.front());
      continue;
    }
    std::set<std::uint64_t> blocks;
    for (const std::size_t k : own) {
      const Ticket& ticket = tickets[k];
      SlotHeader header{};
      header.magic = SlotHeader::kMagic;
      header.format_version = kFormatVersion;
      header.kind = SlotKind::kKvPage;
      header.key = hashes[ticket.index];
      header.fingerprint = fingerprint;
      header.parent = ticket.parent;
      header.generation = ticket.generation;
      header.segment = id;
      header.slot = ticket.where.slot;
      header.segment_epoch = owner->epoch();
      header.part_count = geometry.parts;
      header.slot_bytes = owner->geometry().slot_bytes;
      header.part_bytes = geometry.part_bytes;
      header.part_stride = geometry.part_stride;
      header.payload_bytes = geometry.payload_bytes();
      header.root_digest = payload.root(k);
      header.flush_group = group;
      header.last_durable_group = durable;
      seal(header);
      (*table)->header(ticket.where.slot) = header;
      std::copy_n(payload.chunk_digests(k), geometry.chunks(), (*table)->digests(ticket.where.slot));
      (*table)->blocks_of(ticket.where.slot, blocks);
    }
    if (Status status = owner->write_table(blocks); !status) {
      failure = status.error();
      fail_from(tickets, own.front());
    }
  }
}

}  // namespace tardis
