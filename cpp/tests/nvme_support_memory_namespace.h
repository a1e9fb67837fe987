// SPDX-License-Identifier: Apache-2.0
// A namespace in memory. Keeps a journal of what reaches it, from which a test makes what a power cut could have left.
#pragma once

#include <gtest/gtest.h>

#include <cerrno>
#include <cstdint>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "block/iovec_range.h"
#include "block_file.h"
#include "nvme/raw_namespace.h"

namespace tardis::nvme::testing {

using tardis::testing::BlockFile;
using tardis::testing::kSector;

inline constexpr std::uint64_t kMiB = 1u << 20;

// 0, or EINVAL for what no namespace of these blocks takes.
inline int check_request(const NamespaceRequest& request, std::uint64_t bytes, std::uint32_t block_bytes) {
  const std::uint64_t length = total_bytes(request.memory);
  const bool fits = length > 0 && request.offset <= bytes && length <= bytes - request.offset &&
                    request.offset % block_bytes == 0 && length % block_bytes == 0;
  EXPECT_TRUE(fits) << "a request for " << length << " bytes at " << request.offset << " of " << bytes;
  return fits ? 0 : EINVAL;
}

inline void read_into(const BlockFile& contents, const NamespaceRequest& request) {
  std::uint64_t at = request.offset;
  for (const iovec& piece : request.memory) {
    contents.read(at, piece.iov_base, piece.iov_len);
    at += piece.iov_len;
  }
}
inline std::string bytes_of(const NamespaceRequest& request) {
  std::string data;
  for (const iovec& piece : request.memory) data.append(static_cast<const char*>(piece.iov_base), piece.iov_len);
  return data;
}

class MemoryNamespace final : public RawNamespace {
 public:
  struct Event {
    bool flush = false;  // else a write
    std::uint64_t offset = 0;
    std::string data{};
  };

  explicit MemoryNamespace(std::uint64_t bytes, std::uint32_t block_bytes = 512)
      : bytes_(bytes), block_bytes_(block_bytes) {
    contents.resize(bytes);
  }
  MemoryNamespace(BlockFile image, std::uint32_t block_bytes)
      : contents(std::move(image)), bytes_(contents.bytes()), block_bytes_(block_bytes) {}

  std::string name() const override { return "memory namespace"; }
  std::uint64_t bytes() const override { return bytes_; }
  std::uint32_t block_bytes() const override { return block_bytes_; }
  std::uint32_t atomic_bytes() const override { return block_bytes_; }

  void run(std::span<NamespaceRequest> requests, const Completion& on_complete) override {
    {
      const std::lock_guard lock(mutex_);
      ++batches;
      for (NamespaceRequest& request : requests) {
        const bool read = request.op == NamespaceRequest::Op::kRead;
        ++(read ? reads : writes);
        request.error = check_request(request, bytes_, block_bytes_);
        if (request.error == 0 && before) request.error = before(request);
        if (request.error != 0) continue;
        if (read) {
          read_into(contents, request);
          continue;
        }
        std::string data = bytes_of(request);
        contents.write(request.offset, data.data(), data.size());
        if (recording) events.push_back({false, request.offset, std::move(data)});
      }
    }
    for (NamespaceRequest& request : requests) {
      if (on_complete) on_complete(request);
    }
  }
  Status flush() override {
    const std::lock_guard lock(mutex_);
    ++flushes;
    if (const int error = before_flush ? before_flush() : 0; error != 0) return errno_error(error, "flush (injected)");
    if (recording) events.push_back({true});
    return {};
  }
  Status register_memory(void*, std::size_t) override { return registering; }
  void unregister_memory(void*) override { ++unregistered; }

  BlockFile contents;
  bool recording = false;
  std::vector<Event> events;
  // An errno fails the request, or the flush, without it.
  std::function<int(const NamespaceRequest&)> before;
  std::function<int()> before_flush;
  std::uint64_t batches = 0, reads = 0, writes = 0, flushes = 0;
  Status registering;
  std::uint64_t unregistered = 0;

 private:
  const std::uint64_t bytes_;
  const std::uint32_t block_bytes_;
  std::mutex mutex_;
};

// Of `first` after so many events, if the power went then: what was flushed is there, of the rest any sectors.
inline BlockFile after_power_cut(const BlockFile& first, const std::vector<MemoryNamespace::Event>& events,
                                 std::size_t count, std::mt19937_64& random) {
  std::size_t flushed = count;
  while (flushed > 0 && !events[flushed - 1].flush) --flushed;
  BlockFile image = first;
  const unsigned percent = std::array<unsigned, 5>{0, 10, 50, 90, 100}[random() % 5];
  for (std::size_t i = 0; i < count; ++i) {
    const MemoryNamespace::Event& event = events[i];
    for (std::size_t at = 0; at < event.data.size(); at += kSector) {
      if (i < flushed || random() % 100 < percent) image.write(event.offset + at, event.data.data() + at, kSector);
    }
  }
  return image;
}

}  // namespace tardis::nvme::testing
