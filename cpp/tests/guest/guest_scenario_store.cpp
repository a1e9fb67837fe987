// SPDX-License-Identifier: Apache-2.0
// A store on namespace 1 whose process or machine ends at any moment, or whose medium dies; its home is in
// TARDIS_GUEST_FOLDER. Each round fills a chain of pages of its own. TARDIS_GUEST_FLUSHED has how many pages of each
// chain were flushed when the end came: "1:24,2:96".
#include <filesystem>
#include <fstream>
#include <sstream>

#include "guest_scenario.h"
#include "tests/nvme_store_support.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;

constexpr std::size_t kPagesAtOnce = 6;
constexpr std::uint64_t kMostPages = 600;  // of a round; the store never evicts
const Layout kLayout{2, {20'000, 12'345}};

StoreOptions store_options() {
  StoreOptions options = small_store(24);
  options.device.workers = 2;
  return options;
}

std::map<std::uint64_t, std::uint64_t> flushed_pages() {
  std::map<std::uint64_t, std::uint64_t> all;
  std::istringstream words(setting("TARDIS_GUEST_FLUSHED"));
  for (std::string word; std::getline(words, word, ',');) {
    all[std::stoull(word)] = std::stoull(word.substr(word.find(':') + 1));
  }
  return all;
}

class ScenarioStore : public Guest {
 protected:
  void SetUp() override {
    Guest::SetUp();
    if (IsSkipped() || HasFailure()) return;
    home = setting("TARDIS_GUEST_FOLDER") + "/store";
    controller = open();
    ASSERT_NE(controller, nullptr);
    disk = space_of(controller, 1);
    ASSERT_NE(disk, nullptr);
  }

  std::shared_ptr<NvmeNamespace> control_space() {
    return controller->driver()->find_namespace(2) != nullptr ? space_of(controller, 2) : nullptr;
  }

  std::string home;
  std::shared_ptr<VfioController> controller;
  std::shared_ptr<NvmeNamespace> disk;
};

// On namespace 2, where there is one: what is written and not flushed is to vanish with the machine, or nothing has
// been proven about what was flushed.
constexpr std::uint64_t kControlStride = 4u << 20, kControlBytes = 64u << 10;

void write_control(NvmeNamespace& disk, std::uint64_t chain) {
  AlignedBuffer memory(kControlBytes);
  const std::uint64_t offset = chain * kControlStride;
  mark(memory.data(), kControlBytes, offset);
  ASSERT_EQ(move(disk, Op::kWrite, offset, memory.data(), kControlBytes), 0);
  ASSERT_TRUE(disk.flush());
  mark(memory.data(), kControlBytes, offset + kControlStride / 2);
  ASSERT_EQ(move(disk, Op::kWrite, offset + kControlStride / 2, memory.data(), kControlBytes), 0);
}

void check_control(NvmeNamespace& disk, std::uint64_t chain) {
  AlignedBuffer memory(kControlBytes);
  const std::uint64_t offset = chain * kControlStride;
  ASSERT_EQ(move(disk, Op::kRead, offset, memory.data(), kControlBytes), 0);
  EXPECT_TRUE(holds_mark(memory.data(), kControlBytes, offset)) << "what was flushed is gone";
  ASSERT_EQ(move(disk, Op::kRead, offset + kControlStride / 2, memory.data(), kControlBytes), 0);
  EXPECT_TRUE(std::all_of(memory.data(), memory.data() + kControlBytes, [](std::byte b) { return b == std::byte{0}; }))
      << "the drive has no volatile cache: the cut lost nothing";
}

// Whoever waits for the end of this learns what is flushed: from a file, where one is named, else the host.
void report_flushed(std::uint64_t chain, std::uint64_t pages) {
  const std::string line = "flushed " + std::to_string(chain) + " " + std::to_string(pages);
  if (const char* const path = std::getenv("TARDIS_GUEST_PROGRESS"); path != nullptr) {
    std::ofstream(path, std::ios::app) << line << "\n" << std::flush;
  } else {
    ask_host(line);
  }
}

TEST_F(ScenarioStore, FillUntilTheEnd) {
  const std::uint64_t chain = std::stoull(setting("TARDIS_GUEST_ROUND"));
  std::filesystem::create_directories(home);
  if (const auto control = control_space(); control != nullptr) write_control(*control, chain);
  auto store = open_store(home, store_options(), true, on(disk));
  ASSERT_NE(store, nullptr);
  Space pages(*store, 1, kLayout);
  for (std::uint64_t at = 0; at < kMostPages; at += kPagesAtOnce) {
    ASSERT_EQ(pages.put(chain, at, kPagesAtOnce), kPagesAtOnce);
    // Two batches of three are durable soon; the third stays open for the end to come into.
    if (at / kPagesAtOnce % 3 != 1) continue;
    ASSERT_TRUE(store->flush());
    report_flushed(chain, at + kPagesAtOnce);
  }
  FAIL() << "the end did not come";
}

TEST_F(ScenarioStore, WhatWasFlushedIsThere) {
  auto store = open_store(home, store_options(), false, on(disk));
  ASSERT_NE(store, nullptr);
  Space pages(*store, 1, kLayout);
  for (const auto& [chain, flushed] : flushed_pages()) {
    if (const auto control = control_space(); control != nullptr) check_control(*control, chain);
    // get() compares each byte of what it finds.
    const auto found = pages.get(chain, 0, kMostPages);
    std::uint64_t missing = 0, further = 0;
    for (std::uint64_t i = 0; i < kMostPages; ++i) {
      if (i < flushed && found[i] == 0) ++missing;
      if (i >= flushed && found[i] != 0) ++further;
    }
    EXPECT_EQ(missing, 0u) << "of " << flushed << " pages of chain " << chain;
    std::printf("chain %llu: flushed %llu, missing %llu, further %llu\n", static_cast<unsigned long long>(chain),
                static_cast<unsigned long long>(flushed), static_cast<unsigned long long>(missing),
                static_cast<unsigned long long>(further));
  }
  // And it takes new ones.
  EXPECT_EQ(pages.put(900'000 + flushed_pages().size(), 0, kPagesAtOnce), kPagesAtOnce);
  expect_slots_conserved(*store);
  EXPECT_TRUE(store->close());
}

// The server of the drive's blocks ends. Everything has an end, and nothing wrong is served.
TEST_F(ScenarioStore, TheMediumDies) {
  std::filesystem::create_directories(home);
  auto store = open_store(home, store_options(), true, on(disk));
  ASSERT_NE(store, nullptr);
  Space pages(*store, 1, kLayout);
  constexpr std::size_t kPages = 60;
  ASSERT_EQ(pages.put(1, 0, kPages), kPages);
  ASSERT_TRUE(store->flush());
  ASSERT_EQ(pages.fetch(1, 0, kPages), kPages);
  ask_host("kill-server");
  AlignedBuffer memory(4096);
  EXPECT_EQ(timed("dead medium, a read", [&] { return move(*disk, Op::kRead, 0, memory.data(), 4096); }).error, EIO);
  EXPECT_EQ(timed("dead medium, a write", [&] { return move(*disk, Op::kWrite, 32 << 20, memory.data(), 4096); }).error,
            EIO);
  EXPECT_FALSE(disk->flush());
  Status why;
  pages.get(1, 0, kPages, &why);
  EXPECT_EQ(pages.fetch(1, 0, kPages), 0u);
  const std::size_t stored = pages.put(2, 0, kPages);
  EXPECT_EQ(stored, 0u);
  EXPECT_EQ(pages.fetch(2, 0, kPages), 0u);
  EXPECT_EQ(controller->driver()->state(), DriverState::kLive) << "the controller answers";
  (void)store->close();
}

}  // namespace
}  // namespace tardis::nvme::testing
