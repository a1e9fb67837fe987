// SPDX-License-Identifier: Apache-2.0
#include "store/segment.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"

namespace tardis {
namespace {

constexpr int kTries = 5;  // at a superblock that may be in the middle of a write
}  // namespace

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

Segment::Segment(Passkey, StripedDevice& device, LiveSegment& live, const StoreFolder& folder, std::uint32_t id)
    : device_(device),
      live_(live),
      folder_(folder),
      path_(folder.segment_path({live.path.load(), live.number.load()})),
      id_(id),
      store_(folder.superblock().uuid),
      bytes_(folder.superblock().segment_bytes) {}

Segment::~Segment() {
  if (joined_) {
    device_.close_file(file_);
  } else {
    for (const FileId file : files_) device_.close_file(file);
  }
}

SegmentGeometry Segment::geometry() const {
  return SegmentGeometry::with(live_.slots.load(), live_.slot_bytes.load(), live_.digests_per_slot.load());
}

SegmentGeometry Segment::room_for(SlotClass slot_class, std::uint64_t unit) const {
  return stripes_ ? stripes_.geometry(slot_class, unit)
                  : SegmentGeometry::of(bytes_, slot_class.slot_bytes, slot_class.digests_per_slot);
}

// Nobody has a slot of this segment in hand.
void Segment::adopt(SlotClass slot_class, std::uint64_t unit) {
  const SegmentGeometry g = room_for(slot_class, unit);
  live_.slot_bytes.store(g.slot_bytes);
  live_.digests_per_slot.store(g.digests_per_slot);
  live_.payload_offset.store(g.payload_offset);
  live_.slots.store(g.slots);
  live_.next_slot.store(0);
  live_.stripe_map.store(stripes_ ? StripeMap::pack(g.payload_offset, unit) : 0);
}

Status Segment::open_own(bool create) {
  auto file = device_.open_file(path_, create, /*writable=*/true);
  if (!file) return file.error();
  files_.push_back(*file);
  file_ = *file;
  return {};
}

void Segment::join() {
  if (!stripes_) return;
  file_ = device_.join(files_, live_.stripe_map);
  joined_ = true;
}

// Durable, with their names, before the segment's own file: a crash leaves files that belong to nobody, not a segment
// that lacks some.
Status Segment::create_members(Blame& blame) {
  std::vector<FileId> members;
  AlignedBuffer block(kTableBlockBytes, kTableBlockBytes);
  Status status;
  for (std::uint32_t i = 1; i < stripes_.files && status; ++i) {
    blame.path = stripes_.paths[i];
    const std::string path = member_path(i);
    status = folder_.remove_file(path);  // left by another segment of this name
    auto file = status ? device_.open_file(path, /*create=*/true, /*writable=*/true) : status.error();
    if (!file) return file.error();
    files_.push_back(*file);
    const StripeHeader header = stripe_header(stripes_, i, store_, name());
    std::memcpy(block.data(), &header, sizeof header);
    status = device_.reserve(*file, stripes_.bytes_of(i), kTableBlockBytes);
    if (status) {
      status =
          transfer_bytes(device_, IoRequest::Op::kWrite, *file, 0, block.data(), kTableBlockBytes, path + ": writing");
    }
    if (status) status = device_.flush(*file);
    if (status) status = folder_.sync_segments_folder(stripes_.paths[i]);
  }
  return status;
}

Status Segment::open_members(Blame& blame) {
  AlignedBuffer block(kTableBlockBytes, kTableBlockBytes);
  for (std::uint32_t i = 1; i < stripes_.files; ++i) {
    const StorePath& own = folder_.paths()[stripes_.paths[i]];
    blame.path = stripes_.paths[i];
    if (!own.present) {
      blame.lost = own.flags == 0;
      return Error{Code::kIo, path_ + ": has stripes on " +
                                  (own.flags == 0 ? "a path that the store has no longer"
                                                  : "path " + own.folder + ", which is not there")};
    }
    const std::string path = member_path(i);
    auto file = device_.open_file(path, /*create=*/false, /*writable=*/true);
    if (!file) {
      blame.lost = file.error().os_error == ENOENT;
      // Not kNotFound, which says that there is no segment.
      return Error{blame.lost ? Code::kCorrupt : file.error().code, file.error().message, file.error().os_error};
    }
    files_.push_back(*file);
    auto length = device_.file_bytes(*file);
    if (!length) return length.error();
    StripeHeader header;
    if (*length < kTableBlockBytes) {
      blame.lost = true;
      return Error{Code::kCorrupt, path + ": " + std::to_string(*length) + " bytes are no stripes"};
    }
    if (Status status = transfer_bytes(device_, IoRequest::Op::kRead, *file, 0, block.data(), kTableBlockBytes,
                                       path + ": its first block");
        !status) {
      return status;
    }
    std::memcpy(&header, block.data(), sizeof header);
    if (same_stripe(header, stripe_header(stripes_, i, store_, name()))) continue;
    blame.lost = sealed(header) || all_zero(block.data(), kTableBlockBytes);
    return Error{Code::kCorrupt, path + (sealed(header) ? ": has stripes of another segment than " + path_
                                                        : ": the first block fails its checksum")};
  }
  blame = {live_.path.load(), false};
  return {};
}

Result<std::unique_ptr<Segment>> Segment::create(StripedDevice& device, LiveSegment& live, const StoreFolder& folder,
                                                 std::uint32_t id, SlotClass slot_class, const Stripes& stripes,
                                                 std::uint64_t unit, Blame& blame) {
  auto segment = std::make_unique<Segment>(Passkey(), device, live, folder, id);
  segment->stripes_ = stripes;
  blame = {live.path.load(), false};
  std::vector<FileId>& files = segment->files_;
  if (stripes) {
    if (Status status = segment->create_members(blame); !status) return status.error();
    blame.path = live.path.load();
  }
  if (Status status = segment->open_own(/*create=*/true); !status) return status.error();
  std::rotate(files.begin(), files.end() - 1, files.end());
  const std::uint64_t bytes = stripes ? stripes.bytes_of(0) : segment->bytes_;
  const std::uint64_t tables_end = segment->room_for(slot_class, unit).payload_offset;
  if (Status status = device.reserve(files.front(), bytes, std::min(tables_end, bytes)); !status) {
    return status.error();
  }
  segment->adopt(slot_class, unit);
  segment->join();
  live.epoch.store(0);
  live.write_sequence.store(1);
  if (Status status = segment->write_superblock(kSegmentDirty); !status) return status.error();
  segment->table_ = std::make_unique<SegmentTable>(segment->geometry());  // a fresh file reads as zeros
  segment->table_version_ = live.table_version.load();
  return segment;
}

Result<std::unique_ptr<Segment>> Segment::open(StripedDevice& device, LiveSegment& live, const StoreFolder& folder,
                                               std::uint32_t id, Blame& blame) {
  auto segment = std::make_unique<Segment>(Passkey(), device, live, folder, id);
  blame = {live.path.load(), false};
  if (Status status = segment->open_own(/*create=*/false); !status) return status.error();
  if (live.all_paths.load() == 1u << live.path.load()) return segment;
  // Another process may be writing it; what is asked for here does not change.
  auto superblock = segment->read_superblock();
  for (int attempt = 1; !superblock && superblock.error().code == Code::kCorrupt && attempt < kTries; ++attempt) {
    superblock = segment->read_superblock();
  }
  if (!superblock) return superblock.error();
  segment->stripes_ = Stripes::of(*superblock);
  if (!segment->stripes_.sane()) return Error{Code::kCorrupt, segment->path_ + ": its stripes contradict themselves"};
  if (Status status = segment->open_members(blame); !status) return status.error();
  segment->join();
  return segment;
}

Result<SegmentSuperblock> Segment::read_superblock() {
  AlignedBuffer block(kTableBlockBytes, kTableBlockBytes);
  if (Status status = transfer_bytes(device_, IoRequest::Op::kRead, files_.front(), 0, block.data(), kTableBlockBytes,
                                     path_ + ": superblock");
      !status) {
    return status.error();
  }
  if (all_zero(block.data(), kTableBlockBytes)) return Error{Code::kNotFound, path_ + ": never used"};
  SegmentSuperblock s;
  std::memcpy(&s, block.data(), sizeof s);
  if (!sealed(s)) return Error{Code::kCorrupt, path_ + ": the segment superblock fails its checksum"};
  return s;
}

Result<std::unique_ptr<Segment>> Segment::load(StripedDevice& device, LiveSegment& live, const StoreFolder& folder,
                                               std::uint32_t id, SegmentImage& image, Blame& blame) {
  auto segment = std::make_unique<Segment>(Passkey(), device, live, folder, id);
  const std::string& path = segment->path_;
  const std::uint64_t bytes = segment->bytes_;
  blame = {live.path.load(), false};
  live.all_paths.store(1u << live.path.load());
  if (Status status = segment->open_own(/*create=*/false); !status) return status.error();
  auto length = device.file_bytes(segment->files_.front());
  if (!length) return length.error();
  if (*length == 0) return Error{Code::kNotFound, path + ": empty file"};
  auto superblock = segment->read_superblock();
  if (!superblock) return superblock.error();
  const SegmentSuperblock& s = image.superblock = *superblock;
  if (s.format_version != kFormatVersion) {
    return Error{Code::kUnsupportedFormat, path + ": format version " + std::to_string(s.format_version) +
                                               ", this release reads " + std::to_string(kFormatVersion)};
  }
  if (s.store_uuid != segment->store_) return Error{Code::kCorrupt, path + ": belongs to another store"};
  if (s.segment != live.number.load() || s.segment_bytes != bytes) {
    return Error{Code::kCorrupt, path + ": says it is segment " + std::to_string(s.segment) + " of " +
                                     std::to_string(s.segment_bytes) + " bytes, expected " +
                                     std::to_string(live.number.load()) + " of " + std::to_string(bytes)};
  }
  const Stripes stripes = segment->stripes_ = Stripes::of(s);
  const bool sane = !stripes || (stripes.sane() && stripes.paths[0] == live.path.load() && s.stripe_unit > 0 &&
                                 s.stripe_unit % StripeMap::kBlock == 0 && s.stripe_unit <= bytes);
  const SegmentGeometry expected =
      sane ? segment->room_for({s.slot_bytes, s.digests_per_slot}, s.stripe_unit) : SegmentGeometry();
  if (s.slots == 0 || s.slot_bytes % kSlotAlign != 0 || expected.slots != s.slots ||
      expected.payload_offset != s.payload_offset || expected.digest_table_offset != s.digest_table_offset ||
      expected.header_table_offset != s.header_table_offset) {
    return Error{Code::kCorrupt, path + ": the segment superblock contradicts itself"};
  }
  if (stripes) live.all_paths.store(stripes.mask());
  segment->adopt({s.slot_bytes, s.digests_per_slot}, s.stripe_unit);
  live.epoch.store(s.epoch);
  live.flags.store(s.flags);
  live.write_sequence.store(s.write_sequence);
  if (Status status = segment->open_members(blame); !status) return status.error();
  segment->join();
  auto available = segment->available_bytes();
  if (!available) return available.error();
  image.file_bytes = *available;
  return segment;
}

Result<std::uint64_t> Segment::available_bytes() {
  if (!stripes_) return device_.file_bytes(file_);
  bool whole = true;
  for (std::uint32_t i = 0; i < stripes_.files; ++i) {
    auto length = device_.file_bytes(files_[i]);
    if (!length) return length.error();
    whole = whole && *length >= stripes_.bytes_of(i);
  }
  if (whole) return bytes_;  // what is left over behind the last slot is not dealt
  auto end = device_.file_bytes(file_);
  if (!end) return end.error();
  return std::min(*end, bytes_ - 1);
}

std::vector<Segment::Met> Segment::take_met(IoUse use) {
  std::vector<Met> result;
  if (!joined_) return result;
  const auto all = device_.take_met(file_, use);
  for (std::size_t i = 0; i < all.size(); ++i) result.push_back({stripes_.paths[i], all[i]});
  return result;
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
  if (stripes_) {
    s.stripes = stripes_.files;
    s.stripe_unit = StripeMap::of(live_.stripe_map.load(), stripes_.files).unit;
    s.stripe_bytes = stripes_.member_bytes;
    s.stripe_nonce = stripes_.nonce;
    s.stripe_paths = stripes_.paths;
  }
  seal(s);
  std::memcpy(block.data(), &s, sizeof s);
  if (Status status = transfer_bytes(device_, IoRequest::Op::kWrite, files_.front(), 0, block.data(), kTableBlockBytes,
                                     path_ + ": writing the superblock");
      !status) {
    return status;
  }
  if (Status status = flush_tables(); !status) return status;
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

Status Segment::reclass(SlotClass slot_class, std::uint64_t unit) {
  table_.reset();
  live_.table_version.fetch_add(1);
  adopt(slot_class, unit);
  live_.epoch.fetch_add(1);  // headers left by the old class are of the old epoch and not believed
  live_.write_sequence.fetch_add(1);
  if (Status status = write_superblock(live_.flags.load() | kSegmentDirty); !status) return status;
  table_ = std::make_unique<SegmentTable>(geometry());
  table_version_ = live_.table_version.load();
  return transfer_bytes(device_, IoRequest::Op::kWrite, files_.front(), geometry().header_table_offset, table_->data(),
                        table_->bytes(), path_ + ": emptying the tables");
}

Result<SegmentTable*> Segment::table() {
  table_used_ns_.store(monotonic_ns(), std::memory_order_relaxed);
  const std::uint64_t version = live_.table_version.load();
  if (table_ == nullptr || table_version_ != version) {  // another process wrote it meanwhile
    table_.reset();
    auto length = device_.file_bytes(files_.front());
    if (!length) return length.error();
    auto table = std::make_unique<SegmentTable>(geometry());
    const std::uint64_t offset = geometry().header_table_offset;
    const std::uint64_t available = *length <= offset ? 0 : *length - offset;
    const std::uint64_t bytes = std::min(table->bytes(), available / kTableBlockBytes * kTableBlockBytes);
    if (bytes > 0) {
      if (Status status = transfer_bytes(device_, IoRequest::Op::kRead, files_.front(), offset, table->data(), bytes,
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
    request.file = files_.front();
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

Status Segment::restore_length() {
  if (!stripes_) return device_.preallocate(file_, bytes_);
  for (std::uint32_t i = 0; i < stripes_.files; ++i) {
    if (Status status = device_.preallocate(files_[i], stripes_.bytes_of(i)); !status) return status;
  }
  return {};
}

}  // namespace tardis
