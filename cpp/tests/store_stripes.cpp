// SPDX-License-Identifier: Apache-2.0
// Segments striped over several folders: where layers lie, and what becomes of parts that are missing or do not belong.
#include "store/folder.h"
#include "store/live_verify.h"
#include "store/stripes.h"
#include "store_stripes_support.h"

namespace tardis::testing {
namespace {

namespace fs = std::filesystem;

TEST_F(StoreStripesTest, ObjectsOfEveryShapeComeBack) {
  const Layout layouts[] = {
      {1, {64 * 1024}},       {1, {200'000}},   {1, {3000}},          {2, {5000, 3000}}, {32, {4096}},
      {32, {20'000}},         {3, {16'384}},    {7, {1000, 24, 500}}, {2, {700'000}},    {5, {123'457}},
      {16, {49'152, 12'288}}, {1, {1'500'000}},
  };
  for (const auto engine : {BlockDeviceOptions::Engine::kSync, BlockDeviceOptions::Engine::kIoUring}) {
    for (const std::size_t paths : {2u, 3u}) {
      std::uint8_t number = 0;
      for (const Layout& layout : layouts) {
        SCOPED_TRACE("layout " + std::to_string(number++) + ", paths " + std::to_string(paths));
        for (std::size_t path = 0; path < 3; ++path) fs::remove_all(folder(path));
        const std::size_t pages = 5;
        auto opened = Store::open(folder(0), options(paths, 16, engine), true);
        if (!opened && engine == BlockDeviceOptions::Engine::kIoUring) GTEST_SKIP() << opened.error().message;
        auto store = std::move(*opened);
        Space space(*store, 1, layout);
        ASSERT_EQ(space.put(1, 0, pages), pages);
        EXPECT_EQ(space.fetch(1, 0, pages), pages);
        EXPECT_EQ(all(".part").size(), all(".seg").size() * (paths - 1)) << "striped over all paths";
        expect_whole_lengths(all(".seg"), all(".part"));
        ASSERT_TRUE(store->close());
        EXPECT_EQ(still(options(paths, 16, engine), pages, layout), pages);
        forget_checkpoint();
        EXPECT_EQ(still(options(paths, 16, engine), pages, layout), pages);
      }
    }
  }
}

TEST_F(StoreStripesTest, LayersLieOnTheDrivesInTurn) {
  for (const std::size_t paths : {2u, 3u}) {
    for (std::size_t path = 0; path < 3; ++path) fs::remove_all(folder(path));
    const Layout layout{6, {16'384, 4096}};  // no power of two
    fill(options(paths), 8, layout);
    const std::string base = all(".seg").front();
    const auto s = read_struct<SegmentSuperblock>(base, 0);
    ASSERT_TRUE(sealed(s));
    ASSERT_EQ(s.stripes, paths);
    EXPECT_EQ(s.stripe_unit, 20'480u);
    std::vector<std::string> member = {base};
    StoreFolder names(folder(0));
    ASSERT_TRUE(names.read_superblock());
    ASSERT_TRUE(names.paths().load(names.superblock().uuid));
    for (std::uint32_t i = 1; i < s.stripes; ++i)
      member.push_back(names.stripe_path({s.stripe_paths[0], s.segment}, s.stripe_paths[i]));
    for (std::uint32_t slot = 0; slot < 8; ++slot) {
      const auto h = read_struct<SlotHeader>(base, s.header_table_offset + slot * kHeaderBytes);
      ASSERT_TRUE(sealed(h));
      PageMemory page(6, layout.regions, 1);
      page.write(0, page_seed(1, h.key));
      for (std::uint32_t layer = 0; layer < 6; ++layer) {
        const std::uint32_t unit = slot * 6 + layer;
        const std::uint32_t drive = unit % s.stripes;
        EXPECT_EQ(drive, layer % paths) << "layer p on drive p mod S, as 6 layers are a multiple of 2 and 3";
        const auto bytes = file_contents(
            member[drive], (drive == 0 ? s.payload_offset : 4096) + unit / s.stripes * s.stripe_unit, 20'480);
        const auto* k = reinterpret_cast<const std::uint8_t*>(page.pieces()[layer * 2]);
        const auto* v = reinterpret_cast<const std::uint8_t*>(page.pieces()[layer * 2 + 1]);
        ASSERT_EQ(bytes.size(), 20'480u);
        EXPECT_TRUE(std::equal(k, k + 16'384, bytes.begin())) << "slot " << slot << " layer " << layer;
        EXPECT_TRUE(std::equal(v, v + 4096, bytes.begin() + 16'384));
      }
    }
  }
}

TEST_F(StoreStripesTest, WithOnePathSegmentsAreOrdinary) {
  fill(options(1), 20);
  EXPECT_TRUE(all(".part").empty());
  EXPECT_EQ(still(options(1), 20), 20u);
}

TEST_F(StoreStripesTest, BothKindsLiveSideBySide) {
  StoreOptions objects = options();
  objects.placement = Placement::kObjects;
  fill(objects, 60);
  const std::size_t ordinary = all(".seg").size();
  EXPECT_TRUE(all(".part").empty());
  {
    auto store = open(options());
    Space space(*store, 1, kLayers);
    EXPECT_EQ(found(space, 1, 60), 60u);
    for (std::uint64_t chain = 2; chain < 5; ++chain) ASSERT_EQ(space.put(chain, 0, 60), 60u);
    ASSERT_TRUE(store->close());
  }
  EXPECT_GT(all(".part").size(), 0u);
  EXPECT_EQ(all(".seg").size() - all(".part").size(), ordinary);
  auto store = open(objects);
  Space space(*store, 1, kLayers);
  for (std::uint64_t chain = 1; chain < 5; ++chain) EXPECT_EQ(found(space, chain, 60), 60u);
  const std::size_t striped = all(".part").size();
  ASSERT_EQ(space.put(9, 0, 100), 100u);
  EXPECT_EQ(all(".part").size(), striped) << "the setting is of new segments";
}

TEST_F(StoreStripesTest, OfAKilledProcessNothingFlushedIsLost) {
  in_killed_process([&] {
    auto store = open(options(3));
    Space space(*store, 1, kLayers);
    ASSERT_EQ(space.put(1, 0, 60), 60u);
    ASSERT_TRUE(store->flush());
    ASSERT_EQ(space.put(2, 0, 10), 10u);
    store.release();  // no close before the kill
  });
  auto store = open(options(3));
  Space space(*store, 1, kLayers);
  EXPECT_EQ(space.fetch(1, 0, 60), 60u);
  space.fetch(2, 0, 10);
  expect_slots_conserved(*store);
}

TEST_F(StoreStripesTest, ASecondProcessReadsAndWritesThem) {
  auto one = open(options(3));
  auto two = open(options(3));
  Space here(*one, 1, kLayers), there(*two, 1, kLayers);
  ASSERT_EQ(here.put(1, 0, 60), 60u);
  EXPECT_EQ(there.fetch(1, 0, 60), 60u);
  ASSERT_EQ(there.put(2, 0, 60), 60u);
  EXPECT_EQ(here.fetch(2, 0, 60), 60u);
  expect_slots_conserved(*one);
}

TEST_F(StoreStripesTest, AMissingPartCostsItsSegmentAndNothingElse) {
  fill(options());
  const std::vector<std::string> parts = all(".part");
  ASSERT_EQ(parts.size(), all(".seg").size());
  ASSERT_GE(parts.size(), 3u);
  fs::remove(parts[1]);
  {
    auto store = open(options());
    Space space(*store, 1, kLayers);
    const std::size_t hits = found(space, 1, 60);
    EXPECT_GT(hits, 0u);
    EXPECT_LT(hits, 60u);
    EXPECT_NE(notes(*store).find("segment removed"), std::string::npos) << notes(*store);
    EXPECT_EQ(stats_of(*store).segments_unreadable, 0u);
    EXPECT_EQ(stats_of(*store).paths_out, 0u);
    ASSERT_EQ(space.put(2, 0, 60), 60u);
    EXPECT_TRUE(store->clear(std::nullopt)) << "nothing is in the way";
    ASSERT_TRUE(store->close());
  }
  EXPECT_EQ(all(".part").size(), all(".seg").size());
}

TEST_F(StoreStripesTest, PartsOfAnotherSegmentAreNotTakenForItsOwn) {
  fill(options());
  // Those of the same path, so that only number and nonce tell them apart.
  const std::vector<std::string> parts = files(folder(1), ".part");
  ASSERT_GE(parts.size(), 2u);
  const std::string spare = parent.path() + "/spare";
  fs::rename(parts[0], spare);
  fs::rename(parts[1], parts[0]);
  fs::rename(spare, parts[1]);
  auto store = open(options());
  Space space(*store, 1, kLayers);
  EXPECT_LT(found(space, 1, 60), 60u);
  EXPECT_EQ(stats_of(*store).get_pages_corrupt, 0u);
  expect_slots_conserved(*store);
  ASSERT_TRUE(store->close());
  EXPECT_EQ(all(".part").size(), all(".seg").size()) << "the strays are gone";
}

TEST_F(StoreStripesTest, APartOfAnOlderSegmentOfTheSameNameIsNotTakenForItsOwn) {
  fill(options());
  const std::string part = files(folder(1), ".part").front();
  auto header = read_struct<StripeHeader>(part, 0);
  ++header.nonce;
  seal(header);
  write_bytes(part, 0, &header, sizeof header);
  EXPECT_LT(still(options()), 60u);
  EXPECT_EQ(all(".part").size(), all(".seg").size());
}

TEST_F(StoreStripesTest, APartWhoseFirstBlockIsDamagedIsLeftAlone) {
  fill(options());
  const std::string part = files(folder(1), ".part").front();
  flip_bit(part, 100);
  forget_checkpoint();
  auto store = open(options());
  EXPECT_EQ(stats_of(*store).segments_unreadable, 1u);
  EXPECT_EQ(stats_of(*store).paths_out, 0u);
  auto cleared = store->clear(std::nullopt);
  ASSERT_FALSE(cleared) << "it may hold more";
  EXPECT_EQ(cleared.error().code, Code::kCorrupt);
  ASSERT_TRUE(store->close());
  EXPECT_TRUE(fs::exists(part));
}

TEST_F(StoreStripesTest, OfATruncatedPartThePagesBeforeItsEndAreKept) {
  fill(options());
  const std::string part = all(".part").front();
  const std::uint64_t length = fs::file_size(part);
  fs::resize_file(part, length / 2);
  {
    auto store = open(options());
    Space space(*store, 1, kLayers);
    const std::size_t hits = found(space, 1, 60);
    EXPECT_GT(hits, 60u - 60u / 2);
    EXPECT_LT(hits, 60u);
    EXPECT_NE(notes(*store).find("instead of"), std::string::npos);
    EXPECT_EQ(fs::file_size(part), length) << "it gets its length back";
    ASSERT_EQ(space.put(1, 0, 60), 60u);
    EXPECT_EQ(found(space, 1, 60), 60u);
    ASSERT_TRUE(store->close());
  }
  EXPECT_EQ(still(options()), 60u);
}

TEST_F(StoreStripesTest, StripesOfNothingAreRemoved) {
  fill(options());
  const std::size_t before = all(".part").size();
  fs::copy(files(folder(1), ".part").front(), folder(1) + "/segments/000777-00.part");
  std::ofstream(folder(0) + "/segments/000778-01.part").flush();
  std::ofstream(folder(0) + "/segments/not-a-segment.part").flush();
  const std::string base = files(folder(0), ".seg").front();
  fs::remove(base);
  EXPECT_LT(still(options()), 60u);
  EXPECT_EQ(all(".part").size(), before - 1 + 1) << "one part lost its segment, one is not the store's";
  EXPECT_TRUE(fs::exists(folder(0) + "/segments/not-a-segment.part"));
}

TEST_F(StoreStripesTest, AtFullCapacityItEvictsAndTheCapacityHolds) {
  for (const std::size_t paths : {2u, 3u}) {
    for (std::size_t path = 0; path < 3; ++path) fs::remove_all(folder(path));
    const StoreOptions o = options(paths, 6);
    auto store = open(o);
    Space space(*store, 1, kLayers);
    for (std::uint64_t chain = 0; chain < 20; ++chain) {
      ASSERT_EQ(space.put(chain, 0, 20), 20u);
      EXPECT_EQ(space.fetch(chain, 0, 20), 20u);
      EXPECT_LE(allocated(), o.capacity_bytes);
    }
    EXPECT_GT(stats_of(*store).evicted_pages, 0u);
    EXPECT_EQ(all(".seg").size(), 6u);
    expect_whole_lengths(all(".seg"), all(".part"));
    expect_slots_conserved(*store);
    ASSERT_TRUE(store->close());
  }
}

TEST_F(StoreStripesTest, SegmentsChangeTheirClassAndTheirUnit) {
  for (const std::size_t paths : {2u, 3u}) {
    for (std::size_t path = 0; path < 3; ++path) fs::remove_all(folder(path));
    const StoreOptions o = options(paths, 4);
    auto store = open(o);
    auto other = open(o);  // has the files open, and must see them change
    const Layout small{3, {4096}}, large{4, {100'000, 50'000}};
    for (int round = 0; round < 4; ++round) {
      const Layout& layout = round % 2 == 0 ? small : large;
      const auto number = static_cast<std::uint8_t>(1 + round % 2);
      Space space(*store, number, layout), there(*other, number, layout);
      const std::size_t batch = round % 2 == 0 ? 100 : 4;
      for (std::uint64_t chain = 0; chain < 12; ++chain) {
        const std::uint64_t at = static_cast<std::uint64_t>(round) * 100 + chain;
        ASSERT_EQ(space.put(at, 0, batch), batch);
        EXPECT_EQ(space.fetch(at, 0, batch), batch);
        EXPECT_EQ(there.fetch(at, 0, batch), batch);
      }
      EXPECT_LE(allocated(), o.capacity_bytes);
    }
    EXPECT_EQ(stats_of(*store).get_pages_corrupt + stats_of(*other).get_pages_corrupt, 0u);
    expect_slots_conserved(*store);
    ASSERT_TRUE(other->close());
    ASSERT_TRUE(store->close());
    const auto verified = verify_store(folder(0), false, {});
    ASSERT_TRUE(verified);
    EXPECT_TRUE(verified->problems.empty()) << verified->problems.front();
  }
}

// Its first blocks take room in every file: where an object leaves none, the segment is not striped.
TEST_F(StoreStripesTest, AnObjectThatFillsASegmentGetsAnOrdinaryOne) {
  const Layout whole{2, {1536 * 1024}};
  auto store = open(options(2, 4));
  Space space(*store, 1, whole), small(*store, 2, kLayers);
  ASSERT_EQ(space.put(1, 0, 1), 1u);
  EXPECT_TRUE(all(".part").empty());
  ASSERT_EQ(small.put(1, 0, 60), 60u);
  EXPECT_EQ(all(".part").size(), 3u);
  // The capacity is used up: of the segments, the one that it fits in changes hands.
  for (std::uint64_t chain = 2; chain < 6; ++chain) {
    ASSERT_EQ(space.put(chain, 0, 1), 1u);
    EXPECT_EQ(space.fetch(chain, 0, 1), 1u);
    ASSERT_EQ(small.put(chain, 0, 20), 20u);
  }
  expect_slots_conserved(*store);
}

TEST_F(StoreStripesTest, AnObjectThatFitsNoStripedSegmentIsRefusedOnceAllAreStriped) {
  auto store = open(options(2, 3));
  Space space(*store, 1, {2, {1536 * 1024}}), small(*store, 2, kLayers);
  ASSERT_EQ(small.put(1, 0, 60), 60u);
  ASSERT_EQ(all(".part").size(), 3u);
  Status why;
  EXPECT_EQ(space.put(1, 0, 1, &why), 0u);
  EXPECT_EQ(why.error().code, Code::kNoSpace);
  EXPECT_EQ(found(small, 1, 60), 60u);
}

TEST_F(StoreStripesTest, ASmallerCapacityRemovesSegmentsWithTheirStripes) {
  fill(options(3, 16));
  still(options(3, 2));
  EXPECT_EQ(all(".seg").size(), 2u);
  EXPECT_EQ(all(".part").size(), 4u);
}

TEST_F(StoreStripesTest, VerifyFindsAFlippedBitInAPart) {
  fill(options(3), 20);
  const auto verify = [&](bool live) {
    auto verified = live ? verify_live_store(folder(0), {}) : verify_store(folder(0), false, {});
    EXPECT_TRUE(verified);
    return *verified;
  };
  for (const bool live : {false, true}) {
    EXPECT_EQ(verify(live).report.bad_payloads, 0u);
    EXPECT_EQ(verify(live).report.objects, 20u);
    EXPECT_TRUE(verify(live).problems.empty());
  }
  const std::string part = files(folder(2), ".part").front();
  flip_bit(part, 4096 + 5);
  for (const bool live : {false, true}) EXPECT_EQ(verify(live).report.bad_payloads, 1u) << live;
  flip_bit(part, 4096 + 5);
  const auto inspected = inspect_store(folder(0));
  ASSERT_TRUE(inspected);
  EXPECT_NE(inspected->find("\"objects\":20"), std::string::npos) << *inspected;
  std::uint64_t blocks = 0;
  for (const char* extension : {".seg", ".part"}) {
    for (const std::string& file : all(extension)) {
      struct stat status {};
      ASSERT_EQ(::stat(file.c_str(), &status), 0);
      blocks += static_cast<std::uint64_t>(status.st_blocks) * 512;
    }
  }
  EXPECT_NE(inspected->find("\"allocated_bytes\":" + std::to_string(blocks)), std::string::npos) << *inspected;
  // Without a part nothing can be said of the segment.
  fs::remove(part);
  for (const bool live : {false, true}) {
    const VerifyResult result = verify(live);
    EXPECT_EQ(result.report.unreadable_segments, 1u);
    EXPECT_FALSE(result.problems.empty());
  }
}

TEST(StoreStripesPlan, FilesAddUpAndEveryClassThatFitsIsServed) {
  std::mt19937_64 random(11);
  for (int i = 0; i < 3000; ++i) {
    const std::uint64_t segment = round_up(kMinSegmentBytes + random() % (64u << 20), kTableBlockBytes);
    std::vector<std::uint32_t> paths(2 + random() % 15);
    for (std::uint32_t p = 0; p < paths.size(); ++p) paths[p] = p;
    const auto object = [&] {
      const std::uint64_t region = 1 + random() % (random() % 2 ? 20'000 : 1'000'000);
      return ObjectGeometry::of(1 + static_cast<std::uint32_t>(random() % 40), 1, &region, random() % 2 ? 512 : 4096);
    };
    const ObjectGeometry first = object(), second = object();
    const auto files = static_cast<std::uint32_t>(paths.size());
    const std::uint64_t unit = stripe_unit(first, files);
    ASSERT_GT(unit, 0u);
    ASSERT_EQ(unit % StripeMap::kBlock, 0u);
    ASSERT_LE(unit, first.slot_class().slot_bytes);
    const Stripes stripes = Stripes::plan(segment, first.slot_class(), unit, paths);
    if (!stripes) continue;
    ASSERT_TRUE(stripes.sane());
    std::uint64_t sum = 0;
    for (std::uint32_t f = 0; f < files; ++f) sum += stripes.bytes_of(f);
    ASSERT_EQ(sum, segment);
    for (const ObjectGeometry& one : {first, second}) {
      const std::uint64_t own = stripe_unit(one, files);
      const SegmentGeometry g = stripes.geometry(one.slot_class(), own);
      const StripeMap map{g.payload_offset, own, files};
      for (std::uint32_t f = 0; f < files; ++f) {
        ASSERT_LE(map.start_in(f) + map.share(f, g.slots * g.slot_bytes), stripes.bytes_of(f));
      }
    }
    ASSERT_GT(stripes.geometry(first.slot_class(), unit).slots, 0u);
  }
}

}  // namespace
}  // namespace tardis::testing
