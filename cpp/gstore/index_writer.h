// SPDX-License-Identifier: Apache-2.0
// One change to the index, done by a warp, or by a host thread that plays its 32 lanes. Writers of one key exclude each
// other by the lock of its first bucket; readers are not excluded. An object never moves while it is there, so a lookup
// of a key that is there throughout finds it.
#pragma once

#include "gstore/index_layout.h"

namespace tardis::gstore {

enum class Status : std::uint32_t {
  kInserted = TARDIS_GPU_INDEX_INSERTED,
  kReplaced = TARDIS_GPU_INDEX_REPLACED,
  kErased = TARDIS_GPU_INDEX_ERASED,
  kExists = TARDIS_GPU_INDEX_EXISTS,
  kStale = TARDIS_GPU_INDEX_STALE,
  kAbsent = TARDIS_GPU_INDEX_ABSENT,
  kFull = TARDIS_GPU_INDEX_FULL,
  kBusy = TARDIS_GPU_INDEX_BUSY,
};

// `Warp` gives: Words (a word a lane), words(from, n) (0 in the lanes from n), at(words, lane), ballot(f(lane)),
// first_lanes(n, f(lane)), leader(f()), whose result all lanes get, and ordered(), after which what any lane did is
// ordered before what any lane does.
template <class Warp>
class IndexWriter {
 public:
  TARDIS_GSTORE_FUNCTION IndexWriter(Warp& warp, const tardis_gpu_index& index) : warp_(warp), index_(index) {}

  TARDIS_GSTORE_FUNCTION Status apply(const tardis_gpu_index_entry* change) {
    change_ = warp_.words(reinterpret_cast<const std::uint64_t*>(change), kRecordWords);
    Key key;
    for (int i = 0; i < 4; ++i) key.word[i] = warp_.at(change_, kKey + i);
    identity_ = warp_.at(change_, kIdentity);
    place_ = place_of(key, space_of(identity_), index_.buckets);
    header_ = bucket_words(index_, place_.first) + kHeaderLane;
    const std::uint32_t op = op_of(identity_);
    if (op > TARDIS_GPU_INDEX_FORGET) return Status::kBusy;
    if (!lock()) return Status::kBusy;
    const bool removes = op == TARDIS_GPU_INDEX_ERASE || op == TARDIS_GPU_INDEX_FORGET;
    const Status status = removes ? erase(op == TARDIS_GPU_INDEX_FORGET) : put(op == TARDIS_GPU_INDEX_ADD);
    unlock();
    return status;
  }

 private:
  using Words = typename Warp::Words;

  struct Entry {
    std::uint32_t bucket;
    int lane;  // < 0: none
    std::uint64_t word;
  };

  TARDIS_GSTORE_FUNCTION bool lock() {
    const std::uint64_t locked = warp_.leader([&]() -> std::uint64_t {
      Deadline deadline;
      for (;;) {
        const std::uint64_t header = load(header_);
        if ((header & kLocked) == 0 && compare_exchange(header_, header, header | kLocked)) return 1;
        if (deadline.passed(patience_of(index_, Deadline::kWriterPatience))) return 0;
        relax();
      }
    });
    warp_.ordered();  // forbids that the buckets are read before the lock is held
    return locked != 0;
  }

  TARDIS_GSTORE_FUNCTION void unlock() {
    warp_.ordered();  // forbids that the lock is seen free before what was done under it
    warp_.leader([&]() -> std::uint64_t {
      store(header_, load(header_) & ~kLocked);
      return 0;
    });
  }

  TARDIS_GSTORE_FUNCTION Entry find_in(std::uint32_t bucket, const Words& words) {
    std::uint32_t rest =
        warp_.ballot([&](int lane) { return lane != kHeaderLane && leads_to(warp_.own(words, lane), place_.tag); });
    for (; rest != 0; rest &= rest - 1) {
      const int lane = lowest(rest);
      const Words record = warp_.words(record_words(index_, bucket, lane), kRecordWords);
      const std::uint32_t other = warp_.ballot([&](int i) {
        const std::uint64_t difference = warp_.own(record, i) ^ warp_.own(change_, i);
        if (i == kIdentity) return space_of(difference) != 0;
        return i < kLocation && difference != 0;
      });
      if (other == 0) return {bucket, lane, warp_.at(words, lane)};
    }
    return {bucket, -1, 0};
  }

  TARDIS_GSTORE_FUNCTION Entry find() {
    first_ = warp_.words(bucket_words(index_, place_.first), kLanes);
    second_ = warp_.words(bucket_words(index_, place_.second), kLanes);
    const Entry entry = find_in(place_.first, first_);
    if (entry.lane >= 0 || !has_overflow(warp_.at(first_, kHeaderLane))) return entry;
    return find_in(place_.second, second_);
  }

  TARDIS_GSTORE_FUNCTION std::uint64_t in_record(const Entry& entry, int word) {
    const std::uint64_t* record = record_words(index_, entry.bucket, entry.lane);
    return warp_.leader([&]() -> std::uint64_t { return load(record + word); });
  }
  TARDIS_GSTORE_FUNCTION bool newer(const Entry& entry) {
    return in_record(entry, kGeneration) > warp_.at(change_, kGeneration);
  }

  TARDIS_GSTORE_FUNCTION Status erase(bool by_location) {
    const Entry entry = find();
    if (entry.lane < 0) return Status::kAbsent;
    const bool other = by_location ? in_record(entry, kLocation) != warp_.at(change_, kLocation) : newer(entry);
    if (other) return Status::kStale;
    set_word(entry, next_word(entry.word, 0, EntryState::kEmpty));
    if (entry.bucket != place_.first) {
      warp_.ordered();  // forbids that a lookup is sent away while the entry is still there for others
      add_overflow(-1);
    }
    return Status::kErased;
  }

  TARDIS_GSTORE_FUNCTION Status put(bool add) {
    const Entry entry = find();
    if (entry.lane >= 0) {
      if (add) return Status::kExists;
      if (newer(entry)) return Status::kStale;
      const std::uint64_t changing = next_word(entry.word, place_.tag, EntryState::kChanging);
      set_word(entry, changing);
      warp_.ordered();  // forbids that a reader which still sees the old word finds a part of the new record
      write_record(entry);
      publish(entry, changing);
      return Status::kReplaced;
    }
    const Entry claimed = claim();
    if (claimed.lane < 0) return Status::kFull;
    write_record(claimed);
    if (claimed.bucket != place_.first) add_overflow(1);
    publish(claimed, claimed.word);
    return Status::kInserted;
  }

  // An empty entry, taken: other writers may put keys of other first buckets there.
  TARDIS_GSTORE_FUNCTION Entry claim() {
    for (;;) {
      const std::uint32_t free_first = free_in(first_), free_second = free_in(second_);
      const bool second = free_first == 0 || second_is_better(kEntriesPerBucket - population(free_first),
                                                              kEntriesPerBucket - population(free_second));
      const std::uint32_t free = second ? free_second : free_first;
      if (free == 0) return {place_.first, -1, 0};
      const std::uint32_t bucket = second ? place_.second : place_.first;
      const int lane = lowest(free);
      const std::uint64_t empty = second ? warp_.at(second_, lane) : warp_.at(first_, lane);
      const std::uint64_t claimed = next_word(empty, place_.tag, EntryState::kClaimed);
      const bool mine = warp_.leader([&]() -> std::uint64_t {
        return compare_exchange(bucket_words(index_, bucket) + lane, empty, claimed);
      }) != 0;
      if (mine) {
        warp_.ordered();  // forbids that the record is written before the entry is claimed
        return {bucket, lane, claimed};
      }
      if (second) {
        second_ = warp_.words(bucket_words(index_, bucket), kLanes);
      } else {
        first_ = warp_.words(bucket_words(index_, bucket), kLanes);
      }
    }
  }

  TARDIS_GSTORE_FUNCTION std::uint32_t free_in(const Words& words) {
    return warp_.ballot(
        [&](int lane) { return lane != kHeaderLane && state_of(warp_.own(words, lane)) == EntryState::kEmpty; });
  }

  TARDIS_GSTORE_FUNCTION void write_record(const Entry& entry) {
    std::uint64_t* record = record_words(index_, entry.bucket, entry.lane);
    warp_.first_lanes(kRecordWords, [&](int i) {
      const std::uint64_t word = warp_.own(change_, i);
      store(record + i, i == kIdentity ? without_op(word) : word);
    });
  }

  TARDIS_GSTORE_FUNCTION void publish(const Entry& entry, std::uint64_t word) {
    warp_.ordered();  // forbids that a reader which sees the word finds an older record
    set_word(entry, next_word(word, place_.tag, EntryState::kLive));
  }

  TARDIS_GSTORE_FUNCTION void set_word(const Entry& entry, std::uint64_t word) {
    warp_.leader([&]() -> std::uint64_t {
      store(bucket_words(index_, entry.bucket) + entry.lane, word);
      return 0;
    });
  }

  // Only who holds the lock changes a header.
  TARDIS_GSTORE_FUNCTION void add_overflow(int count) {
    warp_.leader([&]() -> std::uint64_t {
      store(header_, load(header_) + static_cast<std::uint64_t>(static_cast<std::int64_t>(count)));
      return 0;
    });
  }

  static TARDIS_GSTORE_FUNCTION int lowest(std::uint32_t mask) {
#if defined(__CUDA_ARCH__)
    return __ffs(static_cast<int>(mask)) - 1;
#else
    return __builtin_ctz(mask);
#endif
  }
  static TARDIS_GSTORE_FUNCTION int population(std::uint32_t mask) {
#if defined(__CUDA_ARCH__)
    return __popc(mask);
#else
    return __builtin_popcount(mask);
#endif
  }

  Warp& warp_;
  const tardis_gpu_index& index_;
  Place place_{};
  std::uint64_t identity_ = 0;
  std::uint64_t* header_ = nullptr;
  Words change_{}, first_{}, second_{};
};

}  // namespace tardis::gstore
