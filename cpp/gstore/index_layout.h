// SPDX-License-Identifier: Apache-2.0
// The index's memory, for host and device code. A bucket is 32 words, one for each lane of a warp: a header and 31
// entries; an object is in one of two buckets. An entry's word tells whether its record is worth a look; the record, at
// the same position in an array beside the buckets, holds the whole key, which alone decides.
#pragma once

#include <cstddef>

#include "gstore/index.h"
#include "gstore/shared_word.h"

namespace tardis::gstore {

constexpr int kLanes = 32;
constexpr int kHeaderLane = 0;
constexpr int kEntriesPerBucket = kLanes - 1;
constexpr std::uint32_t kEntryLanes = 0xFFFFFFFEu;  // as a mask
constexpr int kRecordWords = 8;
constexpr std::uint64_t kNowhere = ~std::uint64_t{0};

static_assert(sizeof(tardis_gpu_index_entry) == kRecordWords * 8 && offsetof(tardis_gpu_index_entry, root) == 48 &&
              offsetof(tardis_gpu_index_entry, payload_bytes) == 56 && offsetof(tardis_gpu_index_entry, space) == 60 &&
              offsetof(tardis_gpu_index_entry, op) == 62);
static_assert(sizeof(tardis_gpu_index_answer) == 32 && sizeof(tardis_gpu_ticket) == 64 &&
              sizeof(tardis_gpu_report) == 48);

enum RecordWord { kKey = 0, kLocation = 4, kGeneration = 5, kRoot = 6, kIdentity = 7 };

struct Key {
  std::uint64_t word[4];
};

// The last word of a record: payload bytes, namespace. A change has its operation there as well.
TARDIS_GSTORE_FUNCTION std::uint32_t space_of(std::uint64_t identity) {
  return static_cast<std::uint32_t>(identity >> 32) & 0xFFFF;
}
TARDIS_GSTORE_FUNCTION std::uint32_t op_of(std::uint64_t identity) {
  return static_cast<std::uint32_t>(identity >> 48) & 0xFF;
}
TARDIS_GSTORE_FUNCTION std::uint64_t without_op(std::uint64_t identity) { return identity & 0xFFFFFFFFFFFFu; }

// An entry's word: tag << 32 | version << 2 | state. The version grows with every change of state, so that a reader
// that finds the same word before and after it read the record has read one object's record.
enum class EntryState : std::uint32_t {
  kEmpty = 0,
  kClaimed = 1,  // a record is being written: nothing there yet
  kLive = 2,
  kChanging = 3,  // the same object's place is being replaced: a reader waits
};
constexpr std::uint32_t kStateMask = 3;

TARDIS_GSTORE_FUNCTION EntryState state_of(std::uint64_t word) {
  return static_cast<EntryState>(static_cast<std::uint32_t>(word) & kStateMask);
}
TARDIS_GSTORE_FUNCTION std::uint64_t next_word(std::uint64_t word, std::uint32_t tag, EntryState state) {
  const std::uint32_t version = (static_cast<std::uint32_t>(word) | kStateMask) + 1;
  return std::uint64_t{tag} << 32 | version | static_cast<std::uint32_t>(state);
}
TARDIS_GSTORE_FUNCTION bool leads_to(std::uint64_t word, std::uint32_t tag) {
  return static_cast<std::uint32_t>(word >> 32) == tag && (word & 2) != 0;
}

// A bucket's header: a lock for writers of keys whose first bucket it is, and how many of those keys are in their
// second bucket. A lookup that finds 0 need not look there.
constexpr std::uint64_t kLocked = std::uint64_t{1} << 63;
TARDIS_GSTORE_FUNCTION bool has_overflow(std::uint64_t header) { return static_cast<std::uint32_t>(header) != 0; }

struct Place {
  std::uint32_t first, second;  // buckets
  std::uint32_t tag;
};

TARDIS_GSTORE_FUNCTION std::uint64_t mix(std::uint64_t x) {  // the finalizer of MurmurHash3
  x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCDu;
  x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53u;
  return x ^ (x >> 33);
}

TARDIS_GSTORE_FUNCTION std::uint32_t scale(std::uint64_t hash, std::uint32_t range) {
  return static_cast<std::uint32_t>((hash >> 32) * range >> 32);
}

TARDIS_GSTORE_FUNCTION std::uint64_t rotate_left(std::uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

// Keys are SHA-256 values; the namespace is mixed in so that one key in two namespaces does not share its buckets.
TARDIS_GSTORE_FUNCTION Place place_of(const Key& key, std::uint32_t space, std::uint32_t buckets) {
  const std::uint64_t hash = mix(key.word[0] + space * 0x9E3779B97F4A7C15u);
  Place place;
  place.first = scale(hash, buckets);
  place.second = scale(mix(hash), buckets);
  if (place.second == place.first) place.second = place.first + 1 == buckets ? 0 : place.first + 1;
  const std::uint64_t rest = key.word[1] ^ rotate_left(key.word[2], 21) ^ rotate_left(key.word[3], 42);
  place.tag = static_cast<std::uint32_t>(mix(rest) >> 32);
  return place;
}

// Up to this many entries a key goes to its first bucket, beyond it to the emptier one: most lookups end in the first
// bucket, and at a load of 0.8 none finds both full.
constexpr int kFirstBucketEntries = 27;

TARDIS_GSTORE_FUNCTION bool second_is_better(int used_first, int used_second) {
  return used_first >= kFirstBucketEntries && used_second < used_first;
}

TARDIS_GSTORE_FUNCTION std::uint64_t* bucket_words(const tardis_gpu_index& index, std::uint32_t bucket) {
  return index.words + std::size_t{bucket} * kLanes;
}
TARDIS_GSTORE_FUNCTION std::uint64_t* record_words(const tardis_gpu_index& index, std::uint32_t bucket, int lane) {
  return index.records + (std::size_t{bucket} * kLanes + static_cast<std::size_t>(lane)) * kRecordWords;
}

// Of who waits for another to be done with a word or a lock, in ns.
TARDIS_GSTORE_FUNCTION std::uint64_t patience_of(const tardis_gpu_index& index, std::uint64_t usual) {
  return index.patience == 0 ? usual : usual * index.patience;
}

constexpr std::uint64_t kBucketBytes = kLanes * 8 + kLanes * kRecordWords * 8;  // with its records

TARDIS_GSTORE_FUNCTION std::uint64_t buckets_for(std::uint64_t entries) {
  const std::uint64_t slots = entries + entries / 4 + 1;
  const std::uint64_t buckets = (slots + kEntriesPerBucket - 1) / kEntriesPerBucket;
  return buckets < 2 ? 2 : buckets;
}

}  // namespace tardis::gstore
