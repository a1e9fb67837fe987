// SPDX-License-Identifier: Apache-2.0
#include "nvme/disk_marks.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "base/aligned_buffer.h"

namespace tardis::nvme {
namespace {

using namespace std::string_view_literals;

struct Mark {
  std::uint64_t offset;
  std::string_view bytes;
  const char* what;
};

// From the beginning.
constexpr Mark kFirst[] = {
    {0, "TARDISNV"sv, "a tardis volume"},
    {512, "EFI PART"sv, "a GPT partition table"},
    {4096, "EFI PART"sv, "a GPT partition table"},
    {3, "NTFS    "sv, "an NTFS file system"},
    {3, "EXFAT   "sv, "an exFAT file system"},
    {3, "ReFS\0\0\0\0"sv, "a ReFS file system"},
    {3, "-FVE-FS-"sv, "a BitLocker volume"},
    {54, "FAT12   "sv, "a FAT file system"},
    {54, "FAT16   "sv, "a FAT file system"},
    {82, "FAT32   "sv, "a FAT file system"},
    {1080, "\x53\xEF"sv, "an ext2, ext3 or ext4 file system"},
    {0, "XFSB"sv, "an XFS file system"},
    {0x10040, "_BHRfS_M"sv, "a btrfs file system"},
    {0x400, "\x10\x20\xF5\xF2"sv, "an F2FS file system"},
    {4120, "\xC6\x85\x73\xF6\x4E\x1A\x45\xCA\x82\x65\xF5\x7F\x48\xBA\x6D\x81"sv, "a bcache or bcachefs member"},
    {4120, "\xC6\x85\x73\xF6\x66\xCE\x90\xA9\xD9\x6A\x60\xCF\x80\x3D\xF7\xEF"sv, "a bcachefs file system"},
    {0x8000, "JFS1"sv, "a JFS file system"},
    {0x10034, "ReIsEr"sv, "a ReiserFS file system"},
    {0x406, "\x34\x34"sv, "a NILFS2 file system"},
    {0x1000, "OCFSV2"sv, "an OCFS2 file system"},
    {0x10000, "\x01\x16\x19\x70"sv, "a GFS2 file system"},
    {1024, "H+\0\4"sv, "an HFS+ file system"},
    {32, "NXSB"sv, "an APFS container"},
    {0, "hsqs"sv, "a squashfs image"},
    {0x400, "\xE2\xE1\xF5\xE0"sv, "an EROFS image"},
    {0x8001, "CD001"sv, "an ISO 9660 image"},
    {0x8001, "BEA01"sv, "a UDF file system"},
    {4086, "SWAPSPACE2"sv, "swap space"},
    {8182, "SWAPSPACE2"sv, "swap space"},
    {16374, "SWAPSPACE2"sv, "swap space"},
    {65526, "SWAPSPACE2"sv, "swap space"},
    {4086, "SWAP-SPACE"sv, "swap space"},
    {0, "LABELONE"sv, "an LVM physical volume"},
    {512, "LABELONE"sv, "an LVM physical volume"},
    {1024, "LABELONE"sv, "an LVM physical volume"},
    {1536, "LABELONE"sv, "an LVM physical volume"},
    {0, "LUKS\xBA\xBE"sv, "a LUKS volume"},
    {0x4000, "SKUL\xBA\xBE"sv, "the second header of a LUKS volume"},
    {0, "\xFC\x4E\x2B\xA9"sv, "a Linux RAID member"},
    {4096, "\xFC\x4E\x2B\xA9"sv, "a Linux RAID member"},
    {0, "dmvdo001"sv, "a VDO volume"},
    {0, "integrt\0"sv, "a dm-integrity volume"},
    {0, "verity\0\0"sv, "a dm-verity volume"},
    {516, "!Stra0tis\x86\xff\x02^\x41rh"sv, "a Stratis device"},
    {0, "bluestore block device"sv, "a Ceph BlueStore device"},
    {0, "SPDKBLOB"sv, "an SPDK blobstore"},
};

// Backwards from the end.
constexpr Mark kLast[] = {
    {4096, "TARDISNV"sv, "the second superblock of a tardis volume"},
    {512, "EFI PART"sv, "the second copy of a GPT partition table"},
    {4096, "EFI PART"sv, "the second copy of a GPT partition table"},
    {1024, "Intel Raid ISM Cfg Sig. "sv, "an Intel RAID member"},
    {512, "\xDE\x11\xDE\x11"sv, "a DDF RAID member"},
};

constexpr std::string_view kRaid = "\xFC\x4E\x2B\xA9"sv;
constexpr std::string_view kZfsUberblock = "\x0C\xB1\xBA\0\0\0\0\0"sv, kZfsUberblockBig = "\0\0\0\0\0\xBA\xB1\x0C"sv;

class Search {
 public:
  Search(std::span<const std::byte> first, std::span<const std::byte> last, std::uint64_t bytes)
      : first_(first), last_(last), last_begin_(bytes - last.size()), bytes_(bytes) {}

  // Where either end holds `offset`.
  bool has(std::uint64_t offset, std::string_view bytes) const {
    const auto in = [&](std::span<const std::byte> part, std::uint64_t begin) {
      return offset >= begin && offset - begin <= part.size() && bytes.size() <= part.size() - (offset - begin) &&
             std::memcmp(part.data() + (offset - begin), bytes.data(), bytes.size()) == 0;
    };
    return in(first_, 0) || in(last_, last_begin_);
  }
  void look(std::uint64_t offset, std::string_view bytes, const char* what) {
    if (has(offset, bytes)) found_.push_back({offset, what});
  }
  void look_back(std::uint64_t from_end, std::string_view bytes, const char* what) {
    if (from_end <= bytes_) look(bytes_ - from_end, bytes, what);
  }

  std::vector<DiskMark> all() {
    for (const Mark& mark : kFirst) look(mark.offset, mark.bytes, mark.what);
    for (const Mark& mark : kLast) look_back(mark.offset, mark.bytes, mark.what);
    raid_at_the_end();
    zfs();
    boot_sector();
    std::stable_sort(found_.begin(), found_.end(),
                     [](const DiskMark& a, const DiskMark& b) { return a.offset < b.offset; });
    const auto same = std::unique(found_.begin(), found_.end());
    found_.erase(same, found_.end());
    return std::move(found_);
  }

 private:
  // Superblocks of versions 0.90 and 1.0.
  void raid_at_the_end() {
    constexpr std::uint64_t kReserved = 64u << 10, kSectors = 16;
    if (bytes_ >= 2 * kReserved) look(bytes_ / kReserved * kReserved - kReserved, kRaid, "a Linux RAID member");
    const std::uint64_t sectors = bytes_ / 512;
    if (sectors >= 2 * kSectors) look(((sectors - kSectors) & ~std::uint64_t{7}) * 512, kRaid, "a Linux RAID member");
  }
  // Four labels of 256 KiB, two at either end, of which the second half is an array of uberblocks.
  void zfs() {
    constexpr std::uint64_t kLabel = 256u << 10, kStep = 1u << 10;
    const std::uint64_t end = bytes_ / kLabel * kLabel;
    for (const std::uint64_t label : {std::uint64_t{0}, kLabel, end - 2 * kLabel, end - kLabel}) {
      if (end < 4 * kLabel) break;
      for (std::uint64_t at = label + kLabel / 2; at < label + kLabel; at += kStep) {
        if (!has(at, kZfsUberblock) && !has(at, kZfsUberblockBig)) continue;
        found_.push_back({at, "a ZFS label"});
        break;
      }
    }
  }
  // The same two bytes end a boot sector of a file system and a partition table.
  void boot_sector() {
    constexpr std::uint64_t kTable = 446, kEntry = 16, kType = 4, kSize = 12;
    if (first_.size() < 512 || !has(510, "\x55\xAA"sv)) return;
    const bool named = std::any_of(found_.begin(), found_.end(), [](const DiskMark& m) { return m.offset < 510; });
    std::string types;
    for (std::uint64_t at = kTable; at < kTable + 4 * kEntry; at += kEntry) {
      const auto status = std::to_integer<unsigned>(first_[at]), type = std::to_integer<unsigned>(first_[at + kType]);
      std::uint32_t sectors = 0;
      std::memcpy(&sectors, first_.data() + at + kSize, sizeof sectors);
      if ((status & 0x7f) != 0 || type == 0 || sectors == 0) continue;
      constexpr char kDigits[] = "0123456789abcdef";
      types += (types.empty() ? "" : ", ") + std::string{kDigits[type >> 4], kDigits[type & 15]} + "h";
    }
    if (!types.empty()) {
      found_.push_back({510, "an MBR partition table (partitions of type " + types + ")"});
    } else if (!named) {
      found_.push_back({510, "an MBR partition table or boot sector"});
    }
  }

  const std::span<const std::byte> first_, last_;
  const std::uint64_t last_begin_, bytes_;
  std::vector<DiskMark> found_;
};

}  // namespace

std::vector<DiskMark> disk_marks(std::span<const std::byte> first, std::span<const std::byte> last,
                                 std::uint64_t bytes) {
  return Search(first, last, bytes).all();
}

std::string describe(const std::vector<DiskMark>& marks) {
  std::string text;
  for (const DiskMark& mark : marks) {
    text += (text.empty() ? "" : ", ") + mark.what + " at byte " + std::to_string(mark.offset);
  }
  return text;
}

Result<std::vector<DiskMark>> what_is_on(RawNamespace& device) {
  const std::uint64_t block = device.block_bytes();
  const std::uint64_t bytes = std::min(kDiskMarkBytes, device.bytes()) / block * block;
  AlignedBuffer first(bytes), last(bytes);
  for (const auto& [offset, buffer] : {std::pair{std::uint64_t{0}, &first}, {device.bytes() - bytes, &last}}) {
    const iovec range{buffer->data(), buffer->size()};
    NamespaceRequest request{.op = NamespaceRequest::Op::kRead, .offset = offset, .memory = {&range, 1}, .error = 0};
    device.run({&request, 1}, nullptr);
    if (request.error != 0) {
      return errno_error(request.error, device.name() + ": reading at byte " + std::to_string(offset));
    }
  }
  return disk_marks({first.data(), bytes}, {last.data(), bytes}, device.bytes());
}

}  // namespace tardis::nvme
