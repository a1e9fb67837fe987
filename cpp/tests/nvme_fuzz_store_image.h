// SPDX-License-Identifier: Apache-2.0
// A small store over two folders, with whole and with striped objects, as files in memory that can be put back.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "nvme_fuzz_engine.h"
#include "store/checkpoint.h"
#include "store/store.h"
#include "store_pages.h"

namespace tardis::nvme::fuzz {

class StoreImage {
 public:
  // Two kinds of pages, of different slot classes: the first whole on one path, the second dealt to both.
  static constexpr std::array<std::uint32_t, 2> kParts = {2, 3};
  static constexpr std::uint64_t kPartBytes = 65536;
  static constexpr std::size_t kPages = 6;

  StoreImage() : folder_(scratch_folder(::getpid())) {
    const Findings findings;
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_ / "live");
    std::filesystem::create_directories(folder_ / "more");
    for (const std::size_t kind : {0u, 1u}) {
      StoreOptions options = this->options();
      options.placement = kind == 0 ? Placement::kObjects : Placement::kLayers;
      options.more_paths = std::vector<std::string>{(folder_ / "more").string()};
      auto store = Store::open(home(), options, true);
      findings.expect(static_cast<bool>(store), "the store cannot be made");
      const auto space = open_space(**store, kind);
      findings.expect(static_cast<bool>(space), "the namespace cannot be made");
      findings.expect(put(**store, kind, *space, 0, kPages) == kPages, "a page was not stored");
      findings.expect(static_cast<bool>((*store)->flush()), "the store cannot be flushed");
      findings.expect(static_cast<bool>((*store)->close()), "the store cannot be closed");
    }
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_)) {
      if (!entry.is_regular_file()) continue;
      const std::string name = std::filesystem::relative(entry.path(), folder_).string();
      if (name.starts_with("live/")) continue;
      std::ifstream file(entry.path(), std::ios::binary);
      files_[name] = std::string(std::istreambuf_iterator<char>(file), {});
      names_.push_back(name);
    }
    std::sort(names_.begin(), names_.end());
  }

  std::string home() const { return (folder_ / "home").string(); }
  const std::vector<std::string>& names() const { return names_; }
  const std::string& original(const std::string& name) const { return files_.at(name); }
  StoreOptions options() const {
    StoreOptions options;
    options.device.engine = BlockDeviceOptions::Engine::kSync;
    options.device.workers = 1;
    options.device.queue_depth = 32;
    options.segment_bytes = kMinSegmentBytes;
    options.capacity_bytes = 6 * kMinSegmentBytes + kMetadataBytes;
    options.flush_milliseconds = 10'000;
    options.live_folder = (folder_ / "live").string();
    return options;
  }

  // Writes `bytes` at `offset` of a file.
  void change(const std::string& name, std::uint64_t offset, const void* data, std::size_t bytes) {
    const int fd = ::open((folder_ / name).c_str(), O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    const auto written = ::pwrite(fd, data, bytes, static_cast<off_t>(offset));
    ::close(fd);
    if (written == static_cast<ssize_t>(bytes)) changed_[name].push_back({offset, bytes});
  }
  void truncate(const std::string& name, std::uint64_t bytes) {
    std::error_code ignored;
    std::filesystem::resize_file(folder_ / name, bytes, ignored);
    whole_ = false;
  }
  void remove(const std::string& name) {
    std::filesystem::remove(folder_ / name);
    whole_ = false;
  }
  void touched() { whole_ = false; }  // somebody else may have written anywhere

  // As it was made.
  void put_back() {
    if (whole_) {
      for (const auto& [name, ranges] : changed_) {
        const int fd = ::open((folder_ / name).c_str(), O_WRONLY | O_CLOEXEC);
        for (const auto& [offset, bytes] : ranges) {
          const std::string& original = files_.at(name);
          if (::pwrite(fd, original.data() + offset, bytes, static_cast<off_t>(offset)) < 0) whole_ = false;
        }
        ::close(fd);
      }
    }
    changed_.clear();
    if (whole_) return;
    for (const char* sub : {"home", "more", "live"}) std::filesystem::remove_all(folder_ / sub);
    std::filesystem::create_directories(folder_ / "live");
    for (const auto& [name, contents] : files_) {
      std::filesystem::create_directories((folder_ / name).parent_path());
      std::ofstream file(folder_ / name, std::ios::binary);
      file.write(contents.data(), static_cast<std::streamsize>(contents.size()));
    }
    whole_ = true;
  }

  static Result<NamespaceId> open_space(Store& store, std::size_t kind) {
    static constexpr std::array<std::uint64_t, 1> kRegions = {kPartBytes};
    return store.open_namespace({static_cast<std::uint8_t>(9 + kind), 0x77}, "{\"fuzz\": 1}", kParts[kind], kRegions);
  }
  static std::size_t put(Store& store, std::size_t kind, NamespaceId space, std::size_t first, std::size_t count) {
    testing::PageMemory memory(kParts[kind], {kPartBytes}, count);
    const auto hashes = keys(first, count);
    for (std::size_t i = 0; i < count; ++i) memory.write(i, testing::page_seed(kSeed, hashes[i]));
    std::vector<std::uint8_t> ok(count);
    (void)store.set(space, hashes.data(), nullptr, memory.pieces(), count, ok.data());
    return static_cast<std::size_t>(std::count(ok.begin(), ok.end(), 1));
  }
  struct Got {
    std::size_t arrived = 0, wrong = 0;
  };
  static Got get(Store& store, std::size_t kind, NamespaceId space, std::size_t first, std::size_t count) {
    testing::PageMemory memory(kParts[kind], {kPartBytes}, count);
    const auto hashes = keys(first, count);
    std::vector<std::uint8_t> ok(count);
    (void)store.get(space, hashes.data(), memory.pieces(), count, ok.data());
    Got got;
    for (std::size_t i = 0; i < count; ++i) {
      if (ok[i] == 0) continue;
      ++got.arrived;
      got.wrong += memory.holds(i, testing::page_seed(kSeed, hashes[i])) ? 0 : 1;
    }
    return got;
  }

 private:
  static constexpr std::uint32_t kSeed = 9;

  static std::vector<Hash256> keys(std::size_t first, std::size_t count) {
    std::vector<Hash256> result(count);
    for (std::size_t i = 0; i < count; ++i) result[i] = testing::page_key(1, first + i);
    return result;
  }

  const std::filesystem::path folder_;
  std::map<std::string, std::string> files_;
  std::vector<std::string> names_;
  std::map<std::string, std::vector<std::pair<std::uint64_t, std::size_t>>> changed_;
  bool whole_ = true;  // but for `changed_`
};

}  // namespace tardis::nvme::fuzz
