// SPDX-License-Identifier: Apache-2.0
// Requests of media without a controller, and media that tests hold in their hands.
#pragma once

#include <gtest/gtest.h>
#include <sys/uio.h>

#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "nvme/soft/medium.h"
#include "nvme_soft_client.h"

namespace tardis::nvme::testing {

using Op = MediumRequest::Op;

// One request, run to its end.
inline int run(Medium& medium, Op op, std::uint64_t offset, std::vector<std::uint8_t>* data, std::uint64_t bytes = 0,
               bool durable = false) {
  MediumRequest request;
  request.op = op;
  request.offset = offset;
  request.bytes = data != nullptr ? data->size() : bytes;
  request.durable = durable;
  iovec memory[2]{};
  if (data != nullptr) {
    // In two parts, neither of which is aligned.
    memory[0] = {data->data(), data->size() / 3};
    memory[1] = {data->data() + data->size() / 3, data->size() - data->size() / 3};
    request.memory = memory;
  }
  int completions = 0;
  medium.run({&request, 1}, [&](MediumRequest&) { ++completions; });
  EXPECT_EQ(completions, 1);
  return request.error;
}

inline std::vector<std::uint8_t> read(Medium& medium, std::uint64_t offset, std::uint64_t bytes) {
  std::vector<std::uint8_t> data(bytes);
  EXPECT_EQ(run(medium, Op::kRead, offset, &data), 0);
  return data;
}

inline void write(Medium& medium, std::uint64_t offset, std::vector<std::uint8_t> data, bool durable = false) {
  EXPECT_EQ(run(medium, Op::kWrite, offset, &data, 0, durable), 0);
}

inline std::shared_ptr<MemoryMedium> memory(std::uint64_t bytes) {
  Result<std::unique_ptr<MemoryMedium>> made = MemoryMedium::create(bytes);
  EXPECT_TRUE(made);
  return std::shared_ptr<MemoryMedium>(std::move(*made));
}

// A medium whose requests finish when they are let go.
class GatedMedium final : public Medium {
 public:
  std::uint64_t bytes() const override { return 1 << 20; }
  bool immediate() const override { return false; }
  bool needs_flush() const override { return true; }
  void run(std::span<MediumRequest> requests, const Completion& on_complete) override {
    {
      std::unique_lock lock(mutex_);
      inside_ += requests.size();
      changed_.notify_all();
      changed_.wait(lock, [&] { return open_; });
    }
    for (MediumRequest& request : requests) {
      for (const iovec& part : request.memory) {
        if (request.op == Op::kRead) std::memset(part.iov_base, 0x5a, part.iov_len);
      }
      on_complete(request);
    }
  }
  void wait_for(std::size_t requests) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::nanoseconds(kPatienceNs), [&] { return inside_ >= requests; }));
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t inside_ = 0;
  bool open_ = false;
};

}  // namespace tardis::nvme::testing
