// SPDX-License-Identifier: Apache-2.0
// Loads through the C ABI, run by a thread of the loader: bytes, repairs, and what makes a load bad.
#include "gio_loads_support.h"

namespace tardis::gio::testing {
namespace {

class GioLoads : public ::testing::TestWithParam<std::pair<const char*, RigTerms>> {};

TEST_P(GioLoads, PagesFromFilesAndFromPinnedMemory) {
  LoadRig rig(GetParam().second);
  const auto files = objects(2, 17);
  const std::vector<std::pair<std::uint64_t, std::uint32_t>> pinned = {{77, 1}, {78, 62}, {79, 30}};
  auto job = rig.job(files, pinned);
  const tardis_load_result result = rig.all(*job);
  EXPECT_EQ(result.good, 1u);
  EXPECT_EQ(result.renew, 0u);
  EXPECT_EQ(result.pages, 17u);
  EXPECT_EQ(result.repaired_parts, 0u);
  auto expected = seeds(files);
  for (const auto& [seed, id] : pinned) expected[id] = seed;
  rig.expect_pools(expected);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_EQ(rig.board(*job).landed(layer), TARDIS_LOAD_GOOD);
    EXPECT_EQ(rig.board(*job).done(layer), TARDIS_LOAD_GOOD);
  }
  EXPECT_EQ(rig.board(*job).head().ring_pages, 17u);
  rig.expect_no_leases();
}

TEST_P(GioLoads, WithoutRingsTheHostReadsAllOfIt) {
  LoadRig rig(GetParam().second);
  const auto files = objects(0, kStored);
  auto job = rig.job(files);
  job->ring = {};
  job->ring.pool_pages = job->file_ids.data();
  const tardis_load_result result = rig.all(*job, /*use_rings=*/0);
  EXPECT_EQ(result.good, 1u);
  EXPECT_EQ(result.repaired_parts, kStored * kLayers);
  EXPECT_EQ(rig.board(*job).head().ring_pages, 0u);
  rig.expect_pools(seeds(files));
  rig.expect_no_leases();
}

RigTerms several_commands() {
  RigTerms terms;
  terms.most_bytes = 16 << 10;
  return terms;
}
RigTerms layers_apart() {
  RigTerms terms;
  terms.layers_apart = true;
  return terms;
}
RigTerms resting() {
  RigTerms terms;
  terms.rest_us = 200;
  return terms;
}
INSTANTIATE_TEST_SUITE_P(Shapes, GioLoads,
                         ::testing::Values(std::pair("OneCommand", RigTerms{}),
                                           std::pair("SeveralCommands", several_commands()),
                                           std::pair("LayersApart", layers_apart()), std::pair("Resting", resting())),
                         [](const auto& info) { return info.param.first; });

TEST(GioLoadsPinned, OnlyFromPinnedMemory) {
  LoadRig rig;
  auto job = rig.job({}, {{5, 0}, {6, 63}});
  rig.run(*job);
  rig.wait(*job);
  EXPECT_EQ(rig.board(*job).done(kLayers - 1), TARDIS_LOAD_GOOD);
  rig.expect_pools({{0, 5}, {63, 6}});
  job = rig.job({}, {{7, 1}, {8, kPoolPages}, {9, 0xffffffff}});
  rig.run(*job);
  rig.wait(*job);
  EXPECT_EQ(rig.board(*job).done(0), TARDIS_LOAD_BAD);
  EXPECT_EQ(rig.board(*job).head().errors, 2u * kLayers);
  rig.expect_pools({{0, 5}, {63, 6}, {1, 7}});
}

TEST(GioLoadsFailures, AnIdOutsideOfThePoolsMakesItBad) {
  LoadRig rig;
  auto files = objects(0, 5);
  files[2].second = kPoolPages;
  auto job = rig.job(files);
  EXPECT_EQ(rig.all(*job).good, 0u);
  EXPECT_EQ(rig.board(*job).head().errors, kLayers);
  files.erase(files.begin() + 2);
  rig.expect_pools(seeds(files));
  rig.expect_no_leases();
}

// A byte of a data file changes: the ring says so, the host reads it again, and the store puts the object aside.
TEST(GioLoadsFailures, DamageOnTheDriveMakesItBadAndTheObjectIsGone) {
  LoadRig rig;
  rig.flip(4, kPart + kHalf + 5);  // V of layer 1
  const auto files = objects(0, 8);
  auto job = rig.job(files);
  const tardis_load_result result = rig.all(*job);
  EXPECT_EQ(result.good, 0u);
  EXPECT_EQ(result.renew, 0u);
  const LoadBoard board = rig.board(*job);
  EXPECT_EQ(board.done(0), TARDIS_LOAD_GOOD);
  EXPECT_EQ(board.landed(1), TARDIS_LOAD_BAD);
  EXPECT_EQ(board.repaired(1), TARDIS_LOAD_BAD);
  EXPECT_EQ(board.done(1), TARDIS_LOAD_BAD);
  EXPECT_EQ(board.done(2), TARDIS_LOAD_BAD);
  EXPECT_EQ(rig.counters().damaged_pages, 1u);
  EXPECT_EQ(rig.counters().repaired_parts, 0u);
  rig.expect_pools(seeds(files), 1);  // not the changed byte
  EXPECT_FALSE(rig.found(4));
  EXPECT_EQ(tardis::testing::stats_of(rig.store()).get_pages_corrupt, 1u);
  // Without it the others are as good as before.
  rig.poison();
  auto others = files;
  others.erase(others.begin() + 4);
  job = rig.job(others);
  EXPECT_EQ(rig.all(*job).good, 1u);
  rig.expect_pools(seeds(others));
  // And it can be stored anew.
  rig.put();
  job = rig.job(files);
  EXPECT_EQ(rig.all(*job).good, 1u);
  rig.expect_pools(seeds(files));
  rig.expect_no_leases();
}

// The drive reads a part neither for the ring nor for the host.
TEST(GioLoadsFailures, WhatCannotBeReadTwiceMakesItBad) {
  LoadRig rig;
  const auto where = tardis::testing::find_on_disk(rig.folder(), rig.key(kStored - 1));
  std::filesystem::resize_file(where.file, where.payload_offset + kPart);  // layer 0 is left
  const auto files = objects(kStored - 4, 4);
  auto job = rig.job(files);
  const tardis_load_result result = rig.all(*job);
  EXPECT_EQ(result.good, 0u);
  EXPECT_EQ(result.renew, 0u);
  EXPECT_EQ(rig.board(*job).done(0), TARDIS_LOAD_GOOD);
  EXPECT_EQ(rig.board(*job).repaired(1), TARDIS_LOAD_BAD);
  rig.expect_pools(seeds(files), 1);
  EXPECT_EQ(rig.counters().failed_pages, 1u);
  EXPECT_EQ(rig.counters().damaged_pages, 0u);
  EXPECT_FALSE(rig.found(kStored - 1));
  EXPECT_TRUE(rig.found(kStored - 2));
}

TEST(GioLoadsFailures, WhatOnlyARingCouldNotReadIsReadAgain) {
  LoadRig rig;
  nvme::FaultRule rule;
  rule.kind = nvme::FaultKind::kMediaError;
  rule.opcode = 2;  // read
  rule.skip = 3;
  rule.count = 6;
  rig.faults().add(rule);
  const auto files = objects(3, 12);
  auto job = rig.job(files, {{99, 2}});
  const tardis_load_result result = rig.all(*job);
  EXPECT_EQ(result.good, 1u);
  EXPECT_EQ(result.renew, 0u);
  EXPECT_EQ(result.repaired_parts, 6u);
  auto expected = seeds(files);
  expected[2] = 99;
  rig.expect_pools(expected);
  const tardis_loader_counters counters = rig.counters();
  EXPECT_EQ(counters.repaired_parts, 6u);
  EXPECT_EQ(counters.failed_pages + counters.damaged_pages + counters.missing + counters.unproven, 0u);
  rig.expect_no_leases();
}

TEST(GioLoadsFailures, AQueuePairThatIsDownIsReportedAndReadAround) {
  RigTerms terms;
  terms.deadline_ns = 1;
  LoadRig rig(terms);
  const auto files = objects(0, 16);
  auto job = rig.job(files);
  tardis_load_result result = rig.all(*job);
  EXPECT_EQ(result.good, 1u);
  EXPECT_EQ(result.renew, 1u);
  EXPECT_GE(result.repaired_parts, 16u);
  rig.expect_pools(seeds(files));
  rig.renew();
  rig.poison();
  job = rig.job(files);
  job->ring.deadline_ns = 10'000'000'000;
  result = rig.all(*job);
  EXPECT_EQ(result.good, 1u);
  EXPECT_EQ(result.renew, 0u);
  EXPECT_EQ(result.repaired_parts, 0u);
  rig.expect_pools(seeds(files));
}

TEST(GioLoadsFailures, MoreRepairsThanStagingMakeItBad) {
  RigTerms terms;
  terms.most_repairs = 4;
  LoadRig rig(terms);
  nvme::FaultRule rule;
  rule.kind = nvme::FaultKind::kMediaError;
  rule.opcode = 2;
  rule.skip = 10;  // layer 0 is read
  rule.count = 5;
  rig.faults().add(rule);
  auto job = rig.job(objects(0, 10));
  tardis_load_result result = rig.all(*job);
  EXPECT_EQ(result.good, 0u);
  EXPECT_EQ(rig.board(*job).done(0), TARDIS_LOAD_GOOD);
  EXPECT_EQ(rig.board(*job).repaired(1), TARDIS_LOAD_BAD);
  EXPECT_TRUE(rig.found(0));  // nothing says that an object is damaged
  rule.skip = 0;
  rule.count = 4;
  rig.faults().add(rule);
  const auto files = objects(0, 10);
  job = rig.job(files);
  result = rig.all(*job);
  EXPECT_EQ(result.good, 1u);
  EXPECT_EQ(result.repaired_parts, 4u);
  rig.poison();
  job = rig.job(objects(0, 5));
  EXPECT_EQ(rig.all(*job, /*use_rings=*/0).good, 0u);  // five parts a layer
  rig.expect_pools(seeds(objects(0, 5)), 0);
  rig.poison();
  job = rig.job(objects(0, 4));
  EXPECT_EQ(rig.all(*job, /*use_rings=*/0).good, 1u);
  rig.expect_pools(seeds(objects(0, 4)));
}

TEST(GioLoadsFailures, ObjectsThatAreGoneMakeItBadAtOnce) {
  LoadRig rig;
  const auto files = objects(0, 10);
  auto job = rig.job(files);
  Store::Selection selection;
  selection.key = rig.key(6);
  selection.key_nibbles = 64;
  ASSERT_TRUE(rig.store().remove(selection));
  EXPECT_EQ(rig.all(*job).good, 0u);
  EXPECT_EQ(rig.counters().missing, 4u);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_EQ(rig.board(*job).repaired(layer), TARDIS_LOAD_BAD);
  }
  rig.expect_pools(seeds(files), 0);
  rig.expect_no_leases();
  job = rig.job(files);
  EXPECT_EQ(rig.all(*job).good, 0u);
  EXPECT_EQ(rig.counters().missing, 14u);
}

// Deleted while it is read: the lease keeps the slot, and the bytes are proven.
TEST(GioLoadsFailures, WhatIsDeletedUnderTheLeaseIsStillRead) {
  LoadRig rig;
  const auto files = objects(0, 10);
  auto job = rig.job(files);
  ASSERT_EQ(rig.begin(*job), TARDIS_OK);
  rig.await(rig.board(*job).head().ready);
  ASSERT_TRUE(rig.store().clear(std::nullopt));
  rig.run(*job);
  rig.wait(*job);
  EXPECT_EQ(rig.end(*job).good, 1u);
  rig.expect_pools(seeds(files));
  rig.expect_no_leases();
}

TEST(GioLoadsFailures, DigestsThatProveNothingMakeItBad) {
  LoadRig rig;
  const auto where = tardis::testing::find_on_disk(rig.folder(), rig.key(3));
  const auto table = tardis::testing::read_struct<SegmentSuperblock>(where.file, 0);
  const SegmentGeometry geometry = SegmentGeometry::with(table.slots, table.slot_bytes, kLayers * kChunks);
  const std::uint64_t slot = (where.payload_offset - table.payload_offset) / table.slot_bytes;
  tardis::testing::flip_bit(where.file, geometry.digest_table_offset + (slot * kLayers * kChunks + 4) * 8);
  auto job = rig.job(objects(0, 10));
  EXPECT_EQ(rig.all(*job).good, 0u);
  EXPECT_EQ(rig.counters().unproven, 1u);
  rig.expect_pools(seeds(objects(0, 10)), 0);
  rig.poison();
  // Its bytes are right, but no load would ever be good: it is put aside.
  EXPECT_FALSE(rig.found(3));
  EXPECT_EQ(tardis::testing::stats_of(rig.store()).get_pages_corrupt, 1u);
  job = rig.job(objects(4, 6));
  EXPECT_EQ(rig.all(*job).good, 1u);
  rig.expect_pools(seeds(objects(4, 6)));
  rig.expect_no_leases();
}

// Parts that are no whole blocks: no command can name them, whatever the caller says.
TEST(GioLoadsFailures, LayersThatAreNoWholeBlocksAreReadByTheHost) {
  RigTerms terms;
  terms.half = 9 << 10;
  terms.most_bytes = 20 << 10;
  LoadRig rig(terms);
  const auto files = objects(0, 6);
  auto job = rig.job(files);
  const tardis_load_result result = rig.all(*job);
  EXPECT_EQ(result.good, 1u);
  EXPECT_EQ(result.repaired_parts, 6u * kLayers);
  EXPECT_EQ(rig.board(*job).head().ring_pages, 0u);
  rig.expect_pools(seeds(files));
  rig.expect_no_leases();
}

}  // namespace
}  // namespace tardis::gio::testing
