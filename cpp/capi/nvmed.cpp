// SPDX-License-Identifier: Apache-2.0
// The C ABI over a broker of a controller.
#include "tardis/nvmed.h"

#include <grp.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "capi/guarded.h"
#include "nvme/broker/vfio_broker.h"

struct tardis_nvmed {
  std::unique_ptr<tardis::nvme::broker::VfioBroker> broker;
};

namespace {

using namespace tardis;
using capi::guarded;
using nvme::broker::VfioBroker;
using nvme::broker::VfioBrokerOptions;

static_assert(sizeof(tardis_nvmed_options) == 32);

}  // namespace

uint64_t tardis_nvmed_options_bytes(void) { return sizeof(tardis_nvmed_options); }

void tardis_nvmed_default_options(tardis_nvmed_options* options) {
  const VfioBrokerOptions defaults;
  const auto& limits = defaults.broker.limits;
  *options = {limits.bytes,  TARDIS_NVMED_NO_GROUP, defaults.broker.clients, defaults.client_queues,
              limits.queues, limits.ranges,         limits.regions};
}

tardis_code tardis_nvmed_open(const char* pci_address, const char* socket_path, const tardis_nvmed_options* options,
                              tardis_nvmed_log log, void* context, tardis_nvmed** nvmed, char** report, char** error) {
  return guarded(error, [&]() -> Status {
    VfioBrokerOptions made;
    made.broker.socket_path = socket_path;
    if (options->group != static_cast<uint32_t>(TARDIS_NVMED_NO_GROUP)) made.broker.group = options->group;
    made.broker.clients = options->clients;
    made.broker.limits = {options->client_queues, options->client_ranges, options->client_regions,
                          options->client_bytes};
    made.client_queues = options->queues;
    if (log != nullptr) made.broker.log = [log, context](const std::string& line) { log(context, line.c_str()); };
    auto broker = VfioBroker::open(pci_address, made);
    if (!broker) return broker.error();
    auto handle = std::make_unique<tardis_nvmed>();
    handle->broker = std::move(*broker);
    *report = capi::copy_text(handle->broker->controller().report());
    *nvmed = handle.release();
    return {};
  });
}

tardis_code tardis_nvmed_drop_privileges(uint32_t user, uint32_t group, uint32_t more, char** error) {
  return guarded(error, [&]() -> Status {
    const gid_t groups[] = {group, more};
    const std::size_t count = more == static_cast<uint32_t>(TARDIS_NVMED_NO_GROUP) || more == group ? 1 : 2;
    // In this order: who is no longer root can change no groups. glibc does each for all threads.
    if (::setgroups(count, groups) != 0) return errno_error(errno, "setgroups");
    if (::setresgid(group, group, group) != 0) return errno_error(errno, "setresgid to " + std::to_string(group));
    if (::setresuid(user, user, user) != 0) return errno_error(errno, "setresuid to " + std::to_string(user));
    if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return errno_error(errno, "PR_SET_NO_NEW_PRIVS");
    if (user != 0 && ::setuid(0) == 0) {
      return Error{Code::kPermission, "dropping privileges: expected that root cannot be had again, found that it can"};
    }
    return {};
  });
}

tardis_code tardis_nvmed_run(tardis_nvmed* nvmed, char** error) {
  return guarded(error, [&] { return nvmed->broker->broker().run(); });
}

void tardis_nvmed_stop(tardis_nvmed* nvmed) { nvmed->broker->broker().stop(); }

void tardis_nvmed_close(tardis_nvmed* nvmed) { std::unique_ptr<tardis_nvmed>(nvmed).reset(); }
