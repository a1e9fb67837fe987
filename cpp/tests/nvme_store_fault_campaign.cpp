// SPDX-License-Identifier: Apache-2.0
// A software controller breaks at random while a store on it works. Every call ends within a bound, with what was asked
// for, an error or a miss; no byte is wrong; and when the drive works again, everything that a flush or close promised
// is there, unless the medium lost it.
//
// TARDIS_NVME_CAMPAIGN multiplies the faults (default 1); TARDIS_CRASH_SEED: where the seeds begin (default 1).
#include <cstdio>

#include "base/clock.h"
#include "crash_campaign.h"
#include "nvme/soft/cached_medium.h"
#include "nvme_store_support.h"
#include "nvme_support_soft_stack.h"
#include "store_failing_session.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;

constexpr std::uint64_t kFaults = 200;  // for each kind of drive
constexpr std::uint64_t kNamespaceBytes = 40 * kMiB;
constexpr int kSteps = 6;  // with one set of faults
// Of one call of the store, which moves several batches, each of which may meet time-out, Abort, deletion and reset,
// and that again with each retry.
constexpr std::uint64_t kLongestCallNs = 60'000'000'000;

const FailingWorkload kWorkload{{{{2, {5000, 3000}}, {1, {40000}}}}, 8, 5, 8, false};

struct Tally {
  std::uint64_t faults = 0, calls = 0, failed = 0, longest_ns = 0, dead = 0, power_lost = 0, openings = 0,
                failed_openings = 0, checked = 0, promised = 0;
};

class FaultCampaign {
 public:
  explicit FaultCampaign(std::uint64_t seed, std::uint32_t block_bytes, bool cache)
      : random_(seed), block_bytes_(block_bytes), bytes_(kWorkload.layouts) {
    auto made = MemoryMedium::create(kNamespaceBytes);
    EXPECT_TRUE(made);
    medium_ = std::shared_ptr<MemoryMedium>(std::move(*made));
    if (!cache) return;
    cache_ =
        std::make_shared<CachedMedium>(medium_, CacheOptions{.atomic_bytes = block_bytes, .torn_bytes = block_bytes});
    medium_ = cache_;
  }

  void run(std::uint64_t faults) {
    faults_ = std::make_shared<FaultPlan>(random_());
    while (faults_->injected() + tally_.power_lost < faults && !::testing::Test::HasFailure()) life();
    tally_.faults += faults_->injected();
  }
  const Tally& tally() const { return tally_; }

 private:
  template <class Call>
  auto timed(const Call& call) {
    const std::uint64_t begin = monotonic_ns();
    ++tally_.calls;
    struct End {
      ~End() {
        const std::uint64_t took = monotonic_ns() - begin;
        longest = std::max(longest, took);
        EXPECT_LT(took, kLongestCallNs);
      }
      std::uint64_t begin;
      std::uint64_t& longest;
    } end{begin, tally_.longest_ns};
    return call();
  }

  // One controller and driver.
  void life() {
    SoftStackOptions options = small_stack(block_bytes_);
    options.soft.faults = faults_;
    options.soft.mdts = random_() % 2 == 0 ? 4 : 8;
    options.soft.sgl = random_() % 2 == 0 ? kSglNone : kSglAnyAlignment;
    options.soft.aborts = random_() % 2 == 0;
    options.soft.timeout_ms = 500;
    options.driver.io_timeout_ms = 15;
    options.driver.abort_grace_ms = 5;
    options.driver.admin_timeout_ms = 150;
    Result<std::shared_ptr<SoftStack>> stack = SoftStack::try_make(medium_, options);
    // Times so short may be over on a machine that is loaded.
    for (int attempt = 0; !stack && attempt < 50; ++attempt) stack = SoftStack::try_make(medium_, options);
    ASSERT_TRUE(stack) << stack.error().message;
    store_lives_on(**stack, *stack);
    faults_->clear();
    if ((*stack)->driver->state() != DriverState::kLive) ++tally_.dead;
  }

  void store_lives_on(SoftStack& stack, const std::shared_ptr<SoftStack>& shared) {
    const bool faults_at_opening = random_() % 4 == 0;
    history_ += faults_at_opening ? "\nopened with" : "\nopened";
    if (faults_at_opening) add_faults(stack);
    // Recovery gives up what it cannot read off the medium, also if it fails afterwards.
    doubtful_ = doubtful_ || (faults_at_opening && media_errors_);
    ++tally_.openings;
    auto pages = timed([&] { return open(shared); });
    faults_->clear();
    if (!pages) {
      ++tally_.failed_openings;
      if (!faults_at_opening && stack.driver->state() == DriverState::kLive) note_trouble(pages.error().message);
      return;
    }
    FailingSession session(
        kWorkload, oracle_, random_, [] { return true; }, [] { return true; });
    const bool whole = !faults_at_opening && stack.driver->counters().errors == 0;
    if (whole) {
      trouble_ = 0;
      if (doubtful_) forget_what_is_gone(**pages);
      doubtful_ = false;
      SCOPED_TRACE("this store was" + history_);
      tally_.checked += (*pages)->check(oracle_).size();
      for (const auto& [page, promise] : oracle_.pages) tally_.promised += promise.durable;
    }
    while (stack.driver->state() == DriverState::kLive && !::testing::Test::HasFailure()) {
      add_faults(stack);
      for (int step = 0; step < kSteps; ++step) timed([&] { session.step(**pages); });
      if (media_errors_) forget_what_is_gone(**pages);
      faults_->clear();
      if (random_() % 3 == 0 || stack.driver->cache_lost()) break;
    }
    const tardis_stats s = stats_of((*pages)->store());
    history_ += "\nclosed, driver " + std::to_string(static_cast<int>(stack.driver->state())) + ", " +
                std::to_string(s.segments) + " segments, " + std::to_string(s.segments_unreadable) +
                " left alone, evicted " + std::to_string(s.evicted_pages);
    timed([&] { session.close(**pages); });
    tally_.failed += session.failed_calls();
  }

  Result<std::unique_ptr<OpenPages>> open(const std::shared_ptr<SoftStack>& stack) {
    return OpenPages::try_open(home_.path(), small_store(kWorkload.segments), on(SoftStack::disk_of(stack)), bytes_);
  }

  // Without faults it must open, but for a time-out on a loaded machine.
  void note_trouble(const std::string& message) { ASSERT_LT(++trouble_, 20) << message; }

  void add_faults(SoftStack& stack) {
    media_errors_ = false;
    history_ += " faults";
    const std::uint64_t count = 1 + random_() % 3;
    for (std::uint64_t i = 0; i < count; ++i) {
      static constexpr FaultKind kKinds[] = {
          FaultKind::kLostCompletion, FaultKind::kLateCompletion, FaultKind::kDuplicate, FaultKind::kReorder,
          FaultKind::kWrongCommandId, FaultKind::kStatus,         FaultKind::kStatus,    FaultKind::kMediaError,
          FaultKind::kMediaError,     FaultKind::kStuckSqHead,    FaultKind::kSlow,      FaultKind::kFatal,
          FaultKind::kRemovedAllOnes, FaultKind::kRemovedZeros};
      FaultRule rule;
      rule.kind = kKinds[random_() % std::size(kKinds)];
      const bool ends = rule.kind == FaultKind::kFatal || rule.kind == FaultKind::kRemovedAllOnes ||
                        rule.kind == FaultKind::kRemovedZeros;
      rule.skip = random_() % (ends ? 60 : 12);
      rule.count = ends ? 1 : 1 + random_() % 8;
      rule.delay = std::chrono::microseconds(std::array<int, 3>{200, 4000, 30'000}[random_() % 3]);
      rule.late_data = random_() % 2 == 0;
      if (rule.kind == FaultKind::kStatus) {
        rule.count *= 1 + random_() % 4;
        rule.status = std::array<std::uint16_t, 5>{0x300, kScInternal, kScDataTransferError, kScPowerLossAbort,
                                                   kScInternal | 1 << 14}[random_() % 5];
        rule.probability = 0.3;
      }
      if (rule.kind == FaultKind::kMediaError) {
        media_errors_ = true;
        const std::uint64_t blocks = kNamespaceBytes / block_bytes_, first = random_() % blocks;
        rule.first_block = first;
        rule.last_block = first + random_() % (blocks / 4);
        rule.count = 0;
      }
      history_ += " " + std::to_string(static_cast<int>(rule.kind));
      faults_->add(rule);
    }
    if (cache_ != nullptr && random_() % 12 == 0) {
      // The drive's power goes and comes back, and this host lives on.
      stack.controller->cut_power();
      (void)cache_->power_cut(random_);
      ++tally_.power_lost;
      history_ += " power lost";
      oracle_.damaged += 1000;  // what was in its cache does not fit its headers now
    }
  }

  // A page that could not be read off the medium is given up.
  void forget_what_is_gone(OpenPages& pages) {
    for (auto& [page, promise] : oracle_.pages) {
      if (promise.durable && !pages.has(page)) promise.durable = false;
    }
    oracle_.damaged += 1000;
  }

  std::mt19937_64 random_;
  const std::uint32_t block_bytes_;
  PageBytes bytes_;
  TempFolder home_{memory_parent()};
  std::shared_ptr<Medium> medium_;
  std::shared_ptr<CachedMedium> cache_;
  std::shared_ptr<FaultPlan> faults_;
  Oracle oracle_;
  bool media_errors_ = false;  // among the faults of now
  bool doubtful_ = false;      // there were some when the store was opened last
  std::string history_;
  int trouble_ = 0;
  Tally tally_;
};

TEST(NvmeStoreFaultCampaign, CallsEndAndPromisesHold) {
  const std::uint64_t wanted = kFaults * setting("TARDIS_NVME_CAMPAIGN", 1);
  for (const std::uint32_t block_bytes : {512u, 4096u}) {
    for (const bool cache : {false, true}) {
      SCOPED_TRACE("blocks of " + std::to_string(block_bytes) + (cache ? ", volatile cache" : ""));
      const std::uint64_t begin = monotonic_ns();
      FaultCampaign campaign(setting("TARDIS_CRASH_SEED", 1) * 4 + (block_bytes == 512) * 2 + cache, block_bytes,
                             cache);
      campaign.run(wanted);
      const Tally& tally = campaign.tally();
      const auto count = [](std::uint64_t value) { return static_cast<unsigned long long>(value); };
      std::printf(
          "[ CAMPAIGN ] blocks of %u%s: %llu faults, %llu power losses, %llu calls, %llu failed, longest %llu ms, "
          "%llu openings, %llu failed, %llu drivers ended, %llu pages read, %llu promises checked, %.1f s\n",
          block_bytes, cache ? " with a cache" : "", count(tally.faults), count(tally.power_lost), count(tally.calls),
          count(tally.failed), count(tally.longest_ns / 1'000'000), count(tally.openings), count(tally.failed_openings),
          count(tally.dead), count(tally.checked), count(tally.promised),
          static_cast<double>(monotonic_ns() - begin) / 1e9);
      if (HasFailure()) return;
      EXPECT_GT(tally.failed, 0u);
      EXPECT_GT(tally.dead, 0u);
      EXPECT_GT(tally.promised, 0u);
    }
  }
}

}  // namespace
}  // namespace tardis::nvme::testing
