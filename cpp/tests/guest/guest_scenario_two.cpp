// SPDX-License-Identifier: Apache-2.0
// Two controllers with a store each, as two ranks have them; the first loses its slot's power.
#include <filesystem>

#include "guest_scenario.h"
#include "guest_slot.h"
#include "tests/nvme_store_support.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;

TEST(ScenarioTwo, OneThatGoesIsNothingToTheOther) {
  const auto addresses = guest_controllers();
  ASSERT_EQ(addresses.size(), 2u);
  std::vector<std::shared_ptr<VfioController>> controllers;
  std::vector<std::shared_ptr<RawNamespace>> disks;
  std::vector<std::unique_ptr<Store>> stores;
  std::vector<Space> spaces;
  for (std::size_t i = 0; i < 2; ++i) {
    const std::string home = setting("TARDIS_GUEST_FOLDER") + "/" + std::to_string(i);
    std::filesystem::create_directories(home);
    auto controller = VfioController::open(addresses[i], guest_options());
    ASSERT_TRUE(controller) << controller.error().message;
    controllers.push_back(*controller);
    auto disk = (*controller)->open_namespace(1);
    ASSERT_TRUE(disk) << disk.error().message;
    disks.push_back(*disk);
    stores.push_back(open_store(home, small_store(8), true, on(*disk)));
    ASSERT_NE(stores.back(), nullptr);
    spaces.emplace_back(*stores.back(), 1, Layout{2, {20'000}});
  }
  constexpr std::size_t kPages = 80;
  for (std::size_t i = 0; i < 2; ++i) {
    ASSERT_EQ(spaces[i].put(1 + i, 0, kPages), kPages);
    ASSERT_TRUE(stores[i]->flush());
    ASSERT_EQ(spaces[i].fetch(1 + i, 0, kPages), kPages);
    EXPECT_EQ(spaces[i].run(2 - i, 0, kPages), 0u) << "the two are one";
  }

  switch_slot_off(addresses[0]);
  std::thread other([&] {
    for (std::uint64_t chain = 100; chain < 110; ++chain) {
      EXPECT_EQ(spaces[1].put(chain, 0, 8), 8u);
      EXPECT_EQ(spaces[1].fetch(chain, 0, 8), 8u);
      EXPECT_EQ(spaces[1].fetch(2, 0, kPages), kPages);
    }
  });
  AlignedBuffer memory(4096);
  const Timed read = timed("removed, registers read as zeros", [&] {
    int error = 0;
    EXPECT_TRUE(within(20, [&] {
      error = move(*disks[0], Op::kRead, 0, memory.data(), memory.size());
      return error != 0;
    })) << "it still reads";
    return error;
  });
  EXPECT_EQ(read.error, ENODEV);
  const Timed gone = timed("removed, its store", [&] {
    EXPECT_TRUE(within(20, [&] { return spaces[0].fetch(1, 0, kPages) == 0; })) << "nobody has noticed";
    return spaces[0].put(200, 0, 1) == 0 ? ENODEV : 0;
  });
  EXPECT_EQ(gone.error, ENODEV);
  other.join();
  EXPECT_EQ(stats_of(*stores[1]).paths_out, 0u);
  EXPECT_TRUE(stores[1]->close());
  EXPECT_NE(controllers[0]->driver()->report().find("GONE"), std::string::npos);
  const auto again = Driver::open(controllers[0]->window(), controllers[0]->mapper(), guest_options().driver);
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().os_error, ENODEV) << again.error().message;
  EXPECT_FALSE(controllers[0]->device().set_bus_mastering(false));
  const Timed closed = timed("removed, its store is closed", [&] { return stores[0]->close() ? 0 : EIO; });
  EXPECT_LT(closed.ms, 10'000);
}

}  // namespace
}  // namespace tardis::nvme::testing
