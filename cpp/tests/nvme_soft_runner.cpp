// SPDX-License-Identifier: Apache-2.0
// How the threads that wait for a drive share out requests, and what a medium is told of memory.
#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "block_support.h"
#include "nvme/soft/file_medium.h"
#include "nvme/soft/medium_runner.h"
#include "nvme_soft_client.h"

namespace tardis::nvme::testing {
namespace {

using tardis::testing::TempFolder;
using Op = MediumRequest::Op;

// Tells of each batch as it comes, "read x 2", and keeps it until it is let go.
class BatchMedium final : public Medium {
 public:
  std::uint64_t bytes() const override { return 1 << 20; }
  bool immediate() const override { return false; }
  bool needs_flush() const override { return true; }
  void run(std::span<MediumRequest> requests, const Completion& on_complete) override {
    {
      std::unique_lock lock(mutex_);
      std::string text;
      for (const MediumRequest& request : requests) {
        text += request.op == Op::kRead ? 'r' : request.op == Op::kFlush ? 'f' : 'w';
      }
      batches_.push_back(text);
      changed_.notify_all();
      changed_.wait(lock, [&] { return allowed_ >= batches_.size(); });
    }
    for (MediumRequest& request : requests) on_complete(request);
  }
  // The batches that have come, once there are so many.
  std::vector<std::string> wait_for(std::size_t batches) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::nanoseconds(kPatienceNs), [&] { return batches_.size() >= batches; });
    return batches_;
  }
  void let_go(std::size_t batches) {
    const std::lock_guard lock(mutex_);
    allowed_ = batches;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> batches_;
  std::size_t allowed_ = 0;
};

std::vector<MediumRequest> requests(const std::string& kinds) {
  std::vector<MediumRequest> made(kinds.size());
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    made[i].op = kinds[i] == 'r' ? Op::kRead : kinds[i] == 'f' ? Op::kFlush : Op::kWrite;
  }
  return made;
}

using Batches = std::vector<std::string>;

// What waits goes to the medium together, so that a drive has all of it at once; a flush does not wait for the writes
// that came with it, nor a write with reads for the turn of reads.
TEST(NvmeSoftRunner, WhatIsAlikeGoesTogether) {
  BatchMedium medium;
  MediumRunner runner(medium, 64, [](MediumRequest&) {});
  ASSERT_TRUE(runner.start(1));
  runner.submit(requests("r"));
  ASSERT_EQ(medium.wait_for(1), Batches({"r"}));
  runner.submit(requests("rrrrrrwwwf"));
  runner.submit(requests("fww"));
  medium.let_go(4);
  EXPECT_EQ(medium.wait_for(5), Batches({"r", "rrrrrr", "www", "ff", "ww"}));
  medium.let_go(5);
}

TEST(NvmeSoftRunner, AFlushGoesToAnotherThread) {
  BatchMedium medium;
  MediumRunner runner(medium, 64, [](MediumRequest&) {});
  ASSERT_TRUE(runner.start(2));
  runner.submit(requests("wwwwf"));
  Batches batches = medium.wait_for(2);
  std::sort(batches.begin(), batches.end());  // of two threads, whichever came first
  EXPECT_EQ(batches, Batches({"f", "wwww"}));
  medium.let_go(2);
}

TEST(NvmeSoftRunner, NoBatchIsLargerThanAsked) {
  BatchMedium medium;
  MediumRunner runner(medium, 4, [](MediumRequest&) {});
  ASSERT_TRUE(runner.start(2));
  runner.submit(requests("rrrrrrrrr"));
  EXPECT_EQ(medium.wait_for(2), Batches({"rrrr", "rrrr"}));
  medium.let_go(2);
  EXPECT_EQ(medium.wait_for(3), Batches({"rrrr", "rrrr", "r"}));
  medium.let_go(3);
}

// As the kernel takes them, so that it need not look up their pages for each request; what a driver or a store has
// registered, and its bounce buffers, are such ranges.
TEST(NvmeSoftRunner, LargeRangesAreRegisteredWithTheDeviceBelow) {
  const TempFolder folder;
  auto device = open_block_device(folder.path(), {}, -1);
  ASSERT_TRUE(device);
  if ((*device)->report().engine != "io_uring") GTEST_SKIP() << "no io_uring here";
  const auto file = (*device)->open_file(folder.file("data"), true, true);
  ASSERT_TRUE(file);
  ASSERT_TRUE((*device)->preallocate(*file, 1 << 20));
  auto medium = FileMedium::create(**device, {{*file, 1 << 20}});
  ASSERT_TRUE(medium);
  const auto told = [&] {
    const BlockDeviceCounters counters = (*device)->counters();
    return counters.registered_bytes + counters.not_registered_bytes;
  };
  DmaSpace space(translated());
  constexpr std::size_t kLarge = 2 << 20;
  auto before = std::make_unique<SharedMemory>(space, kLarge);
  SharedMemory small(space, 64 << 10);
  {
    SoftControllerOptions options;
    options.namespaces.push_back({std::shared_ptr<Medium>(std::move(*medium)), 12, 0, 0});
    const auto controller = SoftController::create(options, space);
    ASSERT_TRUE(controller);
    EXPECT_EQ(told(), kLarge);
    auto later = std::make_unique<SharedMemory>(space, kLarge);
    EXPECT_EQ(told(), 2 * kLarge);
    before.reset();
    EXPECT_EQ(told(), kLarge);
    before = std::make_unique<SharedMemory>(space, kLarge);
    later.reset();
    EXPECT_EQ(told(), kLarge);
  }
  EXPECT_EQ(told(), 0u);
}

}  // namespace
}  // namespace tardis::nvme::testing
