// SPDX-License-Identifier: Apache-2.0
// The C ABI over NVMe drives: calls that open one with VFIO, and give it back.
#include <array>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "capi/guarded.h"
#include "capi/nvme_machine.h"
#include "nvme/disk_marks.h"
#include "nvme/health_log.h"
#include "nvme/identify_json.h"
#include "nvme/nvme_device.h"
#include "nvme/raw_volume.h"
#include "nvme/vfio/doorbell_check.h"
#include "nvme/vfio/vfio_controller.h"
#include "store/folder.h"
#include "tardis/nvme.h"

namespace {

namespace fs = std::filesystem;
using namespace tardis;
using namespace tardis::nvme;
using capi::guarded;

// One queue pair of little memory: a tool should work within small memlock limits.
VfioOptions small(const tardis_nvme_machine* machine) {
  VfioOptions options;
  options.paths = capi::paths_of(machine);
  options.driver.queues = 1;
  options.driver.queue_entries = 64;
  options.driver.bounce_buffers = 8;
  return options;
}

std::vector<std::uint32_t> all_ids(Driver& driver, Status& status) {
  std::array<std::uint32_t, kIdentifyBytes / sizeof(std::uint32_t)> list{};
  status = driver.read_identify(kCnsActiveNamespaces, 0, std::as_writable_bytes(std::span(list)));
  return status ? read_namespace_list(list) : std::vector<std::uint32_t>();
}

Status write_namespaces(JsonWriter& out, Driver& driver) {
  Status status;
  out.begin_array("namespaces");
  for (const std::uint32_t id : all_ids(driver, status)) {
    IdentifyNamespace data;
    status = driver.read_identify(kCnsNamespace, id, std::as_writable_bytes(std::span(&data, 1)));
    if (!status) return status;
    out.begin_object();
    write_namespace(out, id, data, driver.controller());
    out.end_object();
  }
  out.end_array();
  return status;
}

std::optional<Uuid> volume_on(RawNamespace& space) {
  const auto volume = RawVolume::open(space, std::nullopt);
  if (!volume) return std::nullopt;
  return (*volume)->superblock().uuid;
}

}  // namespace

tardis_code tardis_nvme_identify(const tardis_nvme_machine* machine, const char* address, char** json, char** error) {
  return guarded(error, [&]() -> Status {
    if (address == nullptr) return capi::missing("tardis_nvme_identify", "an address");
    VfioOptions options = small(machine);
    options.driver.external_queues = kMaxQueueEntries;  // none is made: the answer says how many there could be
    auto controller = VfioController::open(address, std::move(options));
    if (!controller) return controller.error();
    Driver& driver = *(*controller)->driver();
    IdentifyController data;
    if (Status read = driver.read_identify(kCnsController, 0, std::as_writable_bytes(std::span(&data, 1))); !read) {
      return read;
    }
    const PciDevice& pci = (*controller)->pci();
    const PciCapabilities& found = (*controller)->device().capabilities();
    JsonWriter out;
    out.begin_object();
    out.field("address", pci.address.text());
    out.field("report", (*controller)->report());
    out.field("bar_bytes", pci.bar_bytes[0]);
    out.field("function_reset", found.function_reset);
    out.field("msix_vectors", found.msix_vectors);
    out.field("link_speed_mts", found.link.speed_mts);
    out.field("link_lanes", found.link.lanes);
    out.field("link_most_speed_mts", found.link.most_speed_mts);
    out.field("link_most_lanes", found.link.most_lanes);
    out.field("dma_buf_export", (*controller)->device().exports_dma_buf());
    write_controller(out, data, driver.controller(), driver.capabilities());
    out.field("queue_grant", driver.granted_queues());
    std::optional<bool> enabled;
    if (driver.controller().volatile_cache) {
      const auto answer = driver.volatile_cache_enabled();
      if (answer) enabled = *answer;
    }
    out.field("volatile_cache_enabled", enabled);
    if (Status written = write_namespaces(out, driver); !written) return written;
    out.end_object();
    return capi::give(out.text(), json);
  });
}

tardis_code tardis_nvme_health(const tardis_nvme_machine* machine, const char* address, char** json, char** error) {
  return guarded(error, [&]() -> Status {
    if (address == nullptr) return capi::missing("tardis_nvme_health", "an address");
    auto controller = VfioController::open(address, small(machine));
    if (!controller) return controller.error();
    Driver& driver = *(*controller)->driver();
    HealthLog log;
    if (Status read = driver.read_log(kLogHealth, std::as_writable_bytes(std::span(&log, 1))); !read) return read;
    JsonWriter out;
    out.begin_object();
    out.field("address", (*controller)->pci().address.text());
    out.field("model", driver.controller().model);
    out.field("serial", driver.controller().serial);
    write_health(out, log);
    out.end_object();
    return capi::give(out.text(), json);
  });
}

tardis_code tardis_nvme_format_store(const tardis_nvme_machine* machine, const char* address, uint32_t namespace_id,
                                     const char* home, int erase, char** json, char** error) {
  return guarded(error, [&]() -> Status {
    if (address == nullptr || home == nullptr || *home == 0) {
      return capi::missing("tardis_nvme_format_store", "an address and a folder");
    }
    auto controller = VfioController::open(address, small(machine));
    if (!controller) return controller.error();
    auto opened = (*controller)->open_namespace(namespace_id);
    if (!opened) return opened.error();
    std::shared_ptr<RawNamespace> space = *opened;
    const auto marks = what_is_on(*space);
    if (!marks) return marks.error();
    const auto before = volume_on(*space);
    std::error_code failure;
    if (!fs::exists(home, failure)) {
      // First, so that a refusal leaves no folder behind.
      if (erase == 0) {
        if (Status blank = RawVolume::check_blank(*space); !blank) return blank;
      }
      fs::create_directories(home, failure);
      if (failure) return errno_error(failure.value(), home);
    }
    std::string report;
    {
      auto device = NvmeDevice::open(space, home, {.force = erase != 0});
      if (!device) return device.error();
      report = (*device)->report().reason;
    }
    const auto after = volume_on(*space);
    if (!after) return Error{Code::kIo, space->name() + ": expected the volume that was just made, found none"};
    JsonWriter out;
    out.begin_object();
    out.field("address", (*controller)->pci().address.text());
    out.field("namespace", namespace_id);
    out.field("home", std::string(home));
    out.field("bytes", space->bytes());
    out.field("block_bytes", space->block_bytes());
    out.field("volume", hex(after->data(), after->size()));
    out.field("formatted", !before || *before != *after);
    out.field("found", describe(*marks));
    out.field("report", report);
    out.end_object();
    return capi::give(out.text(), json);
  });
}

tardis_code tardis_nvme_check_doorbells(const tardis_nvme_machine* machine, const char* address,
                                        tardis_nvme_reader reader, char** json, char** error) {
  return guarded(error, [&]() -> Status {
    if (address == nullptr || reader == nullptr) {
      return capi::missing("tardis_nvme_check_doorbells", "an address and a reader");
    }
    auto controller = VfioController::open(address, small(machine));
    if (!controller) return controller.error();
    auto window = (*controller)->device().map_registers();
    if (!window) return window.error();
    const auto verdict = check_doorbells(**window, reader);
    if (!verdict) return verdict.error();
    JsonWriter out;
    out.begin_object();
    out.field("address", (*controller)->pci().address.text());
    out.field("reached", verdict->reached);
    out.field("reader_error", verdict->reader_error);
    out.field("found", verdict->found);
    out.end_object();
    return capi::give(out.text(), json);
  });
}
