// SPDX-License-Identifier: Apache-2.0
// Helpers of the block device tests.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <system_error>
#include <vector>

#include "block/block_device.h"

namespace tardis::testing {

// A folder that goes with its contents.
class TempFolder {
 public:
  explicit TempFolder(std::string parent = {}) {
    path_ = (parent.empty() ? disk_parent() : std::move(parent)) + "/tardis-block-XXXXXX";
    if (::mkdtemp(path_.data()) == nullptr) path_.clear();
  }
  ~TempFolder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  // /tmp may be memory, where direct I/O cannot be tested; /var/tmp seldom is.
  static std::string disk_parent() {
    std::string parent = ::testing::TempDir();
    while (parent.size() > 1 && parent.back() == '/') parent.pop_back();
    struct statfs found;
    if (::statfs(parent.c_str(), &found) == 0 && found.f_type == 0x01021994) return "/var/tmp";
    return parent;
  }

  std::string path_;
};

inline std::vector<std::uint8_t> random_bytes(std::size_t bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint8_t> data(bytes);
  std::size_t i = 0;
  for (; i + 8 <= bytes; i += 8) {
    const std::uint64_t word = random();
    std::copy_n(reinterpret_cast<const std::uint8_t*>(&word), 8, data.begin() + static_cast<std::ptrdiff_t>(i));
  }
  for (; i < bytes; ++i) data[i] = static_cast<std::uint8_t>(random());
  return data;
}

// Memory at a chosen distance from a 4096-byte boundary.
class OffsetMemory {
 public:
  OffsetMemory(std::size_t bytes, std::size_t distance)
      : bytes_(bytes),
        owned_(static_cast<std::uint8_t*>(::aligned_alloc(4096, (bytes + distance + 8191) / 4096 * 4096))),
        data_(owned_.get() + distance) {}
  std::uint8_t* data() { return data_; }
  std::size_t size() const { return bytes_; }
  std::vector<std::uint8_t> copy() const { return {data_, data_ + bytes_}; }
  void fill(const std::vector<std::uint8_t>& from) { std::copy(from.begin(), from.end(), data_); }

 private:
  struct Free {
    void operator()(std::uint8_t* memory) const { ::free(memory); }
  };
  std::size_t bytes_;
  std::unique_ptr<std::uint8_t, Free> owned_;
  std::uint8_t* data_;
};

inline std::vector<std::uint8_t> file_contents(const std::string& path, std::uint64_t offset, std::size_t bytes) {
  std::vector<std::uint8_t> data(bytes);
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  const ssize_t got = ::pread(fd, data.data(), bytes, static_cast<off_t>(offset));
  ::close(fd);
  data.resize(got < 0 ? 0 : static_cast<std::size_t>(got));
  return data;
}

}  // namespace tardis::testing
