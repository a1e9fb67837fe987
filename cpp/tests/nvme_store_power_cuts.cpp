// SPDX-License-Identifier: Apache-2.0
// Stores behind a driver and a software controller whose medium has a volatile cache. The power goes at any request of
// the controller to its medium, also in the middle of one; of what was not flushed, the cache saves any blocks. A new
// controller, driver and store find what is left, are checked against what the store before had promised, and are cut
// off in their turn, also while they recover. The file system of the store's folder keeps what it has at that moment
// (nvme_store_crash_states.cpp has the folder lose things, too).
//
// TARDIS_NVME_CAMPAIGN multiplies the cuts (default 1); TARDIS_CRASH_SEED: where the seeds begin (default 1).
#include <gtest/gtest-spi.h>

#include <cstdio>

#include "base/clock.h"
#include "crash_campaign.h"
#include "nvme/soft/cached_medium.h"
#include "nvme_support_power_switch.h"
#include "nvme_support_soft_stack.h"
#include "nvme_support_store_folder.h"
#include "store_failing_session.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;

constexpr std::uint64_t kCuts = 300;  // for each kind of drive
constexpr int kSteps = 14;            // of a store that nothing cuts off
constexpr std::uint64_t kLivesOfAStore = 40;

const FailingWorkload kWorkloads[] = {
    // Everything flushed stays.
    {{{{2, {5000, 3000}}, {1, {40000}}}}, 3, 5, 8, false},
    // Always full, and segments change their class.
    {{{{2, {20000, 12345}}, {1, {300'000}}}}, 2, 8, 8, true},
};

struct Drive {
  const char* name;
  std::uint32_t block_bytes;
  std::uint8_t mdts;
  SglSupport sgl;
};
void PrintTo(const Drive& drive, std::ostream* out) { *out << drive.name; }

struct Tally {
  std::uint64_t cuts = 0, in_recovery = 0, forced = 0, checked = 0, promised = 0, deleted = 0, lost_writes = 0,
                torn_writes = 0;
};

class PowerCuts {
 public:
  PowerCuts(const Drive& drive, std::uint64_t seed, bool ignore_flushes)
      : drive_(drive), random_(seed), ignore_flushes_(ignore_flushes), parent_(memory_parent()) {}

  void run(std::uint64_t cuts) {
    for (std::uint64_t number = 0; tally_.cuts < cuts && !::testing::Test::HasFailure(); ++number) {
      const FailingWorkload& workload = kWorkloads[number % std::size(kWorkloads)];
      auto made = MemoryMedium::create((workload.segments * 4 + 8) * kMiB);
      ASSERT_TRUE(made);
      platter_ = std::move(*made);
      bytes_.emplace(workload.layouts);
      oracle_ = {};
      folder_ = parent_.path() + "/" + std::to_string(folders_++);
      std::filesystem::create_directory(folder_);
      for (std::uint64_t life = 0; life < kLivesOfAStore && tally_.cuts < cuts; ++life) {
        SCOPED_TRACE("store " + std::to_string(number) + ", life " + std::to_string(life));
        live(workload);
        if (::testing::Test::HasFailure()) return;
      }
      std::filesystem::remove_all(folder_);
    }
  }
  const Tally& tally() const { return tally_; }

 private:
  void live(const FailingWorkload& workload) {
    CacheOptions cache_options;
    cache_options.atomic_bytes = cache_options.torn_bytes = drive_.block_bytes;
    if (random_() % 4 == 0) cache_options.most_bytes = 256 << 10;  // then it writes back unasked
    const auto cache = std::make_shared<CachedMedium>(platter_, cache_options);
    const auto power = std::make_shared<PowerSwitch>(cache);
    if (ignore_flushes_) power->ignore_flushes();
    StoreFolderImage left;
    power->at_cut = [&] { left = StoreFolderImage::of(folder_); };
    {
      SoftStackOptions options = small_stack(drive_.block_bytes);
      options.soft.mdts = drive_.mdts;
      options.soft.sgl = drive_.sgl;
      options.driver.retries = 0;  // nobody waits for a drive without power
      const auto stack = SoftStack::make(power, options);
      if (stack == nullptr) return;
      work(workload, *power, stack);
      if (!power->on()) stack->controller->remove(/*reads_as_zero=*/false);
    }
    const CachedMedium::Cut cut = cache->power_cut(random_);
    ++tally_.cuts;
    tally_.lost_writes += cut.lost;
    tally_.torn_writes += cut.torn;
    std::filesystem::remove_all(folder_);
    folder_ = parent_.path() + "/" + std::to_string(folders_++);
    left.put(folder_);
  }

  // Until the power has gone.
  void work(const FailingWorkload& workload, PowerSwitch& power, const std::shared_ptr<SoftStack>& stack) {
    FailingSession session(
        workload, oracle_, random_, [&] { return !power.on(); }, [&] { return power.on(); });
    if (random_() % 3 == 0) power.cut_after(random_() % 30, static_cast<unsigned>(random_() % 256));
    std::unique_ptr<OpenPages> pages = open(workload, power, stack);
    if (pages == nullptr) {
      ++tally_.in_recovery;
      return;
    }
    power.cut_after(PowerSwitch::kNever, 0);
    // Reading makes pages of a store that was not closed trusted; some are used on unread.
    if (power.on() && random_() % 3 != 0) check(*pages);
    power.cut_after(random_() % (random_() % 4 == 0 ? 8 : 100), static_cast<unsigned>(random_() % 256));
    for (int step = 0; step < kSteps && power.on() && !::testing::Test::HasFailure(); ++step) {
      if (random_() % 12 != 0) {
        session.step(*pages);
        continue;
      }
      session.close(*pages);
      pages.reset();
      if (!power.on()) return;
      pages = open(workload, power, stack);
      if (pages == nullptr) return;
    }
    if (!power.on()) return session.forget_evicted(*pages);
    ++tally_.forced;
    if (random_() % 2 == 0) session.close(*pages);
    power.cut();
  }

  std::unique_ptr<OpenPages> open(const FailingWorkload& workload, PowerSwitch& power,
                                  const std::shared_ptr<SoftStack>& stack) {
    auto pages = OpenPages::try_open(folder_, small_store(workload.segments), on(SoftStack::disk_of(stack)), *bytes_);
    if (pages) return std::move(*pages);
    EXPECT_FALSE(power.on()) << "the store cannot be opened: " << pages.error().message;
    if (power.on()) power.cut();
    return nullptr;
  }

  void check(OpenPages& pages) {
    tally_.checked += pages.check(oracle_).size();
    for (const auto& [page, promise] : oracle_.pages) {
      tally_.promised += promise.durable;
      tally_.deleted += promise.versions.empty();
    }
  }

  const Drive& drive_;
  std::mt19937_64 random_;
  const bool ignore_flushes_;
  TempFolder parent_;
  std::uint64_t folders_ = 0;
  std::shared_ptr<MemoryMedium> platter_;
  std::optional<PageBytes> bytes_;
  Oracle oracle_;
  std::string folder_;
  Tally tally_;
};

class NvmeStorePowerCuts : public ::testing::TestWithParam<Drive> {};

TEST_P(NvmeStorePowerCuts, KeepEveryPromise) {
  const std::uint64_t wanted = kCuts * setting("TARDIS_NVME_CAMPAIGN", 1);
  const std::uint64_t begin = monotonic_ns();
  PowerCuts cuts(GetParam(), setting("TARDIS_CRASH_SEED", 1), /*ignore_flushes=*/false);
  cuts.run(wanted);
  const Tally& tally = cuts.tally();
  std::printf(
      "[ CUTS     ] %s: %llu cuts, %llu of them in recovery, %llu writes lost and %llu torn, %llu pages read, "
      "%llu promises checked, %llu deletions checked, %.1f s\n",
      GetParam().name, static_cast<unsigned long long>(tally.cuts), static_cast<unsigned long long>(tally.in_recovery),
      static_cast<unsigned long long>(tally.lost_writes), static_cast<unsigned long long>(tally.torn_writes),
      static_cast<unsigned long long>(tally.checked), static_cast<unsigned long long>(tally.promised),
      static_cast<unsigned long long>(tally.deleted), static_cast<double>(monotonic_ns() - begin) / 1e9);
  // Otherwise it did not test what it is for.
  EXPECT_GT(tally.in_recovery, wanted / 50);
  EXPECT_LT(tally.forced, wanted / 2);
  EXPECT_GT(tally.lost_writes, wanted / 3);
  EXPECT_GT(tally.torn_writes, wanted / 4);
  EXPECT_GT(tally.promised, wanted);
  EXPECT_GT(tally.deleted, 0u);
}

constexpr Drive kDrives[] = {
    {"Blocks512SmallMdts", 512, 4, kSglNone},
    {"Blocks512", 512, 8, kSglAnyAlignment},
    {"Blocks4096SmallMdts", 4096, 4, kSglAnyAlignment},
    {"Blocks4096", 4096, 8, kSglNone},
};
INSTANTIATE_TEST_SUITE_P(Drives, NvmeStorePowerCuts, ::testing::ValuesIn(kDrives),
                         [](const auto& info) { return std::string(info.param.name); });

// The control: with a drive that says it has flushed and has not, promises must be seen to be broken.
TEST(NvmeStorePowerCutsControl, ADriveThatDoesNotFlushIsFoundOut) {
  for (const Drive& drive : {kDrives[0], kDrives[3]}) {
    ::testing::TestPartResultArray failures;
    {
      ::testing::ScopedFakeTestPartResultReporter intercepted(
          ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ALL_THREADS, &failures);
      PowerCuts(drive, 1, /*ignore_flushes=*/true).run(40);
    }
    bool lost = false;
    for (int i = 0; i < failures.size(); ++i) {
      lost = lost ||
             std::string(failures.GetTestPartResult(i).message()).find("was flushed and is lost") != std::string::npos;
    }
    EXPECT_TRUE(lost) << drive.name << ": " << failures.size() << " failures of other kinds";
  }
}

}  // namespace
}  // namespace tardis::nvme::testing
