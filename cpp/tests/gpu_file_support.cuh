// SPDX-License-Identifier: Apache-2.0
// Files for programs that read them into a GPU: made of words that tell where they belong, compared in HBM.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <numeric>
#include <random>

#include "tests/gpu_gio_support.cuh"

namespace tardis::gio::testing {

[[noreturn]] inline void give_up(const char* what, const std::string& file) {
  std::fprintf(stderr, "%s: %s: %s\n", file.c_str(), what, std::strerror(errno));
  std::fflush(stderr);
  std::_Exit(1);
}

class File {
 public:
  // O_DIRECT where the file system has it (tmpfs on some kernels has not).
  File(const std::string& name, int flags) : name_(name), file_(::open(name.c_str(), flags | O_DIRECT, 0600)) {
    direct_ = file_ >= 0;
    if (file_ < 0) file_ = ::open(name.c_str(), flags, 0600);
    if (file_ < 0) give_up("open", name);
  }
  ~File() { ::close(file_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return file_; }
  bool direct() const { return direct_; }

  void read(void* to, std::size_t bytes, std::uint64_t at) const {
    for (std::size_t done = 0; done < bytes;) {
      const ssize_t got = ::pread(file_, static_cast<char*>(to) + done, bytes - done, static_cast<off_t>(at + done));
      if (got <= 0) give_up("pread", name_);
      done += static_cast<std::size_t>(got);
    }
  }
  void write(const void* from, std::size_t bytes, std::uint64_t at) const {
    for (std::size_t done = 0; done < bytes;) {
      const ssize_t put =
          ::pwrite(file_, static_cast<const char*>(from) + done, bytes - done, static_cast<off_t>(at + done));
      if (put <= 0) give_up("pwrite", name_);
      done += static_cast<std::size_t>(put);
    }
  }
  void flush() const {
    if (::fsync(file_) != 0) give_up("fsync", name_);
  }

 private:
  std::string name_;
  int file_;
  bool direct_;
};

// Every word of it follows from its place (word_at).
inline void fill_file(const std::string& name, std::uint64_t bytes, std::uint64_t seed) {
  constexpr std::size_t kPart = 8 << 20;
  const Array<std::byte> part(Where::kMapped, kPart);
  const File file(name, O_RDWR | O_CREAT | O_TRUNC);
  for (std::uint64_t at = 0; at < bytes; at += kPart) {
    const std::size_t n = std::min<std::uint64_t>(kPart, bytes - at);
    fill_words(part.data(), n, seed + at / 8);
    file.write(part.data(), n, at);
  }
  file.flush();
}

// The records of a file in some order, all of them or as many as `most`.
inline std::vector<std::uint64_t> shuffled_records(std::uint64_t file_bytes, std::uint64_t record, std::uint64_t seed,
                                                   std::uint64_t most = ~std::uint64_t{0}) {
  std::vector<std::uint64_t> order(file_bytes / record);
  std::iota(order.begin(), order.end(), std::uint64_t{0});
  std::mt19937_64 random(seed);
  std::shuffle(order.begin(), order.end(), random);
  order.resize(std::min<std::uint64_t>(order.size(), most));
  return order;
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace tardis::gio::testing
