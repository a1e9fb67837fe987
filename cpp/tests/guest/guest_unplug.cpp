// SPDX-License-Identifier: Apache-2.0
// A drive that is pulled out, and one that the kernel asks for. TARDIS_GUEST_UNPLUG names a controller behind a
// hot-plug port, which is gone after the last of these tests: they come last.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <thread>

#include "base/aligned_buffer.h"
#include "base/clock.h"
#include "guest_support.h"

namespace tardis::nvme::testing {
namespace {

using Op = NamespaceRequest::Op;
constexpr std::uint64_t kSecond = 1'000'000'000;

class GuestUnplug : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* const text = std::getenv("TARDIS_GUEST_UNPLUG");
    if (text == nullptr) GTEST_SKIP() << "TARDIS_GUEST_UNPLUG names no controller behind a hot-plug port";
    address = text;
  }
  static int move(NvmeNamespace& space, Op op, std::vector<std::byte>& data) {
    const iovec range{data.data(), data.size()};
    NamespaceRequest request{.op = op, .offset = 0, .memory = {&range, 1}, .error = -1};
    space.run({&request, 1}, nullptr);
    return request.error;
  }
  // The port's slot power goes off, as if the drive were pulled.
  bool power_off() const {
    namespace fs = std::filesystem;
    const fs::path port = fs::canonical("/sys/bus/pci/devices/" + address).parent_path() / "config";
    const UniqueFd fd(::open(port.c_str(), O_RDWR | O_CLOEXEC));
    std::array<std::byte, kPciConfigBytes> config{};
    if (!fd || ::pread(fd.get(), config.data(), config.size(), 0) != static_cast<ssize_t>(config.size())) return false;
    const PciCapabilities found = read_capabilities(config);
    constexpr std::uint32_t kSlotControl = 0x18;
    constexpr std::uint16_t kPowerIndicatorOff = 3u << 8, kPowerOff = 1u << 10;
    std::uint16_t control = 0;
    std::memcpy(&control, config.data() + found.express_offset + kSlotControl, sizeof control);
    control |= kPowerIndicatorOff | kPowerOff;
    return found.express && ::pwrite(fd.get(), &control, sizeof control, found.express_offset + kSlotControl) == 2;
  }
  std::string address;
};

// Somebody unbinds it, or asks the machine for its removal: the process is told, and goes on until it lets go.
TEST_F(GuestUnplug, KernelAsksForIt) {
  auto opened = VfioController::open(address, guest_options());
  ASSERT_TRUE(opened) << opened.error().message;
  auto controller = *opened;
  auto space = *controller->open_namespace(1);
  EXPECT_FALSE(controller->device().release_requested());
  std::atomic<bool> unbound{false};
  std::thread asker([&] {
    const UniqueFd fd(::open("/sys/bus/pci/drivers/vfio-pci/unbind", O_WRONLY | O_CLOEXEC));
    EXPECT_EQ(::write(fd.get(), address.data(), address.size()), static_cast<ssize_t>(address.size()));
    unbound = true;
  });
  const std::uint64_t start = monotonic_ns();
  while (!controller->device().release_requested() && monotonic_ns() - start < 20 * kSecond) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_TRUE(controller->device().release_requested());
  EXPECT_FALSE(unbound.load());
  std::vector<std::byte> data(4096);
  EXPECT_EQ(move(*space, Op::kRead, data), 0) << "it works until it is let go";
  space.reset();
  opened = Error{Code::kClosed, ""};
  controller.reset();
  asker.join();
  EXPECT_TRUE(unbound.load());
  const UniqueFd probe(::open("/sys/bus/pci/drivers_probe", O_WRONLY | O_CLOEXEC));
  EXPECT_EQ(::write(probe.get(), address.data(), address.size()), static_cast<ssize_t>(address.size()));
  auto again = VfioController::open(address, guest_options());
  EXPECT_TRUE(again) << again.error().message;
}

TEST_F(GuestUnplug, PulledInTheMiddleOfItsWork) {
  auto opened = VfioController::open(address, guest_options());
  ASSERT_TRUE(opened) << opened.error().message;
  auto controller = *opened;
  auto space = *controller->open_namespace(1);
  auto driver = controller->driver();
  AlignedBuffer registered(1 << 20);
  if (driver->options().zero_copy) {
    ASSERT_TRUE(space->register_memory(registered.data(), registered.size()));
  }
  std::atomic<std::uint64_t> pulled{0};
  std::atomic<int> under_way{0};
  std::vector<std::thread> users;
  for (int t = 0; t < 3; ++t) {
    users.emplace_back([&, t] {
      std::vector<std::byte> data(128 << 10);
      int error = 0;
      for (int turn = 0; error == 0; ++turn) {
        if (turn == 2) ++under_way;
        error = move(*space, t == 0 ? Op::kWrite : Op::kRead, data);
      }
      const std::uint64_t now = monotonic_ns();
      EXPECT_EQ(error, ENODEV) << std::strerror(error);
      EXPECT_LT(now - pulled.load(), kSecond) << "a request knew for too long";
    });
  }
  while (under_way.load() < 3) std::this_thread::yield();
  pulled = monotonic_ns();
  ASSERT_TRUE(power_off());
  for (std::thread& user : users) user.join();
  EXPECT_EQ(driver->state(), DriverState::kGone);
  std::printf("registers of a drive that is gone: CSTS %08x\n", controller->window().read32(kRegCsts));
  std::vector<std::byte> data(4096);
  EXPECT_EQ(move(*space, Op::kRead, data), ENODEV);
  EXPECT_FALSE(space->flush());
  EXPECT_FALSE(driver->reset());
  EXPECT_FALSE(driver->volatile_cache_enabled());
  // Memory is free of it, and whoever gives it up does not wait for the kernel, which may take a minute.
  const std::uint64_t start = monotonic_ns();
  space.reset();
  driver.reset();
  opened = Error{Code::kClosed, ""};
  controller.reset();
  const double took = static_cast<double>(monotonic_ns() - start) / 1e9;
  std::printf("given up after %.2f s\n", took);
  EXPECT_LT(took, 2);
}

}  // namespace
}  // namespace tardis::nvme::testing
