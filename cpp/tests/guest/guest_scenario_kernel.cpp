// SPDX-License-Identifier: Apache-2.0
// Drives that the kernel's own driver has, or had. The first has a file system, the second is used for swap;
// tests/qemu/test_refusals.py says when which of these runs.
#include <filesystem>

#include "guest_scenario.h"
#include "tests/nvme_store_support.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;

std::string refusal(std::size_t number) {
  const auto controller = VfioController::open(guest_controllers().at(number), guest_options());
  EXPECT_FALSE(controller) << "it was opened";
  if (controller) return {};
  EXPECT_EQ(controller.error().code, Code::kBusy);
  std::printf("refused: %s\n", controller.error().message.c_str());
  return controller.error().message;
}

TEST(ScenarioKernel, DrivesInUseAreRefused) {
  EXPECT_NE(refusal(0).find("mounted"), std::string::npos);
  EXPECT_NE(refusal(1).find("swap"), std::string::npos);
}

TEST(ScenarioKernel, DrivesOfTheKernelAreRefused) {
  for (const std::size_t number : {0u, 1u}) {
    const std::string why = refusal(number);
    EXPECT_EQ(why.find("mounted"), std::string::npos);
    EXPECT_NE(why.find("driver_override"), std::string::npos) << "how to release it is not said";
  }
}

TEST(ScenarioKernel, WhatIsOnThemIsNotLost) {
  const std::string parent = setting("TARDIS_GUEST_FOLDER");
  for (const std::size_t number : {0u, 1u}) {
    const std::string home = parent + "/home" + std::to_string(number);
    std::filesystem::create_directories(home);
    auto disk = open_vfio_namespace(guest_controllers().at(number), 1, guest_options());
    ASSERT_TRUE(disk) << disk.error().message;
    AlignedBuffer before(1u << 20), after(1u << 20);
    ASSERT_EQ(move(**disk, Op::kRead, 0, before.data(), before.size()), 0);
    const auto refused = NvmeDevice::open(*disk, home, {});
    ASSERT_FALSE(refused);
    std::printf("refused: %s\n", refused.error().message.c_str());
    EXPECT_NE(refused.error().message.find(number == 0 ? "ext" : "swap"), std::string::npos);
    ASSERT_EQ(move(**disk, Op::kRead, 0, after.data(), after.size()), 0);
    EXPECT_EQ(std::memcmp(before.data(), after.data(), before.size()), 0) << "it was written to";
    if (number == 0) continue;
    // With the explicit switch.
    auto device = NvmeDevice::open(*disk, home, {.force = true});
    EXPECT_TRUE(device) << device.error().message;
  }
}

}  // namespace
}  // namespace tardis::nvme::testing
