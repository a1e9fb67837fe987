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

Segment::Segment(Passkey, BlockDevice& device, std::string path, std::uint32_t id, FileId file)
    : device_(device), path_(std::move(path)), id_(id), file_(file) {}

Segment::~Segment() { device_.close_file(file_); }

void Segment::reset_slots() {
  slots.assign(geometry_.slots, {});
  free_slots = geometry_.slots;
  next_slot = 0;
}

Result<std::unique_ptr<Segment>> Segment::create(BlockDevice& device, const std::string& path, std::uint32_t id,
                                                 const Uuid& store, std::uint64_t bytes, SlotClass slot_class) {
  auto file = device.open_file(path, /*create=*/true, /*writable=*/true);
  if (!file) return file.error();
  auto segment = std::make_unique<Segment>(Passkey(), device, path, id, *file);
  if (Status status = device.preallocate(*file, bytes); !status) return status.error();
  segment->file_bytes_ = bytes;
  SegmentSuperblock& s = segment->superblock_;
  s.magic = SegmentSuperblock::kMagic;
  s.format_version = kFormatVersion;
  s.flags = kSegmentDirty;
  s.store_uuid = store;
  s.segment = id;
  s.segment_bytes = bytes;
  segment->geometry_ = SegmentGeometry::of(bytes, slot_class.slot_bytes, slot_class.digests_per_slot);
  s.slot_bytes = segment->geometry_.slot_bytes;
  s.slots = segment->geometry_.slots;
  s.digests_per_slot = segment->geometry_.digests_per_slot;
  s.header_table_offset = segment->geometry_.header_table_offset;
  s.digest_table_offset = segment->geometry_.digest_table_offset;
  s.payload_offset = segment->geometry_.payload_offset;
  if (Status status = segment->write_superblock(); !status) return status.error();
  segment->reset_slots();
  segment->table_ = std::make_unique<SegmentTable>(segment->geometry_);  // a fresh file reads as zeros
  return segment;
}

Result<std::unique_ptr<Segment>> Segment::load(BlockDevice& device, const std::string& path, std::uint32_t id,
                                               const Uuid& store, std::uint64_t bytes) {
  auto file = device.open_file(path, /*create=*/false, /*writable=*/true);
  if (!file) return file.error();
  auto segment = std::make_unique<Segment>(Passkey(), device, path, id, *file);
  auto length = device.file_bytes(*file);
  if (!length) return length.error();
  segment->file_bytes_ = *length;
  segment->truncated_ = *length < bytes;
  AlignedBuffer block(kTableBlockBytes, kTableBlockBytes);
  if (*length == 0) return Error{Code::kNotFound, path + ": empty file"};
  if (Status status =
          transfer_bytes(device, IoRequest::Op::kRead, *file, 0, block.data(), kTableBlockBytes, path + ": superblock");
      !status) {
    return status.error();
  }
  if (all_zero(block.data(), kTableBlockBytes)) return Error{Code::kNotFound, path + ": never used"};
  std::memcpy(&segment->superblock_, block.data(), sizeof segment->superblock_);
  const SegmentSuperblock& s = segment->superblock_;
  if (!sealed(s)) return Error{Code::kCorrupt, path + ": the segment superblock fails its checksum"};
  if (s.format_version != kFormatVersion) {
    return Error{Code::kUnsupportedFormat, path + ": format version " + std::to_string(s.format_version) +
                                               ", this release reads " + std::to_string(kFormatVersion)};
  }
  if (s.store_uuid != store) return Error{Code::kCorrupt, path + ": belongs to another store"};
  if (s.segment != id || s.segment_bytes != bytes) {
    return Error{Code::kCorrupt, path + ": says it is segment " + std::to_string(s.segment) + " of " +
                                     std::to_string(s.segment_bytes) + " bytes, expected " + std::to_string(id) +
                                     " of " + std::to_string(bytes)};
  }
  segment->geometry_ = SegmentGeometry::of(s);
  const SegmentGeometry expected = SegmentGeometry::of(bytes, s.slot_bytes, s.digests_per_slot);
  if (s.slots == 0 || s.slot_bytes % kSlotAlign != 0 || expected.slots != s.slots ||
      expected.payload_offset != s.payload_offset || expected.digest_table_offset != s.digest_table_offset ||
      expected.header_table_offset != s.header_table_offset) {
    return Error{Code::kCorrupt, path + ": the segment superblock contradicts itself"};
  }
  segment->reset_slots();
  return segment;
}

Status Segment::write_superblock() {
  AlignedBuffer block(kTableBlockBytes, kTableBlockBytes);
  seal(superblock_);
  std::memcpy(block.data(), &superblock_, sizeof superblock_);
  if (Status status = transfer_bytes(device_, IoRequest::Op::kWrite, file_, 0, block.data(), kTableBlockBytes,
                                     path_ + ": writing the superblock");
      !status) {
    return status;
  }
  return device_.flush(file_);
}

Status Segment::set_flags(std::uint32_t flags) {
  if (superblock_.flags == flags) return {};
  const std::uint32_t before = superblock_.flags;
  superblock_.flags = flags;
  Status status = write_superblock();
  if (!status) superblock_.flags = before;
  return status;
}

Status Segment::reclass(SlotClass slot_class) {
  geometry_ = SegmentGeometry::of(superblock_.segment_bytes, slot_class.slot_bytes, slot_class.digests_per_slot);
  superblock_.slot_bytes = geometry_.slot_bytes;
  superblock_.slots = geometry_.slots;
  superblock_.digests_per_slot = geometry_.digests_per_slot;
  superblock_.digest_table_offset = geometry_.digest_table_offset;
  superblock_.payload_offset = geometry_.payload_offset;
  superblock_.epoch += 1;  // headers left by the old class are of the old epoch and not believed
  superblock_.flags |= kSegmentDirty;
  table_.reset();
  if (Status status = write_superblock(); !status) return status;
  return zero_tables();
}

Status Segment::zero_tables() {
  table_ = std::make_unique<SegmentTable>(geometry_);
  return transfer_bytes(device_, IoRequest::Op::kWrite, file_, geometry_.header_table_offset, table_->data(),
                        table_->bytes(), path_ + ": emptying the tables");
}

Result<SegmentTable*> Segment::table() {
  table_used_ns_.store(monotonic_ns(), std::memory_order_relaxed);
  if (table_ == nullptr) {
    auto table = std::make_unique<SegmentTable>(geometry_);
    const std::uint64_t offset = geometry_.header_table_offset;
    const std::uint64_t available = file_bytes_ <= offset ? 0 : file_bytes_ - offset;
    const std::uint64_t bytes = std::min(table->bytes(), available / kTableBlockBytes * kTableBlockBytes);
    if (bytes > 0) {
      if (Status status = transfer_bytes(device_, IoRequest::Op::kRead, file_, offset, table->data(), bytes,
                                         path_ + ": reading the tables");
          !status) {
        return status.error();
      }
    }
    table_ = std::move(table);
  }
  return table_.get();
}

Status Segment::write_table(const std::set<std::uint64_t>& blocks) {
  std::vector<iovec> pieces;
  std::vector<IoRequest> requests;
  pieces.reserve(blocks.size());
  for (auto it = blocks.begin(); it != blocks.end();) {
    const std::uint64_t first = *it;
    std::uint64_t end = first + 1;
    for (++it; it != blocks.end() && *it == end; ++it) ++end;  // neighbours go in one write
    pieces.push_back({table_->data() + first * kTableBlockBytes, (end - first) * kTableBlockBytes});
    IoRequest request;
    request.op = IoRequest::Op::kWrite;
    request.file = file_;
    request.offset = geometry_.header_table_offset + first * kTableBlockBytes;
    request.memory = {&pieces.back(), 1};
    requests.push_back(request);
  }
  device_.run(requests, {});
  for (const IoRequest& request : requests) {
    if (request.error != 0) {
      table_.reset();  // what is on disk is unknown now: read it again before the next change
      return errno_error(request.error, path_ + ": writing slot headers");
    }
  }
  return {};
}

Status Segment::restore_length() {
  if (Status status = device_.preallocate(file_, superblock_.segment_bytes); !status) return status;
  file_bytes_ = superblock_.segment_bytes;
  truncated_ = false;
  return {};
}

}  // namespace tardis
