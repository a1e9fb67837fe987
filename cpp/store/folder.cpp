// SPDX-License-Identifier: Apache-2.0
#include "store/folder.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>
#include <thread>

#include "store/byte_locks.h"
#include "store/checkpoint.h"
#include "store/files.h"

namespace tardis {
namespace {

constexpr const char* kNamespacesFolder = "namespaces";
constexpr std::size_t kSuperblockFileBytes = 4096;

// Which byte of the lock file stands for what; the text that names a byte's owner lies at byte * kOwnerBytes.
constexpr std::uint32_t kSetupByte = 0, kFirstProcessByte = 1, kLockBytes = kFirstProcessByte + kMaxProcesses;
constexpr std::size_t kOwnerBytes = 512;
// Behind them: which shared index is in use. All of it is allocated when the store is made, so that a full disk does
// not keep a process from opening it.
constexpr std::size_t kLiveOffset = kLockBytes * kOwnerBytes;
constexpr std::size_t kLockFileBytes = kLiveOffset + kOwnerBytes;
// Another process may be recovering a large store.
constexpr auto kSetupPatience = std::chrono::seconds(120);

std::string boot_id() {
  auto text = read_file("/proc/sys/kernel/random/boot_id", 64);
  return text ? text->substr(0, text->find('\n')) : "unknown";
}

Result<struct statvfs> filesystem(const std::string& path) {
  struct statvfs status {};
  if (::statvfs(path.c_str(), &status) != 0) return errno_error(errno, path + ": statvfs");
  return status;
}

}  // namespace

std::string hex(const std::uint8_t* bytes, std::size_t n) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (std::size_t i = 0; i < n; ++i) {
    text.push_back(kDigits[bytes[i] >> 4]);
    text.push_back(kDigits[bytes[i] & 15]);
  }
  return text;
}

std::string human_bytes(std::uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

Status StoreFolder::create_folders() {
  if (Status status = make_folders(path_); !status) return status;
  if (Status status = make_folder(paths_.segments_folder(0)); !status) return status;
  return make_folder(path_ + "/" + kNamespacesFolder);
}

Status StoreFolder::open_lock() {
  if (lock_) return {};
  const std::string file = path_ + "/" + kLockFile;
  UniqueFd fd(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!fd) return errno_error(errno, file + ": cannot open the store's lock");
  lock_ = std::move(fd);
  return {};
}

// Under the setup lock: what another process wrote there meanwhile must not be wiped.
Status StoreFolder::fill_lock_file() const {
  const std::string file = path_ + "/" + kLockFile;
  struct stat status {};
  if (::fstat(lock_.get(), &status) != 0) return errno_error(errno, file);
  const auto bytes = static_cast<std::size_t>(status.st_size);
  if (bytes >= kLockFileBytes) return {};
  const std::string zeros(kLockFileBytes - bytes, '\0');
  if (::pwrite(lock_.get(), zeros.data(), zeros.size(), status.st_size) != static_cast<ssize_t>(zeros.size())) {
    return errno_error(errno, file);
  }
  return {};
}

Status StoreFolder::sign(std::uint32_t byte) const {
  char host[256] = "unknown";
  ::gethostname(host, sizeof host - 1);
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char when[32];
  std::strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", &utc);
  std::string text = "pid " + std::to_string(::getpid()) + " on " + host + " since " + when + "\n";
  text.resize(kOwnerBytes, '\0');
  if (::pwrite(lock_.get(), text.data(), text.size(), static_cast<off_t>(byte * kOwnerBytes)) < 0) {
    return errno_error(errno, path_ + "/" + kLockFile);
  }
  return {};
}

Status StoreFolder::lock_setup() {
  if (Status status = open_lock(); !status) return status;
  const auto give_up = std::chrono::steady_clock::now() + kSetupPatience;
  while (true) {
    auto locked = try_lock(lock_.get(), F_WRLCK, kSetupByte, 1, path_ + "/" + kLockFile);
    if (!locked) return locked.error();
    if (*locked) {
      Status status = fill_lock_file();
      return status ? sign(kSetupByte) : status;
    }
    if (std::chrono::steady_clock::now() >= give_up) {
      return Error{Code::kBusy, "path " + path_ + ": the store is being opened, closed or verified by " + owner() +
                                    "; wait for that process, stop it, or give this one another path"};
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void StoreFolder::unlock_setup() { tardis::unlock(lock_.get(), kSetupByte, 1); }

Result<std::uint32_t> StoreFolder::lock_process() {
  for (std::uint32_t place = 0; place < kMaxProcesses; ++place) {
    auto locked = try_lock(lock_.get(), F_WRLCK, kFirstProcessByte + place, 1, path_ + "/" + kLockFile);
    if (!locked) return locked.error();
    if (!*locked) continue;
    if (Status status = sign(kFirstProcessByte + place); !status) return status.error();
    return place;
  }
  return Error{Code::kBusy, "path " + path_ + ": " + std::to_string(kMaxProcesses) +
                                " processes use the store, which is the most; give this one another path"};
}

bool StoreFolder::process_alive(std::uint32_t place) const {
  return held_by_another(lock_.get(), kFirstProcessByte + place, 1);
}

bool StoreFolder::any_process_alive() const { return held_by_another(lock_.get(), kFirstProcessByte, kMaxProcesses); }

bool StoreFolder::any_process_stays() const {
  char host[256] = "unknown";
  ::gethostname(host, sizeof host - 1);
  const auto killed = [&](std::uint32_t byte) {
    int pid = 0;
    char name[kOwnerBytes] = {};
    const bool named = std::sscanf(owner_of(byte, lock_.get()).c_str(), "pid %d on %511s since", &pid, name) == 2;
    return named && std::string_view(name) == host && ::kill(pid, 0) != 0 && errno == ESRCH;
  };
  const auto give_up = std::chrono::steady_clock::now() + kKilledPatience;
  while (any_process_alive()) {
    bool all_killed = true;
    for (std::uint32_t place = 0; place < kMaxProcesses; ++place) {
      if (process_alive(place)) all_killed = all_killed && killed(kFirstProcessByte + place);
    }
    if (!all_killed || std::chrono::steady_clock::now() >= give_up) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

Status StoreFolder::lock_alone() {
  if (Status status = lock_setup(); !status) return status;
  const auto give_up = std::chrono::steady_clock::now() + kKilledPatience;
  while (any_process_alive()) {
    if (std::chrono::steady_clock::now() >= give_up) {
      const std::string by = owner();
      unlock();
      return Error{Code::kBusy, "path " + path_ + ": the store is in use by " + by +
                                    "; this needs the store for itself: stop that process first"};
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return {};
}

void StoreFolder::unlock() {
  paths_.unlock();
  if (!lock_) return;
  // Not by close() alone: a ring that is being torn down still holds the same file description.
  tardis::unlock(lock_.get(), 0, kLockBytes);
  lock_.reset();
}

std::string StoreFolder::owner_of(std::uint32_t byte, int fd) const {
  char text[kOwnerBytes + 1] = {};
  if (::pread(fd, text, kOwnerBytes, static_cast<off_t>(byte * kOwnerBytes)) <= 0) return "an unnamed process";
  const std::string line(text);
  return line.substr(0, line.find('\n'));
}

std::string StoreFolder::owner() const {
  const std::string file = path_ + "/" + kLockFile;
  UniqueFd fd(::open(file.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) fd.reset(::open(file.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return {};
  std::string all;
  for (std::uint32_t byte = 0; byte < kLockBytes; ++byte) {
    if (!held_by_another(fd.get(), byte, 1)) continue;
    const std::string one = owner_of(byte, fd.get());
    if (all.find(one) == std::string::npos) all += (all.empty() ? "" : "; ") + one;
  }
  return all;
}

Result<LiveIdentity> StoreFolder::live_identity() const {
  const std::string file = path_ + "/" + kSuperblockFile;
  struct stat status {};
  if (::stat(file.c_str(), &status) != 0) return errno_error(errno, file);
  return LiveIdentity{superblock_.uuid, status.st_dev, status.st_ino};
}

Status StoreFolder::write_live(const std::string& file_id) const {
  std::string text = file_id + "\n" + boot_id() + "\n";
  text.resize(kOwnerBytes, '\0');
  if (::pwrite(lock_.get(), text.data(), text.size(), kLiveOffset) != static_cast<ssize_t>(text.size())) {
    return errno_error(errno, path_ + "/" + kLockFile);
  }
  return {};
}

Status StoreFolder::check_live(const std::string& file_id) const {
  char bytes[kOwnerBytes + 1] = {};
  if (::pread(lock_.get(), bytes, kOwnerBytes, kLiveOffset) < 0) return errno_error(errno, path_ + "/" + kLockFile);
  const std::string text(bytes);
  if (text == file_id + "\n" + boot_id() + "\n") return {};
  const bool same_boot = text.find(boot_id()) != std::string::npos;
  return Error{Code::kBusy, "path " + path_ + ": in use by " + owner() + " through another shared index (" +
                                text.substr(0, text.find('\n')) + ", here " + file_id + "): " +
                                (same_boot ? "another container with its own /dev/shm; share it (docker: --ipc), "
                                           : "another machine; a store serves one, ") +
                                "or give this process another path"};
}

std::string StoreFolder::checkpoint_path() const { return path_ + "/" + kCheckpointFile; }

Status StoreFolder::remove_checkpoint() const {
  if (::unlink(checkpoint_path().c_str()) != 0 && errno != ENOENT) return errno_error(errno, checkpoint_path());
  return sync_folder(path_);
}

bool StoreFolder::has_superblock() const { return ::access((path_ + "/" + kSuperblockFile).c_str(), F_OK) == 0; }

Status StoreFolder::check_device(const BlockDevice* device) const {
  const std::string file = path_ + "/" + kVolumeFile;
  if ((device != nullptr && device->room()) || ::access(file.c_str(), F_OK) != 0) return {};
  // Empty: a raw namespace was tried here, and refused.
  if (const auto start = read_file(file, 1); start && (start->empty() || start->front() == 0)) return {};
  return Error{Code::kInvalidArgument, path_ + ": this store has its segments on a raw namespace (" + kVolumeFile +
                                           " says which); open it with that namespace"};
}

Status StoreFolder::read_superblock() {
  const std::string file = path_ + "/" + kSuperblockFile;
  auto bytes = read_file(file, kSuperblockFileBytes);
  if (!bytes) return bytes.error();
  if (bytes->size() < sizeof superblock_) {
    return Error{Code::kCorrupt, file + ": expected " + std::to_string(kSuperblockFileBytes) + " bytes, found " +
                                     std::to_string(bytes->size())};
  }
  std::memcpy(&superblock_, bytes->data(), sizeof superblock_);
  if (superblock_.magic != StoreSuperblock::kMagic) {
    return Error{Code::kCorrupt, file + ": not a tardis store; choose another path, or move the file away"};
  }
  if (superblock_.format_version > kFormatVersion) {
    return Error{Code::kUnsupportedFormat, file + ": format version " + std::to_string(superblock_.format_version) +
                                               ", this release reads up to " + std::to_string(kFormatVersion) +
                                               "; upgrade sglang-tardis or choose another path (nothing was changed)"};
  }
  if (!sealed(superblock_)) {
    return Error{Code::kCorrupt, file + ": fails its checksum; restore it from a backup or choose another path"};
  }
  const StoreSuperblock& s = superblock_;
  const bool sane = s.format_version == kFormatVersion && s.chunk_bytes == kChunkBytes &&
                    s.segment_bytes >= kMinSegmentBytes && s.segment_bytes <= kMaxSegmentBytes &&
                    s.segment_bytes % kTableBlockBytes == 0 && s.capacity_bytes >= s.segment_bytes + kMetadataBytes &&
                    s.block_bytes >= 512 && s.block_bytes <= kTableBlockBytes &&
                    (s.block_bytes & (s.block_bytes - 1)) == 0;
  if (!sane) return Error{Code::kCorrupt, file + ": contradicts itself"};
  return {};
}

Status StoreFolder::write_superblock(const StoreSuperblock& superblock) {
  superblock_ = superblock;
  superblock_.magic = StoreSuperblock::kMagic;
  superblock_.format_version = kFormatVersion;
  superblock_.chunk_bytes = kChunkBytes;
  seal(superblock_);
  char block[kSuperblockFileBytes] = {};
  std::memcpy(block, &superblock_, sizeof superblock_);
  return write_file_durably(path_, kSuperblockFile, block, sizeof block);
}

std::string StoreFolder::segment_path(SegmentName name) const {
  char file[16];
  std::snprintf(file, sizeof file, "%06u", name.number);
  return paths_.segments_folder(name.path) + "/" + file + kSegmentSuffix;
}

Result<std::map<SegmentName, std::string>> StoreFolder::segment_files(std::uint32_t path) const {
  std::map<SegmentName, std::string> files;
  auto names = list_folder(paths_.segments_folder(path));
  if (!names) return names.error();
  for (const std::string& name : *names) {
    std::uint32_t number = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
    if (error != std::errc() || std::string_view(end) != kSegmentSuffix || number >= kMaxSegments) continue;
    files[{path, number}] = segment_path({path, number});
  }
  return files;
}

Result<std::map<SegmentName, std::string>> StoreFolder::segment_files() const {
  std::map<SegmentName, std::string> all;
  for (std::uint32_t path = 0; path < kMaxPaths; ++path) {
    if (!paths_[path].present) continue;
    auto files = segment_files(path);
    if (!files) return files.error();
    all.merge(*files);
  }
  return all;
}

std::uint32_t number_for_next_segment(const std::map<SegmentName, std::string>& files) {
  constexpr std::uint32_t kEnough = 65536;  // of segments that are made before the store is next opened
  std::uint32_t end = 0, gap = 0, gap_size = 0;
  for (const auto& [name, path] : files) {
    if (name.number - end > gap_size) {
      gap = end;
      gap_size = name.number - end;
    }
    end = name.number + 1;
  }
  return kMaxSegments - end >= kEnough || gap_size < kEnough ? end : gap;
}

std::string StoreFolder::stripe_path(SegmentName segment, std::uint32_t path) const {
  char file[32];
  std::snprintf(file, sizeof file, "%06u-%02u", segment.number, segment.path);
  return paths_.segments_folder(path) + "/" + file + kStripeSuffix;
}

Result<std::map<SegmentName, std::string>> StoreFolder::stripe_files(std::uint32_t path) const {
  std::map<SegmentName, std::string> files;
  auto names = list_folder(paths_.segments_folder(path));
  if (!names) return names.error();
  for (const std::string& name : *names) {
    SegmentName of;
    const char* const end = name.data() + name.size();
    const auto number = std::from_chars(name.data(), end, of.number);
    if (number.ec != std::errc() || number.ptr == end || *number.ptr != '-') continue;
    const auto own = std::from_chars(number.ptr + 1, end, of.path);
    if (own.ec != std::errc() || std::string_view(own.ptr) != kStripeSuffix || of.path >= kMaxPaths ||
        of.number >= kMaxSegments) {
      continue;
    }
    files[of] = stripe_path(of, path);
  }
  return files;
}

Status StoreFolder::remove_file(const std::string& file) const {
  if (::unlink(file.c_str()) != 0 && errno != ENOENT) return errno_error(errno, file);
  return {};
}

// Its own file first: a crash leaves stripes of nothing, which the next recovery removes.
Status StoreFolder::remove_segment(SegmentName name) const {
  Status result;
  if (paths_[name.path].present) {
    result = remove_file(segment_path(name));
    if (result) result = sync_segments_folder(name.path);
  }
  for (std::uint32_t path = 0; path < kMaxPaths; ++path) {
    if (path == name.path || !paths_[path].present) continue;
    const std::string file = stripe_path(name, path);
    if (::access(file.c_str(), F_OK) != 0) continue;
    Status status = remove_file(file);
    if (status) status = sync_segments_folder(path);
    if (!status) result = status;
  }
  return result;
}

Status StoreFolder::sync_segments_folder(std::size_t path) const { return sync_folder(paths_.segments_folder(path)); }

Status StoreFolder::describe_namespace(const Fingerprint& fingerprint, const std::string& description) {
  const std::string folder = path_ + "/" + kNamespacesFolder;
  const std::string name = hex(fingerprint.data(), fingerprint.size()) + ".json";
  const std::string path = folder + "/" + name;
  if (::access(path.c_str(), F_OK) == 0) {
    auto found = read_file(path, description.size() + 1);
    if (!found) return found.error();
    if (*found == description) return {};
    // A crash can leave an empty or partial file behind only under its temporary name, so a difference is a foreign
    // text.
    return Error{Code::kInvalidArgument,
                 path +
                     ": describes another namespace under the same fingerprint; move the file away "
                     "only if it was edited by hand"};
  }
  return write_file_durably(folder, name, description.data(), description.size());
}

Result<std::map<std::string, std::string>> StoreFolder::namespaces() const {
  const std::string folder = path_ + "/" + kNamespacesFolder;
  auto names = list_folder(folder);
  if (!names) return names.error();
  std::map<std::string, std::string> result;
  for (const std::string& name : *names) {
    if (name.size() != 2 * sizeof(Fingerprint) + 5 || !name.ends_with(".json")) continue;
    auto text = read_file(folder + "/" + name, 1u << 20);
    if (text) result[name.substr(0, name.size() - 5)] = *text;
  }
  return result;
}

Result<std::uint64_t> StoreFolder::free_bytes(std::size_t path) const {
  auto status = filesystem(paths_[path].folder);
  if (!status) return status.error();
  return std::uint64_t{status->f_bavail} * status->f_frsize;
}

}  // namespace tardis
