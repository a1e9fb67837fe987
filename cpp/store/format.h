// SPDX-License-Identifier: Apache-2.0
// Format v1 on disk (docs/on-disk-format.md). Little-endian, fixed size, every struct proves itself with a CRC-32C over
// all bytes before its `crc` field. Structs fit one 512-byte sector, the unit that drives write atomically.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace tardis {

static_assert(std::endian::native == std::endian::little, "format v1 is little-endian");

inline constexpr std::uint32_t kFormatVersion = 1;
inline constexpr std::uint64_t kChunkBytes = 16 * 1024;  // unit of the payload digest
inline constexpr std::uint64_t kTableBlockBytes = 4096;  // unit of header and digest table writes
inline constexpr std::uint64_t kHeaderBytes = 512;
inline constexpr std::uint64_t kFirstPayloadAlign = 1u << 20;  // the first slot starts at a multiple of this
inline constexpr std::uint64_t kSlotAlign = 4096;
inline constexpr std::uint64_t kMinSegmentBytes = 4u << 20;
inline constexpr std::uint64_t kMaxAutoSegmentBytes = 1u << 30;
inline constexpr std::uint64_t kMaxSegmentBytes = std::uint64_t{1}
                                                  << 40;  // so that no offset or count in one can overflow
inline constexpr std::uint64_t kMetadataBytes = 1u
                                                << 20;  // superblock file, lock, namespace texts: part of the capacity
inline constexpr std::uint32_t kMaxRegions = 4;
inline constexpr std::uint32_t kMaxPaths = 16;     // folders of one store
inline constexpr std::uint32_t kSegmentBits = 20;  // of a segment's number in its folder
inline constexpr std::uint32_t kMaxSegments = 1u << kSegmentBits;

using Hash256 = std::array<std::uint8_t, 32>;
using Fingerprint = std::array<std::uint8_t, 16>;
using Uuid = std::array<std::uint8_t, 16>;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) { return (value + unit - 1) / unit * unit; }

// First 512 bytes of the file `tardis.store`.
struct StoreSuperblock {
  static constexpr std::array<char, 8> kMagic{'T', 'A', 'R', 'D', 'I', 'S', 'S', 'T'};
  std::array<char, 8> magic;
  std::uint32_t format_version;
  std::uint32_t chunk_bytes;
  Uuid uuid;
  std::uint64_t capacity_bytes;
  std::uint64_t segment_bytes;
  std::uint32_t block_bytes;  // parts are padded to this (the device's logical block when the store was made)
  std::uint32_t reserved0;
  std::uint64_t created_unix_seconds;
  std::array<std::uint8_t, 440> reserved;
  std::uint32_t flags;
  std::uint32_t crc;
};
static_assert(sizeof(StoreSuperblock) == 512 && offsetof(StoreSuperblock, crc) == 508);
static_assert(std::is_trivially_copyable_v<StoreSuperblock>);

// A segment file: the folder's number among those of the store (0: the store's own), and its number in that folder.
struct SegmentName {
  std::uint32_t path = 0;
  std::uint32_t number = 0;
  auto operator<=>(const SegmentName&) const = default;
  // As tools and checkpoints write it.
  constexpr std::uint32_t word() const { return path << kSegmentBits | number; }
};

enum PathFlags : std::uint32_t {
  kPathKnown = 1,  // the entry is in use
  kPathAway = 2,   // the store was opened without it since
  kPathStale = 4,  // and something was deleted meanwhile: what it holds must not come back
};

// A further folder of a store, as the store's own folder tells of it.
struct PathEntry {
  Uuid uuid;
  std::uint32_t flags;
  std::uint32_t folder_bytes;
  std::uint64_t turn;  // see PathMarker
  std::array<char, 992> folder;
};
static_assert(sizeof(PathEntry) == 1024);

// The file `tardis.paths`, in a store that has further folders; entry i is path i + 1.
struct PathsFile {
  static constexpr std::array<char, 8> kMagic{'T', 'A', 'R', 'D', 'I', 'S', 'P', 'S'};
  std::array<char, 8> magic;
  std::uint32_t format_version;
  std::uint32_t reserved0;
  Uuid store_uuid;
  std::array<std::uint8_t, 984> reserved;
  std::array<PathEntry, kMaxPaths - 1> entries;
  std::uint32_t reserved1;
  std::uint32_t crc;
};
static_assert(sizeof(PathsFile) == 16384 && offsetof(PathsFile, crc) == 16380);
static_assert(std::is_trivially_copyable_v<PathsFile>);

// First 512 bytes of the file `tardis.path` in a further folder.
struct PathMarker {
  static constexpr std::array<char, 8> kMagic{'T', 'A', 'R', 'D', 'I', 'S', 'P', 'A'};
  std::array<char, 8> magic;
  std::uint32_t format_version;
  std::uint32_t reserved0;
  Uuid store_uuid;
  Uuid path_uuid;
  // Rises by 2 with every opening of the store and every deletion: by 1 here, by 2 in the store's list, by 1 here
  // again. A folder that was put back from a copy is told by it, and one that another copy of the store's own folder
  // has used since; a difference of 1 is what a crash leaves.
  std::uint64_t turn;
  std::array<std::uint8_t, 448> reserved;
  std::uint32_t reserved1;
  std::uint32_t crc;
};
static_assert(sizeof(PathMarker) == 512 && offsetof(PathMarker, crc) == 508);
static_assert(std::is_trivially_copyable_v<PathMarker>);

enum SegmentFlags : std::uint32_t {
  kSegmentDirty = 1,    // written since it was last known to be whole; made durable before the first such write
  kSegmentSuspect = 2,  // survived a crash; its slots have not all been verified since
};

// First 512 bytes of a segment file; the rest of its 4 KiB is zero. With stripes: of the file on the first of its
// paths, which has the tables too and is named like the segment.
struct SegmentSuperblock {
  static constexpr std::array<char, 8> kMagic{'T', 'A', 'R', 'D', 'I', 'S', 'S', 'G'};
  std::array<char, 8> magic;
  std::uint32_t format_version;
  std::uint32_t flags;
  Uuid store_uuid;
  std::uint32_t segment;
  std::uint32_t epoch;  // counts re-classings; a header of another epoch is not believed
  std::uint64_t segment_bytes;
  std::uint64_t slot_bytes;
  std::uint32_t slots;
  std::uint32_t digests_per_slot;
  std::uint64_t header_table_offset;
  std::uint64_t digest_table_offset;
  std::uint64_t payload_offset;
  std::uint64_t write_sequence;  // rises whenever the segment becomes dirty: what a checkpoint says of it holds or not
  std::uint32_t stripes;         // files that the payload is dealt to; 0: it lies in this one
  std::uint32_t reserved0;
  std::uint64_t stripe_unit;   // bytes that lie side by side in one of them
  std::uint64_t stripe_bytes;  // length of each file but this one; this one has the rest of segment_bytes
  std::uint64_t stripe_nonce;  // the other files repeat it
  std::array<std::uint8_t, kMaxPaths> stripe_paths;  // of each file, this one first
  std::array<std::uint8_t, 360> reserved;
  std::uint32_t reserved_flags;
  std::uint32_t crc;
};
static_assert(sizeof(SegmentSuperblock) == 512 && offsetof(SegmentSuperblock, crc) == 508);
static_assert(offsetof(SegmentSuperblock, write_sequence) == 88 && offsetof(SegmentSuperblock, stripes) == 96);
static_assert(offsetof(SegmentSuperblock, stripe_unit) == 104 && offsetof(SegmentSuperblock, stripe_paths) == 128);
static_assert(std::is_trivially_copyable_v<SegmentSuperblock>);

// First 512 bytes of a further file of a striped segment; the rest of its 4 KiB is zero, and behind it is payload.
struct StripeHeader {
  static constexpr std::array<char, 8> kMagic{'T', 'A', 'R', 'D', 'I', 'S', 'S', 'P'};
  std::array<char, 8> magic;
  std::uint32_t format_version;
  std::uint32_t index;  // of this file in stripe_paths
  Uuid store_uuid;
  std::uint32_t path;  // of the segment's first file
  std::uint32_t segment;
  std::uint64_t nonce;
  std::array<std::uint8_t, 456> reserved;
  std::uint32_t reserved1;
  std::uint32_t crc;
};
static_assert(sizeof(StripeHeader) == 512 && offsetof(StripeHeader, crc) == 508);
static_assert(offsetof(StripeHeader, path) == 32 && offsetof(StripeHeader, nonce) == 40);
static_assert(std::is_trivially_copyable_v<StripeHeader>);

enum class SlotKind : std::uint16_t {
  kFree = 0,
  kKvPage = 1 /* reserved: 2 side pool, 3 sparse segment, 4 head group */
};

enum SlotFlags : std::uint16_t { kSlotQuarantined = 1 };

struct SlotHeader {
  static constexpr std::array<char, 8> kMagic{'T', 'A', 'R', 'D', 'I', 'S', 'S', 'L'};
  std::array<char, 8> magic;
  std::uint32_t format_version;
  SlotKind kind;
  std::uint16_t flags;
  Hash256 key;
  Fingerprint fingerprint;
  std::uint64_t parent;  // first 8 bytes of the parent's key as a little-endian integer; 0: none known
  std::uint64_t generation;
  std::uint32_t segment;
  std::uint32_t slot;
  std::uint32_t segment_epoch;
  std::uint32_t part_count;  // layers in the layer-major layout
  std::uint64_t slot_bytes;
  std::uint64_t part_bytes;
  std::uint64_t part_stride;
  std::uint64_t payload_bytes;  // part_count * part_bytes
  std::uint64_t root_digest;
  std::uint64_t flush_group;         // this object is durable once this group is
  std::uint64_t last_durable_group;  // proven durable when this header was written
  std::uint64_t companion_set;       // reserved for hybrid models: objects that are restorable together or not at all
  std::uint32_t companion_count;
  std::uint32_t reserved0;
  std::array<std::uint8_t, 336> reserved;
  std::uint32_t reserved1;
  std::uint32_t crc;
};
static_assert(sizeof(SlotHeader) == kHeaderBytes && offsetof(SlotHeader, crc) == 508);
static_assert(offsetof(SlotHeader, key) == 16 && offsetof(SlotHeader, fingerprint) == 48);
static_assert(offsetof(SlotHeader, parent) == 64 && offsetof(SlotHeader, root_digest) == 128);
static_assert(std::is_trivially_copyable_v<SlotHeader>);

std::uint32_t struct_crc(const void* data, std::size_t bytes_before_crc);

template <class T>
void seal(T& record) {
  record.crc = struct_crc(&record, offsetof(T, crc));
}

template <class T>
bool sealed(const T& record) {
  return record.magic == T::kMagic && record.crc == struct_crc(&record, offsetof(T, crc));
}

// True for a record that was never written (fallocate leaves zeros).
bool all_zero(const void* data, std::size_t bytes);

// Where things lie in a segment of one slot class. slots == 0: the class does not fit.
struct SegmentGeometry {
  std::uint64_t slot_bytes = 0;
  std::uint32_t digests_per_slot = 0;
  std::uint32_t slots = 0;
  std::uint64_t header_table_offset = 0;
  std::uint64_t digest_table_offset = 0;
  std::uint64_t payload_offset = 0;

  std::uint64_t slot_offset(std::uint32_t slot) const { return payload_offset + slot * slot_bytes; }
  std::uint64_t table_bytes() const { return payload_offset - header_table_offset; }
  static SegmentGeometry of(std::uint64_t segment_bytes, std::uint64_t slot_bytes, std::uint32_t digests_per_slot);
  static SegmentGeometry of(const SegmentSuperblock& superblock);
  static SegmentGeometry with(std::uint32_t slots, std::uint64_t slot_bytes, std::uint32_t digests_per_slot);
};

// Objects of equal slot class can replace each other.
struct SlotClass {
  std::uint64_t slot_bytes;
  std::uint32_t digests_per_slot;
  auto operator<=>(const SlotClass&) const = default;
};

// How one object is cut into parts (layers), regions (K, V) and digest chunks.
struct ObjectGeometry {
  std::uint32_t parts = 0;
  std::uint32_t regions = 0;
  std::array<std::uint64_t, kMaxRegions> region_bytes{};
  std::uint64_t part_bytes = 0;
  std::uint64_t part_stride = 0;
  std::uint32_t chunks_per_part = 0;

  std::uint64_t payload_bytes() const { return parts * part_bytes; }
  std::uint64_t stored_bytes() const { return parts * part_stride; }
  std::uint32_t chunks() const { return parts * chunks_per_part; }
  std::uint32_t pieces() const { return parts * regions; }
  SlotClass slot_class() const { return {round_up(stored_bytes(), kSlotAlign), chunks()}; }
  static ObjectGeometry of(std::uint32_t parts, std::uint32_t regions, const std::uint64_t* region_bytes,
                           std::uint32_t block_bytes);
  // The object as one contiguous region a part: what a header alone tells.
  static ObjectGeometry of(const SlotHeader& header);
};

}  // namespace tardis
