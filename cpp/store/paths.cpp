// SPDX-License-Identifier: Apache-2.0
#include "store/paths.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "store/files.h"

namespace tardis {
namespace {

constexpr const char* kPathsFile = "tardis.paths";
constexpr const char* kMarkerFile = "tardis.path";
constexpr const char* kSegmentsFolder = "segments";
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

StorePaths::StorePaths(std::string home) : paths_(kMaxPaths) {
  paths_[0] = {std::move(home), {}, kPathKnown, true, {}};
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
    paths_[path] = {std::string(entry.folder.data(), length), entry.uuid, entry.flags, false, {}};
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

// The number of a folder that the store knows, by its marker or else by its name.
Result<std::optional<std::size_t>> StorePaths::which(const std::string& folder) const {
  const auto marker = read_marker(folder);
  if (marker && *marker && (*marker)->store_uuid != store_) {
    return setting_error(folder, "is part of another store; name another folder, or empty this one");
  }
  for (std::size_t path = 1; path < kMaxPaths; ++path) {
    if (paths_[path].flags == 0) continue;
    const bool this_one = marker && *marker ? (*marker)->path_uuid == paths_[path].uuid : paths_[path].folder == folder;
    if (this_one) return std::optional(path);
  }
  if (!marker && marker.error().code != Code::kCorrupt) return marker.error();
  if (!marker) return setting_error(folder, marker.error().message + "; empty the folder to use it anew");
  return std::optional<std::size_t>();
}

// The numbers of those that the store knows; the others are `unknown`.
Result<std::vector<std::size_t>> StorePaths::match_known(const std::vector<std::string>& wanted,
                                                         std::vector<std::string>& unknown) {
  std::vector<std::size_t> known;
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
    const auto number = which(folder);
    if (!number) return number.error();
    if (!*number) {
      unknown.push_back(folder);
      continue;
    }
    if (std::find(known.begin(), known.end(), **number) != known.end()) {
      return setting_error(folder, "is a copy of another folder of this store; name one of them");
    }
    paths_[**number].folder = folder;
    known.push_back(**number);
  }
  return known;
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
  PathMarker fresh{};
  fresh.magic = PathMarker::kMagic;
  fresh.format_version = kFormatVersion;
  fresh.store_uuid = store_;
  if (::getrandom(fresh.path_uuid.data(), fresh.path_uuid.size(), 0) != static_cast<ssize_t>(fresh.path_uuid.size())) {
    return errno_error(errno, "getrandom");
  }
  seal(fresh);
  char block[kMarkerFileBytes] = {};
  std::memcpy(block, &fresh, sizeof fresh);
  // The marker before the list: a crash between them leaves a folder that starts empty, not one that is missing.
  if (Status status = write_file_durably(folder, kMarkerFile, block, sizeof block); !status) return status;
  if (Status status = sync_folder(parent_folder(folder)); !status) return status;
  *place = {folder, fresh.path_uuid, kPathKnown, true, {}};
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
    if (own.present) {
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
  const bool same = std::equal(before.begin(), before.end(), paths_.begin(), [](const auto& a, const auto& b) {
    return a.folder == b.folder && a.uuid == b.uuid && a.flags == b.flags;
  });
  return same ? Status() : save();
}

Status StorePaths::welcome_back() {
  bool changes = false;
  for (StorePath& path : paths_) {
    if (!path.present || (path.flags & kPathAway) == 0) continue;
    path.flags &= ~std::uint32_t{kPathAway};
    changes = true;
  }
  return changes ? save() : Status();
}

Status StorePaths::match(const std::optional<std::vector<std::string>>& wanted) {
  if (!wanted) return {};
  const std::string theirs = text();
  std::vector<std::string> unknown;
  auto known = match_known(*wanted, unknown);
  if (!known) return known.error();
  if (unknown.empty() && known->size() + 1 == this->known()) {
    for (const std::size_t path : *known) look(path);
    return {};
  }
  return Error{Code::kInvalidArgument, "path: the store at " + paths_[0].folder + " is in use with " + theirs +
                                           ", the configuration of this process says " + paths_[0].folder +
                                           (wanted->empty() ? "" : ", " + joined(*wanted)) +
                                           "; all processes of a store name the same folders"};
}

Status StorePaths::mark_stale(std::size_t path) const {
  StorePaths now(paths_[0].folder);  // another process may have written the list since
  if (Status status = now.load(store_); !status) return status;
  if ((now.paths_[path].flags & kPathStale) != 0) return {};
  now.paths_[path].flags |= kPathStale;
  return now.save();
}

}  // namespace tardis
