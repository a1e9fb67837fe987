// SPDX-License-Identifier: Apache-2.0
// Named files of fixed length on a raw namespace (docs/raw-namespace.md): a superblock at either end, a directory at
// either end, and between them ranges that are one file each. Whatever is said on the namespace is said twice, so that
// no single sector loses more than itself.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "base/status.h"
#include "nvme/raw_namespace.h"
#include "store/format.h"

namespace tardis::nvme {

inline constexpr std::uint32_t kVolumeVersion = 1;
inline constexpr std::uint64_t kVolumeBlockBytes = 4096;        // around each superblock; offsets of directories
inline constexpr std::uint64_t kVolumeExtentAlign = 1u << 20;   // of files
inline constexpr std::uint64_t kVolumeInspectBytes = 1u << 20;  // at either end, must be zero before a first format

// First 512 bytes of the namespace, and of its last 4 KiB.
struct VolumeSuperblock {
  static constexpr std::array<char, 8> kMagic{'T', 'A', 'R', 'D', 'I', 'S', 'N', 'V'};
  std::array<char, 8> magic;
  std::uint32_t format_version;
  std::uint32_t block_bytes;  // of the namespace
  Uuid uuid;
  std::uint64_t namespace_bytes;  // when it was formatted
  std::uint64_t generation;       // rises with each format of the namespace
  std::uint64_t entries;
  std::array<std::uint64_t, 2> directory_offset;
  std::uint64_t data_offset;
  std::uint64_t data_bytes;
  std::uint64_t created_unix_seconds;
  std::array<std::uint8_t, 408> reserved;
  std::uint32_t reserved0;
  std::uint32_t crc;
};
static_assert(sizeof(VolumeSuperblock) == 512 && offsetof(VolumeSuperblock, crc) == 508);
static_assert(offsetof(VolumeSuperblock, uuid) == 16 && offsetof(VolumeSuperblock, entries) == 48);
static_assert(offsetof(VolumeSuperblock, data_offset) == 72);
static_assert(std::is_trivially_copyable_v<VolumeSuperblock>);

enum class EntryState : std::uint32_t { kFree = 1, kInUse = 2 };

// One sector of a directory. Zero: never used.
struct VolumeEntry {
  static constexpr std::array<char, 8> kMagic{'T', 'A', 'R', 'D', 'I', 'S', 'N', 'E'};
  std::array<char, 8> magic;
  std::uint32_t format_version;
  EntryState state;
  Uuid volume;
  std::uint64_t generation;  // rises with each change; of two copies that differ the newer holds
  std::uint64_t offset;      // of the file, in the namespace
  std::uint64_t bytes;
  std::uint32_t number;  // of this entry
  std::uint32_t name_bytes;
  std::array<char, 444> name;
  std::uint32_t crc;
};
static_assert(sizeof(VolumeEntry) == 512 && offsetof(VolumeEntry, crc) == 508);
static_assert(offsetof(VolumeEntry, generation) == 32 && offsetof(VolumeEntry, name) == 64);
static_assert(std::is_trivially_copyable_v<VolumeEntry>);

struct VolumeExtent {
  std::uint64_t offset = 0, bytes = 0;
};

// Thread-safe. Makes what it says of files durable before it returns.
class RawVolume {
  struct Passkey {
    explicit Passkey() = default;
  };

 public:
  // Why the namespace must not be formatted without force: what lies at its ends.
  static Status check_blank(RawNamespace& device);
  // Makes an empty volume. What was there is lost, whatever it was: check_blank() first.
  static Status format(RawNamespace& device, const Uuid& uuid);
  // Code::kNotFound: nothing but zeros where a superblock would be. kInvalidArgument: another volume than `expected`,
  // or not as it was when it was formatted. kCorrupt: no volume, or one that fails its checks.
  static Result<std::unique_ptr<RawVolume>> open(RawNamespace& device, const std::optional<Uuid>& expected);

  RawVolume(Passkey, RawNamespace& device, const VolumeSuperblock& superblock);

  const VolumeSuperblock& superblock() const { return superblock_; }
  // Superblocks and entries that were mended from their copy when it was opened, and entries of which both are lost.
  std::uint64_t mended() const { return mended_; }
  std::uint64_t lost() const { return lost_; }

  std::optional<VolumeExtent> find(const std::string& name) const;
  std::vector<std::string> names() const;
  // A file of that length, of which the first `zeros` bytes read as zeros and the others as anything. The name must be
  // new. Code::kNoSpace: no range is long enough, or the directory is full.
  Result<VolumeExtent> create(const std::string& name, std::uint64_t bytes, std::uint64_t zeros);
  // Their ranges are free when it returns. Names that are not there are fine.
  Status remove(const std::vector<std::string>& names);
  std::uint64_t free_bytes() const;

 private:
  Status load_directory();
  Status read_copies(std::uint64_t first, std::array<std::vector<VolumeEntry>, 2>& copies);
  bool sane(const VolumeEntry& entry, std::uint64_t number) const;
  Status adopt(std::uint32_t number);
  Result<std::uint32_t> free_entry() const;
  std::optional<std::uint64_t> first_fit(std::uint64_t bytes) const;
  VolumeEntry make_entry(std::uint32_t number, EntryState state) const;
  // Both copies; durable when it returns.
  Status write_entries(const std::vector<std::uint32_t>& numbers);
  Status free_entries(const std::vector<std::uint32_t>& numbers);
  Error broken(const std::string& what) const;

  RawNamespace& device_;
  const VolumeSuperblock superblock_;
  std::uint64_t mended_ = 0, lost_ = 0;

  mutable std::mutex mutex_;  // held during I/O on the directory
  std::vector<VolumeEntry> entries_;
  std::map<std::string, std::uint32_t> by_name_;
  std::map<std::uint64_t, std::uint64_t> used_;  // offset -> bytes, in units of kVolumeExtentAlign
  std::set<std::uint32_t> doubtful_;             // in use here, but writing that failed
};

}  // namespace tardis::nvme
