// SPDX-License-Identifier: Apache-2.0
// A controller that is asked for while it works. It is behind a port of its own; the host takes it out when it is asked
// to ("unplug 0").
#include <atomic>
#include <filesystem>

#include "guest_scenario.h"
#include "guest_slot.h"

namespace tardis::nvme::testing {
namespace {

constexpr std::size_t kBytes = 16 << 10;
constexpr std::uint64_t kBlocks = 64;  // of kBytes, that are read and written

// Reads and writes until an error, or the end.
class Traffic {
 public:
  explicit Traffic(std::shared_ptr<NvmeNamespace> disk) : disk_(std::move(disk)), thread_([this] { run(); }) {}
  ~Traffic() { stop(); }
  void stop() {
    over_ = true;
    if (thread_.joinable()) thread_.join();
    disk_.reset();
  }
  int error() const { return error_; }
  std::uint64_t requests() const { return requests_; }
  bool wrong() const { return wrong_; }

 private:
  void run() {
    AlignedBuffer memory(kBytes);
    for (std::uint64_t i = 0; !over_; ++i) {
      const std::uint64_t offset = i / 2 % kBlocks * kBytes;
      if (i % 2 == 0) mark(memory.data(), kBytes, offset);
      const int error = move(*disk_, i % 2 == 0 ? Op::kWrite : Op::kRead, offset, memory.data(), kBytes);
      if (error != 0) {
        error_ = error;
        return;
      }
      if (!holds_mark(memory.data(), kBytes, offset)) wrong_ = true;
      ++requests_;
    }
  }

  std::shared_ptr<NvmeNamespace> disk_;
  std::atomic<bool> over_{false}, wrong_{false};
  std::atomic<int> error_{0};
  std::atomic<std::uint64_t> requests_{0};
  std::thread thread_;
};

using ScenarioRemoval = Guest;

// Somebody asks for the drive: the process is told, the drive works until the process lets go of it, and then it is
// gone.
TEST_F(ScenarioRemoval, AskedForWhileItWorks) {
  auto controller = open();
  ASSERT_NE(controller, nullptr);
  {
    Traffic traffic(space_of(controller, 1));
    ASSERT_TRUE(within(10, [&] { return traffic.requests() > 20; }));
    EXPECT_FALSE(controller->device().release_requested());
    const std::uint64_t start = monotonic_ns();
    ask_host("unplug 0");
    ASSERT_TRUE(within(30, [&] { return controller->device().release_requested(); })) << "nobody was told";
    std::printf("asked after: %.1f ms\n", static_cast<double>(monotonic_ns() - start) / 1e6);
    const std::uint64_t before = traffic.requests();
    EXPECT_TRUE(within(10, [&] { return traffic.requests() > before + 20; })) << "it works on";
    traffic.stop();
    EXPECT_EQ(traffic.error(), 0);
    EXPECT_FALSE(traffic.wrong());
  }
  EXPECT_EQ(controller->driver()->state(), DriverState::kLive);
  controller.reset();
  EXPECT_TRUE(within(30, [&] { return !std::filesystem::exists(sysfs(address)); })) << "still there";
  ask_host("gone 0");
  const auto again = VfioController::open(address, guest_options());
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code, Code::kNotFound) << again.error().message;
}

}  // namespace
}  // namespace tardis::nvme::testing
