// SPDX-License-Identifier: Apache-2.0
// What the header tables of a store say, read without any lock: the store may be in use, and then what is told is a
// moment that has passed. An object that was evicted is still told of until its slot is used again.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "block/stripe_map.h"
#include "store/folder.h"
#include "store/format.h"
#include "store/scan.h"

namespace tardis {

struct ObjectInfo {
  Hash256 key;
  Fingerprint fingerprint;
  std::uint64_t parent, generation, payload_bytes, root_digest, flush_group;
  std::uint32_t parts;    // each of payload_bytes / parts
  std::uint32_t segment;  // SegmentName::word()
  std::uint32_t slot;
  bool quarantined;
};

// A store's superblock and segment files, on every path that is there.
struct StoreFiles {
  StoreFolder folder;
  std::map<SegmentName, std::string> segments;
  std::vector<std::string> missing;  // paths, and why
};
Result<StoreFiles> store_files(const std::string& folder);

// One segment's superblock and headers, from one moment: neither was changed between reading the one and the other.
struct HeaderTable {
  std::string path;
  std::vector<std::string> files;  // with stripes: where the payload is, this path first
  SegmentName name;
  SegmentSuperblock superblock;
  std::uint64_t file_bytes;  // segment_bytes, or where its files end too early
  std::vector<SlotHeader> headers;

  // Of a striped segment.
  StripeMap stripe_map() const {
    return {superblock.payload_offset, superblock.stripe_unit, static_cast<std::uint32_t>(files.size())};
  }
  SegmentFacts facts(const StoreSuperblock& store) const {
    return {name.number, superblock.epoch, SegmentGeometry::of(superblock), file_bytes, store.block_bytes};
  }
};
// Code::kNotFound: the segment was deleted meanwhile. Code::kCorrupt: it cannot be understood.
Result<HeaderTable> read_header_table(SegmentName name, const StoreFolder& folder);
// The header as it is now; Code::kCorrupt if it fails its checks, also when it is being written at each of several
// tries.
Result<SlotHeader> read_header(const HeaderTable& table, std::uint32_t slot);

// Calls `visit` for each object, by segment and slot, until it returns false. Segments that cannot be read are left
// out.
Status list_store(const std::string& folder, const std::function<bool(const ObjectInfo&)>& visit);
// The same through a device; the store must be closed.
Status list_closed_store(const std::string& folder, const DeviceFactory& make_device,
                         const std::function<bool(const ObjectInfo&)>& visit);

}  // namespace tardis
