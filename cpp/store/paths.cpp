// SPDX-License-Identifier: Apache-2.0
#include "store/paths.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "store/files.h"

namespace tardis {
namespace {

constexpr const char* kPathsFile = "tardis.paths";
constexpr const char* kMarkerFile = "tardis.path";
constexpr const char* kSegmentsFolder = "segments";
constexpr const char* kLockFile = "LOCK";
constexpr std::size_t kMarkerFileBytes = 4096;
// A process that was killed gives its locks back when its I/O in flight has ended.
constexpr auto kKilledPatience = std::chrono::seconds(2);

// PathMarker::turn
constexpr std::uint64_t next_turn(std::uint64_t turn) { return (turn | 1) + 1; }

bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

// Nothing: there is no marker.
Result<std::optional<PathMarker>> read_marker(const std::string& folder) {
  const std::string file = folder + "/" + kMarkerFile;
  auto bytes = read_file(file, kMarkerFileBytes);
  if (!bytes) {
    if (bytes.error().code == Code::kNotFound) return std::optional<PathMarker>();
    return bytes.error();
  }
  PathMarker marker;
  if (bytes->size() < sizeof marker) return Error{Code::kCorrupt, file + ": too short"};
  std::memcpy(&marker, bytes->data(), sizeof marker);
  if (!sealed(marker)) return Error{Code::kCorrupt, file + ": fails its checksum"};
  if (marker.format_version != kFormatVersion) {
    return Error{Code::kUnsupportedFormat, file + ": format version " + std::to_string(marker.format_version) +
                                               ", this release reads " + std::to_string(kFormatVersion)};
  }
  return std::optional(marker);
}

bool is_segment_file(const std::string& name) { return name.ends_with(".seg") || name.ends_with(".part"); }

// Removes every file of a segment or of its stripes, durably; other files are not the store's.
Status empty_segments(const std::string& folder) {
  const std::string segments = folder + "/" + kSegmentsFolder;
  auto names = list_folder(segments);
  if (!names) return names.error();
  for (const std::string& name : *names) {
    if (!is_segment_file(name)) continue;
    const std::string file = segments + "/" + name;
    if (::unlink(file.c_str()) != 0 && errno != ENOENT) return errno_error(errno, file);
  }
  return sync_folder(segments);
}

bool same_folder(const std::string& a, const std::string& b) {
  struct stat one {
  }, other{};
  if (a == b) return true;
  return ::stat(a.c_str(), &one) == 0 && ::stat(b.c_str(), &other) == 0 && one.st_dev == other.st_dev &&
         one.st_ino == other.st_ino;
}

std::string parent_folder(const std::string& path) {
  const std::size_t at = path.find_last_of('/');
  return at == std::string::npos ? "." : at == 0 ? "/" : path.substr(0, at);
}

std::string joined(const std::vector<std::string>& folders) {
  std::string text;
  for (const std::string& folder : folders) text += (text.empty() ? "" : ", ") + folder;
  return text;
}

Error setting_error(const std::string& folder, const std::string& problem) {
  return Error{Code::kInvalidArgument, "path: " + folder + ": " + problem};
}

}  // namespace

StorePaths::StorePaths(std::string home) : paths_(kMaxPaths), locks_(kMaxPaths) {
  paths_[0] = {std::move(home), {}, kPathKnown, true, {}, 0};
}

std::size_t StorePaths::known() const {
  return static_cast<std::size_t>(
      std::count_if(paths_.begin(), paths_.end(), [](const StorePath& path) { return path.flags != 0; }));
}

std::string StorePaths::text() const {
  std::vector<std::string> folders;
  for (const StorePath& path : paths_) {
    if (path.flags != 0) folders.push_back(path.folder);
  }
  return joined(folders);
}

std::vector<std::string> StorePaths::more_present() const {
  std::vector<std::string> folders;
  for (std::size_t path = 1; path < kMaxPaths; ++path) {
    if (paths_[path].present) folders.push_back(paths_[path].folder);
  }
  return folders;
}

std::vector<std::string> StorePaths::missing() const {
  std::vector<std::string> lines;
  for (const StorePath& path : paths_) {
    if (path.flags != 0 && !path.present) lines.push_back("path " + path.folder + ": " + path.problem);
  }
  return lines;
}

std::string StorePaths::segments_folder(std::size_t path) const { return paths_[path].folder + "/" + kSegmentsFolder; }

Status StorePaths::load(const Uuid& store) {
  store_ = store;
  const std::string file = paths_[0].folder + "/" + kPathsFile;
  auto bytes = read_file(file, sizeof(PathsFile));
  if (!bytes) {
    if (bytes.error().code == Code::kNotFound) return {};
    return bytes.error();
  }
  const auto list = std::make_unique<PathsFile>();
  if (bytes->size() == sizeof *list) std::memcpy(list.get(), bytes->data(), sizeof *list);
  if (bytes->size() != sizeof *list || !sealed(*list) || list->store_uuid != store) {
    return Error{Code::kCorrupt, file +
                                     ": not the list of this store's folders; delete it to go on without the "
                                     "further folders (they can be named again, and then start empty)"};
  }
  if (list->format_version != kFormatVersion) {
    return Error{Code::kUnsupportedFormat, file + ": format version " + std::to_string(list->format_version) +
                                               ", this release reads " + std::to_string(kFormatVersion)};
  }
  for (std::size_t path = 1; path < kMaxPaths; ++path) {
    const PathEntry& entry = list->entries[path - 1];
    const std::size_t length = std::min<std::size_t>(entry.folder_bytes, entry.folder.size());
    paths_[path] = {std::string(entry.folder.data(), length), entry.uuid, entry.flags, false, {}, entry.turn};
    if (entry.flags != 0) look(path);
  }
  return {};
}

Status StorePaths::save() const {
  const auto list = std::make_unique<PathsFile>();
  list->magic = PathsFile::kMagic;
  list->format_version = kFormatVersion;
  list->store_uuid = store_;
  for (std::size_t path = 1; path < kMaxPaths; ++path) {
    PathEntry& entry = list->entries[path - 1];
    if (paths_[path].flags == 0) continue;
    entry.uuid = paths_[path].uuid;
    entry.flags = paths_[path].flags;
    entry.turn = paths_[path].turn;
    entry.folder_bytes = static_cast<std::uint32_t>(paths_[path].folder.size());
    std::copy(paths_[path].folder.begin(), paths_[path].folder.end(), entry.folder.begin());
  }
  seal(*list);
  return write_file_durably(paths_[0].folder, kPathsFile, list.get(), sizeof *list);
}

void StorePaths::look(std::size_t path) {
  StorePath& own = paths_[path];
  const auto marker = read_marker(own.folder);
  own.present = marker && *marker && (*marker)->store_uuid == store_ && (*marker)->path_uuid == own.uuid;
  own.problem = own.present ? ""
                : !marker   ? marker.error().message
                : !*marker  ? "no " + std::string(kMarkerFile) + " there (not mounted?)"
                            : "belongs to another store, or was emptied and made anew";
}

// The numbers of those that the store knows; the others are `unknown`.
Result<std::vector<std::size_t>> StorePaths::match_known(const std::vector<std::string>& wanted,
                                                         std::vector<std::string>& unknown) {
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const std::string& folder = wanted[i];
    if (folder.empty() || folder.front() != '/') return setting_error(folder, "expected an absolute name");
    if (folder.size() > sizeof(PathEntry::folder)) {
      return setting_error(folder, "expected at most " + std::to_string(sizeof(PathEntry::folder)) + " bytes");
    }
    if (same_folder(folder, paths_[0].folder)) {
      return setting_error(folder, "is the store's own folder, " + paths_[0].folder + "; name it once");
    }
    for (std::size_t k = 0; k < i; ++k) {
      if (same_folder(folder, wanted[k])) return setting_error(folder, "is named twice (" + wanted[k] + ")");
    }
  }
  // By their markers first: a drive may be mounted in another's place, and then a name says nothing.
  const std::vector<StorePath> before = paths_;
  std::vector<std::size_t> known;
  std::vector<std::string> unmarked;
  const auto is_known = [&](std::size_t path) { return std::find(known.begin(), known.end(), path) != known.end(); };
  for (const std::string& folder : wanted) {
    const auto marker = read_marker(folder);
    if (!marker || !*marker) {
      unmarked.push_back(folder);
      continue;
    }
    if ((*marker)->store_uuid != store_) {
      return setting_error(folder, "is part of another store; name another folder, or empty this one");
    }
    const auto number = by_uuid((*marker)->path_uuid);
    if (!number) {
      unknown.push_back(folder);
      continue;
    }
    if (is_known(*number)) return setting_error(folder, "is a copy of another folder of this store; name one of them");
    paths_[*number].folder = folder;
    known.push_back(*number);
  }
  for (const std::string& folder : unmarked) {
    const auto of_name = [&](std::size_t path) { return before[path].flags != 0 && before[path].folder == folder; };
    std::optional<std::size_t> number;
    for (std::size_t path = 1; path < kMaxPaths; ++path) {
      if (of_name(path)) number = path;
    }
    if (number && is_known(*number)) {
      // That one was found in another place, so this may be the place of one that was not.
      for (std::size_t path = 1; path < kMaxPaths; ++path) {
        const bool wanted_by_name = std::find(wanted.begin(), wanted.end(), before[path].folder) != wanted.end();
        if (before[path].flags != 0 && !is_known(path) && wanted_by_name) number = path;
      }
      if (is_known(*number)) number.reset();
    }
    if (!number) {
      if (const auto marker = read_marker(folder); !marker) {
        if (marker.error().code != Code::kCorrupt) return marker.error();
        return setting_error(folder, marker.error().message + "; empty the folder to use it anew");
      }
      unknown.push_back(folder);
      continue;
    }
    paths_[*number].folder = folder;
    known.push_back(*number);
  }
  return known;
}

std::optional<std::size_t> StorePaths::by_uuid(const Uuid& uuid) const {
  for (std::size_t path = 1; path < kMaxPaths; ++path) {
    if (paths_[path].flags != 0 && paths_[path].uuid == uuid) return path;
  }
  return std::nullopt;
}

Status StorePaths::add(const std::string& folder) {
  const auto place = std::find_if(paths_.begin(), paths_.end(), [](const StorePath& path) { return path.flags == 0; });
  if (place == paths_.end()) {
    return setting_error(folder, "a store has at most " + std::to_string(kMaxPaths - 1) + " folders beside its own");
  }
  const std::string segments = folder + "/" + kSegmentsFolder;
  if (exists(folder + "/tardis.store")) return setting_error(folder, "is a store of its own; name another folder");
  if (Status status = make_folders(segments); !status) return status;
  auto marker = read_marker(folder);
  if (!marker) return marker.error();
  if (!*marker) {
    auto names = list_folder(segments);
    if (!names) return names.error();
    if (std::any_of(names->begin(), names->end(), is_segment_file)) {
      return setting_error(
          folder, "has segment files but no " + std::string(kMarkerFile) + "; restore that file, or empty the folder");
    }
  }
  // It was part of this store and then forgotten: pages may have been deleted since.
  if (Status status = empty_segments(folder); !status) return status;
  StorePath fresh{folder, {}, kPathKnown, true, {}, 2};
  if (::getrandom(fresh.uuid.data(), fresh.uuid.size(), 0) != static_cast<ssize_t>(fresh.uuid.size())) {
    return errno_error(errno, "getrandom");
  }
  *place = fresh;
  // The marker before the list: a crash between them leaves a folder that starts empty, not one that is missing.
  if (Status status = write_marker(static_cast<std::size_t>(place - paths_.begin()), fresh.turn); !status) {
    return status;
  }
  return sync_folder(parent_folder(folder));
}

Status StorePaths::write_marker(std::size_t path, std::uint64_t turn) const {
  PathMarker marker{};
  marker.magic = PathMarker::kMagic;
  marker.format_version = kFormatVersion;
  marker.store_uuid = store_;
  marker.path_uuid = paths_[path].uuid;
  marker.turn = turn;
  seal(marker);
  char block[kMarkerFileBytes] = {};
  std::memcpy(block, &marker, sizeof marker);
  return write_file_durably(paths_[path].folder, kMarkerFile, block, sizeof block);
}

Status StorePaths::lock(std::size_t path, bool alone) {
  const std::string file = paths_[path].folder + "/" + kLockFile;
  UniqueFd& fd = locks_[path];
  fd.reset(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
  if (!fd) return errno_error(errno, file);
  const auto give_up = std::chrono::steady_clock::now() + kKilledPatience;
  while (true) {
    struct flock range {};
    range.l_type = alone ? F_WRLCK : F_RDLCK;
    range.l_whence = SEEK_SET;
    if (::fcntl(fd.get(), F_OFD_SETLK, &range) == 0) break;
    if (errno != EAGAIN && errno != EACCES) return errno_error(errno, file + ": locking");
    if (std::chrono::steady_clock::now() >= give_up) {
      return Error{Code::kBusy, "path " + paths_[path].folder +
                                    ": a process uses it that has come to it by another copy of " + paths_[0].folder +
                                    "; a store has one folder of its own: stop that process, and delete the copy"};
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (!alone) return {};
  struct flock range {};  // from now on others of this store may come too
  range.l_type = F_RDLCK;
  range.l_whence = SEEK_SET;
  if (::fcntl(fd.get(), F_OFD_SETLK, &range) != 0) return errno_error(errno, file + ": locking");
  return {};
}

Status StorePaths::lock_alone() {
  for (std::size_t path = 1; path < kMaxPaths; ++path) {
    if (!paths_[path].present) continue;
    if (Status status = lock(path, /*alone=*/true); !status) return status;
  }
  return {};
}

void StorePaths::unlock() {
  for (UniqueFd& fd : locks_) fd.reset();
}

// Whether the folder is of the same moment as the list.
void StorePaths::judge_turn(std::size_t path, std::vector<std::string>& notes) {
  StorePath& own = paths_[path];
  const auto marker = read_marker(own.folder);
  const std::uint64_t there = marker && *marker ? (*marker)->turn : 0;
  if (there > own.turn + 1) {
    own.present = false;
    own.problem = "was used since by another copy of " + paths_[0].folder;
  } else if (there + 1 < own.turn && (own.flags & kPathStale) == 0) {
    own.flags |= kPathStale;
    notes.push_back("path " + own.folder + ": was put back from an older copy, which may hold what was deleted since");
  }
}

// Of every path that is there.
Status StorePaths::take_turns() {
  for (std::size_t path = 1; path < kMaxPaths; ++path) {
    StorePath& own = paths_[path];
    if (!own.present) continue;
    const auto marker = read_marker(own.folder);
    const std::uint64_t next = next_turn(std::max(own.turn, marker && *marker ? (*marker)->turn : 0));
    if (Status status = write_marker(path, next - 1); !status) {
      own.present = false;
      own.flags |= kPathAway;
      own.problem = status.error().message;
      continue;
    }
    own.turn = next;
  }
  if (Status status = save(); !status) return status;
  for (std::size_t path = 1; path < kMaxPaths; ++path) {
    if (paths_[path].present) (void)write_marker(path, paths_[path].turn);  // as after a crash, if it fails
  }
  return {};
}

Status StorePaths::settle(const std::optional<std::vector<std::string>>& wanted, const Uuid& store,
                          const Usable& usable, const std::function<Status()>& before_change,
                          std::vector<std::string>& notes) {
  store_ = store;
  const std::vector<StorePath> before = paths_;
  std::vector<std::string> unknown;
  if (wanted) {
    auto known = match_known(*wanted, unknown);
    if (!known) return known.error();
    bool changes = !unknown.empty();
    for (std::size_t path = 1; path < kMaxPaths; ++path) {
      if (paths_[path].flags == 0 || std::find(known->begin(), known->end(), path) != known->end()) continue;
      notes.push_back("path " + paths_[path].folder + ": named no longer, and forgotten; what it holds can be deleted");
      paths_[path] = {};
      changes = true;
    }
    if (changes) {
      if (Status status = before_change(); !status) return status;
    }
  }
  for (const std::string& folder : unknown) {
    Status status = add(folder);
    if (status) status = usable(folder);
    if (!status) return Error{status.error().code, "path: " + folder + ": " + status.error().message};
  }
  for (std::size_t path = 1; path < kMaxPaths; ++path) {
    StorePath& own = paths_[path];
    if (own.flags == 0) continue;
    look(path);
    if (own.present) judge_turn(path, notes);
    if (own.present) {
      if (Status status = lock(path, /*alone=*/true); !status && status.error().code == Code::kBusy) return status;
      Status status = usable(own.folder);
      if (status && (own.flags & kPathStale) != 0) {
        status = empty_segments(own.folder);
        if (status) notes.push_back("path " + own.folder + ": pages were deleted while it was away; starts empty");
      }
      if (!status) {
        own.present = false;
        own.problem = status.error().message;
      }
    }
    if (own.present) {
      own.flags &= ~std::uint32_t{kPathStale};
    } else {
      own.flags |= kPathAway;
      notes.push_back("path " + own.folder + ": left out, and what it holds is not found: " + own.problem);
    }
  }
  const bool any_further = std::any_of(before.begin() + 1, before.end(), [](const auto& a) { return a.flags != 0; });
  return any_further || known() > 1 ? take_turns() : Status();
}

Status StorePaths::welcome_back(const std::function<bool(std::uint32_t path)>& in_use) {
  bool changes = false;
  for (std::uint32_t path = 1; path < kMaxPaths; ++path) {
    if (!in_use(path) || (paths_[path].flags & kPathAway) == 0) continue;
    paths_[path].flags &= ~std::uint32_t{kPathAway};
    changes = true;
  }
  return changes ? save() : Status();
}

Status StorePaths::match(const std::optional<std::vector<std::string>>& wanted, const Usable& usable) {
  const std::string theirs = text();
  if (wanted) {
    std::vector<std::string> unknown;
    auto known = match_known(*wanted, unknown);
    if (!known) return known.error();
    if (!unknown.empty() || known->size() + 1 != this->known()) {
      return Error{Code::kInvalidArgument, "path: the store at " + paths_[0].folder + " is in use with " + theirs +
                                               ", the configuration of this process says " + paths_[0].folder +
                                               (wanted->empty() ? "" : ", " + joined(*wanted)) +
                                               "; all processes of a store name the same folders"};
    }
  }
  for (std::size_t path = 1; path < kMaxPaths; ++path) {
    if (paths_[path].flags == 0) continue;
    look(path);
    if (!paths_[path].present) continue;
    Status status = lock(path, /*alone=*/false);
    if (status) status = usable(paths_[path].folder);
    if (status) continue;
    paths_[path].present = false;
    paths_[path].problem = status.error().message;
  }
  return {};
}

Result<std::vector<std::uint32_t>> StorePaths::deleted(const std::function<bool(std::uint32_t path)>& in_use) const {
  StorePaths now(paths_[0].folder);  // another process may have written the list since
  if (Status status = now.load(store_); !status) return status.error();
  std::vector<std::uint32_t> failed, written;
  for (std::uint32_t path = 1; path < kMaxPaths; ++path) {
    StorePath& own = now.paths_[path];
    if (own.flags == 0) continue;
    own.folder = paths_[path].folder;  // as this process sees it
    if (in_use(path)) {
      if (now.write_marker(path, next_turn(own.turn) - 1)) {
        own.turn = next_turn(own.turn);
        written.push_back(path);
        continue;
      }
      failed.push_back(path);
    }
    own.flags |= kPathStale;
  }
  if (Status status = now.save(); !status) return status.error();
  for (const std::uint32_t path : written) (void)now.write_marker(path, now.paths_[path].turn);
  return failed;
}

}  // namespace tardis
