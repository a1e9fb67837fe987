// SPDX-License-Identifier: Apache-2.0
// The C ABI over the C++ core: converts arguments, turns every exception into a code.
#include "tardis/tardis.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>

#include "base/json.h"
#include "block/path_report_json.h"
#include "capi/guarded.h"
#include "capi/store_handle.h"
#include "store/digest.h"
#include "store/list.h"
#include "store/live_verify.h"
#include "store/store.h"
#include "store/tools.h"

namespace {

using namespace tardis;
using capi::copy_text;
using capi::guarded;

static_assert(sizeof(Hash256) == TARDIS_HASH_BYTES && sizeof(Fingerprint) == TARDIS_FINGERPRINT_BYTES);
static_assert(static_cast<int>(Code::kInternal) == TARDIS_INTERNAL);

Result<StoreOptions> store_options(const tardis_options& o) {
  if (o.abi_version != TARDIS_ABI_VERSION) {
    return Error{Code::kInvalidArgument, "tardis_options.abi_version: expected " + std::to_string(TARDIS_ABI_VERSION) +
                                             ", found " + std::to_string(o.abi_version)};
  }
  if (o.engine > TARDIS_ENGINE_SYNC || o.direct > TARDIS_DIRECT_OFF) {
    return Error{Code::kInvalidArgument, "engine / direct_io: unknown value"};
  }
  if (o.placement > TARDIS_PLACEMENT_LAYERS) return Error{Code::kInvalidArgument, "placement: unknown value"};
  StoreOptions options;
  options.placement = static_cast<Placement>(o.placement);
  options.device.engine = static_cast<BlockDeviceOptions::Engine>(o.engine);
  options.device.direct = static_cast<BlockDeviceOptions::Direct>(o.direct);
  options.device.queue_depth = o.queue_depth;
  options.device.workers = o.io_workers;
  options.device.bounce_buffers = o.bounce_buffers;
  options.capacity_bytes = o.capacity_bytes;
  options.segment_bytes = o.segment_bytes;
  options.object_bytes_hint = o.object_bytes_hint;
  options.free_space_floor = o.free_space_floor;
  options.flush_bytes = o.flush_bytes;
  options.flush_milliseconds = o.flush_milliseconds;
  options.verify_reads = o.verify_reads != 0;
  options.checkpoint_seconds = o.checkpoint_seconds;
  if (o.shared_memory != nullptr) options.live_folder = o.shared_memory;
  if (o.more_paths != nullptr) options.more_paths.emplace(o.more_paths, o.more_paths + o.more_paths_count);
  return options;
}

ObjectGeometry object_geometry(const tardis_object_layout& layout) {
  return ObjectGeometry::of(layout.parts, layout.regions, layout.region_bytes, 512);
}

Fingerprint as_fingerprint(const uint8_t* bytes) {
  Fingerprint fingerprint;
  std::copy_n(bytes, fingerprint.size(), fingerprint.begin());
  return fingerprint;
}

std::optional<Fingerprint> maybe_fingerprint(const uint8_t* bytes) {
  if (bytes == nullptr) return std::nullopt;
  return as_fingerprint(bytes);
}

std::function<bool(std::uint64_t, std::uint64_t)> step(tardis_progress progress, void* context) {
  return [=](std::uint64_t done, std::uint64_t total) {
    return progress == nullptr || progress(context, done, total) == 0;
  };
}

Status answer(Result<VerifyResult> result, tardis_verify_report* report, char** problems) {
  *report = {};
  *problems = nullptr;
  if (!result) return result.error();
  *report = result->report;
  JsonWriter json;
  json.begin_array();
  for (const std::string& line : result->problems) json.value(line);
  json.end_array();
  *problems = copy_text(json.text());
  return {};
}

const Hash256* as_hashes(const uint8_t* bytes) { return reinterpret_cast<const Hash256*>(bytes); }

std::string report_json(const PathReport& report) {
  JsonWriter json;
  json.begin_object();
  write_fields(json, report);
  json.end_object();
  return json.text();
}

}  // namespace

extern "C" {

const char* tardis_version(void) { return TARDIS_VERSION; }

void tardis_free(void* memory) { std::free(memory); }

void tardis_default_options(tardis_options* o) {
  const StoreOptions defaults;
  *o = {};
  o->abi_version = TARDIS_ABI_VERSION;
  o->engine = TARDIS_ENGINE_AUTO;
  o->direct = TARDIS_DIRECT_AUTO;
  o->placement = TARDIS_PLACEMENT_OBJECTS;
  o->queue_depth = defaults.device.queue_depth;
  o->io_workers = defaults.device.workers;
  o->bounce_buffers = defaults.device.bounce_buffers;
  o->free_space_floor = defaults.free_space_floor;
  o->flush_bytes = defaults.flush_bytes;
  o->flush_milliseconds = defaults.flush_milliseconds;
  o->verify_reads = defaults.verify_reads ? 1 : 0;
  o->checkpoint_seconds = defaults.checkpoint_seconds;
}

tardis_code tardis_open(const char* folder, const tardis_options* o, int create, tardis_store** out, char** error) {
  return guarded(error, [&]() -> Status {
    *out = nullptr;
    auto options = store_options(*o);
    if (!options) return options.error();
    auto store = Store::open(folder, *options, create != 0);
    if (!store) return store.error();
    auto handle = std::make_unique<tardis_store>();
    handle->store = std::move(*store);
    *out = handle.release();
    return {};
  });
}

tardis_code tardis_close(tardis_store* store, char** error) {
  return guarded(error, [&] { return store->store->close(); });
}

void tardis_destroy(tardis_store* store) { std::unique_ptr<tardis_store>(store).reset(); }

tardis_code tardis_namespace_open(tardis_store* store, const uint8_t fingerprint[TARDIS_FINGERPRINT_BYTES],
                                  const char* description, const tardis_object_layout* layout, uint32_t* handle,
                                  char** error) {
  return guarded(error, [&]() -> Status {
    const std::uint32_t regions = std::min<std::uint32_t>(layout->regions, kMaxRegions + 1);
    std::vector<std::uint64_t> bytes(regions);
    std::copy_n(layout->region_bytes, std::min<std::uint32_t>(regions, kMaxRegions), bytes.begin());
    auto space = store->store->open_namespace(as_fingerprint(fingerprint), description, layout->parts, bytes);
    if (!space) return space.error();
    *handle = *space;
    return {};
  });
}

tardis_code tardis_lookup(tardis_store* store, uint32_t handle, const uint8_t* hashes, size_t n, size_t* run) {
  return guarded(nullptr, [&]() -> Status {
    *run = 0;
    auto found = store->store->lookup(handle, as_hashes(hashes), n);
    if (!found) return found.error();
    *run = *found;
    return {};
  });
}

tardis_code tardis_set(tardis_store* store, uint32_t handle, const uint8_t* hashes, const uint8_t* parent_of_first,
                       const uint64_t* pieces, size_t n, uint8_t* ok, char** error) {
  return guarded(
      error, [&] { return store->store->set(handle, as_hashes(hashes), as_hashes(parent_of_first), pieces, n, ok); });
}

tardis_code tardis_get(tardis_store* store, uint32_t handle, const uint8_t* hashes, const uint64_t* pieces, size_t n,
                       uint8_t* ok, char** error) {
  return guarded(error, [&] { return store->store->get(handle, as_hashes(hashes), pieces, n, ok); });
}

tardis_code tardis_register_memory(tardis_store* store, void* base, uint64_t bytes, char** error) {
  return guarded(error, [&] { return store->store->register_memory(base, bytes); });
}

tardis_code tardis_unregister_memory(tardis_store* store, void* base) {
  return guarded(nullptr, [&]() -> Status {
    store->store->unregister_memory(base);
    return {};
  });
}

tardis_code tardis_flush(tardis_store* store, char** error) {
  return guarded(error, [&] { return store->store->flush(); });
}

tardis_code tardis_clear(tardis_store* store, const uint8_t* fingerprint, uint64_t* pages, char** error) {
  return guarded(error, [&]() -> Status {
    *pages = 0;
    auto cleared = store->store->clear(maybe_fingerprint(fingerprint));
    if (!cleared) return cleared.error();
    *pages = *cleared;
    return {};
  });
}

tardis_code tardis_remove(tardis_store* store, const uint8_t* fingerprint, const uint8_t* key, uint32_t key_nibbles,
                          uint64_t* pages, char** error) {
  return guarded(error, [&]() -> Status {
    *pages = 0;
    if (key_nibbles > 2 * TARDIS_HASH_BYTES) {
      return Error{Code::kInvalidArgument,
                   "key prefix: expected at most 64 hexadecimal digits, found " + std::to_string(key_nibbles)};
    }
    Store::Selection selection{maybe_fingerprint(fingerprint), {}, key_nibbles};
    std::copy_n(key, (key_nibbles + 1) / 2, selection.key.begin());
    auto removed = store->store->remove(selection);
    if (!removed) return removed.error();
    *pages = *removed;
    return {};
  });
}

tardis_code tardis_prune(tardis_store* store, const uint8_t* fingerprint, uint64_t target_bytes, uint64_t* pages,
                         char** error) {
  return guarded(error, [&]() -> Status {
    *pages = 0;
    auto pruned = store->store->prune(target_bytes, maybe_fingerprint(fingerprint));
    if (!pruned) return pruned.error();
    *pages = *pruned;
    return {};
  });
}

tardis_code tardis_repair_headers(tardis_store* store, uint64_t* slots, char** error) {
  return guarded(error, [&]() -> Status {
    *slots = 0;
    auto repaired = store->store->repair_headers();
    if (!repaired) return repaired.error();
    *slots = *repaired;
    return {};
  });
}

tardis_code tardis_get_stats(tardis_store* store, tardis_stats* stats) {
  return guarded(nullptr, [&]() -> Status {
    store->store->stats(*stats);
    return {};
  });
}

tardis_code tardis_path_report(tardis_store* store, char** json) {
  return guarded(nullptr, [&]() -> Status {
    *json = copy_text(store->store->path_report_json());
    return {};
  });
}

tardis_code tardis_probe(const char* folder, const tardis_options* o, char** json, char** error) {
  return guarded(error, [&]() -> Status {
    *json = nullptr;
    auto options = store_options(*o);
    if (!options) return options.error();
    auto report = probe_path(folder, options->device, /*read_only=*/false);
    if (!report) return report.error();
    *json = copy_text(report_json(*report));
    return {};
  });
}

tardis_code tardis_inspect(const char* folder, char** json, char** error) {
  return guarded(error, [&]() -> Status {
    *json = nullptr;
    auto text = inspect_store(folder);
    if (!text) return text.error();
    *json = copy_text(*text);
    return {};
  });
}

tardis_code tardis_list(const char* folder, int (*visit)(void* context, const tardis_object_info* object),
                        void* context, char** error) {
  return guarded(error, [&]() -> Status {
    return list_store(folder, [&](const ObjectInfo& o) {
      tardis_object_info object{};
      std::copy(o.key.begin(), o.key.end(), object.key);
      std::copy(o.fingerprint.begin(), o.fingerprint.end(), object.fingerprint);
      object.parent = o.parent;
      object.generation = o.generation;
      object.payload_bytes = o.payload_bytes;
      object.root_digest = o.root_digest;
      object.flush_group = o.flush_group;
      object.parts = o.parts;
      object.segment = o.segment;
      object.slot = o.slot;
      object.quarantined = o.quarantined;
      return visit(context, &object) == 0;
    });
  });
}

tardis_code tardis_verify(const char* folder, int repair, tardis_progress progress, void* context,
                          tardis_verify_report* report, char** problems, char** error) {
  return guarded(error, [&]() -> Status {
    return answer(verify_store(folder, repair != 0, step(progress, context)), report, problems);
  });
}

tardis_code tardis_verify_live(const char* folder, tardis_progress progress, void* context,
                               tardis_verify_report* report, char** problems, char** error) {
  return guarded(
      error, [&]() -> Status { return answer(verify_live_store(folder, step(progress, context)), report, problems); });
}

tardis_code tardis_digest(const tardis_object_layout* layout, const uint64_t* pieces, uint64_t* chunk_digests,
                          uint64_t* part_digests, uint64_t* root) {
  return guarded(nullptr, [&]() -> Status {
    if (layout->parts == 0 || layout->regions == 0 || layout->regions > kMaxRegions) {
      return Error{Code::kInvalidArgument, "object layout"};
    }
    const ObjectGeometry g = object_geometry(*layout);
    std::vector<std::uint64_t> own(g.chunks());
    for (std::uint32_t part = 0; part < g.parts; ++part) {
      digest_chunks(g, pieces + std::size_t{part} * g.regions, 0, g.chunks_per_part,
                    own.data() + std::size_t{part} * g.chunks_per_part);
    }
    *root = digest_root(g, own.data(), part_digests);
    if (chunk_digests != nullptr) std::copy(own.begin(), own.end(), chunk_digests);
    return {};
  });
}

}  // extern "C"
