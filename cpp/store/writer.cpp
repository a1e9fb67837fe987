// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
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

std::uint64_t Store::SetCall::parent_of(std::size_t i) const {
  const Hash256* parent = i > 0 ? &hashes[i - 1] : parent_of_first;
  return parent == nullptr || *parent == hashes[i] ? 0 : short_key(*parent);
}

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

  SetCall set{space, hashes, parent_of_first, pieces, n, *geometry, {}};
  const std::vector<std::size_t> wanted = choose_pages(set);
  std::vector<Ticket> tickets = issue_tickets(set, wanted);
  if (!tickets.empty()) {
    Transfer payload(*device_, IoRequest::Op::kWrite);
    make_dirty(set, tickets);
    write_payloads(set, tickets, payload);
    std::shared_ptr<FlushGroup> group;
    std::uint64_t durable = 0;
    {
      const std::lock_guard lock(mutex_);
      group = group_;
      ++group->writers;  // the group is not flushed before these headers are written and published
      durable = durable_group_;
    }
    write_headers(set, tickets, payload, group->id, durable);
    publish(set, tickets, payload, *group);
  }
  limit_cached_tables();

  const std::size_t stored = first_failed(tickets);  // then the pages from `end` on are not
  const std::size_t end = stored < wanted.size() ? wanted[stored] : n;
  std::fill(ok, ok + end, std::uint8_t{1});
  counters_->set_calls += 1;
  counters_->set_pages += n;
  counters_->set_pages_present += n - wanted.size();
  counters_->set_pages_written += stored;
  counters_->set_pages_failed += tickets.size() - stored;
  counters_->set_pages_dropped += tickets.size() < wanted.size() ? n - wanted[tickets.size()] : 0;
  counters_->set_bytes += stored * geometry->payload_bytes();
  counters_->set_nanoseconds += monotonic_ns() - started;
  if (end == n) return {};
  return set.failure ? *set.failure : Error{Code::kInternal, "a page was not stored for an unknown reason"};
}

// The pages to be written, in the order of the call; their parents are held against eviction.
std::vector<std::size_t> Store::choose_pages(const SetCall& set) {
  std::vector<std::size_t> wanted;
  std::set<Hash256> in_call;
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < set.n; ++i) {
    IndexEntry* entry = index_.find({set.space, set.hashes[i]});
    if (entry != nullptr) index_.touch(*entry, /*reuse=*/false);
    // What a crash may have torn is not taken for stored: the caller may flush and rely on it. The bytes are at hand.
    if (entry != nullptr && !entry->suspect) continue;
    if (!in_call.insert(set.hashes[i]).second) continue;  // given twice, the second needs no slot of its own
    wanted.push_back(i);
    index_.hold_parent(set.space, set.parent_of(i));
  }
  return wanted;
}

// A slot for each wanted page, or for as many of the first as there are.
std::vector<Store::Ticket> Store::issue_tickets(SetCall& set, const std::vector<std::size_t>& wanted) {
  const std::vector<SlotRef> slots = reserve(set.geometry.slot_class(), wanted.size(), set.failure);
  std::vector<Ticket> tickets;
  const std::lock_guard lock(mutex_);
  for (std::size_t k = 0; k < slots.size(); ++k) {
    Segment& owner = segment(slots[k].segment);
    tickets.push_back(
        {wanted[k], slots[k], &owner, set.parent_of(wanted[k]), next_generation_++, owner.flush_failures});
  }
  for (std::size_t k = slots.size(); k < wanted.size(); ++k) {
    index_.release_parent(set.space, set.parent_of(wanted[k]));
  }
  if (slots.size() < wanted.size() && !set.failure) {
    set.failure = Error{Code::kNoSpace, "no slot free: capacity " + human_bytes(folder_.superblock().capacity_bytes) +
                                            " of " + folder_.path() + " is held by pages in use"};
  }
  return tickets;
}

void Store::write_payloads(SetCall& set, std::vector<Ticket>& tickets, Transfer& payload) {
  for (const Ticket& ticket : tickets) {
    if (ticket.failed) break;
    payload.add(ticket.owner->file(), ticket.owner->geometry().slot_offset(ticket.where.slot), set.geometry,
                set.pieces + ticket.index * set.geometry.pieces());
  }
  if (payload.size() > 0) payload.run(/*digests=*/true);
  for (std::size_t k = 0; k < payload.size(); ++k) {
    if (payload.error(k) == 0) continue;
    set.failure = errno_error(payload.error(k), "writing a page");
    fail_from(tickets, k);
    return;
  }
}

void Store::publish(SetCall& set, std::vector<Ticket>& tickets, const Transfer& payload, FlushGroup& group) {
  const std::lock_guard lock(mutex_);
  for (std::size_t k = 0; k < tickets.size() && !tickets[k].failed; ++k) {
    if (tickets[k].owner->flush_failures == tickets[k].flush_failures) continue;
    set.failure = *flush_error_;
    fail_from(tickets, k);
  }
  for (std::size_t k = 0; k < tickets.size(); ++k) {
    if (tickets[k].failed) {
      tickets[k].owner->doubtful = true;
      release_slot(tickets[k].where);
    } else {
      publish_page(set, tickets[k], payload.root(k), group);
    }
    index_.release_parent(set.space, tickets[k].parent);
  }
  --group.writers;
  writers_done_.notify_all();
  flusher_wake_.notify_all();
}

void Store::publish_page(const SetCall& set, const Ticket& ticket, std::uint64_t root, FlushGroup& group) {
  const ObjectKey key{set.space, set.hashes[ticket.index]};
  if (IndexEntry* present = index_.find(key)) {
    if (!present->suspect) {  // another call stored it meanwhile
      release_slot(ticket.where);
      return;
    }
    unpublish(*present);
  }
  IndexEntry& entry = index_.insert({.key = key,
                                     .where = ticket.where,
                                     .slot_class = set.geometry.slot_class(),
                                     .parent = ticket.parent,
                                     .generation = ticket.generation,
                                     .root = root,
                                     .payload_bytes = set.geometry.payload_bytes()});
  slot(ticket.where).entry = &entry;
  set_state(ticket.where, SlotState::kLive);
  payload_bytes_ += entry.payload_bytes;
  if (group.pages.empty()) group.opened_ns = monotonic_ns();
  group.pages.push_back({key, ticket.generation, ticket.owner});
  group.bytes += set.geometry.stored_bytes();
}

void Store::make_dirty(SetCall& set, std::vector<Ticket>& tickets) {
  std::set<const Segment*> done;
  for (std::size_t k = 0; k < tickets.size(); ++k) {
    Segment& owner = *tickets[k].owner;
    if (!done.insert(&owner).second) continue;
    const std::lock_guard io(owner.io_mutex());
    const std::uint32_t flags = kSegmentDirty | (owner.suspect() ? kSegmentSuspect : 0u);
    if (Status status = owner.set_flags(flags); !status) {
      set.failure = status.error();
      fail_from(tickets, k);
      return;
    }
  }
}

void Store::write_headers(SetCall& set, std::vector<Ticket>& tickets, const Transfer& payload, std::uint64_t group,
                          std::uint64_t durable) {
  const ObjectGeometry& geometry = set.geometry;
  Fingerprint fingerprint;
  {
    const std::lock_guard lock(mutex_);
    fingerprint = namespaces_[set.space].fingerprint;
  }
  std::map<Segment*, std::vector<std::size_t>> by_segment;
  for (std::size_t k = 0; k < tickets.size() && !tickets[k].failed; ++k) by_segment[tickets[k].owner].push_back(k);
  for (const auto& [owner, own] : by_segment) {
    const std::lock_guard io(owner->io_mutex());
    auto table = owner->table();
    if (!table) {
      set.failure = table.error();
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
      header.key = set.hashes[ticket.index];
      header.fingerprint = fingerprint;
      header.parent = ticket.parent;
      header.generation = ticket.generation;
      header.segment = owner->id();
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
      set.failure = status.error();
      fail_from(tickets, own.front());
    }
  }
}

}  // namespace tardis
