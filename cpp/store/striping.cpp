// SPDX-License-Identifier: Apache-2.0
// Segments that are striped over several paths: where new ones go, and what recovery does with parts of them.
#include <algorithm>

#include "store/store.h"

namespace tardis {

// Over all paths in use that have room for their share; one that turns out not to is left out.
Status Store::create_striped(std::uint32_t id, const ObjectGeometry& object) {
  std::vector<std::uint32_t> paths;
  for (std::uint32_t path = 0; path < kMaxPaths; ++path) {
    if (path_in_use(path)) paths.push_back(path);
  }
  if (paths.empty()) return Error{Code::kIo, "no path of the store is in use"};
  // The first has the tables, which are written with every batch: the paths take turns.
  std::rotate(paths.begin(), paths.begin() + static_cast<std::ptrdiff_t>(id % paths.size()), paths.end());
  Status status = Error{Code::kNoSpace, "a striped segment needs two paths"};
  while (paths.size() > 1) {
    std::uint32_t to_blame = kMaxPaths;
    status = create_segment(id, paths, object, to_blame);
    if (status) return {};
    const auto failed = std::find(paths.begin(), paths.end(), to_blame);
    if (failed == paths.end()) break;
    paths.erase(failed);
  }
  live(id).state.store(SegmentState::kNone);
  return status;
}

// The stripes on all paths in use that belong to segments of other paths.
Result<std::map<std::pair<SegmentName, std::uint32_t>, std::string>> Store::find_stripes() {
  std::map<std::pair<SegmentName, std::uint32_t>, std::string> all;
  for (std::uint32_t path = 0; path < kMaxPaths; ++path) {
    if (!path_in_use(path)) continue;
    auto files = folder_.stripe_files(path);
    if (!files) return files.error();
    for (const auto& [name, file] : *files) all[{name, path}] = file;
  }
  return all;
}

// A segment whose own path is away, and of which there are stripes here: it keeps its share of the capacity.
void Store::reserve_for_absent(std::map<SegmentName, std::string>& files) {
  const auto stripes = find_stripes();
  if (!stripes) return;
  for (const auto& [where, file] : *stripes) {
    const SegmentName& name = where.first;
    if (!path_in_use(name.path) && folder_.paths()[name.path].flags != 0) files[name] = folder_.segment_path(name);
  }
}

// Stripes of no segment: a crash, or a path that starts empty, left them. `whole`: the paths of each segment that was
// loaded, with its stripes; of one that could not be read nothing is known.
Status Store::remove_stray_stripes(const std::map<SegmentName, std::uint32_t>& whole,
                                   const std::map<SegmentName, std::string>& unreadable) {
  const auto stripes = find_stripes();
  if (!stripes) return stripes.error();
  std::uint32_t changed = 0;
  for (const auto& [where, file] : *stripes) {
    const auto& [name, path] = where;
    const auto segment = whole.find(name);
    if (unreadable.contains(name) || (segment != whole.end() && (segment->second >> path & 1) != 0)) continue;
    if (Status status = folder_.remove_file(file); !status) return status;
    changed |= 1u << path;
  }
  for (std::uint32_t path = 0; path < kMaxPaths; ++path) {
    if ((changed >> path & 1) == 0) continue;
    if (Status status = folder_.sync_segments_folder(path); !status) return status;
  }
  return {};
}

}  // namespace tardis
