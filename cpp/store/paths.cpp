// SPDX-License-Identifier: Apache-2.0
#include "store/paths.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "store/byte_locks.h"
#include "store/files.h"

namespace tardis {
namespace {

constexpr const char* kPathsFile = "tardis.paths";
constexpr const char* kMarkerFile = "tardis.path";
constexpr std::size_t kMarkerFileBytes = 4096;

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

bool is_segment_file(const std::string& name) {
  return name.ends_with(kSegmentSuffix) || name.ends_with(kStripeSuffix);
}

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

Status StorePaths::check_names(const std::vector<std::string>& folders) const {
  if (folders.size() >= kMaxPaths) {
    return Error{Code::kInvalidArgument, "path: expected at most " + std::to_string(kMaxPaths - 1) +
                                             " folders beside the store's own, found " +
                                             std::to_string(folders.size())};
  }
  for (std::size_t i = 0; i < folders.size(); ++i) {
    const std::string& folder = folders[i];
    if (folder.empty() || folder.front() != '/') return setting_error(folder, "expected an absolute name");
    if (folder.size() > sizeof(PathEntry::folder)) {
      return setting_error(folder, "expected at most " + std::to_string(sizeof(PathEntry::folder)) + " bytes");
    }
    if (same_folder(folder, paths_[0].folder)) {
      return setting_error(folder, "is the store's own folder, " + paths_[0].folder + "; name it once");
    }
    for (std::size_t k = 0; k < i; ++k) {
      if (same_folder(folder, folders[k])) return setting_error(folder, "is named twice (" + folders[k] + ")");
    }
  }
  return {};
}

Result<StorePaths::Matched> StorePaths::match_folders(const std::vector<std::string>& wanted) {
  if (Status status = check_names(wanted); !status) return status.error();
  // By their markers first: a drive may be mounted in another's place, and then a name says nothing.
  const std::vector<StorePath> before = paths_;
  Matched matched;
  std::vector<std::string> unmarked;
  for (const std::string& folder : wanted) {
    const auto marker = read_marker(folder);
    if (!marker || !*marker) {
      unmarked.push_back(folder);
      continue;
    }
    if ((*marker)->store_uuid != store_) {
      return setting_error(folder, "is part of another store; name another folder, or empty this one");
    }
    const auto path = by_uuid((*marker)->path_uuid);
    if (path && matched.has(*path)) {
      return setting_error(folder, "is a copy of another folder of this store; name one of them");
    }
    if (path) {
      paths_[*path].folder = folder;
      matched.known.push_back(*path);
    } else {
      matched.unknown.push_back(folder);
    }
  }
  for (const std::string& folder : unmarked) {
    if (const auto path = place_of(folder, before, wanted, matched)) {
      paths_[*path].folder = folder;
      matched.known.push_back(*path);
      continue;
    }
    if (const auto marker = read_marker(folder); !marker) {
      if (marker.error().code != Code::kCorrupt) return marker.error();
      return setting_error(folder, marker.error().message + "; empty the folder to use it anew");
    }
    matched.unknown.push_back(folder);
  }
  return matched;
}

// The path that a folder without a marker should be: the one that had this name before; or, if that one was found in
// another place, one that was not found and whose place that was.
std::optional<std::size_t> StorePaths::place_of(const std::string& folder, const std::vector<StorePath>& before,
                                                const std::vector<std::string>& wanted, const Matched& matched) const {
  std::optional<std::size_t> named, displaced;
  for (std::size_t path = 1; path < kMaxPaths; ++path) {
    if (before[path].flags == 0) continue;
    if (before[path].folder == folder) named = path;
    const bool still_wanted = std::find(wanted.begin(), wanted.end(), before[path].folder) != wanted.end();
    if (!matched.has(path) && still_wanted) displaced = path;
  }
  return named && matched.has(*named) ? displaced : named;
}

std::optional<std::size_t> StorePaths::by_uuid(const Uuid& uuid) const {
  for (std::size_t path = 1; path < kMaxPaths; ++path) {
    if (paths_[path].flags != 0 && paths_[path].uuid == uuid) return path;
  }
  return std::nullopt;
}

// There is a number for it, see check_names().
Status StorePaths::add(const std::string& folder) {
  const auto place = std::find_if(paths_.begin(), paths_.end(), [](const StorePath& path) { return path.flags == 0; });
  const std::string segments = folder + "/" + kSegmentsFolder;
  if (exists(folder + "/" + kSuperblockFile))
    return setting_error(folder, "is a store of its own; name another folder");
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
  *place = {folder, {}, kPathKnown, true, {}, 2};
  if (::getrandom(place->uuid.data(), place->uuid.size(), 0) != static_cast<ssize_t>(place->uuid.size())) {
    return errno_error(errno, "getrandom");
  }
  const auto path = static_cast<std::size_t>(place - paths_.begin());
  if (Status status = lock(path, /*alone=*/true); !status) return status;
  // It was part of this store and then forgotten: pages may have been deleted since.
  if (Status status = empty_segments(folder); !status) return status;
  // The marker before the list: a crash between them leaves a folder that starts empty, not one that is missing.
  if (Status status = write_marker(path, place->turn); !status) return status;
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
  if (!fd) fd.reset(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
  if (!fd) return errno_error(errno, file);
  const auto give_up = std::chrono::steady_clock::now() + kKilledPatience;
  auto locked = try_lock(fd.get(), alone ? F_WRLCK : F_RDLCK, 0, 1, file);
  while (locked && !*locked && std::chrono::steady_clock::now() < give_up) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    locked = try_lock(fd.get(), alone ? F_WRLCK : F_RDLCK, 0, 1, file);
  }
  // Who was alone shares from now on: others of this store may come too.
  if (locked && *locked && alone) locked = try_lock(fd.get(), F_RDLCK, 0, 1, file);
  if (!locked) return locked.error();
  if (*locked) return {};
  return Error{Code::kBusy, "path " + paths_[path].folder +
                                ": a process uses it that has come to it by another copy of " + paths_[0].folder +
                                "; a store has one folder of its own: stop that process, and delete the copy"};
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
    return;
  }
  if (there + 1 < own.turn && (own.flags & kPathStale) == 0) {
    own.flags |= kPathStale;
    notes.push_back("path " + own.folder + ": was put back from an older copy, which may hold what was deleted since");
  }
  own.turn = std::max(own.turn, there);
}

Result<std::vector<std::uint32_t>> StorePaths::raise_turns(const std::function<bool(std::uint32_t path)>& reachable,
                                                           std::uint32_t flag_of_others) {
  std::vector<std::uint32_t> raised, failed;
  for (std::uint32_t path = 1; path < kMaxPaths; ++path) {
    StorePath& own = paths_[path];
    if (own.flags == 0) continue;
    const std::uint64_t turn = (own.turn | 1) + 1;  // after a crash it may stand in between
    if (!reachable(path)) {
      own.flags |= flag_of_others;
    } else if (write_marker(path, turn - 1)) {
      own.turn = turn;
      raised.push_back(path);
    } else {
      own.flags |= flag_of_others;
      failed.push_back(path);
    }
  }
  if (Status status = save(); !status) return status.error();
  for (const std::uint32_t path : raised) (void)write_marker(path, paths_[path].turn);  // as after a crash, if it fails
  return failed;
}

Status StorePaths::settle(const std::optional<std::vector<std::string>>& wanted, const Uuid& store,
                          const Usable& usable, const std::function<Status()>& before_change,
                          std::vector<std::string>& notes) {
  store_ = store;
  const std::vector<StorePath> before = paths_;
  if (wanted) {
    auto matched = match_folders(*wanted);
    if (!matched) return matched.error();
    bool changes = !matched->unknown.empty();
    for (std::size_t path = 1; path < kMaxPaths; ++path) {
      if (paths_[path].flags == 0 || matched->has(path)) continue;
      notes.push_back("path " + paths_[path].folder + ": named no longer, and forgotten; what it holds can be deleted");
      paths_[path] = {};
      changes = true;
    }
    if (changes) {
      if (Status status = before_change(); !status) return status;
    }
    for (const std::string& folder : matched->unknown) {
      Status status = add(folder);
      if (status) status = usable(folder);
      if (!status) return Error{status.error().code, "path: " + folder + ": " + status.error().message};
    }
  }
  for (std::size_t path = 1; path < kMaxPaths; ++path) {
    if (paths_[path].flags == 0) continue;
    look(path);
    if (paths_[path].present) judge_turn(path, notes);
    if (paths_[path].present) {
      if (Status status = lock(path, /*alone=*/true); !status && status.error().code == Code::kBusy) return status;
      prepare(path, usable, notes);
    }
  }
  const bool any_further = std::any_of(before.begin() + 1, before.end(), [](const auto& a) { return a.flags != 0; });
  if (any_further || known() > 1) {
    const auto failed = raise_turns([this](std::uint32_t path) { return paths_[path].present; }, kPathAway);
    if (!failed) return failed.error();
    for (const std::uint32_t path : *failed) {
      paths_[path].present = false;
      paths_[path].problem = std::string(kMarkerFile) + " cannot be written";
    }
  }
  for (const std::string& line : missing()) notes.push_back("left out, and what it holds is not found: " + line);
  return {};
}

// Of a path that is there: whether it can be used, and that it holds nothing that was deleted.
void StorePaths::prepare(std::size_t path, const Usable& usable, std::vector<std::string>& notes) {
  StorePath& own = paths_[path];
  Status status = usable(own.folder);
  if (status && (own.flags & kPathStale) != 0) {
    status = empty_segments(own.folder);
    if (status) notes.push_back("path " + own.folder + ": pages were deleted while it was away; starts empty");
  }
  own.present = static_cast<bool>(status);
  if (status) {
    own.flags &= ~std::uint32_t{kPathStale};
  } else {
    own.problem = status.error().message;
  }
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
    auto matched = match_folders(*wanted);
    if (!matched) return matched.error();
    if (!matched->unknown.empty() || matched->known.size() + 1 != known()) {
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
  for (std::size_t path = 1; path < kMaxPaths; ++path) now.paths_[path].folder = paths_[path].folder;
  return now.raise_turns(in_use, kPathStale);
}

}  // namespace tardis
