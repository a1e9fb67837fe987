// SPDX-License-Identifier: Apache-2.0
#include "nvme/raw_volume.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <utility>

#include "base/aligned_buffer.h"
#include "nvme/disk_marks.h"

namespace tardis::nvme {
namespace {

constexpr std::uint64_t kPieceBytes = 1u << 20;   // of one request
constexpr std::uint64_t kLeastExtent = 4u << 20;  // a directory has an entry for each file of this length, at least ...
constexpr std::uint64_t kLeastEntries = 64, kFewEntries = 16384, kMostEntries = 1u << 24;
constexpr std::uint64_t kManyExtent = 512u << 20;  // ... but beyond kFewEntries only for each of this length
constexpr std::uint64_t kEntriesPerPiece = kPieceBytes / sizeof(VolumeEntry);
constexpr std::uint64_t kGenerations = std::uint64_t{1} << 62;  // so that there is always a later one

std::uint64_t round_down(std::uint64_t value, std::uint64_t unit) { return value / unit * unit; }

std::uint64_t tail_offset(std::uint64_t namespace_bytes) {
  return round_down(namespace_bytes, kVolumeBlockBytes) - kVolumeBlockBytes;
}

std::string text(const Uuid& uuid) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string result;
  for (const std::uint8_t byte : uuid) {
    result.push_back(kDigits[byte >> 4]);
    result.push_back(kDigits[byte & 15]);
  }
  return result;
}

// One batch of requests of at most kPieceBytes each. `memory`: of each byte, or one piece of zeros for all.
Status transfer(RawNamespace& device, NamespaceRequest::Op op, std::uint64_t offset, std::byte* memory,
                std::uint64_t bytes, bool repeat = false) {
  std::vector<iovec> pieces;
  for (std::uint64_t at = 0; at < bytes; at += kPieceBytes) {
    pieces.push_back({memory + (repeat ? 0 : at), static_cast<std::size_t>(std::min(kPieceBytes, bytes - at))});
  }
  std::vector<NamespaceRequest> requests(pieces.size());
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    requests[i] = {op, offset + i * kPieceBytes, {&pieces[i], 1}, 0};
  }
  device.run(requests, {});
  for (const NamespaceRequest& request : requests) {
    if (request.error == 0) continue;
    return errno_error(request.error, device.name() + ": " +
                                          (op == NamespaceRequest::Op::kRead ? "reading" : "writing") + " at byte " +
                                          std::to_string(request.offset));
  }
  return {};
}

Status write_zeros(RawNamespace& device, std::uint64_t offset, std::uint64_t bytes) {
  AlignedBuffer zeros(std::min(bytes, kPieceBytes));
  return transfer(device, NamespaceRequest::Op::kWrite, offset, zeros.data(), bytes, /*repeat=*/true);
}

Status write_superblock(RawNamespace& device, std::uint64_t offset, const VolumeSuperblock& superblock) {
  AlignedBuffer block(kVolumeBlockBytes);
  std::memcpy(block.data(), &superblock, sizeof superblock);
  return transfer(device, NamespaceRequest::Op::kWrite, offset, block.data(), block.size());
}

// Where things lie in a namespace of that size; data_bytes == 0: nothing fits.
VolumeSuperblock plan(const RawNamespace& device) {
  VolumeSuperblock s{};
  s.magic = VolumeSuperblock::kMagic;
  s.format_version = kVolumeVersion;
  s.block_bytes = device.block_bytes();
  s.namespace_bytes = device.bytes();
  s.entries = std::clamp(device.bytes() / kLeastExtent, kLeastEntries,
                         std::clamp(device.bytes() / kManyExtent, kFewEntries, kMostEntries));
  s.entries = round_up(s.entries, kVolumeBlockBytes / sizeof(VolumeEntry));
  const std::uint64_t directory = s.entries * sizeof(VolumeEntry);
  s.data_offset = round_up(kVolumeBlockBytes + directory, kVolumeExtentAlign);
  if (device.bytes() < s.data_offset + kVolumeExtentAlign + directory + 2 * kVolumeBlockBytes) return s;
  const std::uint64_t tail = tail_offset(device.bytes());
  s.directory_offset = {kVolumeBlockBytes, tail - directory};
  s.data_bytes = round_down(s.directory_offset[1], kVolumeExtentAlign) - s.data_offset;
  return s;
}

bool sane(const VolumeSuperblock& s) {
  if ((s.block_bytes != 512 && s.block_bytes != kVolumeBlockBytes) || s.generation >= kGenerations) return false;
  if (s.entries == 0 || s.entries > kMostEntries || s.entries % (kVolumeBlockBytes / sizeof(VolumeEntry)) != 0) {
    return false;
  }
  const std::uint64_t directory = s.entries * sizeof(VolumeEntry);
  return s.namespace_bytes >= 2 * kVolumeBlockBytes && s.directory_offset[0] == kVolumeBlockBytes &&
         s.data_offset % kVolumeExtentAlign == 0 && s.data_bytes % kVolumeExtentAlign == 0 && s.data_bytes > 0 &&
         s.data_offset >= kVolumeBlockBytes + directory && s.data_bytes < s.namespace_bytes &&
         s.data_offset < s.namespace_bytes && s.directory_offset[1] >= s.data_offset + s.data_bytes &&
         s.directory_offset[1] % kVolumeBlockBytes == 0 && s.directory_offset[1] < s.namespace_bytes &&
         s.directory_offset[1] + directory <= tail_offset(s.namespace_bytes);
}

struct Look {
  enum class Kind { kValid, kZero, kForeign, kBroken, kNewer, kUnreadable };
  Kind kind = Kind::kUnreadable;
  VolumeSuperblock superblock{};
  Status status;  // why it is unreadable
};

Look look(RawNamespace& device, std::uint64_t offset) {
  using Kind = Look::Kind;
  Look found;
  AlignedBuffer block(kVolumeBlockBytes);
  found.status = transfer(device, NamespaceRequest::Op::kRead, offset, block.data(), block.size());
  if (!found.status) return found;
  VolumeSuperblock& s = found.superblock;
  std::memcpy(&s, block.data(), sizeof s);
  if (s.magic != VolumeSuperblock::kMagic) {
    found.kind = all_zero(block.data(), block.size()) ? Kind::kZero : Kind::kForeign;
  } else if (!sealed(s)) {
    found.kind = Kind::kBroken;
  } else if (s.format_version != kVolumeVersion) {
    found.kind = s.format_version > kVolumeVersion ? Kind::kNewer : Kind::kBroken;
  } else {
    found.kind = sane(s) ? Kind::kValid : Kind::kBroken;
  }
  return found;
}

Error too_small(const RawNamespace& device) {
  return Error{Code::kNoSpace, device.name() + ": has " + std::to_string(device.bytes()) +
                                   " bytes, too few for a volume with one file; use a larger namespace"};
}

}  // namespace

Status RawVolume::check_blank(RawNamespace& device) {
  if (plan(device).data_bytes == 0) return too_small(device);
  const std::uint64_t bytes = std::min(kVolumeInspectBytes, round_down(device.bytes(), kVolumeBlockBytes));
  const std::uint64_t behind = round_down(device.bytes(), device.block_bytes()) - bytes;
  AlignedBuffer first(bytes), last(bytes);
  for (const auto& [offset, memory] : {std::pair{std::uint64_t{0}, &first}, {behind, &last}}) {
    if (auto read = transfer(device, NamespaceRequest::Op::kRead, offset, memory->data(), bytes); !read) return read;
  }
  for (const auto& [offset, memory] : {std::pair{std::uint64_t{0}, &first}, {behind, &last}}) {
    if (all_zero(memory->data(), bytes)) continue;
    const auto marks = disk_marks({first.data(), bytes}, {last.data(), bytes}, behind + bytes);
    const auto* const byte =
        std::find_if(memory->data(), memory->data() + bytes, [](std::byte b) { return b != std::byte{0}; });
    return Error{Code::kInvalidArgument,
                 device.name() + ": expected a namespace whose first and last MiB are zero, found " +
                     (marks.empty() ? std::string("other data") : describe(marks)) + " (byte " +
                     std::to_string(offset + static_cast<std::uint64_t>(byte - memory->data())) +
                     " is not zero); choose another namespace, or format it with force, which destroys what is on it"};
  }
  return {};
}

Status RawVolume::format(RawNamespace& device, const Uuid& uuid) {
  VolumeSuperblock s = plan(device);
  if (s.data_bytes == 0) return too_small(device);
  s.uuid = uuid;
  s.created_unix_seconds = static_cast<std::uint64_t>(std::time(nullptr));
  const std::uint64_t tail = tail_offset(device.bytes());
  s.generation = 1;
  for (const std::uint64_t offset : {std::uint64_t{0}, tail}) {
    const Look before = look(device, offset);
    if (before.kind == Look::Kind::kValid) s.generation = std::max(s.generation, before.superblock.generation + 1);
  }
  seal(s);
  // Neither superblock may stand over a directory that is another's, whatever reaches the medium first.
  for (const std::uint64_t offset : {std::uint64_t{0}, tail}) {
    if (Status status = write_zeros(device, offset, kVolumeBlockBytes); !status) return status;
  }
  if (Status status = device.flush(); !status) return status;
  for (const std::uint64_t offset : s.directory_offset) {
    if (Status status = write_zeros(device, offset, s.entries * sizeof(VolumeEntry)); !status) return status;
  }
  if (Status status = device.flush(); !status) return status;
  for (const std::uint64_t offset : {std::uint64_t{0}, tail}) {
    if (Status status = write_superblock(device, offset, s); !status) return status;
  }
  return device.flush();
}

Result<std::unique_ptr<RawVolume>> RawVolume::open(RawNamespace& device, const std::optional<Uuid>& expected) {
  using Kind = Look::Kind;
  if (device.bytes() < 2 * kVolumeBlockBytes) return too_small(device);
  const std::array<Look, 2> looks = {look(device, 0), look(device, tail_offset(device.bytes()))};
  const auto any = [&](Kind kind) { return looks[0].kind == kind || looks[1].kind == kind; };
  const Error newer{Code::kUnsupportedFormat,
                    device.name() + ": the volume is of a newer format, this release knows " +
                        std::to_string(kVolumeVersion) +
                        "; upgrade sglang-tardis or use another namespace (nothing was changed)"};
  if (any(Kind::kNewer)) return newer;
  const Look* best = nullptr;
  for (const Look& one : looks) {
    if (one.kind != Kind::kValid) continue;
    if (best == nullptr || one.superblock.generation > best->superblock.generation) best = &one;
  }
  if (best == nullptr) {
    for (const Look& one : looks) {
      if (one.kind == Kind::kUnreadable) return one.status.error();
    }
    // A newer release may have its checksum elsewhere.
    for (const Look& one : looks) {
      if (one.kind == Kind::kBroken && one.superblock.format_version > kVolumeVersion) return newer;
    }
    if (any(Kind::kBroken)) {
      return Error{Code::kCorrupt, device.name() +
                                       ": both superblocks of the volume fail their checks; what it holds "
                                       "is lost: format it with force"};
    }
    if (any(Kind::kForeign)) {
      return Error{Code::kCorrupt, device.name() +
                                       ": expected a tardis volume, found something else; attach the right "
                                       "namespace, or format this one with force, which destroys what is "
                                       "on it"};
    }
    return Error{Code::kNotFound, device.name() + ": no tardis volume here"};
  }
  const VolumeSuperblock& s = best->superblock;
  if (s.block_bytes != device.block_bytes()) {
    return Error{Code::kInvalidArgument, device.name() + ": the volume was made on blocks of " +
                                             std::to_string(s.block_bytes) + " bytes, the namespace has blocks of " +
                                             std::to_string(device.block_bytes()) +
                                             " now; format the namespace with its old block size, or the volume anew "
                                             "with force"};
  }
  if (s.namespace_bytes > device.bytes()) {
    return Error{Code::kInvalidArgument, device.name() + ": the volume was made on " +
                                             std::to_string(s.namespace_bytes) + " bytes, the namespace has " +
                                             std::to_string(device.bytes()) +
                                             " now; give it its old size, or format the volume anew with force"};
  }
  if (expected && s.uuid != *expected) {
    return Error{Code::kInvalidArgument, device.name() + ": holds volume " + text(s.uuid) +
                                             ", the store's folder expects volume " + text(*expected) +
                                             "; attach the namespace of this store, or name another folder"};
  }
  auto volume = std::make_unique<RawVolume>(Passkey(), device, s);
  const std::array<std::uint64_t, 2> places = {0, tail_offset(s.namespace_bytes)};
  const bool grown = tail_offset(device.bytes()) != places[1];
  for (std::size_t i = 0; i < places.size(); ++i) {
    const Look now = i == 1 && grown ? look(device, places[i]) : looks[i];
    if (now.kind == Kind::kValid && std::memcmp(&now.superblock, &s, sizeof s) == 0) continue;
    ++volume->mended_;
    if (Status status = write_superblock(device, places[i], s); !status) return status.error();
  }
  // Where the namespace ends now stands one more, or the first alone would tell where the second one is. What may be
  // another's is left alone.
  if (grown && (looks[1].kind == Look::Kind::kZero || looks[1].kind == Look::Kind::kValid) &&
      std::memcmp(&looks[1].superblock, &s, sizeof s) != 0) {
    if (Status status = write_superblock(device, tail_offset(device.bytes()), s); !status) return status.error();
    if (Status status = device.flush(); !status) return status.error();
  }
  if (Status status = volume->load_directory(); !status) return status.error();
  return volume;
}

RawVolume::RawVolume(Passkey, RawNamespace& device, const VolumeSuperblock& superblock)
    : device_(device), superblock_(superblock) {}

Error RawVolume::broken(const std::string& what) const {
  return Error{Code::kCorrupt, device_.name() + ": the directory of volume " + text(superblock_.uuid) +
                                   " contradicts itself: " + what + "; format it with force"};
}

// What entry `number` may say.
bool RawVolume::sane(const VolumeEntry& entry, std::uint64_t number) const {
  if (!sealed(entry) || entry.format_version != kVolumeVersion || entry.volume != superblock_.uuid ||
      entry.number != number || entry.generation >= kGenerations) {
    return false;
  }
  if (entry.state == EntryState::kFree) return true;
  const std::uint64_t end = superblock_.data_offset + superblock_.data_bytes;
  return entry.state == EntryState::kInUse && entry.name_bytes > 0 && entry.name_bytes <= entry.name.size() &&
         entry.offset % kVolumeExtentAlign == 0 && entry.offset >= superblock_.data_offset && entry.bytes > 0 &&
         entry.offset <= end && entry.bytes <= end - entry.offset;
}

// From entry `first` on, as many as one piece holds. Of what cannot be read in one copy the other one tells.
Status RawVolume::read_copies(std::uint64_t first, std::array<std::vector<VolumeEntry>, 2>& copies) {
  constexpr std::uint64_t kPerBlock = kVolumeBlockBytes / sizeof(VolumeEntry);
  const std::uint64_t count = std::min(kEntriesPerPiece, superblock_.entries - first);
  const auto read = [&](std::size_t copy, std::uint64_t from, std::uint64_t n) {
    return transfer(device_, NamespaceRequest::Op::kRead,
                    superblock_.directory_offset[copy] + (first + from) * sizeof(VolumeEntry),
                    reinterpret_cast<std::byte*>(copies[copy].data() + from), n * sizeof(VolumeEntry));
  };
  std::vector<bool> unreadable(count / kPerBlock);
  for (std::size_t copy = 0; copy < copies.size(); ++copy) {
    copies[copy].resize(count);
    if (read(copy, 0, count)) continue;
    for (std::uint64_t block = 0; block < count / kPerBlock; ++block) {
      const Status status = read(copy, block * kPerBlock, kPerBlock);
      if (status) continue;
      if (unreadable[block]) return status;  // both: a drive that answers nothing must not be taken for an empty one
      unreadable[block] = true;
      // No checksum fits these.
      std::memset(static_cast<void*>(copies[copy].data() + block * kPerBlock), 0xFF, kVolumeBlockBytes);
    }
  }
  return {};
}

Status RawVolume::load_directory() {
  entries_.resize(superblock_.entries);
  std::array<std::vector<VolumeEntry>, 2> copies;
  std::vector<std::uint32_t> to_mend;
  const auto unused = [](const VolumeEntry& entry) { return all_zero(&entry, sizeof entry); };
  for (std::uint64_t first = 0; first < superblock_.entries; first += kEntriesPerPiece) {
    if (Status status = read_copies(first, copies); !status) return status;
    for (std::size_t i = 0; i < copies[0].size(); ++i) {
      const VolumeEntry &a = copies[0][i], &b = copies[1][i];
      const auto number = static_cast<std::uint32_t>(first + i);
      if (unused(a) && unused(b)) continue;
      const bool a_sane = sane(a, number), b_sane = sane(b, number);
      if (!a_sane && !b_sane && !unused(a) && !unused(b)) ++lost_;
      if (a_sane && (!b_sane || a.generation >= b.generation)) {
        entries_[number] = a;
      } else if (b_sane) {
        entries_[number] = b;
      } else {
        entries_[number] = make_entry(number, EntryState::kFree);
      }
      if (std::memcmp(&entries_[number], &a, sizeof a) != 0 || std::memcmp(&entries_[number], &b, sizeof b) != 0) {
        to_mend.push_back(number);
      }
      if (Status status = adopt(number); !status) return status;
    }
  }
  mended_ += to_mend.size();
  // Before anything is done that one copy could contradict.
  if (mended_ > 0) return write_entries(to_mend);
  return {};
}

Status RawVolume::adopt(std::uint32_t number) {
  const VolumeEntry& entry = entries_[number];
  if (entry.state != EntryState::kInUse) return {};
  const std::string name(entry.name.data(), entry.name_bytes);
  if (!by_name_.emplace(name, number).second) return broken(name + " is there twice");
  const std::uint64_t bytes = round_up(entry.bytes, kVolumeExtentAlign);
  const auto [place, fresh] = used_.emplace(entry.offset, bytes);
  const auto next = std::next(place);
  const bool apart = fresh && (next == used_.end() || place->first + bytes <= next->first) &&
                     (place == used_.begin() || std::prev(place)->first + std::prev(place)->second <= place->first);
  if (!apart) return broken(name + " shares its range with another file");
  return {};
}

VolumeEntry RawVolume::make_entry(std::uint32_t number, EntryState state) const {
  VolumeEntry entry{};
  entry.magic = VolumeEntry::kMagic;
  entry.format_version = kVolumeVersion;
  entry.state = state;
  entry.volume = superblock_.uuid;
  entry.generation = entries_[number].generation + 1;
  entry.number = number;
  seal(entry);
  return entry;
}

Status RawVolume::write_entries(const std::vector<std::uint32_t>& numbers) {
  // Whole blocks: the neighbours of an entry are written again as they are, so that a torn write does not harm them.
  const std::uint64_t per_block = superblock_.block_bytes / sizeof(VolumeEntry);
  std::set<std::uint64_t> blocks;
  for (const std::uint32_t number : numbers) blocks.insert(number / per_block);
  std::vector<iovec> pieces;
  std::vector<std::uint64_t> offsets;
  for (const std::uint64_t directory : superblock_.directory_offset) {
    for (const std::uint64_t block : blocks) {
      pieces.push_back({entries_.data() + block * per_block, superblock_.block_bytes});
      offsets.push_back(directory + block * superblock_.block_bytes);
    }
  }
  std::vector<NamespaceRequest> requests(pieces.size());
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    requests[i] = {NamespaceRequest::Op::kWrite, offsets[i], {&pieces[i], 1}, 0};
  }
  if (!requests.empty()) device_.run(requests, {});
  for (const NamespaceRequest& request : requests) {
    if (request.error != 0) return errno_error(request.error, device_.name() + ": writing the volume's directory");
  }
  return device_.flush();
}

std::optional<VolumeExtent> RawVolume::find(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto known = by_name_.find(name);
  if (known == by_name_.end() || doubtful_.contains(known->second)) return std::nullopt;
  const VolumeEntry& entry = entries_[known->second];
  return VolumeExtent{entry.offset, entry.bytes};
}

std::vector<std::string> RawVolume::names() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> result;
  for (const auto& [name, number] : by_name_) result.push_back(name);
  return result;
}

std::uint64_t RawVolume::free_bytes() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t bytes = superblock_.data_bytes;
  for (const auto& [offset, used] : used_) bytes -= used;
  return bytes;
}

std::optional<std::uint64_t> RawVolume::first_fit(std::uint64_t bytes) const {
  std::uint64_t at = superblock_.data_offset;
  for (const auto& [offset, used] : used_) {
    if (offset - at >= bytes) return at;
    at = offset + used;
  }
  return superblock_.data_offset + superblock_.data_bytes - at >= bytes ? std::optional(at) : std::nullopt;
}

Result<std::uint32_t> RawVolume::free_entry() const {
  const auto entry = std::find_if(entries_.begin(), entries_.end(),
                                  [](const VolumeEntry& e) { return e.state != EntryState::kInUse; });
  if (entry != entries_.end()) return static_cast<std::uint32_t>(entry - entries_.begin());
  return Error{Code::kNoSpace, device_.name() + ": the volume's directory is full (" +
                                   std::to_string(superblock_.entries) + " files); use larger segments"};
}

Result<VolumeExtent> RawVolume::create(const std::string& name, std::uint64_t bytes, std::uint64_t zeros) {
  const std::lock_guard lock(mutex_);
  if (name.empty() || name.size() > sizeof(VolumeEntry::name) || bytes == 0) {
    return Error{Code::kInvalidArgument, "file " + name + " of " + std::to_string(bytes) +
                                             " bytes: expected a name of 1 to " +
                                             std::to_string(sizeof(VolumeEntry::name)) + " bytes, and at least 1 byte"};
  }
  if (const auto known = by_name_.find(name); known != by_name_.end()) {
    if (!doubtful_.contains(known->second)) return Error{Code::kInternal, name + ": is on the volume already"};
    if (Status status = free_entries({known->second}); !status) return status.error();
  }
  const std::uint64_t whole = round_up(bytes, kVolumeExtentAlign);
  const auto offset = whole >= bytes ? first_fit(whole) : std::nullopt;
  if (!offset) {
    return Error{Code::kNoSpace, device_.name() + ": no range of " + std::to_string(bytes) + " bytes is free of " +
                                     std::to_string(superblock_.data_bytes) + "; lower capacity"};
  }
  const auto number = free_entry();
  if (!number) return number.error();
  // What an earlier file left there must not be read as this one's. Flushed first: no reordering may let the entry be
  // durable and the zeros not.
  const std::uint64_t to_clear = round_up(std::min(zeros, bytes), superblock_.block_bytes);
  if (to_clear > 0) {
    if (Status status = write_zeros(device_, *offset, to_clear); !status) return status.error();
    if (Status status = device_.flush(); !status) return status.error();
  }
  VolumeEntry entry = make_entry(*number, EntryState::kInUse);
  entry.offset = *offset;
  entry.bytes = bytes;
  entry.name_bytes = static_cast<std::uint32_t>(name.size());
  std::copy(name.begin(), name.end(), entry.name.begin());
  seal(entry);
  entries_[*number] = entry;
  by_name_[name] = *number;
  used_[*offset] = whole;
  // If this fails the entry may be there or not: nothing else may use its range before it is known to be free.
  doubtful_.insert(*number);
  if (Status status = write_entries({*number}); !status) return status.error();
  doubtful_.erase(*number);
  return VolumeExtent{*offset, bytes};
}

Status RawVolume::remove(const std::vector<std::string>& names) {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint32_t> numbers;
  for (const std::string& name : names) {
    const auto known = by_name_.find(name);
    if (known != by_name_.end()) numbers.push_back(known->second);
  }
  return free_entries(numbers);
}

Status RawVolume::free_entries(const std::vector<std::uint32_t>& numbers) {
  if (numbers.empty()) return {};
  std::vector<VolumeEntry> before;
  for (const std::uint32_t number : numbers) {
    before.push_back(entries_[number]);
    entries_[number] = make_entry(number, EntryState::kFree);
    doubtful_.insert(number);
  }
  const Status written = write_entries(numbers);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const VolumeEntry& old = before[i];
    if (written) {
      // Only now: a range whose entry may still be durable is not given to another file.
      by_name_.erase(std::string(old.name.data(), old.name_bytes));
      used_.erase(old.offset);
      doubtful_.erase(numbers[i]);
    } else {
      // Newer than what may have been written, since a neighbour's change writes it again.
      const std::uint64_t generation = entries_[numbers[i]].generation + 1;
      entries_[numbers[i]] = old;
      entries_[numbers[i]].generation = generation;
      seal(entries_[numbers[i]]);
    }
  }
  return written;
}

}  // namespace tardis::nvme
