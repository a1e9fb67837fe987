// SPDX-License-Identifier: Apache-2.0
#include <sys/stat.h>

#include <array>
#include <map>

#include "base/json.h"
#include "store/closed_store.h"
#include "store/folder.h"
#include "store/list.h"
#include "store/tools.h"

namespace tardis {
namespace {

struct Usage {
  std::uint64_t objects = 0;
  std::uint64_t bytes = 0;
};

struct Totals {
  std::uint64_t segments = 0, unreadable = 0, dirty = 0, allocated = 0, slots = 0, free = 0, quarantined = 0, bad = 0;
  Usage objects;
  std::map<std::string, Usage> by_namespace;
  std::map<std::uint64_t, std::uint64_t> segments_by_slot_bytes;
};

std::uint64_t allocated(const std::string& file, ClosedStore* closed) {
  if (closed != nullptr && closed->device().room()) {
    StripedDevice& device = closed->device();
    const auto id = device.open_file(file, /*create=*/false, /*writable=*/false);
    if (!id) return 0;
    const auto bytes = device.file_bytes(*id);
    device.close_file(*id);
    return bytes ? *bytes : 0;
  }
  struct stat status {};
  return ::stat(file.c_str(), &status) == 0 ? static_cast<std::uint64_t>(status.st_blocks) * 512 : 0;
}

void inspect_segment(const Result<HeaderTable>& table, const StoreFolder& folder, Totals& totals) {
  if (!table) {
    ++totals.unreadable;
    return;
  }
  const SegmentSuperblock& s = table->superblock;
  ++totals.segments;
  totals.dirty += (s.flags & kSegmentDirty) != 0;
  ++totals.segments_by_slot_bytes[s.slot_bytes];
  totals.slots += s.slots;
  const SegmentFacts facts = table->facts(folder.superblock());
  for (std::uint32_t slot = 0; slot < s.slots; ++slot) {
    const SlotHeader& header = table->headers[slot];
    switch (judge(header, slot, facts)) {
      case Belief::kFree:
        ++totals.free;
        break;
      case Belief::kQuarantined:
        ++totals.quarantined;
        break;
      case Belief::kBad:
        ++totals.bad;
        break;
      case Belief::kObject: {
        Usage& own = totals.by_namespace[hex(header.fingerprint.data(), header.fingerprint.size())];
        ++own.objects;
        own.bytes += header.payload_bytes;
        ++totals.objects.objects;
        totals.objects.bytes += header.payload_bytes;
        break;
      }
    }
  }
}

}  // namespace

Result<std::string> inspect_store(const std::string& path, const DeviceFactory& make_device) {
  auto closed = make_device ? ClosedStore::open(path, make_device) : std::unique_ptr<ClosedStore>();
  if (!closed) return closed.error();
  StoreFolder folder(path);
  if (!folder.has_superblock()) return Error{Code::kNotFound, path + ": no tardis store here"};
  if (Status status = folder.read_superblock(); !status) return status.error();
  if (Status status = folder.paths().load(folder.superblock().uuid); !status) return status.error();
  if (*closed == nullptr) {
    if (Status status = folder.check_device(nullptr); !status) return status.error();
  }
  auto files = folder.segment_files();
  if (!files) return files.error();
  auto namespaces = folder.namespaces();
  if (!namespaces && namespaces.error().code != Code::kNotFound) return namespaces.error();
  const std::map<std::string, std::string> described = namespaces ? *namespaces : std::map<std::string, std::string>();
  const StoreSuperblock& s = folder.superblock();
  Totals totals;
  std::array<std::uint64_t, kMaxPaths> on_path{};
  for (const auto& [name, file] : *files) {
    inspect_segment(*closed ? (*closed)->header_table(name) : read_header_table(name, folder), folder, totals);
    totals.allocated += allocated(file, closed->get());
    ++on_path[name.path];
  }
  for (std::uint32_t i = 0; i < kMaxPaths; ++i) {
    if (!folder.paths()[i].present) continue;
    auto stripes = folder.stripe_files(i);
    if (!stripes) return stripes.error();
    for (const auto& [name, file] : *stripes) totals.allocated += allocated(file, closed->get());
    on_path[i] += stripes->size();
  }

  JsonWriter json;
  json.begin_object();
  json.field("path", path);
  json.field("format_version", s.format_version);
  json.field("uuid", hex(s.uuid.data(), s.uuid.size()));
  json.field("created_unix_seconds", s.created_unix_seconds);
  json.field("owner", folder.owner());
  json.field("capacity_bytes", s.capacity_bytes);
  json.field("segment_bytes", s.segment_bytes);
  json.field("block_bytes", s.block_bytes);
  json.field("allocated_bytes", totals.allocated);
  json.field("segments", totals.segments);
  json.field("segments_unreadable", totals.unreadable);
  json.field("segments_dirty", totals.dirty);
  json.field("slots", totals.slots);
  json.field("slots_free", totals.free);
  json.field("slots_quarantined", totals.quarantined);
  json.field("slots_bad", totals.bad);
  json.field("objects", totals.objects.objects);
  json.field("payload_bytes", totals.objects.bytes);
  json.begin_array("paths");
  for (std::size_t i = 0; i < kMaxPaths; ++i) {
    const StorePath& own = folder.paths()[i];
    if (own.flags == 0) continue;
    json.begin_object();
    json.field("path", own.folder);
    json.field("state", std::string(own.present ? "present" : "missing"));
    json.field("segments", on_path[i]);
    json.end_object();
  }
  json.end_array();
  json.begin_array("slot_classes");
  for (const auto& [bytes, count] : totals.segments_by_slot_bytes) {
    json.begin_object();
    json.field("slot_bytes", bytes);
    json.field("segments", count);
    json.end_object();
  }
  json.end_array();
  for (const auto& [fingerprint, text] : described) totals.by_namespace[fingerprint];
  json.begin_array("namespaces");
  for (const auto& [fingerprint, usage] : totals.by_namespace) {
    json.begin_object();
    json.field("fingerprint", fingerprint);
    json.field("objects", usage.objects);
    json.field("payload_bytes", usage.bytes);
    const auto text = described.find(fingerprint);
    json.field("description", text == described.end() ? std::string() : text->second);
    json.end_object();
  }
  json.end_array();
  json.end_object();
  return json.text();
}

}  // namespace tardis
