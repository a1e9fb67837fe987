// SPDX-License-Identifier: Apache-2.0
// Drives that fail: at each stage of a write, at a flush, at a read.
#include <algorithm>
#include <condition_variable>
#include <set>
#include <thread>

#include "store_support.h"

namespace tardis::testing {
namespace {

using Op = IoRequest::Op;

class StoreFaults : public ::testing::Test {
 protected:
  void set_fault(std::function<int(const IoRequest&)> before) {
    const std::lock_guard lock(faults->mutex);
    faults->before = std::move(before);
  }
  void set_flush_fault(std::function<int(FileId)> before) {
    const std::lock_guard lock(faults->flush_mutex);
    faults->before_flush = std::move(before);
  }
  std::unique_ptr<Store> open(std::uint64_t segments = 2, std::uint32_t flush_milliseconds = 10'000) {
    StoreOptions options = small_store(segments);
    options.flush_milliseconds = flush_milliseconds;
    return open_store(folder.path(), options, true, faulty(faults));
  }
  // After a reopen without faults: the pages of chain 1 are right, nothing is taken for corruption, every slot is
  // usable.
  void expect_healthy(std::size_t pages_of_chain_1, std::uint64_t segments = 2) {
    auto store = open_store(folder.path(), small_store(segments));
    ASSERT_NE(store, nullptr);
    Space space(*store, 1, {});
    EXPECT_EQ(space.fetch(1, 0, pages_of_chain_1), pages_of_chain_1);
    for (std::uint64_t chain = 2; chain < 6; ++chain) space.get(chain, 0, 10);
    EXPECT_EQ(stats_of(*store).get_pages_corrupt, 0u);
    expect_slots_conserved(*store);
    EXPECT_TRUE(store->close());
    auto verified = verify_store(folder.path(), false, {});
    ASSERT_TRUE(verified);
    EXPECT_EQ(verified->report.bad_headers + verified->report.bad_payloads + verified->report.quarantined, 0u);
  }

  TempFolder folder{memory_parent()};
  std::shared_ptr<Faults> faults = std::make_shared<Faults>();
};

TEST_F(StoreFaults, AFailedWriteAtAnyStageDropsASuffixAndNothingElse) {
  // A set of 4 pages: superblock (dirty), 4 payloads, tables. Each is failed once, also half written.
  for (std::uint64_t stage = 1; stage <= 8; ++stage) {
    for (const int verdict : {EIO, -EIO}) {
      SCOPED_TRACE(std::to_string(stage) + (verdict < 0 ? " torn" : ""));
      std::filesystem::remove_all(folder.path() + "/segments");
      std::filesystem::remove(folder.file("tardis.store"));
      faults = std::make_shared<Faults>();
      {
        auto store = open();
        Space space(*store, 1, {});
        ASSERT_EQ(space.put(1, 0, 2), 2u);
        ASSERT_TRUE(store->close());
      }
      {
        auto store = open();
        Space space(*store, 1, {});
        std::uint64_t writes = 0;
        set_fault(
            [&](const IoRequest& request) { return request.op == Op::kWrite && ++writes == stage ? verdict : 0; });
        Status why;
        const std::size_t stored = space.put(2, 0, 4, &why);
        if (stored < 4) {
          EXPECT_EQ(why.error().code, Code::kIo) << why.error().message;
        }
        set_fault({});
        EXPECT_EQ(space.fetch(2, 0, 4), stored);
        EXPECT_EQ(space.put(2, 0, 4), 4u) << "it works again";
        EXPECT_EQ(space.fetch(2, 0, 4), 4u);
        EXPECT_EQ(space.fetch(1, 0, 2), 2u);
        expect_slots_conserved(*store);
        EXPECT_TRUE(store->close());
      }
      expect_healthy(2);
    }
  }
}

// Pages in two segments, whose tables go to the drive together: those of one of them fail.
TEST_F(StoreFaults, TablesOfSeveralSegmentsAreWrittenTogetherAndFailAlone) {
  const auto is_table = [](const IoRequest& request) {
    return request.op == Op::kWrite && request.offset >= kTableBlockBytes && request.offset < (1u << 20);
  };
  std::size_t files_of_one_run = 0;
  {
    TempFolder other{memory_parent()};
    auto store = open_store(other.path(), small_store(2), true, hooked([&](std::span<IoRequest> requests) {
                              std::set<FileId> files;
                              for (const IoRequest& request : requests) {
                                if (is_table(request)) files.insert(request.file);
                              }
                              files_of_one_run = std::max(files_of_one_run, files.size());
                            }));
    Space space(*store, 1, {});
    ASSERT_EQ(space.put(2, 0, 60), 60u);
  }
  EXPECT_EQ(files_of_one_run, 2u);
  for (const std::size_t bad : {0, 1}) {  // the segment of the first pages, or of the last
    SCOPED_TRACE(bad);
    std::filesystem::remove_all(folder.path() + "/segments");
    std::filesystem::remove(folder.file("tardis.store"));
    {
      auto store = open();
      Space space(*store, 1, {});
      std::set<FileId> seen;
      set_fault([&](const IoRequest& request) {
        if (!is_table(request)) return 0;
        seen.insert(request.file);
        return seen.size() == bad + 1 ? EIO : 0;
      });
      Status why;
      const std::size_t stored = space.put(1, 0, 60, &why);
      ASSERT_FALSE(why);
      EXPECT_EQ(why.error().code, Code::kIo) << why.error().message;
      set_fault({});
      EXPECT_EQ(stored > 0, bad == 1);
      EXPECT_LT(stored, 60u);
      EXPECT_EQ(space.fetch(1, 0, 60), stored);
      expect_slots_conserved(*store);
      EXPECT_EQ(space.put(1, 0, 60), 60u) << "it works again";
      EXPECT_EQ(space.fetch(1, 0, 60), 60u);
      EXPECT_TRUE(store->close());
    }
    expect_healthy(60);
  }
}

// The slot of an evicted page is overwritten, but its header never: after a clean close that must not look like
// corruption.
TEST_F(StoreFaults, AFailedOverwriteIsNotTakenForCorruptionAfterACleanClose) {
  {
    auto store = open(1);
    Space space(*store, 1, {});
    ASSERT_EQ(space.put(1, 0, 8), 8u);
    ASSERT_EQ(space.put(9, 0, 40), 40u);
    ASSERT_TRUE(store->close());
  }
  {
    auto store = open(1);
    Space space(*store, 1, {});
    space.fetch(1, 0, 8);  // so that chain 9 goes first
    set_fault(
        [](const IoRequest& request) { return request.op == Op::kWrite && request.offset >= (1u << 20) ? -EIO : 0; });
    EXPECT_EQ(space.put(2, 0, 4), 0u);
    set_fault({});
    EXPECT_TRUE(store->close());
  }
  std::filesystem::remove(folder.file("index.checkpoint"));  // which knows that the page was evicted
  {
    auto store = open_store(folder.path(), small_store(1));
    Space space(*store, 1, {});
    space.get(9, 0, 40);
    for (std::uint64_t i = 0; i < 40; ++i) space.get(9, i, 1);
    EXPECT_EQ(stats_of(*store).get_pages_corrupt, 0u);
    EXPECT_GT(stats_of(*store).get_pages_torn, 0u);
    expect_slots_conserved(*store);
  }
  expect_healthy(8, 1);
}

TEST_F(StoreFaults, AFailedFlushUnpublishesItsGroupAndIsNotRetried) {
  {
    auto store = open();
    Space space(*store, 1, {});
    ASSERT_EQ(space.put(1, 0, 3), 3u);
    ASSERT_TRUE(store->flush());
    ASSERT_EQ(space.put(2, 0, 3), 3u);
    std::uint64_t flushes = 0;
    set_flush_fault([&](FileId) { return ++flushes == 1 ? EIO : 0; });
    Status status = store->flush();
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, Code::kIo);
    EXPECT_EQ(flushes, 1u);
    EXPECT_EQ(space.run(2, 0, 3), 0u);
    EXPECT_EQ(space.fetch(1, 0, 3), 3u);
    const tardis_stats s = stats_of(*store);
    EXPECT_EQ(s.flush_failures, 1u);
    EXPECT_EQ(s.flush_unpublished_pages, 3u);
    EXPECT_TRUE(store->flush()) << "told once";
    EXPECT_EQ(space.put(2, 0, 3), 3u);
    EXPECT_TRUE(store->flush());
    EXPECT_EQ(space.fetch(2, 0, 3), 3u);
    expect_slots_conserved(*store);
  }
  expect_healthy(3);
}

TEST_F(StoreFaults, AFlushThatFailedInTheBackgroundIsToldByTheNextFlush) {
  auto store = open(2, /*flush_milliseconds=*/1);
  Space space(*store, 1, {});
  ASSERT_EQ(space.put(9, 0, 1), 1u);
  ASSERT_TRUE(store->flush());
  set_flush_fault([](FileId) { return EIO; });
  ASSERT_EQ(space.put(1, 0, 3), 3u);
  for (int i = 0; i < 500 && stats_of(*store).flush_failures == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  ASSERT_GT(stats_of(*store).flush_failures, 0u);
  set_flush_fault({});
  EXPECT_EQ(space.run(1, 0, 3), 0u);
  EXPECT_FALSE(store->flush()) << "pages set before the call are gone; success would be a lie";
  EXPECT_TRUE(store->flush());
}

TEST_F(StoreFaults, AFlushThatFailedIsToldByCloseAtTheLatest) {
  auto store = open();
  Space space(*store, 1, {});
  ASSERT_EQ(space.put(1, 0, 3), 3u);
  std::uint64_t flushes = 0;
  set_flush_fault([&](FileId) { return ++flushes == 1 ? EIO : 0; });
  EXPECT_FALSE(store->close());
}

// fdatasync fails once for everything written to the file before, whichever group it is of.
TEST_F(StoreFaults, AFailedFlushTakesPagesOfTheNextGroupInTheSameFile) {
  auto store = open();
  Space space(*store, 1, {});
  ASSERT_EQ(space.put(9, 0, 1), 1u);
  ASSERT_TRUE(store->flush());
  ASSERT_EQ(space.put(1, 0, 3), 3u);
  std::mutex mutex;
  std::condition_variable changed;
  int stage = 0;
  set_flush_fault([&](FileId) {
    std::unique_lock lock(mutex);
    if (stage != 0) return 0;
    stage = 1;
    changed.notify_all();
    changed.wait(lock, [&] { return stage == 2; });
    return EIO;
  });
  std::thread flusher([&] { EXPECT_FALSE(store->flush()); });
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return stage == 1; });
  }
  ASSERT_EQ(space.put(2, 0, 3), 3u);
  {
    const std::lock_guard lock(mutex);
    stage = 2;
    changed.notify_all();
  }
  flusher.join();
  EXPECT_EQ(space.run(1, 0, 3), 0u);
  EXPECT_EQ(space.run(2, 0, 3), 0u) << "written before the failed fdatasync, so not to be called durable by the next";
  EXPECT_EQ(space.run(9, 0, 1), 1u);
  EXPECT_TRUE(store->flush());
  expect_slots_conserved(*store);
}

// The same for a page whose payload was written before the failed fdatasync and whose header comes after it.
TEST_F(StoreFaults, AFailedFlushFailsAWriteThatIsUnderWay) {
  auto store = open();
  Space space(*store, 1, {});
  ASSERT_EQ(space.put(9, 0, 1), 1u);
  ASSERT_TRUE(store->flush());
  ASSERT_EQ(space.put(1, 0, 1), 1u);
  set_flush_fault([](FileId) { return EIO; });
  std::uint64_t payloads = 0;
  set_fault([&](const IoRequest& request) {
    if (request.op == Op::kWrite && request.offset >= (1u << 20) && ++payloads == 2) {
      EXPECT_FALSE(store->flush());
    }
    return 0;
  });
  Status why;
  EXPECT_EQ(space.put(2, 0, 3, &why), 0u);
  EXPECT_EQ(why.error().code, Code::kIo);
  set_fault({});
  set_flush_fault({});
  EXPECT_EQ(space.run(2, 0, 3), 0u);
  EXPECT_EQ(space.put(2, 0, 3), 3u);
  EXPECT_TRUE(store->flush());
  expect_slots_conserved(*store);
}

TEST_F(StoreFaults, AnUnreadablePageIsAMissAndIsQuarantined) {
  auto store = open();
  Space space(*store, 1, {});
  ASSERT_EQ(space.put(1, 0, 4), 4u);
  std::uint64_t reads = 0;
  set_fault([&](const IoRequest& request) { return request.op == Op::kRead && ++reads == 2 ? EIO : 0; });
  Status why;
  EXPECT_EQ(space.get(1, 0, 4, &why), (std::vector<std::uint8_t>{1, 0, 1, 1}));
  EXPECT_EQ(why.error().code, Code::kIo);
  EXPECT_EQ(stats_of(*store).get_pages_failed, 1u);
  EXPECT_EQ(space.run(1, 0, 4), 1u);
  expect_slots_conserved(*store, 1);
  EXPECT_EQ(space.put(1, 0, 4), 4u);
  EXPECT_EQ(space.fetch(1, 0, 4), 4u);
}

TEST_F(StoreFaults, AnErrorThatSaysNothingAboutTheMediumQuarantinesNothing) {
  auto store = open();
  Space space(*store, 1, {});
  ASSERT_EQ(space.put(1, 0, 4), 4u);
  set_fault([](const IoRequest& request) { return request.op == Op::kRead ? ENOMEM : 0; });
  EXPECT_EQ(space.fetch(1, 0, 4), 0u);
  set_fault({});
  EXPECT_EQ(space.fetch(1, 0, 4), 4u);
  expect_slots_conserved(*store);
}

TEST_F(StoreFaults, ManyRandomWriteAndFlushErrors) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 12; ++round) {
    auto store = open(3, 1 + static_cast<std::uint32_t>(random() % 5));
    Space space(*store, 1, {}), other(*store, 2, {2, {100'000}});
    std::mt19937_64 dice(random()), flush_dice(random());
    set_fault([&](const IoRequest& request) {
      return request.op == Op::kWrite && dice() % 12 == 0 ? (dice() % 2 == 0 ? EIO : -EIO) : 0;
    });
    set_flush_fault([&](FileId) { return flush_dice() % 6 == 0 ? EIO : 0; });
    for (int step = 0; step < 60; ++step) {
      Space& target = step % 3 == 0 ? other : space;
      const std::uint64_t chain = random() % 6;
      const std::size_t have = target.run(chain, 0, 40);
      (void)target.put(chain, have, 1 + random() % 5);
      target.get(chain, 0, 40);
      if (random() % 10 == 0) (void)store->flush();
      if (random() % 30 == 0) (void)store->clear(std::nullopt);
    }
    set_fault({});
    set_flush_fault({});
    tardis_stats s = stats_of(*store);
    EXPECT_EQ(s.slots_total, s.slots_live + s.slots_free + s.slots_quarantined + s.slots_writing);
    EXPECT_EQ(s.slots_writing, 0u);
    (void)store->close();
    store = open_store(folder.path(), small_store(3));
    ASSERT_NE(store, nullptr);
    Space after(*store, 1, {}), other_after(*store, 2, {2, {100'000}});
    for (std::uint64_t chain = 0; chain < 6; ++chain) {
      for (std::uint64_t i = 0; i < 40; ++i) after.get(chain, i, 1), other_after.get(chain, i, 1);
    }
    EXPECT_EQ(stats_of(*store).get_pages_corrupt, 0u) << "round " << round;
    expect_slots_conserved(*store);
    // Whatever happened, the whole capacity can be used again.
    EXPECT_TRUE(store->clear(std::nullopt));
    EXPECT_EQ(stats_of(*store).slots_free, stats_of(*store).slots_total);
  }
}

TEST_F(StoreFaults, AStoreThatCannotReserveASegmentWorksWithThoseItHas) {
  class NoReserve : public WrappedDevice {
   public:
    using WrappedDevice::WrappedDevice;
    Status preallocate(FileId file, std::uint64_t bytes) override {
      if (++count_ > 2) return errno_error(ENOSPC, "fallocate (injected)");
      return inner_->preallocate(file, bytes);
    }

   private:
    int count_ = 0;
  };
  auto store = open_store(
      folder.path(), small_store(8), true,
      [](const std::string& path, const BlockDeviceOptions& options, int fd) -> Result<std::unique_ptr<BlockDevice>> {
        auto inner = open_block_device(path, options, fd);
        if (!inner) return inner.error();
        return std::unique_ptr<BlockDevice>(std::make_unique<NoReserve>(std::move(*inner)));
      });
  Space space(*store, 1, {});
  Status why;
  EXPECT_EQ(space.put(1, 0, 100, &why), 96u);
  EXPECT_EQ(why.error().code, Code::kNoSpace);
  EXPECT_NE(why.error().message.find("injected"), std::string::npos) << why.error().message;
  EXPECT_EQ(space.put(2, 0, 10), 10u);
  EXPECT_EQ(stats_of(*store).segments, 2u);
}

// A page whose group no later header proves durable is read in recovery. That this fails says nothing about the page,
// which may have been flushed; only bytes that are lost, or others than the header tells of, do.
TEST_F(StoreFaults, ADriveThatFailsDuringRecoveryCostsNoPage) {
  for (const int error : {ETIMEDOUT, EREMOTEIO, ENXIO, ENOMEM, EIO}) {
    SCOPED_TRACE(std::strerror(error));
    std::filesystem::remove_all(folder.path() + "/segments");
    std::filesystem::remove(folder.file("tardis.store"));
    in_killed_process([&] {
      auto store = open_store(folder.path(), small_store(2));
      Space space(*store, 1, {});
      EXPECT_EQ(space.put(1, 0, 4), 4u);
      EXPECT_TRUE(store->flush());
      (void)store.release();
    });
    set_fault([&](const IoRequest& request) {
      return request.op == Op::kRead && request.offset >= kFirstPayloadAlign ? error : 0;
    });
    {
      auto store = open();
      ASSERT_NE(store, nullptr);
      Space space(*store, 1, {});
      EXPECT_EQ(space.fetch(1, 0, 4), 0u);
      EXPECT_EQ(stats_of(*store).segments_unreadable, error == EIO ? 0u : 1u);
      set_fault({});
      // Others can be stored meanwhile.
      EXPECT_EQ(space.put(2, 0, 4), 4u);
      EXPECT_EQ(space.fetch(2, 0, 4), 4u);
      EXPECT_TRUE(store->close());
    }
    auto store = open_store(folder.path(), small_store(2));
    ASSERT_NE(store, nullptr);
    Space space(*store, 1, {});
    EXPECT_EQ(space.fetch(1, 0, 4), error == EIO ? 0u : 4u);
    EXPECT_EQ(space.fetch(2, 0, 4), 4u);
    expect_slots_conserved(*store);
    EXPECT_TRUE(store->close());
  }
}

// A segment that fails while it changes class is set aside, and close() still ends well.
TEST_F(StoreFaults, AReclassThatFails) {
  {
    auto store = open(2);
    Space a(*store, 1, {}), b(*store, 2, {1, {500'000}});
    ASSERT_EQ(a.put(1, 0, 96), 96u);
    set_fault([](const IoRequest& request) { return request.op == Op::kWrite && request.offset == 0 ? EIO : 0; });
    Status why;
    EXPECT_EQ(b.put(1, 0, 1, &why), 0u);
    EXPECT_EQ(why.error().code, Code::kIo);
    set_fault({});
    EXPECT_GT(stats_of(*store).segments_unreadable, 0u);
    a.get(1, 0, 96);
    expect_slots_conserved(*store);
    EXPECT_TRUE(store->close());
  }
  auto store = open_store(folder.path(), small_store(2));
  Space a(*store, 1, {});
  for (std::uint64_t i = 0; i < 96; ++i) a.get(1, i, 1);
  EXPECT_EQ(stats_of(*store).get_pages_corrupt, 0u);
  expect_slots_conserved(*store);
}

}  // namespace
}  // namespace tardis::testing
