// SPDX-License-Identifier: Apache-2.0
#include "nvme/disk_marks.h"

#include <gtest/gtest.h>

#include <cstring>

#include "nvme_support_memory_namespace.h"

namespace tardis::nvme::testing {
namespace {

constexpr std::uint64_t kBytes = 64u << 20;

struct Case {
  std::uint64_t offset;
  std::string bytes;
  const char* what;
};

std::vector<DiskMark> marks_with(std::uint64_t offset, const std::string& bytes, std::uint64_t size = kBytes) {
  MemoryNamespace device(size);
  device.contents.write(offset, bytes.data(), bytes.size());
  auto marks = what_is_on(device);
  EXPECT_TRUE(marks);
  return marks ? *marks : std::vector<DiskMark>();
}

TEST(NvmeDiskMarks, EachIsFoundWhereItIs) {
  using namespace std::string_literals;
  const Case cases[] = {
      {512, "EFI PART", "a GPT partition table"},
      {4096, "EFI PART", "a GPT partition table"},
      {kBytes - 512, "EFI PART", "the second copy of a GPT partition table"},
      {kBytes - 4096, "EFI PART", "the second copy of a GPT partition table"},
      {3, "NTFS    ", "an NTFS file system"},
      {82, "FAT32   ", "a FAT file system"},
      {1080, "\x53\xEF", "an ext2, ext3 or ext4 file system"},
      {0, "XFSB", "an XFS file system"},
      {0x10040, "_BHRfS_M", "a btrfs file system"},
      {4086, "SWAPSPACE2", "swap space"},
      {65526, "SWAPSPACE2", "swap space"},
      {512, "LABELONE", "an LVM physical volume"},
      {0, "LUKS\xBA\xBE", "a LUKS volume"},
      {4096, "\xFC\x4E\x2B\xA9", "a Linux RAID member"},
      {kBytes - (64u << 10), "\xFC\x4E\x2B\xA9", "a Linux RAID member"},  // 0.90
      {kBytes - 8192, "\xFC\x4E\x2B\xA9", "a Linux RAID member"},         // 1.0
      {(128u << 10) + 7 * 1024, "\x0C\xB1\xBA\0\0\0\0\0"s, "a ZFS label"},
      {kBytes - (128u << 10), "\x0C\xB1\xBA\0\0\0\0\0"s, "a ZFS label"},
      {kBytes - (384u << 10), "\0\0\0\0\0\xBA\xB1\x0C"s, "a ZFS label"},
      {kBytes - 1024, "Intel Raid ISM Cfg Sig. ", "an Intel RAID member"},
      {510, "\x55\xAA", "an MBR partition table or boot sector"},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.what);
    EXPECT_EQ(marks_with(one.offset, one.bytes), (std::vector<DiskMark>{{one.offset, one.what}}));
  }
  EXPECT_TRUE(marks_with(77777, "nothing that is known").empty());
  // RAID of an odd number of sectors: the superblock is at a multiple of 8 of them.
  constexpr std::uint64_t kOdd = kBytes + 4096 + 5 * 512;
  EXPECT_EQ(marks_with((kOdd / 512 - 16) / 8 * 8 * 512, "\xFC\x4E\x2B\xA9", kOdd).size(), 1u);
}

TEST(NvmeDiskMarks, PartitionsAreNamed) {
  std::string sector(512, '\0');
  sector[510] = '\x55', sector[511] = '\xAA';
  sector[446] = '\x80', sector[446 + 4] = '\x83', sector[446 + 12] = 1;
  sector[462 + 4] = '\x82', sector[462 + 12] = 1;
  EXPECT_EQ(describe(marks_with(0, sector)), "an MBR partition table (partitions of type 83h, 82h) at byte 510");
  // The boot sector of a file system is no second thing.
  std::string fat(512, '\0');
  fat[510] = '\x55', fat[511] = '\xAA';
  std::memcpy(fat.data() + 82, "FAT32   ", 8);
  EXPECT_EQ(describe(marks_with(0, fat)), "a FAT file system at byte 82");
}

TEST(NvmeDiskMarks, SeveralAreTold) {
  std::string start(1024, '\0');
  start[510] = '\x55', start[511] = '\xAA';
  start[446 + 4] = '\xee', start[446 + 12] = 1;
  std::memcpy(start.data() + 512, "EFI PART", 8);
  EXPECT_EQ(describe(marks_with(0, start)),
            "an MBR partition table (partitions of type eeh) at byte 510, a GPT partition table at byte 512");
}

TEST(NvmeDiskMarks, SmallNamespacesAndErrors) {
  for (const std::uint64_t bytes : {4096u, 8192u, 1u << 20, 3u << 19}) {
    EXPECT_EQ(marks_with(512, "EFI PART", bytes), (std::vector<DiskMark>{{512, "a GPT partition table"}}));
  }
  MemoryNamespace unreadable(kBytes);
  unreadable.before = [](const NamespaceRequest& r) { return r.offset > 1u << 20 ? EIO : 0; };
  auto failed = what_is_on(unreadable);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().os_error, EIO);
}

}  // namespace
}  // namespace tardis::nvme::testing
