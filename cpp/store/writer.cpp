// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <set>
#include <thread>

#include "base/clock.h"
#include "store/counters.h"
#include "store/scan.h"
#include "store/store.h"

namespace tardis {
namespace {

// How long a set() waits for another process to finish pages that both were given, before it writes them itself.
constexpr std::uint64_t kElsewherePatienceNs = 2'000'000'000;
constexpr auto kElsewherePause = std::chrono::microseconds(200);

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

// The tables of one segment that a call writes, and the lock on them.
struct TableWrite {
  Segment& owner;
  std::unique_lock<std::mutex> io;
  std::size_t first_ticket;
  std::size_t first_request, end_request;
};

}  // namespace

// Until the pages are published: their parents are not evicted, and other processes do not write the same pages.
class Store::Pinned {
 public:
  explicit Pinned(Index& index) : index_(index) {}
  ~Pinned() {
    for (const std::uint32_t pin : parents_) index_.parents().remove(pin);
    for (const std::uint32_t pin : writing_) index_.writing().remove(pin);
  }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  void add(std::uint64_t key, std::uint64_t parent) {
    writing_.push_back(index_.writing().add(key));
    if (parent != 0) parents_.push_back(index_.parents().add(parent));
  }

 private:
  Index& index_;
  std::vector<std::uint32_t> parents_, writing_;
};

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

  SetCall set{space, hashes, parent_of_first, pieces, n, **geometry, std::vector<bool>(n), std::vector<bool>(n),
              {},    {}};
  std::vector<std::size_t> wanted, elsewhere;
  std::vector<std::size_t> unread;
  choose_pages(set, wanted, elsewhere, unread);
  prove(set, unread, wanted);
  store_pages(set, wanted);
  if (!elsewhere.empty() && !set.failure) store_pages(set, still_missing(set, elsewhere));
  for (const auto& [twin, first] : set.twins) set.stored[twin] = set.stored[first];
  // An extension that was there before its prefix was stored anew.
  for (std::size_t i = 1; i < n; ++i) {
    if (set.written[i - 1] && set.stored[i] && !set.written[i]) index_.adopt(space, short_key(hashes[i - 1]));
  }
  limit_cached_tables();

  const auto end =
      static_cast<std::size_t>(std::find(set.stored.begin(), set.stored.end(), false) - set.stored.begin());
  std::fill(ok, ok + end, std::uint8_t{1});
  counters_->set_calls += 1;
  counters_->set_pages += n;
  counters_->set_nanoseconds += monotonic_ns() - started;
  if (end == n) return {};
  return set.failure ? *set.failure : Error{Code::kInternal, "a page was not stored for an unknown reason"};
}

// The pages to be written, in the order of the call; those that another process writes just now; and those that were
// there before a crash and have not been read since.
void Store::choose_pages(SetCall& set, std::vector<std::size_t>& wanted, std::vector<std::size_t>& elsewhere,
                         std::vector<std::size_t>& unread) {
  std::map<Hash256, std::size_t> in_call;
  const std::uint64_t now = index_.tick(set.n);
  const std::unordered_set<std::uint64_t> by_others = index_.written_elsewhere();
  const std::uint64_t failures = table_.header().flush_failures.load();
  std::uint64_t present = 0;
  for (std::size_t i = 0; i < set.n; ++i) {
    const auto entry = index_.find(set.space, set.hashes[i]);
    if (entry) index_.touch(*entry, now + i, /*reuse=*/false);
    if (entry && !entry->stamp.suspect()) {
      set.stored[i] = true;
      ++present;
      continue;
    }
    const auto [first, fresh] = in_call.try_emplace(set.hashes[i], i);
    if (!fresh) {  // given twice, the second needs no slot of its own
      set.twins.emplace_back(i, first->second);
      ++present;
      continue;
    }
    if (entry) {
      unread.push_back(i);
    } else {
      (by_others.contains(short_key(set.hashes[i])) ? elsewhere : wanted).push_back(i);
    }
  }
  counters_->set_pages_present += present;
  if (present > 0) note_others(failures);
}

// What a crash may have torn is not taken for stored: the caller may flush and rely on it. Nor is it written anew
// unread: if it is whole it is durable, and its slot would be another's before the new copy is. What is torn is wanted.
void Store::prove(SetCall& set, const std::vector<std::size_t>& unread, std::vector<std::size_t>& wanted) {
  if (unread.empty()) return;
  struct Looked {
    std::size_t index;
    IndexEntry entry;
    std::uint32_t pin;
    Segment* owner;
  };
  std::vector<Looked> looked;
  std::vector<Claim> claims;
  for (const std::size_t i : unread) {
    const auto entry = index_.find(set.space, set.hashes[i]);
    if (!entry) {
      wanted.push_back(i);
      continue;
    }
    const std::uint32_t pin = index_.lease(entry->slot);
    const SlotRef where = index_.where(entry->slot);
    Segment* owner = segment(where.segment, &set.failure);
    const std::uint64_t offset = owner == nullptr ? 0 : owner->slot_offset(where.slot);
    // As in get(): only now.
    const Stamp now = index_.stamp(entry->slot);
    if (owner == nullptr || !now.live() || now.generation() != entry->stamp.generation()) {
      index_.end_lease(pin, entry->slot);
      if (owner != nullptr) wanted.push_back(i);
      continue;
    }
    looked.push_back({i, *entry, pin, owner});
    SlotHeader header{};
    header.part_count = set.geometry.parts;
    header.part_bytes = set.geometry.part_bytes;
    header.part_stride = set.geometry.part_stride;
    header.root_digest = entry->root;
    claims.push_back({owner->file(), offset, header});
  }
  verify_claims(*device_, claims, {});
  PathTally tally;
  for (std::size_t k = 0; k < looked.size(); ++k) {
    const Looked& page = looked[k];
    const int error = claims[k].error;
    tally.add(*page.owner, IoUse::kRead, error);
    if (claims[k].verified) {
      index_.trust(page.entry);
      set.stored[page.index] = true;
      counters_->set_pages_present += 1;
    } else if (error == 0 || bytes_are_lost(error)) {
      if (error != 0) {
        index_.quarantine(page.entry, /*recorded=*/false);
      } else if (index_.unpublish(page.entry)) {
        counters_->get_pages_torn += 1;
      }
      wanted.push_back(page.index);
    } else {
      set.failure = errno_error(error, page.owner->path() + ": reading a page that a crash may have torn");
    }
    index_.end_lease(page.pin, page.entry.slot);
  }
  tell_paths(tally, IoUse::kRead);
  // In the order of the call; and what comes after one that is not there could not be reached.
  std::sort(wanted.begin(), wanted.end());
  if (!set.failure) return;
  const auto missing = std::find_if(unread.begin(), unread.end(), [&](std::size_t i) {
    return !set.stored[i] && !std::binary_search(wanted.begin(), wanted.end(), i);
  });
  if (missing != unread.end()) wanted.erase(std::lower_bound(wanted.begin(), wanted.end(), *missing), wanted.end());
}

// Of pages that another process was writing: those that it has not stored, or not in time.
std::vector<std::size_t> Store::still_missing(SetCall& set, const std::vector<std::size_t>& elsewhere) {
  const std::uint64_t give_up = monotonic_ns() + kElsewherePatienceNs;
  const std::uint64_t failures = table_.header().flush_failures.load();
  std::vector<std::size_t> missing;
  for (const std::size_t i : elsewhere) {
    while (index_.written_elsewhere().contains(short_key(set.hashes[i])) && monotonic_ns() < give_up) {
      std::this_thread::sleep_for(kElsewherePause);
    }
    set.stored[i] = index_.find(set.space, set.hashes[i]).has_value();
    if (!set.stored[i]) missing.push_back(i);
  }
  counters_->set_pages_present += elsewhere.size() - missing.size();
  if (missing.size() < elsewhere.size()) note_others(failures);
  return missing;
}

void Store::store_pages(SetCall& set, const std::vector<std::size_t>& wanted) {
  if (wanted.empty()) return;
  Pinned pinned(index_);
  for (const std::size_t i : wanted) pinned.add(short_key(set.hashes[i]), set.parent_of(i));
  Reservation reserved = reserve(set.geometry, wanted.size(), set.failure);
  std::vector<Ticket> tickets = issue_tickets(set, wanted, reserved);
  if (!tickets.empty()) {
    Transfer payload(*device_, IoRequest::Op::kWrite, paths_in_use() > 1);
    make_dirty(set, tickets);
    write_payloads(set, tickets, payload);
    std::shared_ptr<FlushGroup> group;
    {
      const std::lock_guard lock(mutex_);
      group = group_;
      if (group->id == 0) group->id = begin_group();
      ++group->writers;  // the group is not flushed before these headers are written and published
    }
    write_headers(set, tickets, payload, group->id, durable_group());
    publish(set, tickets, payload, *group);
  }
  for (Segment* held : reserved.held) release(*held);
  const std::size_t stored = first_failed(tickets);
  for (std::size_t k = 0; k < stored; ++k) set.stored[wanted[k]] = true;
  counters_->set_pages_written += stored;
  counters_->set_pages_failed += tickets.size() - stored;
  counters_->set_pages_dropped += tickets.size() < wanted.size() ? set.n - wanted[tickets.size()] : 0;
  counters_->set_bytes += stored * set.geometry.payload_bytes();
}

// A slot for each wanted page, or for as many of the first as there are.
std::vector<Store::Ticket> Store::issue_tickets(SetCall& set, const std::vector<std::size_t>& wanted,
                                                Reservation& reserved) {
  std::vector<Ticket> tickets;
  for (std::size_t k = 0; k < reserved.slots.size(); ++k) {
    const Reservation::Slot& slot = reserved.slots[k];
    tickets.push_back({wanted[k], slot.slot, slot.owner, set.parent_of(wanted[k]), slot.generation,
                       slot.owner->flush_failures.load()});
  }
  if (reserved.slots.size() < wanted.size() && !set.failure) {
    set.failure =
        reserved.busy
            ? Error{Code::kBusy, folder_.path() + ": other processes write in every segment that has room"}
            : Error{Code::kNoSpace, "no slot free: capacity " + human_bytes(folder_.superblock().capacity_bytes) +
                                        " of " + folder_.path() + " is held by pages in use"};
  }
  return tickets;
}

void Store::write_payloads(SetCall& set, std::vector<Ticket>& tickets, Transfer& payload) {
  for (const Ticket& ticket : tickets) {
    if (ticket.failed) break;
    payload.add(ticket.owner->file(), ticket.owner->slot_offset(index_.where(ticket.slot).slot), set.geometry,
                set.pieces + ticket.index * set.geometry.pieces());
  }
  if (payload.size() > 0) payload.run(/*digests=*/true);
  PathTally tally;
  for (std::size_t k = 0; k < payload.size(); ++k) tally.add(*tickets[k].owner, IoUse::kWrite, payload.error(k));
  tell_paths(tally, IoUse::kWrite);
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
  const std::uint64_t now = index_.tick(tickets.size());
  for (std::size_t k = 0; k < tickets.size(); ++k) {
    const Ticket& ticket = tickets[k];
    const Stamp writing(SlotState::kWriting, ticket.generation);
    if (ticket.failed) {
      ticket.owner->live().doubtful.store(1);
      index_.change(ticket.slot, writing, writing.with(SlotState::kFree));
      continue;
    }
    const auto published = index_.publish({.slot = ticket.slot,
                                           .stamp = writing,
                                           .key = set.hashes[ticket.index],
                                           .space = set.space,
                                           .payload_bytes = static_cast<std::uint32_t>(set.geometry.payload_bytes()),
                                           .root = payload.root(k),
                                           .parent = ticket.parent},
                                          /*suspect=*/false, now + k);
    if (published == Index::Published::kFull) {
      set.failure = Error{Code::kNoSpace,
                          "the shared index has no room for this page; open the store with a smaller "
                          "object_bytes_hint, or in one process, to have it made larger"};
      fail_from(tickets, k);
      continue;
    }
    // Another call stored it meanwhile.
    if (published == Index::Published::kDuplicate) continue;
    // See forget_path().
    if (const std::uint32_t out = path_out(ticket.owner->id()); out < kMaxPaths) {
      if (const auto entry = index_.read(ticket.slot)) index_.unpublish(*entry);
      set.failure = Error{Code::kIo, "path " + folder_.paths()[out].folder + ": was taken out"};
      fail_from(tickets, k);
      continue;
    }
    set.written[ticket.index] = true;
    if (group.pages.empty()) group.opened_ns = monotonic_ns();
    group.pages.push_back({ticket.slot, ticket.generation, ticket.owner});
    group.bytes += set.geometry.stored_bytes();
  }
  --group.writers;
  writers_done_.notify_all();
  flusher_wake_.notify_all();
}

void Store::make_dirty(SetCall& set, std::vector<Ticket>& tickets) {
  std::set<const Segment*> done;
  for (std::size_t k = 0; k < tickets.size(); ++k) {
    Segment& owner = *tickets[k].owner;
    if (!done.insert(&owner).second) continue;
    const std::lock_guard io(owner.io_mutex());
    if (Status status = owner.make_dirty(); !status) {
      path_result(owner.on_path(), IoUse::kWrite, status);
      set.failure = status.error();
      fail_from(tickets, k);
      return;
    }
  }
}

void Store::write_headers(SetCall& set, std::vector<Ticket>& tickets, const Transfer& payload, std::uint64_t group,
                          std::uint64_t durable) {
  const ObjectGeometry& geometry = set.geometry;
  const Fingerprint fingerprint = table_.name_space(set.space).fingerprint;
  std::map<std::uint32_t, std::vector<std::size_t>> by_segment;
  for (std::size_t k = 0; k < tickets.size() && !tickets[k].failed; ++k) {
    by_segment[tickets[k].owner->id()].push_back(k);
  }
  std::vector<TableWrite> writes;
  writes.reserve(by_segment.size());
  std::deque<iovec> pieces;
  std::vector<IoRequest> requests;
  for (const auto& [id, own] : by_segment) {
    Segment& owner = *tickets[own.front()].owner;
    std::unique_lock io(owner.io_mutex());  // of several segments at once, in the order of their ids
    auto table = owner.table();
    if (!table) {
      set.failure = table.error();
      fail_from(tickets, own.front());
      continue;
    }
    std::set<std::uint64_t> blocks;
    for (const std::size_t k : own) {
      const Ticket& ticket = tickets[k];
      const std::uint32_t slot = index_.where(ticket.slot).slot;
      SlotHeader header{};
      header.magic = SlotHeader::kMagic;
      header.format_version = kFormatVersion;
      header.kind = SlotKind::kKvPage;
      header.key = set.hashes[ticket.index];
      header.fingerprint = fingerprint;
      header.parent = ticket.parent;
      header.generation = ticket.generation;
      header.segment = owner.number();
      header.slot = slot;
      header.segment_epoch = owner.epoch();
      header.part_count = geometry.parts;
      header.slot_bytes = geometry.slot_class().slot_bytes;
      header.part_bytes = geometry.part_bytes;
      header.part_stride = geometry.part_stride;
      header.payload_bytes = geometry.payload_bytes();
      header.root_digest = payload.root(k);
      header.flush_group = group;
      header.last_durable_group = durable;
      seal(header);
      (*table)->header(slot) = header;
      std::copy_n(payload.chunk_digests(k), geometry.chunks(), (*table)->digests(slot));
      (*table)->blocks_of(slot, blocks);
    }
    const std::size_t first = requests.size();
    owner.add_table_writes(blocks, pieces, requests);
    writes.push_back({owner, std::move(io), own.front(), first, requests.size()});
  }
  if (!requests.empty()) device_->run(requests, {});
  for (const TableWrite& write : writes) {
    const Status status = write.owner.tables_written(
        std::span(requests).subspan(write.first_request, write.end_request - write.first_request));
    if (!status) {
      path_result(write.owner.on_path(), IoUse::kWrite, status);
      set.failure = status.error();
      fail_from(tickets, write.first_ticket);
    }
  }
}

}  // namespace tardis
