// SPDX-License-Identifier: Apache-2.0
#include "store/folder.h"

#include <dirent.h>
#include <fcntl.h>
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

namespace tardis {
namespace {

constexpr const char* kSuperblockFile = "tardis.store";
constexpr const char* kLockFile = "LOCK";
constexpr const char* kSegmentsFolder = "segments";
constexpr const char* kNamespacesFolder = "namespaces";
constexpr const char* kSegmentSuffix = ".seg";
constexpr std::size_t kSuperblockFileBytes = 4096;

// KV is as private as the prompts it came from: folders and files are the owner's alone.
Status make_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) == 0 || errno == EEXIST) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) return errno_error(errno, path);
    if (!S_ISDIR(status.st_mode)) return Error{Code::kInvalidArgument, path + ": expected a folder, found a file"};
    return {};
  }
  return errno_error(errno, path + ": cannot create the store's folder");
}

Status make_folders(const std::string& path) {
  for (std::size_t at = path.find('/', 1); at != std::string::npos; at = path.find('/', at + 1)) {
    if (Status status = make_folder(path.substr(0, at)); !status) return status;
  }
  return make_folder(path);
}

Status sync_folder(const std::string& path) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) return errno_error(errno, path);
  if (::fsync(fd.get()) != 0) return errno_error(errno, path + ": fsync");
  return {};
}

Result<std::string> read_file(const std::string& path, std::size_t limit) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return errno_error(errno, path);
  std::string text(limit, '\0');
  std::size_t at = 0;
  while (at < limit) {
    const ssize_t got = ::pread(fd.get(), text.data() + at, limit - at, static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_error(errno, path);
    if (got == 0) break;
    at += static_cast<std::size_t>(got);
  }
  text.resize(at);
  return text;
}

Status write_file_durably(const std::string& folder, const std::string& name, const void* data, std::size_t bytes) {
  const std::string path = folder + "/" + name, fresh = path + ".new";
  UniqueFd fd(::open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!fd) return errno_error(errno, fresh);
  const auto* from = static_cast<const char*>(data);
  for (std::size_t at = 0; at < bytes;) {
    const ssize_t put = ::write(fd.get(), from + at, bytes - at);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return errno_error(errno, fresh);
    at += static_cast<std::size_t>(put);
  }
  if (::fsync(fd.get()) != 0) return errno_error(errno, fresh + ": fsync");
  if (::rename(fresh.c_str(), path.c_str()) != 0) return errno_error(errno, path);
  return sync_folder(folder);
}

Result<std::vector<std::string>> list_folder(const std::string& path) {
  const auto close_folder = [](DIR* folder) { ::closedir(folder); };
  std::unique_ptr<DIR, decltype(close_folder)> folder(::opendir(path.c_str()), close_folder);
  if (!folder) return errno_error(errno, path);
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* item = ::readdir(folder.get())) names.emplace_back(item->d_name);
  if (errno != 0) return errno_error(errno, path);
  return names;
}

struct flock whole_file(short type) {
  struct flock range {};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  return range;
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
  if (Status status = make_folder(path_ + "/" + kSegmentsFolder); !status) return status;
  return make_folder(path_ + "/" + kNamespacesFolder);
}

Status StoreFolder::lock() {
  const std::string file = path_ + "/" + kLockFile;
  UniqueFd fd(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!fd) return errno_error(errno, file + ": cannot open the store's lock");
  struct flock range = whole_file(F_WRLCK);
  // The rings of a process that was killed give the lock back a moment after it, when their I/O has ended.
  constexpr auto kPatience = std::chrono::seconds(2);
  const auto give_up = std::chrono::steady_clock::now() + kPatience;
  while (::fcntl(fd.get(), F_OFD_SETLK, &range) != 0) {
    if (errno == EAGAIN || errno == EACCES) {
      if (std::chrono::steady_clock::now() < give_up) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        continue;
      }
      const std::string by = owner();
      return Error{Code::kBusy, "path " + path_ + ": the store is in use" + (by.empty() ? "" : " by " + by) +
                                    "; one process serves a store: stop that process or give this one another path"};
    }
    return errno_error(errno, file + ": locking");
  }
  char host[256] = "unknown";
  ::gethostname(host, sizeof host - 1);
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char when[32];
  std::strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", &utc);
  const std::string text = "pid " + std::to_string(::getpid()) + " on " + host + " since " + when + "\n";
  if (::ftruncate(fd.get(), 0) != 0) return errno_error(errno, file);
  const ssize_t put = ::pwrite(fd.get(), text.data(), text.size(), 0);
  if (put < 0) return errno_error(errno, file);
  lock_ = std::move(fd);
  return {};
}

void StoreFolder::unlock() {
  if (!lock_) return;
  // Not by close() alone: a ring that is being torn down still holds the same file description.
  struct flock range = whole_file(F_UNLCK);
  ::fcntl(lock_.get(), F_OFD_SETLK, &range);
  lock_.reset();
}

std::string StoreFolder::owner() const {
  const std::string file = path_ + "/" + kLockFile;
  UniqueFd fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return {};
  struct flock range = whole_file(F_RDLCK);
  if (::fcntl(fd.get(), F_OFD_GETLK, &range) != 0 || range.l_type == F_UNLCK) return {};
  auto text = read_file(file, 512);
  if (!text || text->empty()) return "an unnamed process";
  return text->substr(0, text->find('\n'));
}

bool StoreFolder::has_superblock() const { return ::access((path_ + "/" + kSuperblockFile).c_str(), F_OK) == 0; }

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

std::string StoreFolder::segment_path(std::uint32_t id) const {
  char name[16];
  std::snprintf(name, sizeof name, "%06u", id);
  return path_ + "/" + kSegmentsFolder + "/" + name + kSegmentSuffix;
}

Result<std::map<std::uint32_t, std::string>> StoreFolder::segment_files() const {
  auto names = list_folder(path_ + "/" + kSegmentsFolder);
  if (!names) return names.error();
  std::map<std::uint32_t, std::string> files;
  for (const std::string& name : *names) {
    std::uint32_t id = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), id);
    if (error == std::errc() && std::string_view(end) == kSegmentSuffix) files[id] = segment_path(id);
  }
  return files;
}

Status StoreFolder::remove_segment(std::uint32_t id) {
  const std::string path = segment_path(id);
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) return errno_error(errno, path);
  return sync_segments_folder();
}

Status StoreFolder::sync_segments_folder() const { return sync_folder(path_ + "/" + kSegmentsFolder); }

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

Result<std::uint64_t> StoreFolder::free_bytes() const {
  auto status = filesystem(path_);
  if (!status) return status.error();
  return std::uint64_t{status->f_bavail} * status->f_frsize;
}

}  // namespace tardis
