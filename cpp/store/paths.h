// SPDX-License-Identifier: Apache-2.0
// The folders over which a store spreads its segments. The first is the store's own; of the others the store's own
// folder keeps a list (PathsFile), and each says which store it belongs to (PathMarker).
#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "store/format.h"

namespace tardis {

// Names in a store's folders.
inline constexpr const char* kSuperblockFile = "tardis.store";
inline constexpr const char* kLockFile = "LOCK";
inline constexpr const char* kSegmentsFolder = "segments";
inline constexpr const char* kSegmentSuffix = ".seg";
inline constexpr const char* kStripeSuffix = ".part";
inline constexpr const char* kVolumeFile = "NVME";  // of a store whose segments are on a raw namespace

struct StorePath {
  std::string folder;
  Uuid uuid{};
  std::uint32_t flags = 0;  // PathFlags; 0: this number is not in use
  bool present = false;
  std::string problem;     // why it is not
  std::uint64_t turn = 0;  // PathMarker, as the list says
};

class StorePaths {
 public:
  explicit StorePaths(std::string home);

  const StorePath& operator[](std::size_t path) const { return paths_[path]; }
  static constexpr std::size_t size() { return kMaxPaths; }
  std::size_t known() const;                      // how many there are
  std::string text() const;                       // their folders in one line
  std::vector<std::string> more_present() const;  // further folders that are there
  std::vector<std::string> missing() const;       // "path ...: why", of those that are not

  // What the store's own folder says, and which of the folders can be found. Changes nothing. An absent file: no
  // further folders.
  Status load(const Uuid& store);

  // Whether further folders could be these, as far as their names tell.
  Status check_names(const std::vector<std::string>& folders) const;

  // ---- for the first process, under the setup lock
  // Makes the store have exactly these further folders; nothing: those that it has. New ones are made; what belonged to
  // the store once and was forgotten starts empty; what is missing stays away, if the store knows it. `usable` says why
  // a folder that is there cannot be used. `before_change` is called before a number may come to mean another folder.
  // `notes`: what the user should know.
  using Usable = std::function<Status(const std::string& folder)>;
  Status settle(const std::optional<std::vector<std::string>>& wanted, const Uuid& store, const Usable& usable,
                const std::function<Status()>& before_change, std::vector<std::string>& notes);
  // What was away has been recovered: it is like the others again.
  Status welcome_back(const std::function<bool(std::uint32_t path)>& in_use);

  // ---- for a process that joins others
  // Code::kInvalidArgument: the others have other folders.
  Status match(const std::optional<std::vector<std::string>>& wanted, const Usable& usable);

  // Something was deleted: no older copy of a path may come back with it, nor one that could not be reached. Durable
  // before it returns. Under the setup lock. Tells the paths whose marker could not be written, which are stale too.
  Result<std::vector<std::uint32_t>> deleted(const std::function<bool(std::uint32_t path)>& in_use) const;
  // For a tool that needs the store for itself.
  Status lock_alone();
  void unlock();

  std::string segments_folder(std::size_t path) const;

 private:
  Status save() const;
  void look(std::size_t path);  // whether it is there
  void judge_turn(std::size_t path, std::vector<std::string>& notes);
  // Against processes that come to this folder by another copy of the store's own.
  Status lock(std::size_t path, bool alone);
  // Raises the turn of the paths that can be written; the others get the flag. Which of those that should have been
  // failed?
  Result<std::vector<std::uint32_t>> raise_turns(const std::function<bool(std::uint32_t path)>& reachable,
                                                 std::uint32_t flag_of_others);
  Status write_marker(std::size_t path, std::uint64_t turn) const;
  std::optional<std::size_t> by_uuid(const Uuid& uuid) const;
  // Which paths the wanted folders are.
  struct Matched {
    std::vector<std::size_t> known;
    std::vector<std::string> unknown;
    bool has(std::size_t path) const { return std::find(known.begin(), known.end(), path) != known.end(); }
  };
  Result<Matched> match_folders(const std::vector<std::string>& wanted);
  std::optional<std::size_t> place_of(const std::string& folder, const std::vector<StorePath>& before,
                                      const std::vector<std::string>& wanted, const Matched& matched) const;
  void prepare(std::size_t path, const Usable& usable, std::vector<std::string>& notes);
  Status add(const std::string& folder);

  std::vector<StorePath> paths_;
  std::vector<UniqueFd> locks_;
  Uuid store_{};
};

}  // namespace tardis
