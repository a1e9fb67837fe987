// SPDX-License-Identifier: Apache-2.0
#include "store/segment.h"

#include <algorithm>
#include <cstring>

#include "base/clock.h"

namespace tardis {

Status transfer_bytes(BlockDevice& device, IoRequest::Op op, FileId file, std::uint64_t offset, void* memory,
                      std::uint64_t bytes, const std::string& what) {
  const iovec piece{memory, static_cast<std::size_t>(bytes)};
  IoRequest request;
  request.op = op;
  request.file = file;
  request.offset = offset;
  request.memory = {&piece, 1};
  device.run({&request, 1}, {});
  if (request.error != 0) return errno_error(request.error, what);
  return {};
}

SegmentTable::SegmentTable(const SegmentGeometry& geometry)
    : geometry_(geometry),
      used_(geometry.digest_table_offset - geometry.header_table_offset +
            round_up(std::uint64_t{geometry.slots} * geometry.digests_per_slot * sizeof(std::uint64_t),
                     kTableBlockBytes)),
      bytes_(used_, kTableBlockBytes) {}

SlotHeader& SegmentTable::header(std::uint32_t slot) {
  return *reinterpret_cast<SlotHeader*>(bytes_.data() + slot * kHeaderBytes);
}

std::uint64_t* SegmentTable::digests(std::uint32_t slot) {
  const std::uint64_t table = geometry_.digest_table_offset - geometry_.header_table_offset;
  return reinterpret_cast<std::uint64_t*>(bytes_.data() + table) + std::uint64_t{slot} * geometry_.digests_per_slot;
}

void SegmentTable::blocks_of(std::uint32_t slot, std::set<std::uint64_t>& blocks) const {
  blocks.insert(slot * kHeaderBytes / kTableBlockBytes);
  const std::uint64_t table = geometry_.digest_table_offset - geometry_.header_table_offset;
  const std::uint64_t bytes = geometry_.digests_per_slot * sizeof(std::uint64_t);
  const std::uint64_t first = table + slot * bytes;
  for (std::uint64_t block = first / kTableBlockBytes; block * kTableBlockBytes < first + bytes; ++block)
    blocks.insert(block);
}

Segment::Segment(Passkey, BlockDevice& device, LiveSegment& live, std::string path, std::uint32_t id, FileId file,
                 const Uuid& store, std::uint64_t bytes)
    : device_(device), live_(live), path_(std::move(path)), id_(id), file_(file), store_(store), bytes_(bytes) {}

Segment::~Segment() { device_.close_file(file_); }

SegmentGeometry Segment::geometry() const {
  return SegmentGeometry::of(bytes_, live_.slot_bytes.load(), live_.digests_per_slot.load());
}

// Nobody has a slot of this segment in hand.
void Segment::adopt(SlotClass slot_class) {
  const SegmentGeometry g = SegmentGeometry::of(bytes_, slot_class.slot_bytes, slot_class.digests_per_slot);
  live_.slot_bytes.store(g.slot_bytes);
  live_.digests_per_slot.store(g.digests_per_slot);
  live_.payload_offset.store(g.payload_offset);
  live_.slots.store(g.slots);
  live_.next_slot.store(0);
}

Result<std::unique_ptr<Segment>> Segment::create(BlockDevice& device, LiveSegment& live, const std::string& path,
                                                 std::uint32_t id, const Uuid& store, std::uint64_t bytes,
                                                 SlotClass slot_class) {
  auto file = device.open_file(path, /*create=*/true, /*writable=*/true);
  if (!file) return file.error();
  auto segment = std::make_unique<Segment>(Passkey(), device, live, path, id, *file, store, bytes);
  if (Status status = device.preallocate(*file, bytes); !status) return status.error();
  segment->adopt(slot_class);
  live.epoch.store(0);
  live.write_sequence.store(1);
  if (Status status = segment->write_superblock(kSegmentDirty); !status) return status.error();
  segment->table_ = std::make_unique<SegmentTable>(segment->geometry());  // a fresh file reads as zeros
  segment->table_version_ = live.table_version.load();
  return segment;
}

Result<std::unique_ptr<Segment>> Segment::open(BlockDevice& device, LiveSegment& live, const std::string& path,
                                               std::uint32_t id, const Uuid& store, std::uint64_t bytes) {
  auto file = device.open_file(path, /*create=*/false, /*writable=*/true);
  if (!file) return file.error();
  return std::make_unique<Segment>(Passkey(), device, live, path, id, *file, store, bytes);
}

Result<std::unique_ptr<Segment>> Segment::load(BlockDevice& device, LiveSegment& live, const std::string& path,
                                               std::uint32_t id, const Uuid& store, std::uint64_t bytes,
                                               SegmentImage& image) {
  auto opened = open(device, live, path, id, store, bytes);
  if (!opened) return opened.error();
  const FileId file = (*opened)->file();
  auto length = device.file_bytes(file);
  if (!length) return length.error();
  image.file_bytes = *length;
  AlignedBuffer block(kTableBlockBytes, kTableBlockBytes);
  if (*length == 0) return Error{Code::kNotFound, path + ": empty file"};
  if (Status status =
          transfer_bytes(device, IoRequest::Op::kRead, file, 0, block.data(), kTableBlockBytes, path + ": superblock");
      !status) {
    return status.error();
  }
  if (all_zero(block.data(), kTableBlockBytes)) return Error{Code::kNotFound, path + ": never used"};
  SegmentSuperblock& s = image.superblock;
  std::memcpy(&s, block.data(), sizeof s);
  if (!sealed(s)) return Error{Code::kCorrupt, path + ": the segment superblock fails its checksum"};
  if (s.format_version != kFormatVersion) {
    return Error{Code::kUnsupportedFormat, path + ": format version " + std::to_string(s.format_version) +
                                               ", this release reads " + std::to_string(kFormatVersion)};
  }
  if (s.store_uuid != store) return Error{Code::kCorrupt, path + ": belongs to another store"};
  if (s.segment != live.number.load() || s.segment_bytes != bytes) {
    return Error{Code::kCorrupt, path + ": says it is segment " + std::to_string(s.segment) + " of " +
                                     std::to_string(s.segment_bytes) + " bytes, expected " +
                                     std::to_string(live.number.load()) + " of " + std::to_string(bytes)};
  }
  const SegmentGeometry expected = SegmentGeometry::of(bytes, s.slot_bytes, s.digests_per_slot);
  if (s.slots == 0 || s.slot_bytes % kSlotAlign != 0 || expected.slots != s.slots ||
      expected.payload_offset != s.payload_offset || expected.digest_table_offset != s.digest_table_offset ||
      expected.header_table_offset != s.header_table_offset) {
    return Error{Code::kCorrupt, path + ": the segment superblock contradicts itself"};
  }
  (*opened)->adopt({s.slot_bytes, s.digests_per_slot});
  live.epoch.store(s.epoch);
  live.flags.store(s.flags);
  live.write_sequence.store(s.write_sequence);
  return opened;
}

Status Segment::write_superblock(std::uint32_t flags) {
  const SegmentGeometry g = geometry();
  AlignedBuffer block(kTableBlockBytes, kTableBlockBytes);
  SegmentSuperblock s{};
  s.magic = SegmentSuperblock::kMagic;
  s.format_version = kFormatVersion;
  s.flags = flags;
  s.store_uuid = store_;
  s.segment = number();
  s.epoch = live_.epoch.load();
  s.segment_bytes = bytes_;
  s.slot_bytes = g.slot_bytes;
  s.slots = g.slots;
  s.digests_per_slot = g.digests_per_slot;
  s.header_table_offset = g.header_table_offset;
  s.digest_table_offset = g.digest_table_offset;
  s.payload_offset = g.payload_offset;
  s.write_sequence = live_.write_sequence.load();
  seal(s);
  std::memcpy(block.data(), &s, sizeof s);
  if (Status status = transfer_bytes(device_, IoRequest::Op::kWrite, file_, 0, block.data(), kTableBlockBytes,
                                     path_ + ": writing the superblock");
      !status) {
    return status;
  }
  if (Status status = device_.flush(file_); !status) return status;
  live_.flags.store(flags);
  return {};
}

Status Segment::make_dirty() {
  const std::uint32_t flags = live_.flags.load();
  if ((flags & kSegmentDirty) != 0) return {};
  live_.write_sequence.fetch_add(1);  // whatever a checkpoint says of this segment no longer holds
  return write_superblock(flags | kSegmentDirty);
}

Status Segment::set_flags(std::uint32_t flags) {
  if (live_.flags.load() == flags) return {};
  return write_superblock(flags);
}

Status Segment::rewrite_superblock() {
  live_.write_sequence.fetch_add(1);
  return write_superblock(live_.flags.load());
}

Status Segment::reclass(SlotClass slot_class) {
  table_.reset();
  live_.table_version.fetch_add(1);
  adopt(slot_class);
  live_.epoch.fetch_add(1);  // headers left by the old class are of the old epoch and not believed
  live_.write_sequence.fetch_add(1);
  if (Status status = write_superblock(live_.flags.load() | kSegmentDirty); !status) return status;
  table_ = std::make_unique<SegmentTable>(geometry());
  table_version_ = live_.table_version.load();
  return transfer_bytes(device_, IoRequest::Op::kWrite, file_, geometry().header_table_offset, table_->data(),
                        table_->bytes(), path_ + ": emptying the tables");
}

Result<SegmentTable*> Segment::table() {
  table_used_ns_.store(monotonic_ns(), std::memory_order_relaxed);
  const std::uint64_t version = live_.table_version.load();
  if (table_ == nullptr || table_version_ != version) {  // another process wrote it meanwhile
    table_.reset();
    auto length = device_.file_bytes(file_);
    if (!length) return length.error();
    auto table = std::make_unique<SegmentTable>(geometry());
    const std::uint64_t offset = geometry().header_table_offset;
    const std::uint64_t available = *length <= offset ? 0 : *length - offset;
    const std::uint64_t bytes = std::min(table->bytes(), available / kTableBlockBytes * kTableBlockBytes);
    if (bytes > 0) {
      if (Status status = transfer_bytes(device_, IoRequest::Op::kRead, file_, offset, table->data(), bytes,
                                         path_ + ": reading the tables");
          !status) {
        return status.error();
      }
    }
    table_ = std::move(table);
    table_version_ = version;
  }
  return table_.get();
}

Status Segment::write_table(const std::set<std::uint64_t>& blocks) {
  std::deque<iovec> pieces;
  std::vector<IoRequest> requests;
  add_table_writes(blocks, pieces, requests);
  device_.run(requests, {});
  return tables_written(requests);
}

void Segment::add_table_writes(const std::set<std::uint64_t>& blocks, std::deque<iovec>& pieces,
                               std::vector<IoRequest>& requests) {
  const std::uint64_t offset = geometry().header_table_offset;
  for (auto it = blocks.begin(); it != blocks.end();) {
    const std::uint64_t first = *it;
    std::uint64_t end = first + 1;
    for (++it; it != blocks.end() && *it == end; ++it) ++end;  // neighbours go in one write
    pieces.push_back({table_->data() + first * kTableBlockBytes, (end - first) * kTableBlockBytes});
    IoRequest request;
    request.op = IoRequest::Op::kWrite;
    request.file = file_;
    request.offset = offset + first * kTableBlockBytes;
    request.memory = {&pieces.back(), 1};
    requests.push_back(request);
  }
}

Status Segment::tables_written(std::span<const IoRequest> requests) {
  table_version_ = live_.table_version.fetch_add(1) + 1;
  for (const IoRequest& request : requests) {
    if (request.error != 0) {
      table_.reset();  // what is on disk is unknown now: read it again before the next change
      return errno_error(request.error, path_ + ": writing slot headers");
    }
  }
  return {};
}

Status Segment::restore_length() { return device_.preallocate(file_, bytes_); }

}  // namespace tardis
