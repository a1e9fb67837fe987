// SPDX-License-Identifier: Apache-2.0
// The shared index of a store in use: a file in tmpfs that every process of the store maps. It is rebuilt from the
// segments whenever no process uses it, so nothing here is a format on disk; the structs are fixed all the same,
// because several processes agree on them.
//
// No lock protects it. Every change is one atomic store or compare-and-swap, and a process killed between two of them
// leaves something that the others recognise: a record that is not live, a word that leads to no live record, a claim
// of a process whose lock is gone.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "block/block_device.h"
#include "store/format.h"

namespace tardis {

using NamespaceId = std::uint32_t;

inline constexpr std::uint32_t kLiveVersion = 4;
inline constexpr std::uint32_t kMaxProcesses = 64;
inline constexpr std::uint32_t kMaxNamespaces = 4096;
inline constexpr std::uint32_t kLeasesPerProcess = 16384;  // loads of long prompts have thousands each, several at once
inline constexpr std::uint32_t kPinsPerProcess = 4096;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free &&
                  std::atomic<std::uint8_t>::is_always_lock_free,
              "atomics in memory that several processes map must not hide a lock");

enum class SlotState : std::uint8_t {
  kFree,
  kWriting,      // reserved by a ticket of the process that holds the segment, invisible
  kLive,         // can be found
  kDying,        // unpublished; free once no lease is on it
  kQuarantined,  // failed its digest in a clean segment; never reused until verified or cleared
};
inline constexpr std::size_t kSlotStates = 5;

// A record's check word: what the slot is, and the generation of the object in it. Whoever copies a record and finds
// the stamp unchanged and live afterwards has a consistent copy.
class Stamp {
 public:
  constexpr Stamp() = default;
  constexpr explicit Stamp(std::uint64_t word) : word_(word) {}
  constexpr Stamp(SlotState state, std::uint64_t generation, bool suspect = false)
      : word_(generation << 8 | (suspect ? kSuspect : 0) | static_cast<std::uint64_t>(state)) {}
  constexpr std::uint64_t word() const { return word_; }
  constexpr SlotState state() const { return static_cast<SlotState>(word_ & 0x7F); }
  constexpr std::uint64_t generation() const { return word_ >> 8; }
  constexpr bool suspect() const { return (word_ & kSuspect) != 0; }  // recovered after a crash, payload not read since
  constexpr bool live() const { return state() == SlotState::kLive; }
  constexpr Stamp with(SlotState state) const { return Stamp(state, generation(), suspect()); }
  constexpr bool operator==(const Stamp&) const = default;

 private:
  static constexpr std::uint64_t kSuspect = 0x80;
  std::uint64_t word_ = 0;
};

// What the index knows of the object in one slot. Written only by the process that holds the slot's segment, while the
// stamp says kWriting; `score`, `reuses` and `children` are hints that anybody updates.
struct SlotRecord {
  std::atomic<std::uint64_t> stamp;
  std::array<std::atomic<std::uint64_t>, 4> key;
  std::atomic<std::uint64_t> identity;  // namespace, payload bytes
  std::atomic<std::uint64_t> root;
  std::atomic<std::uint64_t> parent;    // first 8 bytes of the parent's key, 0: none known
  std::atomic<std::uint64_t> score;     // eviction order
  std::atomic<std::uint32_t> children;  // stored extensions: evicted before this
  std::atomic<std::uint32_t> reuses;
};
static_assert(sizeof(SlotRecord) == 80 && offsetof(SlotRecord, score) == 64);

// One cache line of the hash table: words that lead to records. An object is in one of two buckets.
struct alignas(64) IndexBucket {
  static constexpr std::size_t kWords = 8;
  std::array<std::atomic<std::uint64_t>, kWords> words;  // 0: empty; else tag << 48 | global slot + 1
};
static_assert(sizeof(IndexBucket) == 64);

enum class SegmentState : std::uint32_t {
  kNone,
  kCreating,
  kReady,
  kUnreadable,  // its file is left alone and keeps its share of the capacity
  kDraining,    // nothing new is put in it; as it was, on disk
  kReclassing,  // every slot is free, and it is being given another slot class
};

// Who holds something: a process's place and the number of its registration; 0: nobody.
using Owner = std::uint64_t;

struct alignas(64) LiveSegment {
  std::atomic<SegmentState> state;
  std::atomic<std::uint32_t> epoch;
  std::atomic<Owner> owner;   // the one process that may write slots and tables just now
  std::atomic<Owner> wanted;  // a process that waits for it to be nobody's
  std::atomic<std::uint64_t> slot_bytes;
  std::atomic<std::uint64_t> payload_offset;
  std::atomic<std::uint32_t> slots;
  std::atomic<std::uint32_t> digests_per_slot;
  std::atomic<std::uint32_t> flags;           // SegmentFlags as on disk
  std::atomic<std::uint32_t> doubtful;        // a write or flush failed: some slot may not hold what its header says
  std::atomic<std::uint64_t> write_sequence;  // as on disk
  std::atomic<std::uint64_t> table_version;   // changes with every write to its tables
  std::array<std::atomic<std::uint32_t>, kSlotStates> counts;  // slots by state
  std::atomic<std::uint32_t> next_slot;                        // where the search for a free slot starts
  std::atomic<std::uint32_t> path, number;                     // SegmentName; segments are numbered anew in each table
  std::atomic<std::uint32_t> all_paths;                        // a bit for each on which it has a file
  std::atomic<std::uint64_t> stripe_map;                       // StripeMap::pack(), of a striped one
};
static_assert(sizeof(LiveSegment) == 128);
static_assert(kMaxPaths <= 32);

struct LiveNamespace {
  Fingerprint fingerprint;
};
static_assert(sizeof(LiveNamespace) == 16);

// What one process has in hand. It counts only while the process's lock is held.
struct alignas(64) LiveProcess {
  template <std::uint32_t kMost>
  using Pins = std::array<std::atomic<std::uint64_t>, kMost>;
  std::atomic<Owner> owner;                                         // 0: nobody
  std::atomic<std::uint64_t> oldest_group;                          // not yet durable; 0: none
  std::atomic<std::uint64_t> oldest_read;                           // see FlushTurns
  std::atomic<std::uint32_t> leases_end, parents_end, writing_end;  // entries at and above were never used
  std::atomic<std::uint32_t> flush_asked;                           // another one waits for its open group
  Pins<kLeasesPerProcess> leases;                                   // global slot + 1 of objects being read
  Pins<kPinsPerProcess> parents;  // short keys of objects whose extensions are being written
  Pins<kPinsPerProcess> writing;  // short keys of objects being written
};

enum class PathState : std::uint32_t {
  kNone,
  kInUse,
  kOut,  // missing, or failed: what it holds is not found, until the store is opened anew
};

struct alignas(64) LivePath {
  std::atomic<PathState> state;
  std::atomic<std::uint32_t> next_number;                   // of a segment
  std::array<std::atomic<std::uint32_t>, kIoUses> strikes;  // batches in a row of which nothing succeeded
};
static_assert(sizeof(LivePath) == 64);

// Where the parts of the table lie.
struct LiveShape {
  std::uint64_t capacity_bytes, segment_bytes;
  std::uint32_t max_segments;
  std::uint32_t slots_stride;  // records per segment
  std::uint64_t buckets;
  std::uint64_t processes_offset, namespaces_offset, segments_offset, buckets_offset, records_offset, total_bytes;
};

struct LiveHeader {
  static constexpr std::array<char, 8> kMagic{'T', 'A', 'R', 'D', 'I', 'S', 'L', 'V'};
  std::array<char, 8> magic;
  std::uint32_t version;
  std::atomic<std::uint32_t> ready;
  Uuid store;
  LiveShape shape;
  alignas(64) std::atomic<std::uint64_t> clock;
  alignas(64) std::atomic<std::uint64_t> next_generation;
  alignas(64) std::atomic<std::uint64_t> next_group;
  alignas(64) std::atomic<std::uint64_t> payload_bytes;
  alignas(64) std::atomic<std::uint64_t> registrations;
  std::atomic<std::uint32_t> segments_end;  // ids at and above were never used
  std::atomic<std::uint32_t> namespaces_end;
  std::atomic<std::uint32_t> processes_end;
  std::atomic<std::uint64_t> flush_failures;  // of all processes
  std::atomic<std::uint64_t> flush_turn;      // see FlushTurns
  std::array<LivePath, kMaxPaths> paths;
};
static_assert(sizeof(LiveHeader) <= 4096);

}  // namespace tardis
