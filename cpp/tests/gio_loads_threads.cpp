// SPDX-License-Identifier: Apache-2.0
// Loads through the C ABI: many at once, ended at any stage, and what is refused.
#include <filesystem>
#include <thread>

#include "gio_loads_support.h"

namespace tardis::gio::testing {
namespace {

std::size_t threads_now() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

TEST(GioLoadsThreads, SixteenAtOnce) {
  RigTerms terms;
  terms.loads = 16;
  terms.most_repairs = 4;
  LoadRig rig(terms);
  std::vector<std::unique_ptr<LoadRig::Job>> jobs;
  std::map<std::uint32_t, std::uint64_t> expected;
  for (std::uint32_t i = 0; i < 16; ++i) {
    std::vector<std::pair<std::uint32_t, std::uint32_t>> files;
    for (std::uint32_t k = 0; k < 4; ++k) files.emplace_back((i * 5 + k) % kStored, i * 4 + k);
    for (const auto& [id, seed] : seeds(files)) expected[id] = seed;
    jobs.push_back(rig.job(files));
    ASSERT_EQ(rig.begin(*jobs.back(), /*use_rings=*/i % 4 != 3), TARDIS_OK);
  }
  auto one_more = rig.job(objects(0, 1));
  EXPECT_EQ(rig.begin(*one_more), TARDIS_BUSY);
  for (auto& job : jobs) rig.run(*job);
  for (auto& job : jobs) rig.wait(*job);
  for (auto& job : jobs) EXPECT_EQ(rig.end(*job).good, 1u);
  rig.expect_pools(expected);
  EXPECT_EQ(rig.all(*one_more).good, 1u);
  rig.expect_no_leases();
}

TEST(GioLoadsThreads, TwoThreadsOfUsers) {
  LoadRig rig;
  const auto use = [&](std::uint32_t self) {
    for (int turn = 0; turn < 30; ++turn) {
      std::vector<std::pair<std::uint32_t, std::uint32_t>> files;
      for (std::uint32_t k = 0; k < 6; ++k) files.emplace_back((turn + k) % kStored, self * 8 + k);
      auto job = rig.job(files, {{50 + self, self * 8 + 7}});
      if (rig.all(*job, turn % 3 != 0).good != 1) ADD_FAILURE() << self << " " << turn;
    }
  };
  std::thread other([&] { use(1); });
  use(0);
  other.join();
  std::vector<std::pair<std::uint32_t, std::uint32_t>> last;
  for (std::uint32_t self = 0; self < 2; ++self) {
    for (std::uint32_t k = 0; k < 6; ++k) last.emplace_back((29 + k) % kStored, self * 8 + k);
  }
  auto expected = seeds(last);
  expected[7] = 50;
  expected[15] = 51;
  rig.expect_pools(expected);
  EXPECT_EQ(rig.counters().loads, 60u);
  EXPECT_EQ(rig.counters().pages, 360u);
  rig.expect_no_leases();
}

TEST(GioLoadsThreads, AThousandCyclesLeaveNothingBehind) {
  LoadRig rig;
  const std::size_t threads = threads_now();
  const auto files = objects(0, 8);
  for (int turn = 0; turn < 1000; ++turn) {
    auto job = rig.job(files);
    ASSERT_EQ(rig.begin(*job), TARDIS_OK);
    if (turn % 2 == 0) rig.await(rig.board(*job).head().ready);
    EXPECT_EQ(rig.end(*job, /*cancelled=*/1).good, 0u);
  }
  EXPECT_EQ(threads_now(), threads);
  EXPECT_EQ(rig.counters().loads, 1000u);
  EXPECT_EQ(rig.counters().missing + rig.counters().abandoned, 0u);
  rig.expect_pools({});
  rig.expect_no_leases();
}

// The test is the stream here: it tells what landed, or goes away.
TEST(GioLoadsThreads, CancelledAtEachStage) {
  LoadRig rig;
  const auto files = objects(0, 8);
  enum Stage { kReady, kTold, kFailed, kAnswered, kAbandoned, kAllTold, kStages };
  for (int stage = 0; stage < kStages; ++stage) {
    auto job = rig.job(files);
    ASSERT_EQ(rig.begin(*job), TARDIS_OK);
    const LoadBoard board = rig.board(*job);
    rig.await(board.head().ready);
    EXPECT_EQ(board.head().ring_pages, 8u);
    if (stage >= kTold) LoadBoard::tell(board.landed(0), TARDIS_LOAD_GOOD);
    if (stage >= kFailed) {
      for (std::uint32_t i = 0; i < 8; ++i) board.statuses()[i] = IoStatus::of(IoEnd::kDone).raw;
      board.statuses()[5] = IoStatus::of(IoEnd::kFailed).raw;
      board.reports(1)[0].done = 7;
      board.reports(1)[0].error = RingError::kCommands;
      LoadBoard::tell(board.landed(1), TARDIS_LOAD_BAD);
    }
    if (stage >= kAnswered) {
      rig.await(board.repaired(1));
      EXPECT_EQ(board.repaired(1), TARDIS_LOAD_GOOD);
      ASSERT_EQ(board.repairs(1), 1u);
      EXPECT_EQ(board.list()[0].page, 5u);
      std::vector<std::uint8_t> wanted(kPart);
      fill_page(wanted.data(), kPart, LoadRig::seed(5), kPart);
      EXPECT_EQ(std::memcmp(reinterpret_cast<const void*>(board.list()[0].address), wanted.data(), kPart), 0);
    }
    if (stage == kAbandoned) LoadBoard::tell(board.head().abandoned, 1);
    if (stage == kAllTold) LoadBoard::tell(board.landed(2), TARDIS_LOAD_GOOD);
    const tardis_load_result result = rig.end(*job, stage < kAbandoned);
    EXPECT_EQ(result.good, stage == kAllTold ? 1u : 0u) << stage;
    EXPECT_EQ(result.renew, 0u);
  }
  EXPECT_EQ(rig.counters().abandoned, 1u);
  rig.expect_no_leases();
}

// Statuses that are of a layer before: the rings' reports do not fit them, so all is read again.
TEST(GioLoadsThreads, StatusesThatNobodyWroteAreNotBelieved) {
  LoadRig rig;
  auto job = rig.job(objects(0, 8));
  ASSERT_EQ(rig.begin(*job), TARDIS_OK);
  const LoadBoard board = rig.board(*job);
  rig.await(board.head().ready);
  for (std::uint32_t i = 0; i < 8; ++i) board.statuses()[i] = IoStatus::of(IoEnd::kDone).raw;
  board.reports(0)[1].error = RingError::kQueueFault;
  LoadBoard::tell(board.landed(0), TARDIS_LOAD_BAD);
  rig.await(board.repaired(0));
  EXPECT_EQ(board.repairs(0), 8u);
  EXPECT_EQ(rig.end(*job, 1).renew, 1u);
}

TEST(GioLoadsThreads, LayersThatWereNeverToldAreNotGood) {
  LoadRig rig;
  auto job = rig.job(objects(0, 3));
  ASSERT_EQ(rig.begin(*job), TARDIS_OK);
  rig.await(rig.board(*job).head().ready);
  LoadBoard::tell(rig.board(*job).landed(0), TARDIS_LOAD_GOOD);
  EXPECT_EQ(rig.end(*job).good, 0u);
  rig.expect_no_leases();
}

TEST(GioLoadsThreads, WhatCannotBeRunIsSaid) {
  LoadRig rig;
  const auto refusal = [&](auto change) {
    auto job = rig.job(objects(0, 3), {{1, 1}});
    EXPECT_EQ(rig.begin(*job), TARDIS_OK);
    change(*job);
    char* error = nullptr;
    EXPECT_EQ(tardis_load_run(rig.loader(), job->load, nullptr, &job->what, &error), TARDIS_INVALID_ARGUMENT);
    const std::string text = error == nullptr ? "" : error;
    tardis_free(error);
    EXPECT_EQ(rig.end(*job, 1).good, 0u);
    return text;
  };
  using Job = LoadRig::Job;
  EXPECT_NE(refusal([](Job& j) { j.what.ring = nullptr; }).find("ring"), std::string::npos);
  EXPECT_NE(refusal([](Job& j) { j.what.layers[0] = nullptr; }).find("NULL"), std::string::npos);
  EXPECT_NE(refusal([](Job& j) { j.what.page_bytes[1] = 16; }).find("bytes in a layer"), std::string::npos);
  EXPECT_NE(refusal([](Job& j) { j.what.pinned_ids = nullptr; }).find("pinned"), std::string::npos);
  EXPECT_NE(refusal([](Job& j) { j.ring.rings = 1; }).find("rings"), std::string::npos);
  EXPECT_NE(refusal([](Job& j) { j.ring.most_bytes = 4096; }).find("commands"), std::string::npos);
  EXPECT_NE(refusal([](Job& j) { j.ring.work = nullptr; }).find("working memory"), std::string::npos);
  EXPECT_NE(refusal([](Job& j) { j.ring.pool_pages = nullptr; }).find("ids"), std::string::npos);
  rig.expect_no_leases();

  char* error = nullptr;
  tardis_load* load = nullptr;
  AlignedBuffer board(rig.layout().bytes);
  for (const std::uint32_t n : {0u, 33u}) {
    EXPECT_EQ(tardis_load_begin(rig.loader(), rig.key(0).data(), n, 1, board.data(), &load, &error),
              TARDIS_INVALID_ARGUMENT);
    tardis_free(error);
  }
  EXPECT_EQ(tardis_load_wait(rig.loader(), board.data(), kLayers, &error), TARDIS_INVALID_ARGUMENT);
  tardis_free(error);
}

TEST(GioLoadsThreads, OptionsThatMakeNoSense) {
  LoadRig rig;
  AlignedBuffer staging(16 * 32 * kPart);
  tardis_loader_options options{};
  options.shape = {kLayers, kChunks, 32, 32, 1, kQueues};
  options.name_space = rig.space();
  options.block_bytes = 4096;
  options.loads = 2;
  options.staging = staging.data();
  options.staging_bytes = staging.size();
  const auto refusal = [&](auto change) {
    tardis_loader_options wrong = options;
    change(wrong);
    return rig.refusal(wrong);
  };
  using Options = tardis_loader_options;
  EXPECT_NE(refusal([](Options& o) { o.shape.layers = 4; }).find("layers"), std::string::npos);
  EXPECT_NE(refusal([](Options& o) { o.shape.chunks = 4; }).find("digests"), std::string::npos);
  EXPECT_NE(refusal([](Options& o) { o.shape.most_pages = 2049; }).find("2048"), std::string::npos);
  EXPECT_NE(refusal([](Options& o) { o.shape.rings = 17; }).find("17 rings"), std::string::npos);
  EXPECT_NE(refusal([](Options& o) { o.block_bytes = 1024; }).find("blocks"), std::string::npos);
  EXPECT_NE(refusal([](Options& o) { o.loads = 17; }).find("16 loads"), std::string::npos);
  EXPECT_NE(refusal([](Options& o) { o.staging_bytes = 2 * 32 * kPart - 1; }).find("staging"), std::string::npos);
  EXPECT_NE(refusal([](Options& o) { o.name_space = 99; }), "");
  tardis_load_sizes sizes{};
  tardis_load_sizes_of(&sizes);
  EXPECT_EQ(sizes.board, sizeof(tardis_load_board));
  EXPECT_EQ(sizes.layout, sizeof(tardis_load_board_layout));
  EXPECT_EQ(sizes.options, sizeof(tardis_loader_options));
  EXPECT_EQ(sizes.host_load, sizeof(tardis_host_load));
}

}  // namespace
}  // namespace tardis::gio::testing
