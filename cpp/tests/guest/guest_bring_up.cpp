// SPDX-License-Identifier: Apache-2.0
// Bring-up, Identify and what the machine says of the controller.
#include <cstring>
#include <filesystem>
#include <fstream>

#include "guest_support.h"
#include "nvme/vfio/memlock.h"

namespace tardis::nvme::testing {
namespace {

using GuestBringUp = Guest;

TEST_F(GuestBringUp, ControllerIsFoundAndIdentified) {
  const auto found = PciDevice::list_nvme();
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_GE(found->size(), 1u);
  auto controller = open();
  ASSERT_NE(controller, nullptr);
  const PciDevice& pci = controller->pci();
  EXPECT_EQ(pci.address.text(), address);
  EXPECT_TRUE(pci.is_nvme());
  EXPECT_EQ(pci.driver, "vfio-pci");
  EXPECT_GE(pci.bar_bytes[0], 8192u);
  EXPECT_GT(controller->device().vectors(), 0u);
  EXPECT_TRUE(controller->device().can_reset());
  const ControllerInfo& info = controller->driver()->controller();
  EXPECT_FALSE(info.serial.empty());
  EXPECT_GE(info.version, 0x10000u);
  EXPECT_GE(controller->driver()->namespaces().size(), 1u);
  std::printf("%s\n", controller->report().c_str());
}

TEST_F(GuestBringUp, AgainAndAgain) {
  for (int i = 0; i < 5; ++i) {
    auto controller = open();
    ASSERT_NE(controller, nullptr);
    EXPECT_EQ(controller->window().read32(kRegCsts) & (kCstsReady | kCstsFatal), kCstsReady);
  }
}

TEST_F(GuestBringUp, OneOwnerAtATime) {
  auto controller = open();
  ASSERT_NE(controller, nullptr);
  auto second = VfioController::open(address, guest_options());
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().os_error, EBUSY) << second.error().message;
}

// Files, mappings and pinned memory of attempts, whether they succeeded or not.
TEST_F(GuestBringUp, NothingIsLeftBehind) {
  const auto open_files = [] {
    const std::filesystem::directory_iterator files("/proc/self/fd"), end;
    return std::distance(files, end);
  };
  const auto mappings = [] {
    int count = 0;
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) count += line.find("vfio") != std::string::npos ? 1 : 0;
    return count;
  };
  (void)open();
  const auto files = open_files();
  const std::uint64_t locked = Memlock::read().locked;
  EXPECT_EQ(mappings(), 0);
  for (int i = 0; i < 2; ++i) {
    {
      const auto controller = open();
      ASSERT_NE(controller, nullptr);
      EXPECT_GT(mappings(), 0);
      EXPECT_FALSE(VfioController::open(address, guest_options())) << "a second owner";
      EXPECT_FALSE(open_vfio_namespace(address, 1, guest_options()));
    }
    EXPECT_FALSE(open_vfio_namespace(address, 77, guest_options())) << "no such namespace";
    VfioOptions late = guest_options();
    late.driver.queues = 0;
    EXPECT_FALSE(VfioController::open(address, late)) << "refused once the function is open";
    VfioOptions hasty = guest_options();
    hasty.driver.ready_timeout_ms = 1;
    hasty.driver.admin_timeout_ms = 1;
    (void)VfioController::open(address, hasty);  // at whatever step its time is over, or not at all
    EXPECT_EQ(open_files(), files);
    EXPECT_EQ(mappings(), 0);
    EXPECT_EQ(Memlock::read().locked, locked);
  }
}

TEST_F(GuestBringUp, NamespaceKeepsTheController) {
  auto space = open_vfio_namespace(address, 1, guest_options());
  ASSERT_TRUE(space) << space.error().message;
  EXPECT_GT((*space)->bytes(), 0u);
  std::vector<std::byte> block((*space)->block_bytes());
  const iovec range{block.data(), block.size()};
  NamespaceRequest request{.op = NamespaceRequest::Op::kRead, .memory = {&range, 1}, .error = -1};
  (*space)->run({&request, 1}, nullptr);
  EXPECT_EQ(request.error, 0);
}

}  // namespace
}  // namespace tardis::nvme::testing
