// SPDX-License-Identifier: Apache-2.0
// The store that is tortured: its settings and its two namespaces.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tardis/tardis.h"
#include "torture_log.h"

namespace tardis::testing {

struct TortureLayout {
  std::uint32_t parts;
  std::vector<std::uint64_t> regions;
};

struct Mode {
  bool evict, dirty, repair;
  std::uint64_t capacity;
  std::array<TortureLayout, 2> layouts;
};

inline Mode parse_mode(const std::string& text) {
  Mode mode{text.starts_with("evict"), text.ends_with("-dirty"), text.ends_with("-repair"), 0, {}};
  if (!mode.evict && !text.starts_with("keep")) die("MODE: expected keep or evict, found " + text, 2);
  // Padded parts, regions of odd length, digest chunks that straddle regions. In `keep` both fill the same slot class.
  mode.layouts = {TortureLayout{2, {20000, 12345}},
                  mode.evict ? TortureLayout{3, {40000}} : TortureLayout{1, {40000, 25536}}};
  mode.capacity = (mode.evict ? 4u : 16u) * (std::uint64_t{4} << 20) + (1u << 20);
  return mode;
}

class OpenStore {
 public:
  // `seed` / 1024 settles what all processes of a store must agree in.
  OpenStore(const std::string& folder, const std::string& engine, const Mode& mode, std::uint64_t seed)
      : folder_(folder), further_(folder + "/further"), mode_(mode) {
    tardis_default_options(&options_);
    options_.engine = engine == "io_uring" ? TARDIS_ENGINE_IO_URING
                      : engine == "sync"   ? TARDIS_ENGINE_SYNC
                                           : TARDIS_ENGINE_AUTO;
    options_.capacity_bytes = mode.capacity;
    options_.segment_bytes = 4u << 20;
    options_.io_workers = 2;
    options_.flush_milliseconds = static_cast<std::uint32_t>(1 + seed / 1024 % 30);
    more_paths_[0] = further_.c_str();
    options_.more_paths = more_paths_.data();
    options_.more_paths_count = seed / 1024 % 2;  // every second store has two folders
    for (std::uint32_t i = 0; i < 2; ++i) fingerprints[i] = {static_cast<std::uint8_t>(i + 1), mode.evict};
    open();
  }
  OpenStore(const OpenStore&) = delete;
  OpenStore& operator=(const OpenStore&) = delete;

  void close() {
    char* error = nullptr;
    if (tardis_close(store, &error) != TARDIS_OK) die(std::string("close: ") + error, 3);
    tardis_destroy(store);
    store = nullptr;
  }
  // Namespace handles are those of before: the namespaces are opened in the same order.
  void open() {
    char* error = nullptr;
    if (tardis_open(folder_.c_str(), &options_, 1, &store, &error) != TARDIS_OK) die(std::string("open: ") + error, 4);
    for (std::uint32_t i = 0; i < 2; ++i) {
      const TortureLayout& layout = mode_.layouts[i];
      tardis_object_layout c{layout.parts, static_cast<std::uint32_t>(layout.regions.size()), {}};
      std::copy(layout.regions.begin(), layout.regions.end(), c.region_bytes);
      const std::string text = "{\"torture\": " + std::to_string(i) + "}";
      if (tardis_namespace_open(store, fingerprints[i].data(), text.c_str(), &c, &spaces[i], &error) != TARDIS_OK) {
        die(std::string("namespace: ") + error, 4);
      }
    }
  }

  tardis_store* store = nullptr;
  std::array<std::array<std::uint8_t, 16>, 2> fingerprints{};
  std::array<std::uint32_t, 2> spaces{};

 private:
  const std::string folder_, further_;
  std::array<const char*, 1> more_paths_{};
  const Mode mode_;
  tardis_options options_{};
};

}  // namespace tardis::testing
