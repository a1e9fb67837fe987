// SPDX-License-Identifier: Apache-2.0
// The C ABI over NVMe drives: what is known of them without opening them, and how they are released.
#include "tardis/nvme.h"

#include "base/json.h"
#include "capi/guarded.h"
#include "capi/nvme_machine.h"
#include "nvme/gpu_memory_probe.h"
#include "nvme/vfio/drive_facts.h"
#include "nvme/vfio/drive_release.h"

namespace {

using namespace tardis;
using namespace tardis::nvme;
using capi::guarded;
using capi::paths_of;

}  // namespace

tardis_code tardis_nvme_list(const tardis_nvme_machine* machine, char** json, char** error) {
  return guarded(error, [&]() -> Status {
    const SystemPaths paths = paths_of(machine);
    auto found = PciDevice::list_nvme(paths);
    if (!found) return found.error();
    JsonWriter out;
    out.begin_object();
    out.begin_array("drives");
    for (const PciDevice& pci : *found) write_drive(out, DriveFacts::read(pci, paths));
    out.end_array();
    out.end_object();
    return capi::give(out.text(), json);
  });
}

tardis_code tardis_nvme_release(const tardis_nvme_machine* machine, const char* address, const char* to, int carry_out,
                                char** json, char** error) {
  return guarded(error, [&]() -> Status {
    if (address == nullptr || to == nullptr) return capi::missing("tardis_nvme_release", "an address and a driver");
    const auto at = PciAddress::parse(address);
    if (!at) return at.error();
    auto release = DriveRelease::plan(*at, to, paths_of(machine));
    if (!release) return release.error();
    JsonWriter out;
    out.begin_object();
    out.field("address", at->text());
    out.field("from", release->device().driver);
    out.field("to", release->to());
    out.field("module_missing", release->needed() && release->module_missing());
    out.begin_array("commands");
    for (const std::string& line : release->commands()) out.value(line);
    out.end_array();
    if (carry_out != 0) {
      if (Status done = release->carry_out(); !done) return done;
    }
    out.field("done", !release->needed());
    out.field("remaining", release->remaining());
    out.end_object();
    return capi::give(out.text(), json);
  });
}

tardis_code tardis_nvme_gpu_memory(const tardis_nvme_machine* machine, char** json, char** error) {
  return guarded(error, [&]() -> Status {
    JsonWriter out;
    out.begin_object();
    out.begin_array("probes");
    for (const GpuMemoryProbe& probe : probe_gpu_memory(paths_of(machine))) {
      out.begin_object();
      out.field("way", probe.way);
      out.field("here", probe.here);
      out.field("found", probe.found);
      out.end_object();
    }
    out.end_array();
    out.end_object();
    return capi::give(out.text(), json);
  });
}
