// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/page_frames.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "base/unique_fd.h"

namespace tardis::nvme {
namespace {

// Documentation/admin-guide/mm/pagemap.rst
constexpr std::uint64_t kFrameMask = (std::uint64_t{1} << 55) - 1, kPresent = std::uint64_t{1} << 63;
constexpr std::uint64_t kHuge = std::uint64_t{1} << 17;  // of /proc/kpageflags
constexpr std::size_t kAtOnce = 8192;

// `count` words of a file of one word for each page, from the one of page `first` on.
Status read_words(const UniqueFd& fd, const std::string& path, std::uint64_t first, std::vector<std::uint64_t>& words) {
  const auto wanted = static_cast<ssize_t>(words.size() * sizeof(std::uint64_t));
  const ssize_t got = ::pread(fd.get(), words.data(), static_cast<std::size_t>(wanted),
                              static_cast<off_t>(first * sizeof(std::uint64_t)));
  if (got == wanted) return {};
  return errno_error(got < 0 ? errno : EIO, "reading " + path);
}

}  // namespace

Result<std::uint64_t> physical_address(const void* memory, std::size_t bytes, const std::string& proc) {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  const std::string pagemap = proc + "/self/pagemap", kpageflags = proc + "/kpageflags";
  const UniqueFd map(::open(pagemap.c_str(), O_RDONLY | O_CLOEXEC));
  if (!map) return errno_error(errno, "opening " + pagemap);
  const UniqueFd flags(::open(kpageflags.c_str(), O_RDONLY | O_CLOEXEC));
  if (!flags) return errno_error(errno, "opening " + kpageflags + " (root may)");
  const std::uint64_t first = begin / page, count = (begin + std::max<std::size_t>(bytes, 1) - 1) / page - first + 1;
  std::uint64_t frame = 0;
  std::vector<std::uint64_t> entries, kinds;
  for (std::uint64_t done = 0; done < count; done += entries.size()) {
    entries.resize(std::min<std::uint64_t>(kAtOnce, count - done));
    if (auto read = read_words(map, pagemap, first + done, entries); !read) return read.error();
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if ((entries[i] & kPresent) == 0) {
        return Error{Code::kInternal, "physical address: expected pages that are in memory, found one that is not"};
      }
      const std::uint64_t found = entries[i] & kFrameMask;
      if (found == 0) {
        return Error{Code::kPermission, "physical address: expected " + pagemap +
                                            " to tell it, found it hidden; this needs root (CAP_SYS_ADMIN)"};
      }
      if (done + i == 0) frame = found;
      if (found != frame + done + i) {
        return Error{Code::kInvalidArgument,
                     "physical address: expected " + std::to_string(bytes) +
                         " bytes side by side in the memory of the machine, found a break after " +
                         std::to_string((done + i) * page) +
                         "; without an IOMMU only memory within a huge page can be named to a drive"};
      }
    }
    kinds.resize(entries.size());
    if (auto read = read_words(flags, kpageflags, frame + done, kinds); !read) return read.error();
    if (!std::all_of(kinds.begin(), kinds.end(), [](std::uint64_t kind) { return (kind & kHuge) != 0; })) {
      return Error{Code::kInvalidArgument,
                   "physical address: expected huge pages, found others, which the kernel may move while a drive "
                   "writes to them; without an IOMMU only memory of MAP_HUGETLB can be named to a drive"};
    }
  }
  return frame * page + begin % page;
}

}  // namespace tardis::nvme
