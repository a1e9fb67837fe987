// SPDX-License-Identifier: Apache-2.0
#include "store/list.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/read_exactly.h"
#include "store/closed_store.h"
#include "store/files.h"
#include "store/stripes.h"

namespace tardis {
namespace {

constexpr int kTries = 5;  // at something that may be in the middle of a write

Result<UniqueFd> open_segment(const std::string& path) {
  auto fd = open_regular_file(path);
  if (!fd && fd.error().os_error == ENOENT) return Error{Code::kNotFound, path + ": gone"};
  return fd;
}

Result<SegmentSuperblock> read_superblock(int fd, const std::string& path, SegmentName name,
                                          const StoreSuperblock& store) {
  SegmentSuperblock s;
  if (Status status = read_exactly(fd, path, 0, &s, sizeof s); !status) return status.error();
  if (!sealed(s) || s.format_version != kFormatVersion || s.store_uuid != store.uuid || s.segment != name.number ||
      s.segment_bytes != store.segment_bytes || std::uint64_t{s.slots} * kHeaderBytes > store.segment_bytes) {
    return Error{Code::kCorrupt, path + ": no segment of this store, or its superblock is damaged"};
  }
  return s;
}

ObjectInfo object_info(const SlotHeader& h, SegmentName name, bool quarantined) {
  return {h.key,         h.fingerprint, h.parent,    h.generation, h.payload_bytes, h.root_digest,
          h.flush_group, h.part_count,  name.word(), h.slot,       quarantined};
}

// The files that the payload is in, and up to where they have it.
Status find_payload(const StoreFolder& folder, HeaderTable& table) {
  const Stripes stripes = Stripes::of(table.superblock);
  if (!stripes) return {};
  if (!stripes.sane() || table.superblock.stripe_unit == 0) {
    return Error{Code::kCorrupt, table.path + ": its stripes contradict themselves"};
  }
  std::vector<std::uint64_t> lengths;
  bool whole = true;
  table.files = {table.path};
  for (std::uint32_t i = 0; i < stripes.files; ++i) {
    if (i > 0) table.files.push_back(folder.stripe_path(table.name, stripes.paths[i]));
    struct stat status {};
    if (::stat(table.files[i].c_str(), &status) != 0) {
      return Error{Code::kCorrupt, errno_error(errno, table.files[i]).message};  // kNotFound is of whole segments
    }
    lengths.push_back(static_cast<std::uint64_t>(status.st_size));
    whole = whole && lengths.back() >= stripes.bytes_of(i);
  }
  const std::uint64_t bytes = table.superblock.segment_bytes;
  table.file_bytes = whole ? bytes : std::min(table.stripe_map().available(lengths), bytes - 1);
  return {};
}

// One look at the headers; they may belong to another class than the superblock if the segment was re-classed between.
Result<HeaderTable> look(int fd, const std::string& path, SegmentName name, const StoreFolder& folder) {
  auto superblock = read_superblock(fd, path, name, folder.superblock());
  if (!superblock) return superblock.error();
  struct stat status {};
  if (::fstat(fd, &status) != 0) return errno_error(errno, path);
  HeaderTable table{path,
                    {},
                    name,
                    *superblock,
                    static_cast<std::uint64_t>(status.st_size),
                    std::vector<SlotHeader>(superblock->slots)};
  const Status read = read_exactly(fd, path, superblock->header_table_offset, table.headers.data(),
                                   table.headers.size() * sizeof(SlotHeader));
  if (!read) return read.error();
  if (Status status = find_payload(folder, table); !status) return status.error();
  return table;
}

// Calls `visit` for its objects; false: asked to stop. `again`: the header of a slot as it is now.
bool list_table(const HeaderTable& table, const SegmentFacts& facts,
                const std::function<Result<SlotHeader>(std::uint32_t)>& again,
                const std::function<bool(const ObjectInfo&)>& visit) {
  for (std::uint32_t slot = 0; slot < table.headers.size(); ++slot) {
    SlotHeader header = table.headers[slot];
    Belief belief = judge(header, slot, facts);
    if (belief == Belief::kBad) {
      const auto now = again(slot);
      if (!now) continue;
      header = *now;
      belief = judge(header, slot, facts);
    }
    if (belief != Belief::kObject && belief != Belief::kQuarantined) continue;
    if (!visit(object_info(header, table.name, belief == Belief::kQuarantined))) return false;
  }
  return true;
}

}  // namespace

Result<StoreFiles> store_files(const std::string& path) {
  StoreFolder folder(path);
  if (!folder.has_superblock()) return Error{Code::kNotFound, path + ": no tardis store here"};
  if (Status status = folder.read_superblock(); !status) return status.error();
  if (Status status = folder.paths().load(folder.superblock().uuid); !status) return status.error();
  if (Status status = folder.check_device(nullptr); !status) return status.error();
  auto segments = folder.segment_files();
  if (!segments) return segments.error();
  std::vector<std::string> missing = folder.paths().missing();
  return StoreFiles{std::move(folder), std::move(*segments), std::move(missing)};
}

Result<HeaderTable> read_header_table(SegmentName name, const StoreFolder& folder) {
  const std::string path = folder.segment_path(name);
  auto fd = open_segment(path);
  if (!fd) return fd.error();
  Result<HeaderTable> table = Error{Code::kCorrupt, path + ": changes its slot class faster than it can be read"};
  for (int attempt = 0; attempt < kTries; ++attempt) {
    auto now = look(fd->get(), path, name, folder);
    if (!now) {
      table = now.error();  // perhaps in the middle of a write
      continue;
    }
    auto after = read_superblock(fd->get(), path, name, folder.superblock());
    if (after && after->epoch == now->superblock.epoch) return now;
  }
  return table;
}

Result<SlotHeader> read_header(const HeaderTable& table, std::uint32_t slot) {
  auto fd = open_segment(table.path);
  if (!fd) return fd.error();
  const std::uint64_t offset = table.superblock.header_table_offset + slot * kHeaderBytes;
  for (int attempt = 0; attempt < kTries; ++attempt) {
    SlotHeader header;
    if (Status status = read_exactly(fd->get(), table.path, offset, &header, sizeof header); !status) {
      return status.error();
    }
    if (sealed(header) || all_zero(&header, sizeof header)) return header;
  }
  return Error{Code::kCorrupt, table.path + ": slot " + std::to_string(slot) + ": the header fails its checks"};
}

Status list_store(const std::string& folder, const std::function<bool(const ObjectInfo&)>& visit) {
  auto files = store_files(folder);
  if (!files) return files.error();
  for (const auto& [name, path] : files->segments) {
    const auto table = read_header_table(name, files->folder);
    if (!table) continue;
    // Half of one may have been written when the table was read.
    const auto again = [&](std::uint32_t slot) { return read_header(*table, slot); };
    if (!list_table(*table, table->facts(files->folder.superblock()), again, visit)) return {};
  }
  return {};
}

Status list_closed_store(const std::string& folder, const DeviceFactory& make_device,
                         const std::function<bool(const ObjectInfo&)>& visit) {
  auto store = ClosedStore::open(folder, make_device);
  if (!store) return store.error();
  const auto files = (*store)->folder().segment_files();
  if (!files) return files.error();
  for (const auto& [name, path] : *files) {
    const auto table = (*store)->header_table(name);
    if (!table) continue;
    const auto again = [&](std::uint32_t slot) -> Result<SlotHeader> { return table->headers[slot]; };
    if (!list_table(*table, table->facts((*store)->folder().superblock()), again, visit)) return {};
  }
  return {};
}

}  // namespace tardis
