// SPDX-License-Identifier: Apache-2.0
#include "block/filesystem.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <fstream>

namespace tardis {
namespace {

struct Magic {
  std::uint32_t number;
  const char* name;
};

constexpr std::uint32_t kTmpfs = 0x01021994;
constexpr std::uint32_t kRamfs = 0x858458F6;

// linux/magic.h; written out because that header lacks some of them.
constexpr Magic kMagics[] = {
    {0x0000EF53, "ext4"},  // ext2 and ext3 share the number
    {0x58465342, "xfs"},     {0x9123683E, "btrfs"},    {kTmpfs, "tmpfs"},        {kRamfs, "ramfs"},
    {0x794C7630, "overlay"}, {0xF2F52010, "f2fs"},     {0x2FC12FC1, "zfs"},      {0x00006969, "nfs"},
    {0x65735546, "fuse"},    {0xFF534D42, "cifs"},     {0xFE534D42, "smb2"},     {0x00C36400, "ceph"},
    {0x0BD00BD0, "lustre"},  {0x47504653, "gpfs"},     {0x01021997, "9p"},       {0xCA451A4E, "bcachefs"},
    {0x5346544E, "ntfs"},    {0x73717368, "squashfs"}, {0x61756673, "aufs"},     {0x01161970, "gfs2"},
    {0x7461636F, "ocfs2"},   {0x19830326, "beegfs"},   {0x6A656A63, "virtiofs"},
};

std::string name_of(std::uint32_t magic) {
  for (const Magic& known : kMagics) {
    if (known.number == magic) return known.name;
  }
  char text[16];
  std::snprintf(text, sizeof text, "0x%x", magic);
  return text;
}

std::optional<std::uint32_t> logical_block_of(dev_t device) {
  const std::string base = "/sys/dev/block/" + std::to_string(major(device)) + ":" + std::to_string(minor(device));
  // A partition has no queue of its own; its disk is the folder above.
  for (const char* queue : {"/queue/logical_block_size", "/../queue/logical_block_size"}) {
    std::uint32_t bytes = 0;
    if (std::ifstream(base + queue) >> bytes && bytes > 0) return bytes;
  }
  return std::nullopt;
}

// The start of the kernel's struct statx (stable ABI), up to the fields of Linux 6.1: the libc of a build machine may
// not have them.
struct KernelStatx {
  std::uint32_t mask;
  std::uint32_t before[37];
  std::uint32_t dio_mem_align;
  std::uint32_t dio_offset_align;
  std::uint32_t after[24];
};
static_assert(offsetof(KernelStatx, dio_mem_align) == 0x98 && sizeof(KernelStatx) == 256);

constexpr unsigned kStatxDioAlign = 0x2000;

}  // namespace

Result<FilesystemFacts> filesystem_facts(const std::string& folder) {
  struct stat status;
  if (::stat(folder.c_str(), &status) != 0) return errno_error(errno, "data folder " + folder);
  if (!S_ISDIR(status.st_mode)) {
    return Error{Code::kInvalidArgument, "data folder " + folder + ": expected a folder, found a file"};
  }
  struct statfs found;
  int result;
  do {
    result = ::statfs(folder.c_str(), &found);
  } while (result != 0 && errno == EINTR);
  if (result != 0) return errno_error(errno, "statfs " + folder);

  FilesystemFacts facts;
  const auto magic = static_cast<std::uint32_t>(found.f_type);
  facts.name = name_of(magic);
  facts.in_memory = magic == kTmpfs || magic == kRamfs;
  if (const auto block = logical_block_of(status.st_dev)) {
    facts.logical_block = *block;
    facts.logical_block_known = true;
  }
  return facts;
}

std::optional<DirectAlignment> direct_alignment(int fd) {
  KernelStatx found{};
  if (::syscall(SYS_statx, fd, "", AT_EMPTY_PATH, kStatxDioAlign, &found) != 0) return std::nullopt;
  if ((found.mask & kStatxDioAlign) == 0) return std::nullopt;
  return DirectAlignment{found.dio_offset_align, found.dio_mem_align};
}

}  // namespace tardis
