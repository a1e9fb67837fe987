// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/memlock.h"

#include <linux/capability.h>
#include <sys/resource.h>

#include <cstdlib>
#include <sstream>

#include "nvme/vfio/text_file.h"

namespace tardis::nvme {
namespace {

std::string kib(std::uint64_t bytes) { return std::to_string(bytes >> 10) + " KiB"; }

}  // namespace

Memlock Memlock::read(const std::string& proc) {
  Memlock found;
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) found.limit = limit.rlim_cur;
  std::istringstream lines(read_text(proc + "/self/status").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    const auto value = [&](const char* name, int base) -> std::uint64_t {
      if (!line.starts_with(name)) return 0;
      return std::strtoull(line.c_str() + std::string(name).size(), nullptr, base);
    };
    // VFIO's own IOMMU interface counts as VmLck, iommufd as VmPin.
    found.locked += (value("VmLck:", 10) + value("VmPin:", 10)) << 10;
    if ((value("CapEff:", 16) >> CAP_IPC_LOCK & 1) != 0) found.exempt = true;
  }
  return found;
}

std::string memlock_text(const Memlock& memlock, std::uint64_t pinned, bool of_user) {
  const std::string used =
      "this process has " + kib(memlock.locked) + " locked (" + kib(pinned) + " of it for this drive)";
  const std::string limit = memlock.limit ? "is " + kib(*memlock.limit) : std::string("is unlimited");
  if (!memlock.limit || memlock.exempt) {
    return "expected memory for it, found the machine short of it: the memlock limit (RLIMIT_MEMLOCK) " + limit +
           (memlock.exempt ? " and not for this process, which has CAP_IPC_LOCK, unless that is of a user namespace"
                           : "") +
           ", and " + used + "; free memory, or register less";
  }
  return "expected it to fit in the memlock limit (RLIMIT_MEMLOCK), which " + limit + ", and " + used +
         (of_user ? "; what the user's other processes have pinned counts as well" : "") +
         "; raise it (ulimit -l, LimitMEMLOCK= of a systemd unit, /etc/security/limits.conf), register less memory or "
         "ask "
         "for fewer and shorter queues";
}

}  // namespace tardis::nvme
