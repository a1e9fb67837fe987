// SPDX-License-Identifier: Apache-2.0
// A whole store whose segments are on the controller's namespaces.
#include "guest_support.h"
#include "tests/nvme_store_support.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;
using GuestStore = Guest;

TEST_F(GuestStore, FillsAndVerifies) {
  for (const std::uint32_t id : {1u, 2u}) {
    SCOPED_TRACE("namespace " + std::to_string(id));
    const TempFolder folder(memory_parent());
    const Layout layout{4, {16 << 10, 16 << 10}};
    for (const bool first : {true, false}) {
      auto space = open_vfio_namespace(address, id, guest_options());
      if (!space && space.error().code == Code::kNotFound) GTEST_SKIP() << space.error().message;
      ASSERT_TRUE(space) << space.error().message;
      auto store = open_store(folder.path(), small_store(8), first, on(*space, {.force = first}));
      ASSERT_NE(store, nullptr);
      Space pages(*store, 1, layout);
      if (first) {
        EXPECT_EQ(pages.put(1, 0, 150), 150u);
        EXPECT_TRUE(store->flush());
      }
      EXPECT_EQ(pages.fetch(1, 0, 150), 150u);
      if (!first) {
        // Until old pages have to go.
        for (std::uint64_t chain = 2; chain < 5; ++chain) EXPECT_EQ(pages.put(chain, 0, 60), 60u);
        EXPECT_EQ(pages.fetch(4, 0, 60), 60u);
      }
      EXPECT_TRUE(store->close());
    }
  }
}

TEST_F(GuestStore, RegisteredPoolIsReadWithoutCopies) {
  const TempFolder folder(memory_parent());
  auto controller = open();
  ASSERT_NE(controller, nullptr);
  if (!controller->driver()->options().zero_copy) GTEST_SKIP() << "without an IOMMU all is copied";
  auto space = space_of(controller, 1);
  auto store = open_store(folder.path(), small_store(8), true, on(space, {.force = true}));
  ASSERT_NE(store, nullptr);
  const Layout layout{4, {16 << 10, 16 << 10}};
  Space pages(*store, 1, layout);
  ASSERT_EQ(pages.put(1, 0, 40), 40u);
  ASSERT_TRUE(store->flush());
  PageMemory memory(layout.parts, layout.regions, 40);
  auto* const begin = reinterpret_cast<void*>(*memory.pieces());
  ASSERT_TRUE(store->register_memory(begin, 40 * memory.page_bytes()));
  const std::uint64_t bounced = controller->driver()->counters().bounced_bytes;
  const auto keys = Space::keys(1, 0, 40);
  std::uint8_t ok[40];
  EXPECT_TRUE(store->get(pages.id(), keys.data(), memory.pieces(), 40, ok));
  for (std::size_t page = 0; page < 40; ++page) {
    EXPECT_EQ(ok[page], 1);
    EXPECT_TRUE(memory.holds(page, pages.seed(keys[page])));
  }
  // But for the slots' headers, which the store reads into its own memory.
  EXPECT_LE(controller->driver()->counters().bounced_bytes - bounced, 40u * 4096);
  store->unregister_memory(begin);
  EXPECT_TRUE(store->close());
}

}  // namespace
}  // namespace tardis::nvme::testing
