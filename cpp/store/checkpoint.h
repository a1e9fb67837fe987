// SPDX-License-Identifier: Apache-2.0
// The index on disk, as of a moment when every segment was durable: what it says of a segment holds as long as the
// segment is clean and has not been written since. Deleting the file loses nothing but the time to read header tables.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "store/format.h"

namespace tardis {

inline constexpr const char* kCheckpointFile = "index.checkpoint";

// First 512 bytes of it. Then the fingerprints of its namespaces, then the segments, each with its
// entries behind it.
struct CheckpointHeader {
  static constexpr std::array<char, 8> kMagic{'T', 'A', 'R', 'D', 'I', 'S', 'C', 'P'};
  std::array<char, 8> magic;
  std::uint32_t format_version;
  std::uint32_t namespaces;
  Uuid store_uuid;
  std::uint64_t next_generation;
  std::uint64_t next_group;
  std::uint64_t durable_group;
  std::uint64_t clock;
  std::uint32_t segments;
  std::uint32_t reserved0;
  std::uint64_t bytes;  // of the file
  std::array<std::uint8_t, 424> reserved;
  std::uint32_t namespaces_crc;
  std::uint32_t crc;
};
static_assert(sizeof(CheckpointHeader) == 512 && offsetof(CheckpointHeader, crc) == 508);

struct CheckpointSegment {
  static constexpr std::array<char, 8> kMagic{'T', 'A', 'R', 'D', 'I', 'S', 'C', 'S'};
  std::array<char, 8> magic;
  std::uint32_t segment;  // SegmentName::word()
  std::uint32_t epoch;
  std::uint64_t write_sequence;
  std::uint64_t entries_digest;  // XXH3-64
  std::uint32_t entries;
  std::uint32_t reserved;
  std::uint32_t reserved1;
  std::uint32_t crc;
};
static_assert(sizeof(CheckpointSegment) == 48 && offsetof(CheckpointSegment, crc) == 44);

enum class CheckpointState : std::uint8_t { kLive = 1, kSuspect = 2, kQuarantined = 3 };

struct CheckpointEntry {
  Hash256 key;
  std::uint64_t root;
  std::uint64_t parent;
  std::uint64_t generation;
  std::uint64_t score;
  std::uint32_t payload_bytes;
  std::uint32_t slot;
  std::uint32_t children;
  std::uint16_t space;  // position in the checkpoint's list of namespaces
  std::uint8_t reuses;
  CheckpointState state;
};
static_assert(sizeof(CheckpointEntry) == 80);

class Checkpoint {
 public:
  // Empty if there is none that this release can use: the segments are scanned then.
  static Checkpoint load(const std::string& path, const Uuid& store);

  const CheckpointHeader* header() const { return header_ ? &*header_ : nullptr; }
  const std::vector<Fingerprint>& namespaces() const { return namespaces_; }
  // Whether it tells of this state of the segment.
  bool covers(SegmentName segment, std::uint32_t epoch, std::uint64_t write_sequence) const;
  // False if the entries fail their digest. May be called from several threads; `entries` is memory to use again.
  bool read(SegmentName segment, std::vector<CheckpointEntry>& entries) const;

 private:
  struct Place {
    CheckpointSegment segment;
    std::uint64_t offset;
  };
  UniqueFd fd_;
  std::optional<CheckpointHeader> header_;
  std::vector<Fingerprint> namespaces_;
  std::map<std::uint32_t, Place> segments_;
};

// Writes a checkpoint beside the old one and puts it in its place, durably. `next(segment, entries)` fills in one
// segment after the other (without digest and CRC) and answers false after the last.
Status write_checkpoint(const std::string& folder, const std::vector<Fingerprint>& namespaces, CheckpointHeader header,
                        const std::function<bool(CheckpointSegment&, std::vector<CheckpointEntry>&)>& next);

}  // namespace tardis
