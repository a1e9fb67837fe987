// SPDX-License-Identifier: Apache-2.0
// Stores that were closed, or whose process was killed, and what lies in their files.
#pragma once

#include "store_support.h"

namespace tardis::testing {

class ClosedStore : public ::testing::Test {
 protected:
  // Pages 0..count of chain 1 in a store that was closed.
  void make_clean(std::size_t count, std::uint64_t segments = 4) {
    auto store = open_store(folder.path(), small_store(segments));
    Space space(*store, 1, {});
    ASSERT_EQ(space.put(1, 0, count), count);
    ASSERT_TRUE(store->close());
  }
  // The same, flushed, but killed before it was closed.
  void make_dirty(std::size_t flushed, std::size_t unflushed = 0) {
    in_killed_process([&] {
      auto store = open_store(folder.path(), small_store(4));
      Space space(*store, 1, {});
      EXPECT_EQ(space.put(1, 0, flushed), flushed);
      EXPECT_TRUE(store->flush());
      if (unflushed > 0) {
        EXPECT_EQ(space.put(2, 0, unflushed), unflushed);
      }
      store.release();  // SIGKILL comes before any destructor
    });
  }
  SegmentSuperblock segment(std::uint32_t id = 0) {
    return read_struct<SegmentSuperblock>(segment_file(folder.path(), id), 0);
  }
  void rewrite_header(const OnDisk& page, const std::function<void(SlotHeader&)>& change) {
    SlotHeader header = page.header;
    change(header);
    seal(header);
    write_bytes(page.file, page.header_offset, &header, sizeof header);
  }

  TempFolder folder{memory_parent()};
};

}  // namespace tardis::testing
