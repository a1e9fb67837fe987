// SPDX-License-Identifier: Apache-2.0
// Stores whose segments are striped over several folders, in which one folder may fail.
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "store_broken_folder.h"
#include "store_support.h"

namespace tardis::testing {

inline const Layout kLayers{8, {8192, 8192}};  // 128 KiB: a layer is a unit

class StoreStripesTest : public ::testing::Test {
 protected:
  std::string folder(std::size_t path) const {
    return parent.path() + "/" + std::string(1, static_cast<char>('a' + path));
  }
  std::string away() const { return parent.path() + "/elsewhere"; }
  StoreOptions options(std::size_t paths = 2, std::uint64_t segments = 16,
                       BlockDeviceOptions::Engine engine = BlockDeviceOptions::Engine::kSync) const {
    StoreOptions o = small_store(segments, engine);
    o.live_folder = memory_parent();
    o.placement = Placement::kLayers;
    o.more_paths.emplace();
    for (std::size_t path = 1; path < paths; ++path) o.more_paths->push_back(folder(path));
    return o;
  }
  std::unique_ptr<Store> open(const StoreOptions& o) const { return open_store(folder(0), o); }
  // The requests of `path` can be made to fail.
  std::unique_ptr<Store> open_breakable(const StoreOptions& o, std::size_t path) {
    broken->prefix = folder(path) + "/";
    return open_store(folder(0), o, true, breakable(broken));
  }
  std::vector<std::string> files(const std::string& in, const std::string& extension) const {
    std::vector<std::string> found;
    if (!std::filesystem::exists(in + "/segments")) return found;
    for (const auto& item : std::filesystem::directory_iterator(in + "/segments")) {
      if (item.path().extension() == extension) found.push_back(item.path().string());
    }
    std::sort(found.begin(), found.end());
    return found;
  }
  std::vector<std::string> all(const std::string& extension, std::size_t paths = 3) const {
    std::vector<std::string> found;
    for (std::size_t path = 0; path < paths; ++path) {
      for (const std::string& file : files(folder(path), extension)) found.push_back(file);
    }
    return found;
  }
  std::uint64_t allocated() const {
    std::uint64_t bytes = 0;
    for (const auto& item : std::filesystem::recursive_directory_iterator(parent.path())) {
      struct stat status {};
      if (item.is_regular_file() && ::stat(item.path().c_str(), &status) == 0) {
        bytes += static_cast<std::uint64_t>(status.st_blocks) * 512;
      }
    }
    return bytes;
  }
  static std::size_t found(Space& space, std::uint64_t chain, std::size_t pages) {
    std::size_t hits = 0;
    for (std::size_t i = 0; i < pages; ++i) hits += space.fetch(chain, i, 1);
    return hits;
  }
  void fill(const StoreOptions& o, std::size_t pages = 60, const Layout& layout = kLayers) {
    auto store = open(o);
    Space space(*store, 1, layout);
    ASSERT_EQ(space.put(1, 0, pages), pages);
    ASSERT_TRUE(store->close());
  }
  // Reopens and counts the pages of fill().
  std::size_t still(const StoreOptions& o, std::size_t pages = 60, const Layout& layout = kLayers) {
    auto store = open(o);
    Space space(*store, 1, layout);
    const std::size_t hits = found(space, 1, pages);
    expect_slots_conserved(*store);
    EXPECT_TRUE(store->close());
    return hits;
  }
  void forget_checkpoint() const { std::filesystem::remove(folder(0) + "/index.checkpoint"); }
  static std::string notes(Store& store) { return store.path_report_json(); }

  TempFolder parent{memory_parent()};
  std::shared_ptr<BrokenFolder> broken = std::make_shared<BrokenFolder>();
};

// Sum of the files of each segment: what an ordinary one takes.
inline void expect_whole_lengths(const std::vector<std::string>& segments, const std::vector<std::string>& parts) {
  std::uint64_t sum = 0;
  for (const auto* list : {&segments, &parts}) {
    for (const std::string& file : *list) sum += std::filesystem::file_size(file);
  }
  EXPECT_EQ(sum, segments.size() * kTestSegment);
}

}  // namespace tardis::testing
