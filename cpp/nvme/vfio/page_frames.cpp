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
constexpr std::size_t kAtOnce = 8192;

}  // namespace

Result<std::uint64_t> physical_address(const void* memory, std::size_t bytes, const std::string& pagemap) {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  const UniqueFd fd(::open(pagemap.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return errno_error(errno, "opening " + pagemap);
  const std::uint64_t first = begin / page, count = (begin + std::max<std::size_t>(bytes, 1) - 1) / page - first + 1;
  std::uint64_t frame = 0;
  std::vector<std::uint64_t> entries;
  for (std::uint64_t done = 0; done < count; done += entries.size()) {
    entries.resize(std::min<std::uint64_t>(kAtOnce, count - done));
    const auto wanted = static_cast<ssize_t>(entries.size() * sizeof(std::uint64_t));
    const ssize_t got = ::pread(fd.get(), entries.data(), static_cast<std::size_t>(wanted),
                                static_cast<off_t>((first + done) * sizeof(std::uint64_t)));
    if (got != wanted) return errno_error(got < 0 ? errno : EIO, "reading " + pagemap);
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
  }
  return frame * page + begin % page;
}

}  // namespace tardis::nvme
