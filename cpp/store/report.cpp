// SPDX-License-Identifier: Apache-2.0
// What a store tells of itself: counters, and the path that its data takes.
#include <algorithm>
#include <array>

#include "base/json.h"
#include "block/path_report_json.h"
#include "store/counters.h"
#include "store/store.h"

namespace tardis {

void Store::stats(tardis_stats& out) {
  out = {};
  const Counters& c = *counters_;
#define TARDIS_COPY(field) out.field = c.field.load(std::memory_order_relaxed);
  TARDIS_STATS_SUMS(TARDIS_COPY)
#undef TARDIS_COPY
  const Call call(*this);
  if (!call) return;
  const BlockDeviceCounters io = device_->counters();
  out.io_reads = io.reads;
  out.io_writes = io.writes;
  out.io_read_bytes = io.read_bytes;
  out.io_written_bytes = io.written_bytes;
  out.io_errors = io.errors;
  out.io_peak_in_flight = io.peak_in_flight;
  out.bounced_requests = io.bounced_requests;
  out.bounced_bytes = io.bounced_bytes;
  out.read_batches = io.read_batches;
  out.read_batches_delayed = io.read_batches_delayed;
  out.read_batches_delayed_again = io.read_batches_delayed_again;
  out.max_flushes_per_read_batch = io.max_flushes_per_read_batch;
  out.writes_yielded = io.writes_yielded;
  out.flushes_postponed = io.flushes_postponed;
  out.registered_bytes = io.registered_bytes;
  out.not_registered_bytes = io.not_registered_bytes;
  out.registered_requests = io.registered_requests;
  out.read_depth = io.read_depth;
  out.write_depth = io.write_depth;
  const StoreSuperblock& s = folder_.superblock();
  out.capacity_bytes = s.capacity_bytes;
  std::array<std::uint64_t, kSlotStates> counts{};
  out.paths = folder_.paths().known();
  out.paths_out = out.paths - paths_in_use();
  for_each_segment([&](std::uint32_t id, SegmentState state) {
    out.segments += state == SegmentState::kReady;
    out.segments_unreadable += state == SegmentState::kUnreadable;
    out.allocated_bytes += s.segment_bytes;
    if (state != SegmentState::kReady) return;
    out.slots_total += live(id).slots.load();
    for (std::size_t i = 0; i < kSlotStates; ++i) counts[i] += live(id).counts[i].load();
  });
  const auto count = [&](SlotState state) { return counts[static_cast<std::size_t>(state)]; };
  out.slots_live = count(SlotState::kLive);
  out.slots_free = count(SlotState::kFree);
  out.slots_quarantined = count(SlotState::kQuarantined);
  // The counts are read one after the other while slots change: what is left of the sum is on its way.
  const std::uint64_t known = out.slots_live + out.slots_free + out.slots_quarantined;
  out.slots_writing = out.slots_total - std::min(out.slots_total, known);
  out.payload_bytes = table_.header().payload_bytes.load();
  out.durable_group = durable_group();
  out.index_bytes = table_.buckets() * sizeof(IndexBucket) + out.slots_total * sizeof(SlotRecord);
  for (std::uint32_t place = 0; place < table_.header().processes_end.load(); ++place) {
    out.processes += table_.process(place).owner.load() != 0;
  }
}

void Store::write_paths(JsonWriter& json) {
  const Call call(*this);  // the store may be closed
  std::array<std::uint64_t, kMaxPaths> segments{};
  for_each_segment([&](std::uint32_t id, SegmentState) {
    const std::uint32_t all = live(id).all_paths.load();
    for (std::uint32_t path = 0; path < kMaxPaths; ++path) segments[path] += all >> path & 1;
  });
  json.begin_array("paths");
  for (std::uint32_t path = 0; path < kMaxPaths; ++path) {
    const StorePath& own = folder_.paths()[path];
    if (own.flags == 0) continue;
    const auto free = !has_own_room_ ? folder_.free_bytes(path) : call ? free_bytes(path) : std::uint64_t{0};
    const std::lock_guard lock(problems_mutex_);
    json.begin_object();
    json.field("path", own.folder);
    json.field("state", std::string(path_in_use(path) ? "in use" : "out"));
    json.field("reason", path_in_use(path) ? std::string() : path_problems_[path]);
    json.field("segments", segments[path]);
    json.field("free_bytes", free ? *free : std::uint64_t{0});
    json.end_object();
  }
  json.end_array();
}

std::string Store::path_report_json() {
  JsonWriter json;
  json.begin_object();
  json.field("path", folder_.path());
  write_fields(json, path_report_);
  json.field("capacity_bytes", folder_.superblock().capacity_bytes);
  json.field("segment_bytes", folder_.superblock().segment_bytes);
  json.field("verify_reads", options_.verify_reads);
  write_paths(json);
  json.begin_array("notes");
  for (const std::string& note : notes_) json.value(note);
  json.end_array();
  json.end_object();
  return json.text();
}

}  // namespace tardis
