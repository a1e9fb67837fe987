// SPDX-License-Identifier: Apache-2.0
// A drive in memory that keeps a journal of everything that a store does to it: writes and flushes of segments, which
// go through a BlockDevice, and the names and small files of the store's folder, which go by plain system calls.
// crash_point.h makes from the journal what a power cut could have left.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "block/block_device.h"
#include "block_file.h"
#include "observed_calls.h"
#include "store/store.h"

namespace tardis::testing {

// A store's folder at one moment, by path below it: what a drive holds after a power cut.
struct FolderImage {
  std::map<std::string, BlockFile> segments;
  std::optional<BlockFile> raw;  // a raw namespace, which has the bytes of all segments; they are but names then
  std::map<std::string, std::string> texts;  // superblock, namespaces, checkpoint
};

inline constexpr ino_t kRawNamespace = 0;  // as a file of a drive; no file has this number

// "more": the further folder of a store that has one.
inline constexpr std::array<const char*, 5> kStoreFolders = {"", "segments", "namespaces", "more", "more/segments"};
inline bool holds_segments(std::string_view folder) { return folder.ends_with("segments"); }

// The same with inode numbers, so that a renamed or replaced file can be told from a changed one.
struct Drive {
  std::map<std::string, std::map<std::string, ino_t>> names;  // by folder
  std::map<ino_t, BlockFile> segments;
  std::map<ino_t, std::string> texts;
};

struct Event {
  enum class Kind {
    kWrite,       // of a segment, from `offset`
    kLength,      // a segment's blocks were reserved: `offset` is its length
    kFlush,       // a segment's writes and length up to here are durable
    kDamage,      // the medium itself changed: bit `offset` % 8 of byte `offset` / 8
    kText,        // a small file has these contents
    kSyncText,    // ... and they are durable
    kNames,       // a folder has these names
    kSyncFolder,  // ... and they are durable
  };
  Kind kind{};
  ino_t file = 0;
  std::uint64_t offset = 0;
  std::string data{};    // of kWrite, kText
  std::string folder{};  // of kNames, kSyncFolder
  std::map<std::string, ino_t> names{};
};

// The drive under one store's folder. The folder holds a real, empty file for each segment, so that the store sees its
// name; what is in the segment stays in memory. Small files are real files.
class RecordedDrive : public CallObserver {
 public:
  // Puts the image into `folder`, an existing empty one. With `record`, keeps a journal from then on. `durable`: what
  // of the image a power cut would leave, where that is less; so it is after a process was killed.
  RecordedDrive(std::string folder, const FolderImage& image, bool record, const FolderImage* durable = nullptr)
      : folder_(std::move(folder)) {
    for (const char* name : kStoreFolders) {
      if (*name != 0) make_folder(name);
    }
    for (const auto& [path, file] : image.segments) {
      std::ofstream(folder_ + "/" + path).flush();
      now_.segments[inode(path)] = file;
    }
    if (image.raw) now_.segments[kRawNamespace] = *image.raw;
    for (const auto& [path, text] : image.texts) {
      std::ofstream(folder_ + "/" + path, std::ios::binary)
          .write(text.data(), static_cast<std::streamsize>(text.size()));
    }
    if (!record) return;
    recording_ = true;
    observe();
    events_.clear();
    first_ = now_;
    if (durable != nullptr) owe(*durable);
    observe_calls(this);
  }
  ~RecordedDrive() override { stop(); }
  RecordedDrive(const RecordedDrive&) = delete;
  RecordedDrive& operator=(const RecordedDrive&) = delete;

  // Ends the journal; the drive goes on.
  void stop() {
    if (recording_) observe_calls(nullptr);
    const std::lock_guard lock(mutex_);
    if (recording_) observe();
    recording_ = false;
  }
  const std::string& folder() const { return folder_; }
  const Drive& first() const { return first_; }
  const std::vector<Event>& events() const { return events_; }  // after stop()
  std::size_t length() {
    const std::lock_guard lock(mutex_);
    return events_.size();
  }

  void before_call() override { after_call(); }
  void after_call() override {
    const std::lock_guard lock(mutex_);
    observe();
  }
  void synced(int file) override {
    struct stat status {};
    if (::fstat(file, &status) != 0) return;
    const std::string path = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(file));
    if (!path.starts_with(folder_)) return;
    const std::lock_guard lock(mutex_);
    if (S_ISDIR(status.st_mode)) {
      const std::string below = path.size() > folder_.size() ? path.substr(folder_.size() + 1) : "";
      events_.push_back({.kind = Event::Kind::kSyncFolder, .folder = below});
    } else {
      events_.push_back({.kind = Event::Kind::kSyncText, .file = status.st_ino});
    }
  }

  // Where the segments are on the raw namespace, by their paths below the folder.
  using Ranges = std::map<std::string, std::pair<std::uint64_t, std::uint64_t>>;  // offset, bytes
  void find_ranges_with(std::function<Ranges(const BlockFile&)> find) { find_ranges_ = std::move(find); }

  // From now on the drive says that it has flushed and has not: what a check must notice.
  void lie() { lying_ = true; }

  // Flips one bit of a segment, behind the back of the store.
  void damage(const std::string& segment, std::uint64_t bit) {
    const std::lock_guard lock(mutex_);
    const bool raw = now_.segments.contains(kRawNamespace);
    const ino_t file = raw ? kRawNamespace : inode(segment);
    if (raw) bit += find_ranges_(now_.segments[kRawNamespace]).at(segment).first * 8;
    flip_bit_of(now_.segments[file], bit);
    record({.kind = Event::Kind::kDamage, .file = file, .offset = bit});
  }

  // ---- for the device
  Result<ino_t> open_segment(const std::string& path, bool create) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | (create ? O_CREAT : 0), 0600);
    struct stat status {};
    if (fd < 0 || ::fstat(fd, &status) != 0) return errno_error(errno, path);
    ::close(fd);
    const std::lock_guard lock(mutex_);
    observe();
    now_.segments.try_emplace(status.st_ino);
    return status.st_ino;
  }
  void set_length(ino_t file, std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    observe();
    BlockFile& segment = now_.segments[file];
    if (bytes > segment.bytes()) segment.resize(bytes);
    record({.kind = Event::Kind::kLength, .file = file, .offset = bytes});
  }
  std::uint64_t segment_bytes(ino_t file) {
    const std::lock_guard lock(mutex_);
    return now_.segments[file].bytes();
  }
  void flush(ino_t file) {
    const std::lock_guard lock(mutex_);
    observe();
    if (!lying_) record({.kind = Event::Kind::kFlush, .file = file});
  }
  int transfer(bool read, std::uint64_t at, std::span<const iovec> memory, ino_t file) {
    const std::lock_guard lock(mutex_);
    BlockFile& segment = now_.segments[file];
    std::uint64_t bytes = 0;
    for (const iovec& piece : memory) bytes += piece.iov_len;
    if (at + bytes > segment.bytes()) {
      // A write would make a real file longer; the store reserves its segments first and never relies on that.
      return read ? ENODATA : EFBIG;
    }
    if (read) {
      for (const iovec& piece : memory) {
        segment.read(at, piece.iov_base, piece.iov_len);
        at += piece.iov_len;
      }
      return 0;
    }
    EXPECT_EQ(at % kSector + bytes % kSector, 0u) << "a write that does not begin and end at a sector";
    observe();
    std::string data;
    data.reserve(bytes);
    for (const iovec& piece : memory) data.append(static_cast<const char*>(piece.iov_base), piece.iov_len);
    segment.write(at, data.data(), data.size());
    record({.kind = Event::Kind::kWrite, .file = file, .offset = at, .data = std::move(data)});
    return 0;
  }

  // The segments as they are, by path; for looking at what the store wrote.
  std::map<std::string, BlockFile> segments() {
    const std::lock_guard lock(mutex_);
    std::map<std::string, BlockFile> result;
    const auto raw = now_.segments.find(kRawNamespace);
    const Ranges ranges = raw != now_.segments.end() ? find_ranges_(raw->second) : Ranges();
    for (const std::string folder : kStoreFolders) {
      if (!holds_segments(folder)) continue;
      for (const auto& [name, file] : list(folder)) {
        const std::string path = folder + "/" + name;
        const auto range = ranges.find(path);
        result[path] =
            range == ranges.end() ? now_.segments[file] : raw->second.slice(range->second.first, range->second.second);
      }
    }
    return result;
  }

 private:
  // Begins the journal with what leads from `durable` to what is there now.
  void owe(const FolderImage& durable) {
    ino_t gone = ino_t{1} << 60;  // for files that are no longer there
    first_ = {};
    const auto adopt = [&](const std::string& path) {
      const auto slash = path.rfind('/');
      const std::string folder = slash == std::string::npos ? "" : path.substr(0, slash);
      const std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
      const auto known = now_.names[folder].find(name);
      return first_.names[folder][name] = known != now_.names[folder].end() ? known->second : gone++;
    };
    for (const auto& [path, file] : durable.segments) first_.segments[adopt(path)] = file;
    if (durable.raw) first_.segments[kRawNamespace] = *durable.raw;
    for (const auto& [path, text] : durable.texts) first_.texts[adopt(path)] = text;
    for (const auto& [folder, names] : now_.names) {
      if (first_.names[folder] != names) record({.kind = Event::Kind::kNames, .folder = folder, .names = names});
    }
    std::set<ino_t> named;
    for (const auto& [folder, names] : now_.names) {
      for (const auto& [name, file] : names) {
        if (!name.ends_with(".new") && name != "LOCK") named.insert(file);
      }
    }
    for (const auto& [file, text] : now_.texts) {
      const auto before = first_.texts.find(file);
      if (before != first_.texts.end() && before->second == text) continue;
      // A file gets its name when it has been flushed (which sessions that begin on a whole drive check): only the name
      // may be lost.
      if (named.contains(file)) {
        first_.texts[file] = text;
        continue;
      }
      record({.kind = Event::Kind::kText, .file = file, .data = text});
    }
    for (const auto& [file, segment] : now_.segments) owe_segment(file, first_.segments[file], segment);
  }
  void owe_segment(ino_t file, const BlockFile& before, const BlockFile& now) {
    if (before.bytes() < now.bytes()) record({.kind = Event::Kind::kLength, .file = file, .offset = now.bytes()});
    std::array<char, kSector> old{}, fresh{};
    for (std::uint64_t at = 0; at < now.bytes(); at += kSector) {
      old.fill(0);
      if (at < before.bytes()) before.read(at, old.data(), kSector);
      now.read(at, fresh.data(), kSector);
      if (old == fresh) continue;
      if (!events_.empty() && events_.back().kind == Event::Kind::kWrite && events_.back().file == file &&
          events_.back().offset + events_.back().data.size() == at) {
        events_.back().data.append(fresh.data(), kSector);  // neighbours are one write
      } else {
        record({.kind = Event::Kind::kWrite, .file = file, .offset = at, .data = {fresh.data(), kSector}});
      }
    }
  }

  void make_folder(const std::string& name) { ::mkdir((folder_ + "/" + name).c_str(), 0700); }
  ino_t inode(const std::string& path) const {
    struct stat status {};
    EXPECT_EQ(::stat((folder_ + "/" + path).c_str(), &status), 0) << path;
    return status.st_ino;
  }
  void record(Event event) {
    if (recording_) events_.push_back(std::move(event));
  }

  std::map<std::string, ino_t> list(const std::string& name) const {
    std::map<std::string, ino_t> names;
    DIR* folder = ::opendir((folder_ + "/" + name).c_str());
    if (folder == nullptr) return names;
    while (const dirent* item = ::readdir(folder)) {
      if (item->d_type == DT_REG) names[item->d_name] = item->d_ino;
    }
    ::closedir(folder);
    return names;
  }

  // Notes what changed in the folder since the last look.
  void observe() {
    if (!recording_) return;
    for (const char* name : kStoreFolders) {
      std::map<std::string, ino_t> names = list(name);
      std::map<std::string, ino_t>& known = now_.names[name];
      if (names != known) {
        known = names;
        events_.push_back({.kind = Event::Kind::kNames, .folder = name, .names = std::move(names)});
      }
      if (holds_segments(name)) continue;
      for (const auto& [file, number] : known) {
        std::string text = contents(std::string(name) + "/" + file);
        const auto [known_text, fresh] = now_.texts.try_emplace(number);
        if (!fresh && known_text->second == text) continue;
        known_text->second = text;
        events_.push_back({.kind = Event::Kind::kText, .file = number, .data = std::move(text)});
      }
    }
  }
  std::string contents(const std::string& path) const {
    std::string text;
    const int fd = ::open((folder_ + "/" + path).c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return text;
    std::array<char, 16384> part;
    for (ssize_t got = 0; (got = ::read(fd, part.data(), part.size())) > 0;) {
      text.append(part.data(), static_cast<std::size_t>(got));
    }
    ::close(fd);
    return text;
  }

  const std::string folder_;
  std::mutex mutex_;
  std::function<Ranges(const BlockFile&)> find_ranges_;
  bool recording_ = false, lying_ = false;
  Drive first_, now_;
  std::vector<Event> events_;
};

// The store's side of a RecordedDrive. A store opened twice has two.
class RecordingDevice : public BlockDevice {
 public:
  explicit RecordingDevice(RecordedDrive& drive) : drive_(drive) {
    report_.engine = "memory";
    report_.offset_align = kSector;
    report_.logical_block = kSector;
    report_.filesystem = "test";
  }
  Result<FileId> open_file(const std::string& path, bool create, bool) override {
    auto opened = drive_.open_segment(path, create);
    if (!opened) return opened.error();
    const std::lock_guard lock(mutex_);
    files_[++last_] = *opened;
    return last_;
  }
  void close_file(FileId file) override {
    const std::lock_guard lock(mutex_);
    files_.erase(file);
  }
  Status preallocate(FileId file, std::uint64_t bytes) override {
    drive_.set_length(inode(file), bytes);
    return {};
  }
  Result<std::uint64_t> file_bytes(FileId file) override { return drive_.segment_bytes(inode(file)); }
  void run(std::span<IoRequest> requests, const Completion& on_complete) override {
    for (IoRequest& request : requests) {
      const bool read = request.op == IoRequest::Op::kRead;
      request.error = drive_.transfer(read, request.offset, request.memory, inode(request.file));
      if (on_complete) on_complete(request);
    }
  }
  Status flush(FileId file) override {
    drive_.flush(inode(file));
    return {};
  }
  IoGeometry geometry() const override { return {false, kSector, 1}; }
  const PathReport& report() const override { return report_; }
  BlockDeviceCounters counters() const override { return {}; }

 private:
  ino_t inode(FileId file) {
    const std::lock_guard lock(mutex_);
    return files_.at(file);
  }

  RecordedDrive& drive_;
  PathReport report_;
  std::mutex mutex_;
  FileId last_ = 0;
  std::map<FileId, ino_t> files_;
};

inline Store::DeviceFactory recorded(RecordedDrive& drive) {
  return [&drive](const std::string&, const BlockDeviceOptions&, int) -> Result<std::unique_ptr<BlockDevice>> {
    return std::unique_ptr<BlockDevice>(std::make_unique<RecordingDevice>(drive));
  };
}

}  // namespace tardis::testing
