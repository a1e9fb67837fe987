// SPDX-License-Identifier: Apache-2.0
// The C ABI over gio sessions of a store, and over leases.
#include "tardis/gio_store.h"

#include <memory>
#include <string>
#include <vector>

#include "capi/gio_session.h"
#include "capi/guarded.h"
#include "capi/store_handle.h"
#include "nvme/soft/store_medium.h"

struct tardis_lease {
  tardis::Lease lease;
};

namespace {

using namespace tardis;
using capi::guarded;

Result<gio::SessionOptions> store_session_options(const tardis_gio_options& o) {
  if (o.bytes != 0 || o.file != nullptr) {
    return Error{
        Code::kInvalidArgument,
        "tardis_gio_options: the namespace of a session over a store is the store's; expected bytes 0 and file "
        "NULL"};
  }
  tardis_gio_options given = o;
  given.bytes = 4096;  // of no consequence
  return capi::session_options(given);
}

}  // namespace

size_t tardis_gio_store_memory_bytes(const tardis_gio_options* options) {
  return capi::session_memory_bytes(options, store_session_options);
}

tardis_code tardis_gio_open_store(const tardis_gio_options* options, tardis_store* store, void* memory,
                                  tardis_gio_session** session, char** error) {
  return guarded(error, [&]() -> Status {
    if (options == nullptr || store == nullptr || session == nullptr) {
      return Error{Code::kInvalidArgument,
                   "tardis_gio_open_store: expected options, a store and a place for the session"};
    }
    auto converted = store_session_options(*options);
    if (!converted) return converted.error();
    converted->store = store->store.get();
    return capi::open_session(*converted, memory, session);
  });
}

tardis_code tardis_lease_acquire(tardis_store* store, uint32_t name_space, const uint8_t* hashes, size_t count,
                                 tardis_lease** lease, size_t* n, char** error) {
  return guarded(error, [&]() -> Status {
    *lease = nullptr;
    *n = 0;
    auto acquired = store->store->acquire(name_space, reinterpret_cast<const Hash256*>(hashes), count);
    if (!acquired) return acquired.error();
    auto made = std::make_unique<tardis_lease>();
    made->lease = std::move(*acquired);
    *n = made->lease.size();
    *lease = made.release();
    return {};
  });
}

void tardis_lease_end(tardis_lease* lease) { delete lease; }

tardis_code tardis_lease_layout_of(const tardis_lease* lease, tardis_lease_layout* layout, char** error) {
  return guarded(error, [&]() -> Status {
    const ObjectGeometry& geometry = lease->lease.geometry();
    *layout = {geometry.part_bytes, geometry.part_stride, geometry.parts, geometry.chunks_per_part};
    return {};
  });
}

tardis_code tardis_lease_blocks(const tardis_lease* lease, uint32_t block_bytes, uint64_t* blocks, uint64_t* roots,
                                uint64_t* generations, char** error) {
  return guarded(error, [&]() -> Status {
    if (block_bytes == 0) return Error{Code::kInvalidArgument, "tardis_lease_blocks: expected the bytes of a block"};
    const ObjectGeometry& geometry = lease->lease.geometry();
    if (lease->lease.size() > 0 && geometry.parts > 1 && geometry.part_stride % block_bytes != 0) {
      return Error{Code::kInvalidArgument, "tardis_lease_blocks: layers of this store are " +
                                               std::to_string(geometry.part_stride) +
                                               " bytes apart, which is not whole blocks of " +
                                               std::to_string(block_bytes) + "; open the session with block_bytes 512"};
    }
    for (std::size_t i = 0; i < lease->lease.size(); ++i) {
      const auto ranges = nvme::blocks_of(lease->lease, i, 0, geometry.stored_bytes(), block_bytes);
      if (ranges.size() != 1 || ranges.front().skip != 0) {
        return Error{Code::kInvalidArgument, "tardis_lease_blocks: object " + std::to_string(i) +
                                                 " does not lie in one row of whole blocks; "
                                                 "use a store with placement \"objects\""};
      }
      blocks[i] = ranges.front().first;
      if (roots != nullptr) roots[i] = lease->lease.root_digest(i);
      if (generations != nullptr) generations[i] = lease->lease.generation(i);
    }
    return {};
  });
}

tardis_code tardis_lease_digests(tardis_store* store, uint32_t name_space, const tardis_lease* lease, uint64_t* digests,
                                 uint8_t* proven, char** error) {
  return guarded(error, [&]() -> Status {
    auto geometry = store->store->object_geometry(name_space);
    if (!geometry) return geometry.error();
    if (lease->lease.size() > 0 && (geometry->parts != lease->lease.geometry().parts ||
                                    geometry->chunks_per_part != lease->lease.geometry().chunks_per_part)) {
      return Error{Code::kInvalidArgument,
                   "tardis_lease_digests: expected the namespace that the lease is of, found one whose objects have " +
                       std::to_string(geometry->chunks()) + " digests instead of " +
                       std::to_string(lease->lease.geometry().chunks())};
    }
    std::vector<DigestSource> sources;
    for (std::size_t i = 0; i < lease->lease.size(); ++i) {
      sources.push_back({lease->lease.digest_address(i), lease->lease.root_digest(i)});
    }
    return store->store->read_digests(name_space, sources, digests, proven);
  });
}
