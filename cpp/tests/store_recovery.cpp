// SPDX-License-Identifier: Apache-2.0
// What a store makes of the files that a crash, another release, another store or a careless hand left behind.
#include <sys/stat.h>
#include <sys/wait.h>

#include "store/list.h"
#include "store/live_verify.h"
#include "store_closed.h"

namespace tardis::testing {
namespace {

class StoreRecovery : public ClosedStore {};

TEST_F(StoreRecovery, ACleanCloseLeavesCleanSegments) {
  make_clean(10);
  EXPECT_EQ(segment().flags, 0u);
  auto store = open_store(folder.path(), small_store(4));
  Space space(*store, 1, {});
  EXPECT_EQ(space.fetch(1, 0, 10), 10u);
  EXPECT_EQ(stats_of(*store).recovered_pages, 10u);
  EXPECT_EQ(stats_of(*store).recovered_verified, 0u) << "a clean store is opened without reading payloads";
  EXPECT_EQ(segment().flags, 0u) << "reading alone makes nothing dirty";
  expect_slots_conserved(*store);
}

TEST_F(StoreRecovery, AKilledProcessLosesNothingThatWasFlushed) {
  make_dirty(10, 5);
  EXPECT_EQ(segment().flags, std::uint32_t{kSegmentDirty});
  auto store = open_store(folder.path(), small_store(4));
  Space space(*store, 1, {});
  EXPECT_EQ(space.fetch(1, 0, 10), 10u);
  // SIGKILL takes nothing that the kernel had, and what no header proves durable was read and compared.
  EXPECT_EQ(space.fetch(2, 0, 5), 5u);
  EXPECT_GE(stats_of(*store).recovered_verified, 5u);
  EXPECT_EQ(segment().flags, std::uint32_t{kSegmentDirty | kSegmentSuspect});
  expect_slots_conserved(*store);
  EXPECT_TRUE(store->close());
  EXPECT_EQ(segment().flags, std::uint32_t{kSegmentSuspect});
  auto verified = verify_store(folder.path(), /*repair=*/true, {});
  ASSERT_TRUE(verified);
  EXPECT_EQ(verified->report.objects, 15u);
  EXPECT_EQ(verified->report.torn + verified->report.bad_payloads + verified->report.bad_headers, 0u);
  EXPECT_EQ(segment().flags, 0u);
}

TEST_F(StoreRecovery, ATornPageOfAnUnprovenGroupIsNotPublished) {
  make_dirty(3, 3);
  flip_bit(find_on_disk(folder.path(), page_key(2, 1)).file,
           find_on_disk(folder.path(), page_key(2, 1)).payload_offset + 5000);
  auto store = open_store(folder.path(), small_store(4));
  Space space(*store, 1, {});
  EXPECT_EQ(space.run(2, 0, 3), 1u);
  EXPECT_TRUE(space.has(2, 2));
  EXPECT_EQ(stats_of(*store).recovered_rejected, 1u);
  expect_slots_conserved(*store);
}

// The new copy is not durable before the next flush; until then the old one must not be given up. One that is torn is
// stored anew.
TEST_F(StoreRecovery, WhatIsStoredAgainAfterACrashKeepsItsSlotIfItIsWhole) {
  make_dirty(6, 1);
  const OnDisk whole = find_on_disk(folder.path(), page_key(1, 1)), torn = find_on_disk(folder.path(), page_key(1, 4));
  flip_bit(torn.file, torn.payload_offset + 5000);
  auto store = open_store(folder.path(), small_store(4));
  Space space(*store, 1, {});
  ASSERT_EQ(space.run(1, 0, 6), 6u) << "a later header says that they are durable";
  EXPECT_EQ(space.put(1, 0, 6), 6u);
  EXPECT_EQ(stats_of(*store).set_pages_written, 1u);
  EXPECT_EQ(stats_of(*store).set_pages_present, 5u);
  EXPECT_TRUE(store->flush());
  EXPECT_EQ(find_on_disk(folder.path(), page_key(1, 1)).header.generation, whole.header.generation);
  EXPECT_GT(find_on_disk(folder.path(), page_key(1, 4)).header.generation, torn.header.generation);
  EXPECT_EQ(space.fetch(1, 0, 6), 6u);
  expect_slots_conserved(*store);
}

// What one recovery refused, the next must not believe because later groups became durable.
TEST_F(StoreRecovery, ATornPageStaysRefusedAfterASecondCrash) {
  make_dirty(3, 6);
  for (std::uint64_t i = 1; i < 6; ++i) {
    const OnDisk page = find_on_disk(folder.path(), page_key(2, i));
    flip_bit(page.file, page.payload_offset + 5000);
  }
  in_killed_process([&] {
    auto store = open_store(folder.path(), small_store(4));
    Space space(*store, 1, {});
    EXPECT_EQ(space.put(3, 0, 1), 1u);  // these two take slots of torn pages; the other three stay as they are
    EXPECT_TRUE(store->flush());
    EXPECT_EQ(space.put(4, 0, 1), 1u);
    EXPECT_TRUE(store->flush());
    store.release();
  });
  auto store = open_store(folder.path(), small_store(4));
  Space space(*store, 1, {});
  for (std::uint64_t i = 1; i < 6; ++i) EXPECT_FALSE(space.has(2, i)) << i;
  EXPECT_EQ(space.fetch(3, 0, 1) + space.fetch(4, 0, 1) + space.fetch(2, 0, 1), 3u);
}

// A caller that stores a page and flushes relies on it: what a crash may have torn does not count as stored.
TEST_F(StoreRecovery, StoringAPageAgainRepairsWhatACrashTore) {
  make_dirty(3, 3);
  const OnDisk page = find_on_disk(folder.path(), page_key(1, 1));
  flip_bit(page.file, page.payload_offset + 100);
  {
    auto store = open_store(folder.path(), small_store(4));
    Space space(*store, 1, {});
    ASSERT_TRUE(space.has(1, 1)) << "believed without being read: its group is proven durable";
    EXPECT_EQ(space.put(1, 0, 3), 3u);
    EXPECT_TRUE(store->flush());
    EXPECT_EQ(space.fetch(1, 0, 3), 3u);
    EXPECT_EQ(stats_of(*store).slots_live, 6u);
    expect_slots_conserved(*store);
    const auto written = stats_of(*store).set_pages_written;
    EXPECT_EQ(space.put(1, 0, 3), 3u);
    EXPECT_EQ(stats_of(*store).set_pages_written, written) << "once is enough";
  }
  auto store = open_store(folder.path(), small_store(4));
  Space space(*store, 1, {});
  EXPECT_EQ(space.fetch(1, 0, 3), 3u);
}

TEST_F(StoreRecovery, ATornDigestTableInADirtySegmentIsAFreeSlot) {
  make_dirty(3, 3);
  const OnDisk page = find_on_disk(folder.path(), page_key(2, 2));
  const SegmentSuperblock s = segment();
  flip_bit(page.file, s.digest_table_offset + page.header.slot * s.digests_per_slot * 8);
  {
    auto store = open_store(folder.path(), small_store(4));
    Space space(*store, 1, {});
    EXPECT_EQ(space.run(2, 0, 3), 2u);
    expect_slots_conserved(*store);
  }
  ASSERT_TRUE(verify_store(folder.path(), /*repair=*/true, {}));
  auto verified = verify_store(folder.path(), false, {});
  ASSERT_TRUE(verified);
  EXPECT_EQ(verified->report.bad_headers + verified->report.torn, 0u);
  EXPECT_EQ(verified->report.objects, 5u);
}

TEST_F(StoreRecovery, ATornPageInADirtySegmentIsAFreeSlotNotCorruption) {
  make_dirty(3, 3);
  const OnDisk page = find_on_disk(folder.path(), page_key(1, 1));
  ASSERT_LE(page.header.flush_group, find_on_disk(folder.path(), page_key(2, 0)).header.last_durable_group)
      << "group is proven";
  flip_bit(page.file, page.payload_offset + 64 * 1024 - 1, 7);
  for (int opening = 0; opening < 2; ++opening) {  // also after a clean close: the segment stays suspect
    auto store = open_store(folder.path(), small_store(4));
    Space space(*store, 1, {});
    if (opening == 1) {
      EXPECT_EQ(space.get(1, 0, 3), (std::vector<std::uint8_t>{1, 0, 1}));
      EXPECT_EQ(stats_of(*store).get_pages_torn, 1u);
      EXPECT_EQ(stats_of(*store).get_pages_corrupt, 0u);
    }
    expect_slots_conserved(*store);
  }
}

TEST_F(StoreRecovery, ACorruptPageInACleanSegmentIsQuarantinedForGood) {
  make_clean(3);
  const OnDisk page = find_on_disk(folder.path(), page_key(1, 1));
  flip_bit(page.file, page.payload_offset + 16384);
  {
    auto store = open_store(folder.path(), small_store(4));
    Space space(*store, 1, {});
    Status why;
    EXPECT_EQ(space.get(1, 0, 3, &why), (std::vector<std::uint8_t>{1, 0, 1}));
    EXPECT_EQ(why.error().code, Code::kCorrupt);
    EXPECT_EQ(stats_of(*store).get_pages_corrupt, 1u);
    EXPECT_EQ(space.run(1, 0, 3), 1u);
    expect_slots_conserved(*store, 1);
    EXPECT_EQ(space.put(1, 1, 1), 1u) << "the page can be stored again, elsewhere";
    EXPECT_EQ(space.fetch(1, 0, 3), 3u);
  }
  auto store = open_store(folder.path(), small_store(4));
  Space space(*store, 1, {});
  EXPECT_EQ(space.fetch(1, 0, 3), 3u);
  expect_slots_conserved(*store, 1);
  EXPECT_EQ(*store->clear(std::nullopt), 3u);
  expect_slots_conserved(*store, 0);
}

TEST_F(StoreRecovery, ATornHeaderInADirtySegmentIsAFreeSlot) {
  make_dirty(3, 1);
  flip_bit(find_on_disk(folder.path(), page_key(1, 2)).file,
           find_on_disk(folder.path(), page_key(1, 2)).header_offset + 300);
  auto store = open_store(folder.path(), small_store(4));
  Space space(*store, 1, {});
  EXPECT_EQ(space.run(1, 0, 3), 2u);
  expect_slots_conserved(*store);
}

TEST_F(StoreRecovery, ABrokenHeaderInACleanSegmentQuarantinesItsSlot) {
  make_clean(3);
  const OnDisk page = find_on_disk(folder.path(), page_key(1, 2));
  flip_bit(page.file, page.header_offset + 300);
  {
    auto store = open_store(folder.path(), small_store(4));
    Space space(*store, 1, {});
    EXPECT_EQ(space.run(1, 0, 3), 2u);
    EXPECT_EQ(stats_of(*store).recovered_rejected, 1u);
    expect_slots_conserved(*store, 1);
  }
  auto result = verify_store(folder.path(), /*repair=*/true, {});
  ASSERT_TRUE(result);
  EXPECT_EQ(result->report.bad_headers, 1u);
  auto store = open_store(folder.path(), small_store(4));
  expect_slots_conserved(*store, 0);
}

TEST_F(StoreRecovery, TheNewestGenerationOfAKeyWins) {
  make_clean(3);
  // A second, newer header for key (1, 0) in the slot of (1, 1), whose payload is that of (1, 1).
  const OnDisk first = find_on_disk(folder.path(), page_key(1, 0)),
               second = find_on_disk(folder.path(), page_key(1, 1));
  rewrite_header(second, [&](SlotHeader& h) { h.key = first.header.key, h.generation = 50; });
  {
    auto store = open_store(folder.path(), small_store(4));
    Space space(*store, 1, {});
    EXPECT_EQ(stats_of(*store).recovered_pages, 2u);
    PageMemory memory(1, {64 * 1024}, 1);
    const Hash256 key = page_key(1, 0);
    std::uint8_t ok = 0;
    ASSERT_TRUE(store->get(space.id(), &key, memory.pieces(), 1, &ok));
    EXPECT_TRUE(ok == 1 && memory.holds(0, space.seed(page_key(1, 1))));
    EXPECT_EQ(space.put(3, 0, 1), 1u);
    expect_slots_conserved(*store);
  }
  EXPECT_GT(find_on_disk(folder.path(), page_key(3, 0)).header.generation, 50u) << "generations only grow";
}

TEST_F(StoreRecovery, AHeaderOfAnotherSlotSegmentOrEpochIsNotBelieved) {
  make_clean(5);
  const auto page = [&](std::uint64_t i) { return find_on_disk(folder.path(), page_key(1, i)); };
  rewrite_header(page(1), [](SlotHeader& h) { h.slot += 1; });
  rewrite_header(page(2), [](SlotHeader& h) { h.segment += 1; });
  rewrite_header(page(3), [](SlotHeader& h) { h.segment_epoch += 1; });
  rewrite_header(page(4), [](SlotHeader& h) { h.key[5] ^= 1; });  // another key's page: found under that key only
  auto store = open_store(folder.path(), small_store(4));
  Space space(*store, 1, {});
  EXPECT_EQ(space.run(1, 0, 5), 1u);
  for (std::uint64_t i = 1; i < 5; ++i) EXPECT_FALSE(space.has(1, i)) << i;
  expect_slots_conserved(*store, 2);
}

TEST_F(StoreRecovery, AHostileHeaderDoesNoHarm) {
  make_dirty(4);
  const auto page = [&](std::uint64_t i) { return find_on_disk(folder.path(), page_key(1, i)); };
  // Sealed lies, in groups that recovery reads: huge padding, sizes that wrap, more parts than a slot holds.
  rewrite_header(page(0), [](SlotHeader& h) { h.part_bytes = 1, h.payload_bytes = 1, h.flush_group = 1000; });
  rewrite_header(page(1), [](SlotHeader& h) { h.part_bytes = ~0ull, h.part_stride = ~0ull, h.flush_group = 1000; });
  rewrite_header(page(2),
                 [](SlotHeader& h) { h.part_count = ~0u, h.payload_bytes = h.part_bytes * ~0u, h.flush_group = 1000; });
  auto store = open_store(folder.path(), small_store(4));
  Space space(*store, 1, {});
  EXPECT_EQ(space.get(1, 3, 1), std::vector<std::uint8_t>{1});
  for (std::uint64_t i = 0; i < 3; ++i) EXPECT_FALSE(space.has(1, i)) << i;
  expect_slots_conserved(*store);
}

TEST_F(StoreRecovery, AHostileSegmentSuperblockIsLeftAlone) {
  make_clean(3);
  const std::string file = segment_file(folder.path(), 0);
  const SegmentSuperblock good = segment();
  const std::vector<std::function<void(SegmentSuperblock&)>> lies = {
      [](SegmentSuperblock& s) { s.slots = ~0u; },
      [](SegmentSuperblock& s) { s.slot_bytes = 0; },
      [](SegmentSuperblock& s) { s.slot_bytes = 1, s.digests_per_slot = ~0u; },
      [](SegmentSuperblock& s) { s.digests_per_slot = ~0u; },
      [](SegmentSuperblock& s) { s.payload_offset = 0; },
      [](SegmentSuperblock& s) { s.header_table_offset = ~0ull; },
      [](SegmentSuperblock& s) { s.digest_table_offset = s.header_table_offset; },
      [](SegmentSuperblock& s) { s.segment_bytes *= 2; },
      [](SegmentSuperblock& s) { s.segment = 1; },
      [](SegmentSuperblock& s) { s.store_uuid[0] ^= 1; },  // of another store
      [](SegmentSuperblock& s) { s.format_version = 2; },
      [](SegmentSuperblock& s) {
        s.slot_bytes = 512;  // geometry that fits itself, but not a drive's blocks
        const SegmentGeometry g = SegmentGeometry::of(s.segment_bytes, 512, 1);
        s.slots = g.slots, s.digests_per_slot = 1, s.digest_table_offset = g.digest_table_offset,
        s.payload_offset = g.payload_offset;
      },
  };
  for (std::size_t i = 0; i < lies.size(); ++i) {
    SCOPED_TRACE(i);
    SegmentSuperblock bad = good;
    lies[i](bad);
    seal(bad);
    write_bytes(file, 0, &bad, sizeof bad);
    {
      auto store = open_store(folder.path(), small_store(4));
      Space space(*store, 1, {});
      EXPECT_EQ(space.run(1, 0, 3), 0u);
      EXPECT_EQ(stats_of(*store).segments_unreadable, 1u);
      EXPECT_NE(store->path_report_json().find("left alone"), std::string::npos);
      EXPECT_EQ(stats_of(*store).allocated_bytes, kTestSegment) << "it still takes its share of the capacity";
    }
    EXPECT_EQ(read_struct<SegmentSuperblock>(file, 0).crc, bad.crc) << "changed";
    ASSERT_TRUE(verify_store(folder.path(), false, {}));
    ASSERT_TRUE(inspect_store(folder.path()));
  }
  write_bytes(file, 0, &good, sizeof good);
  auto store = open_store(folder.path(), small_store(4));
  Space space(*store, 1, {});
  EXPECT_EQ(space.fetch(1, 0, 3), 3u);
}

TEST_F(StoreRecovery, ADamagedSegmentSuperblockLosesThatSegmentOnly) {
  make_clean(60);  // 48 slots a segment
  flip_bit(segment_file(folder.path(), 0), 100);
  auto store = open_store(folder.path(), small_store(4));
  Space space(*store, 1, {});
  EXPECT_EQ(stats_of(*store).segments_unreadable, 1u);
  EXPECT_EQ(stats_of(*store).slots_live, 12u);
  EXPECT_EQ(space.put(1, 0, 60), 60u);
  EXPECT_EQ(space.fetch(1, 0, 60), 60u);
  EXPECT_LE(stats_of(*store).allocated_bytes, 4 * kTestSegment);
}

TEST_F(StoreRecovery, TruncatedDeletedAndEmptySegmentFiles) {
  make_clean(130, 4);                                                                           // three segments
  std::filesystem::resize_file(segment_file(folder.path(), 0), (1u << 20) + 10 * 65536 + 100);  // keeps ten pages
  std::filesystem::remove(segment_file(folder.path(), 1));
  std::filesystem::resize_file(segment_file(folder.path(), 2), 0);
  {
    auto store = open_store(folder.path(), small_store(4));
    Space space(*store, 1, {});
    EXPECT_EQ(space.run(1, 0, 130), 10u);
    EXPECT_EQ(space.fetch(1, 0, 10), 10u);
    expect_slots_conserved(*store);
    EXPECT_NE(store->path_report_json().find("pages beyond its end are lost"), std::string::npos);
    EXPECT_EQ(space.put(1, 0, 130), 130u);
    EXPECT_EQ(space.fetch(1, 0, 130), 130u);
  }
  EXPECT_EQ(std::filesystem::file_size(segment_file(folder.path(), 0)), kTestSegment);
  for (const std::uint64_t bytes :
       {std::uint64_t{100}, std::uint64_t{5000}, std::uint64_t{30000}}) {  // within the tables
    SCOPED_TRACE(bytes);
    std::filesystem::resize_file(segment_file(folder.path(), 0), bytes);
    auto store = open_store(folder.path(), small_store(4));
    ASSERT_NE(store, nullptr);
    Space space(*store, 1, {});
    EXPECT_EQ(space.put(1, 0, 48), 48u);
    EXPECT_EQ(space.fetch(1, 0, 48), 48u);
  }
}

TEST_F(StoreRecovery, StrayFilesAreIgnored) {
  make_clean(3);
  for (const char* name : {"/segments/notes.txt", "/segments/12x.seg", "/segments/.seg", "/tardis.store.new", "/x"}) {
    std::ofstream(folder.path() + name) << "stray";
  }
  std::filesystem::create_directory(folder.path() + "/segments/000003.seg");
  auto store = open_store(folder.path(), small_store(4));
  Space space(*store, 1, {});
  EXPECT_EQ(space.fetch(1, 0, 3), 3u);
  EXPECT_EQ(stats_of(*store).segments_unreadable, 1u);  // the folder of that name
}

TEST_F(StoreRecovery, AStrayFileOfTheLastNumberDoesNotEndTheStoresGrowth) {
  make_clean(3, 8);
  std::ofstream(folder.path() + "/segments/1048575.seg") << "stray";
  for (std::uint64_t chain = 2; chain < 4; ++chain) {
    auto store = open_store(folder.path(), small_store(8));
    Space space(*store, 1, {});
    EXPECT_EQ(space.put(chain, 0, 100), 100u);
    EXPECT_EQ(space.fetch(chain, 0, 100), 100u);
    EXPECT_EQ(space.fetch(1, 0, 3), 3u);
    EXPECT_TRUE(store->close());
  }
  EXPECT_TRUE(std::filesystem::exists(segment_file(folder.path(), 1)));
  EXPECT_EQ(std::filesystem::file_size(folder.path() + "/segments/1048575.seg"), 5u);
}

TEST_F(StoreRecovery, NumbersOfNewSegments) {
  const auto next = [](const std::vector<std::uint32_t>& numbers) {
    std::map<SegmentName, std::string> files;
    for (const std::uint32_t number : numbers) files[{0, number}] = {};
    return number_for_next_segment(files);
  };
  constexpr std::uint32_t kLast = kMaxSegments - 1;
  EXPECT_EQ(next({}), 0u);
  EXPECT_EQ(next({0, 1, 5}), 6u);
  EXPECT_EQ(next({kLast}), 0u);
  EXPECT_EQ(next({0, 1, kLast}), 2u);
  EXPECT_EQ(next({7, 400'000, kLast - 65536}), kLast - 65535);
  EXPECT_EQ(next({7, 400'000, kLast - 65535}), 400'001u);
  EXPECT_EQ(next({7, 600'000, kLast}), 8u);
}

// A FIFO waits for a writer when it is opened to be read.
TEST_F(StoreRecovery, AFifoInPlaceOfAFileHoldsUpNothing) {
  const std::string second = folder.path() + "/b";
  StoreOptions options = small_store(8);
  options.more_paths = {second};
  {
    auto store = open_store(folder.path(), options);
    Space space(*store, 1, {});
    ASSERT_EQ(space.put(1, 0, 100), 100u);
    ASSERT_TRUE(store->close());
  }
  struct Case {
    const char* file;
    bool opens;
  };
  for (const auto& [file, opens] : {Case{"/index.checkpoint", true},
                                    {"/segments/000000.seg", true},
                                    {"/b/segments/000000.seg", true},
                                    {"/segments/000077.seg", true},
                                    {"/b/tardis.path", true},
                                    {"/tardis.paths", false},
                                    {"/tardis.store", false}}) {
    const std::string path = folder.path() + file, away = folder.path() + "/away";
    const bool there = std::filesystem::exists(path);
    if (there) std::filesystem::rename(path, away);
    ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::alarm(10);  // ends what hangs
      (void)list_store(folder.path(), [](const ObjectInfo&) { return true; });
      (void)verify_live_store(folder.path(), {});
      auto store = Store::open(folder.path(), options, false);
      const bool named = store || store.error().message.find(file) != std::string::npos;
      ::_exit(!named ? 2 : store ? 0 : 1);  // no close: it would replace the checkpoint
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status)) << file << ": hangs";
    EXPECT_EQ(WEXITSTATUS(status), opens ? 0 : 1) << file;
    if (std::filesystem::exists(path)) std::filesystem::remove(path);
    if (there && std::filesystem::exists(away)) std::filesystem::rename(away, path);
  }
}

TEST_F(StoreRecovery, ANewerFormatIsRefusedAndUntouched) {
  make_clean(3);
  auto s = read_struct<StoreSuperblock>(folder.file("tardis.store"), 0);
  s.format_version = 2;
  s.crc = 0;  // a newer release may even check it in another way
  write_bytes(folder.file("tardis.store"), 0, &s, sizeof s);
  const auto before = file_contents(segment_file(folder.path(), 0), 0, kTestSegment);
  auto store = Store::open(folder.path(), small_store(4), true);
  ASSERT_FALSE(store);
  EXPECT_EQ(store.error().code, Code::kUnsupportedFormat);
  EXPECT_EQ(verify_store(folder.path(), true, {}).error().code, Code::kUnsupportedFormat);
  EXPECT_EQ(inspect_store(folder.path()).error().code, Code::kUnsupportedFormat);
  EXPECT_EQ(file_contents(segment_file(folder.path(), 0), 0, kTestSegment), before);
  EXPECT_EQ(read_struct<StoreSuperblock>(folder.file("tardis.store"), 0).crc, 0u);
}

TEST_F(StoreRecovery, ADamagedStoreSuperblockIsRefused) {
  make_clean(3);
  const std::string file = folder.file("tardis.store");
  const auto good = read_struct<StoreSuperblock>(file, 0);
  const auto refused = [&] {
    auto store = Store::open(folder.path(), small_store(4), true);
    EXPECT_FALSE(store);
    return store ? Code::kOk : store.error().code;
  };
  for (std::uint64_t byte = 0; byte < sizeof good; byte += 7) {
    flip_bit(file, byte, byte % 8);
    const Code code = refused();
    EXPECT_TRUE(code == Code::kCorrupt || code == Code::kUnsupportedFormat) << byte;
    flip_bit(file, byte, byte % 8);
  }
  const std::vector<std::function<void(StoreSuperblock&)>> lies = {
      [](StoreSuperblock& s) { s.capacity_bytes = 5; },           [](StoreSuperblock& s) { s.segment_bytes = 0; },
      [](StoreSuperblock& s) { s.segment_bytes = ~0ull - 4095; }, [](StoreSuperblock& s) { s.block_bytes = 0; },
      [](StoreSuperblock& s) { s.block_bytes = 1u << 30; },       [](StoreSuperblock& s) { s.chunk_bytes = 0; },
      [](StoreSuperblock& s) { s.format_version = 0; },
  };
  for (std::size_t i = 0; i < lies.size(); ++i) {
    StoreSuperblock bad = good;
    lies[i](bad);
    seal(bad);
    write_bytes(file, 0, &bad, sizeof bad);
    EXPECT_EQ(refused(), Code::kCorrupt) << i;
  }
  std::filesystem::resize_file(file, 0);
  EXPECT_EQ(refused(), Code::kCorrupt);
  std::filesystem::remove(file);
  EXPECT_EQ(refused(), Code::kCorrupt) << "segments without a superblock must not be taken for an empty folder";
  EXPECT_TRUE(std::filesystem::exists(segment_file(folder.path(), 0)));
  std::ofstream(file, std::ios::binary).write(reinterpret_cast<const char*>(&good), sizeof good);
  auto store = open_store(folder.path(), small_store(4));
  Space space(*store, 1, {});
  EXPECT_EQ(space.fetch(1, 0, 3), 3u);
}

TEST_F(StoreRecovery, ADifferentSegmentSizeIsNamed) {
  make_clean(1);
  StoreOptions options = small_store(4);
  options.segment_bytes = 8u << 20;
  auto store = Store::open(folder.path(), options, true);
  ASSERT_FALSE(store);
  EXPECT_EQ(store.error().code, Code::kInvalidArgument);
  for (const char* word : {"segment_size", "8388608", "4194304"})
    EXPECT_NE(store.error().message.find(word), std::string::npos) << word;
}

TEST_F(StoreRecovery, CapacityGrowsAndShrinksAtReopen) {
  make_clean(48 * 4, 4);
  {
    auto store = open_store(folder.path(), small_store(6));
    Space space(*store, 1, {});
    EXPECT_EQ(space.fetch(1, 0, 192), 192u);
    EXPECT_EQ(space.put(1, 192, 96), 96u);
    EXPECT_EQ(stats_of(*store).segments, 6u);
    EXPECT_EQ(stats_of(*store).evicted_pages, 0u);
  }
  {
    auto store = open_store(folder.path(), small_store(2));
    Space space(*store, 1, {});
    const tardis_stats s = stats_of(*store);
    EXPECT_EQ(s.segments, 2u);
    EXPECT_LE(s.allocated_bytes, s.capacity_bytes);
    EXPECT_EQ(space.fetch(1, 0, 288), 96u);
    EXPECT_NE(store->path_report_json().find("capacity is smaller than before"), std::string::npos);
    expect_slots_conserved(*store);
  }
  StoreOptions unset = small_store(2);
  unset.capacity_bytes = 0;
  auto store = open_store(folder.path(), unset);
  EXPECT_EQ(stats_of(*store).capacity_bytes, 2 * kTestSegment + kMetadataBytes) << "the store's own";
}

TEST_F(StoreRecovery, FlushGroupsGoOnAfterAReopen) {
  make_dirty(2, 1);
  const std::uint64_t before = find_on_disk(folder.path(), page_key(2, 0)).header.flush_group;
  {
    auto store = open_store(folder.path(), small_store(4));
    Space space(*store, 1, {});
    space.put(3, 0, 1);
    EXPECT_TRUE(store->flush());
  }
  EXPECT_GT(find_on_disk(folder.path(), page_key(3, 0)).header.flush_group, before);
}

TEST_F(StoreRecovery, ASegmentThatWasNeverWrittenIsRemoved) {
  make_clean(1);
  std::ofstream(segment_file(folder.path(), 1)).close();
  std::filesystem::resize_file(segment_file(folder.path(), 1),
                               kTestSegment);  // preallocated, killed before its superblock
  auto store = open_store(folder.path(), small_store(4));
  EXPECT_EQ(stats_of(*store).segments, 1u);
  EXPECT_EQ(stats_of(*store).segments_unreadable, 0u);
  EXPECT_FALSE(std::filesystem::exists(segment_file(folder.path(), 1)));
}

TEST_F(StoreRecovery, EveryFlippedByteOfAHeaderIsHarmless) {
  make_clean(2);
  const OnDisk page = find_on_disk(folder.path(), page_key(1, 1));
  StoreOptions options = small_store(4);
  for (std::uint64_t byte = 0; byte < kHeaderBytes; byte += 3) {
    flip_bit(page.file, page.header_offset + byte, static_cast<unsigned>(byte % 8));
    auto store = open_store(folder.path(), options);
    Space space(*store, 1, {});
    EXPECT_EQ(space.fetch(1, 0, 2), 1u) << byte;  // checks the bytes of what it gets
    store.reset();
    flip_bit(page.file, page.header_offset + byte, static_cast<unsigned>(byte % 8));
  }
  auto store = open_store(folder.path(), options);
  Space space(*store, 1, {});
  EXPECT_EQ(space.fetch(1, 0, 2), 2u);
}

}  // namespace
}  // namespace tardis::testing
