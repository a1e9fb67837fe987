// SPDX-License-Identifier: Apache-2.0
// Very many faults at random, under load: every request ends in time, no byte is wrong, nothing leaks, and no memory is
// touched after its request has ended.
#include <atomic>
#include <cstdio>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "block/iovec_range.h"
#include "tests/nvme_driver_support.h"

namespace tardis::nvme {
namespace {

using testing::Arena;
using testing::BlockModel;
using testing::campaign_factor;
using testing::random_pieces;
using testing::Rig;
using testing::RigOptions;
using Op = NamespaceRequest::Op;

constexpr std::size_t kThreads = 3;
constexpr std::uint64_t kNamespaceBytes = 6 << 20;
constexpr std::size_t kArenaBytes = 1 << 20;
// Of one run(): a command's time, then Abort, deletion and reset with all that each may wait for, of every queue that
// may be before this one; what is sent again may meet it all again.
constexpr std::uint64_t kLongestRunNs = 60'000'000'000;
// Of what must succeed without faults, since time-outs are so short that a loaded machine exceeds them.
constexpr int kAttempts = 200;

struct Tally {
  std::atomic<std::uint64_t> injected{0}, requests{0}, errors{0}, longest_ns{0}, watched_bytes{0};
  std::atomic<std::uint64_t> timeouts{0}, aborted{0}, deletions{0}, resets{0}, drivers{0}, dead{0};
  void add(const Driver& driver) {
    const DriverCounters counters = driver.counters();
    timeouts += counters.timeouts;
    aborted += counters.aborted;
    deletions += counters.queue_deletions;
    resets += counters.resets;
    ++drivers;
    if (driver.state() != DriverState::kLive) ++dead;
  }
};

void note_longest(std::atomic<std::uint64_t>& longest, std::uint64_t value) {
  std::uint64_t seen = longest.load();
  while (seen < value && !longest.compare_exchange_weak(seen, value)) {
  }
}

// One thread's share of the namespace and of memory. Batches use the halves of the memory in turns, and what a failed
// request left in one half is watched while the other is in use.
class Client {
 public:
  Client(std::size_t index, std::uint32_t block_bytes, std::uint64_t seed)
      : random_(seed),
        model_(index * (kNamespaceBytes / block_bytes / kThreads), kNamespaceBytes / block_bytes / kThreads,
               block_bytes),
        registered_(kArenaBytes, 4 * (seed % 7)),
        plain_(kArenaBytes, seed % 4096) {}

  std::byte* registered() { return registered_.data(); }

  void batch(NvmeNamespace& disk, Tally& tally) {
    half_ ^= 1;
    const std::size_t count = 1 + random_() % 6;
    const std::uint32_t block = model_.block_bytes();
    std::vector<Work> work(count);
    std::vector<NamespaceRequest> requests(count);
    const std::uint64_t share = model_.blocks() / count;
    const std::size_t room = kArenaBytes / 2 / count;
    for (std::size_t i = 0; i < count; ++i) {
      Work& w = work[i];
      w.blocks = 1 + random_() % ((48u << 10) / block);
      w.first = i * share + random_() % (share - w.blocks + 1);
      w.bytes.resize(w.blocks * block);
      Arena& arena = random_() % 3 != 0 ? registered_ : plain_;
      std::byte* const begin = arena.data() + half_ * (kArenaBytes / 2) + i * room;
      const std::size_t align = random_() % 2 == 0 ? 4096 : 4;
      w.memory = random_pieces(random_, begin, begin + room, w.bytes.size(), 1 + random_() % 3, align);
      requests[i] = {.op = random_() % 2 == 0 ? Op::kRead : Op::kWrite,
                     .offset = (model_.first() + w.first) * block,
                     .memory = w.memory,
                     .error = -1};
      if (requests[i].op == Op::kWrite) {
        w.version = model_.next_version();
        for (std::uint64_t b = 0; b < w.blocks; ++b) model_.fill(w.first + b, w.version, w.bytes.data() + b * block);
      } else {
        std::memset(w.bytes.data(), 0xee, w.bytes.size());
      }
      IovecCursor at;
      scatter(w.bytes.data(), w.memory, at, w.bytes.size());
    }
    const std::uint64_t start = monotonic_ns();
    std::size_t completions = 0;
    disk.run(requests, [&](NamespaceRequest&) { ++completions; });
    const std::uint64_t took = monotonic_ns() - start;
    note_longest(tally.longest_ns, took);
    ASSERT_LT(took, kLongestRunNs);
    ASSERT_EQ(completions, count);
    look_at_watched(tally);
    for (std::size_t i = 0; i < count; ++i) {
      judge(work[i], requests[i]);
      tally.requests.fetch_add(1);
      if (requests[i].error != 0) tally.errors.fetch_add(1);
      if (requests[i].error == 0) continue;
      // It has an error: from now on this is our memory alone.
      for (const iovec& piece : work[i].memory) {
        std::memset(piece.iov_base, 0x5a, piece.iov_len);
        watched_.push_back(piece);
      }
    }
  }

  void look_at_watched(Tally& tally) {
    for (const iovec& piece : watched_) {
      const auto* const bytes = static_cast<const std::byte*>(piece.iov_base);
      for (std::size_t i = 0; i < piece.iov_len; ++i)
        ASSERT_EQ(bytes[i], std::byte{0x5a}) << "written to after its end";
      tally.watched_bytes.fetch_add(piece.iov_len);
    }
    watched_.clear();
  }

  // With no faults: every block is what it may be.
  void verify(NvmeNamespace& disk) {
    const std::uint32_t block = model_.block_bytes();
    std::vector<std::byte> bytes(model_.blocks() * block);
    const iovec range{bytes.data(), bytes.size()};
    NamespaceRequest request{.op = Op::kRead, .offset = model_.first() * block, .memory = {&range, 1}, .error = -1};
    for (int attempt = 0; attempt < kAttempts && request.error != 0; ++attempt) disk.run({&request, 1}, nullptr);
    ASSERT_EQ(request.error, 0);
    for (std::uint64_t b = 0; b < model_.blocks(); ++b) ASSERT_EQ(model_.judge(b, bytes.data() + b * block), "");
  }

 private:
  struct Work {
    std::uint64_t first = 0, blocks = 0, version = 0;
    std::vector<iovec> memory;
    std::vector<std::byte> bytes;
  };

  void judge(Work& w, const NamespaceRequest& request) {
    const std::uint32_t block = model_.block_bytes();
    if (request.op == Op::kWrite) {
      for (std::uint64_t b = 0; b < w.blocks; ++b) model_.wrote(w.first + b, w.version, request.error == 0);
      return;
    }
    ASSERT_GE(request.error, 0);
    if (request.error != 0) return;
    IovecCursor at;
    gather(w.memory, at, w.bytes.data(), w.bytes.size());
    for (std::uint64_t b = 0; b < w.blocks; ++b) {
      ASSERT_EQ(model_.judge(w.first + b, w.bytes.data() + b * block), "");
    }
  }

  std::mt19937_64 random_;
  BlockModel model_;
  Arena registered_, plain_;
  std::vector<iovec> watched_;
  std::size_t half_ = 0;
};

FaultRule at_random(FaultKind kind, double probability, int delay_us = 0, bool late_data = false) {
  FaultRule rule;
  rule.kind = kind;
  rule.probability = probability;
  rule.count = 0;
  rule.delay = std::chrono::microseconds(delay_us);
  rule.late_data = late_data;
  return rule;
}

void add_rules(FaultPlan& plan, std::mt19937_64& random, std::uint16_t queues) {
  const auto add = [&](FaultRule rule) {
    for (std::uint16_t queue = 1; queue <= queues; ++queue) {
      rule.queue = queue;
      plan.add(rule);
    }
  };
  add(at_random(FaultKind::kDuplicate, 0.02, static_cast<int>(random() % 200)));
  add(at_random(FaultKind::kReorder, 0.1, 50));
  add(at_random(FaultKind::kLateCompletion, 0.02, 2'000));
  add(at_random(FaultKind::kLateCompletion, 0.02, 1'000, true));
  add(at_random(FaultKind::kLateCompletion, 0.003, 60'000));
  add(at_random(FaultKind::kLateCompletion, 0.003, 60'000, true));
  add(at_random(FaultKind::kLostCompletion, 0.003));
  add(at_random(FaultKind::kLostCompletion, 0.003, 40'000, true));
  add(at_random(FaultKind::kMediaError, 0.01));
  add(at_random(FaultKind::kWrongCommandId, 0.005));
  add(at_random(FaultKind::kStuckSqHead, 0.003));
  add(at_random(FaultKind::kSlow, 0.002, 500));
  add(at_random(FaultKind::kFatal, 0.0005));
  FaultRule status = at_random(FaultKind::kStatus, 0.02);
  for (const int code : {0x300, int{kScInternal}, kScInternal | 1 << 14, int{kScDataTransferError}, 0x700}) {
    status.status = static_cast<std::uint16_t>(code);
    add(status);
  }
  // The means of recovery fail too.
  for (const AdminOpcode opcode : {AdminOpcode::kAbort, AdminOpcode::kDeleteSq, AdminOpcode::kDeleteCq}) {
    for (const FaultKind kind : {FaultKind::kLostCompletion, FaultKind::kStatus}) {
      FaultRule rule = at_random(kind, 0.002);
      rule.queue = 0;
      rule.opcode = static_cast<std::uint8_t>(opcode);
      plan.add(rule);
    }
  }
}

RigOptions random_controller(std::mt19937_64& random) {
  RigOptions options;
  options.open = false;
  options.addresses =
      random() % 2 == 0 ? DmaSpaceOptions::Addresses::kIdentity : DmaSpaceOptions::Addresses::kTranslated;
  options.bytes = kNamespaceBytes;
  options.block_shift = random() % 2 == 0 ? 9 : 12;
  const SglSupport sgls[] = {kSglNone, kSglAnyAlignment, kSglDword};
  options.soft.sgl = sgls[random() % 3];
  const std::uint32_t entries[] = {2, 3, 8, 33, 256};
  options.soft.max_queue_entries = entries[random() % 5];
  options.soft.queue_pairs = 1 + random() % 4;
  options.soft.mdts = static_cast<std::uint8_t>(1 + random() % 4);
  options.soft.aborts = random() % 2 == 0;
  options.soft.timeout_ms = 500;
  options.soft.faults = std::make_shared<FaultPlan>(random());
  options.driver.io_timeout_ms = 10;
  options.driver.abort_grace_ms = 3;
  options.driver.admin_timeout_ms = 100;
  return options;
}

// One controller, until it has injected so many faults, or cannot be used any more; then it is looked at without
// faults, by a new driver if need be.
void play_round(std::uint64_t seed, std::uint64_t faults, Tally& tally) {
  std::mt19937_64 random(seed);
  Rig rig(random_controller(random));
  // Completions posted twice take room in the queue that was for others.
  rig.excused = {ViolationKind::kCqOverflow};
  const std::uint32_t block_bytes = 1u << rig.controller->options().namespaces[0].block_shift;
  std::vector<std::unique_ptr<Client>> clients;
  for (std::size_t i = 0; i < kThreads; ++i) clients.push_back(std::make_unique<Client>(i, block_bytes, random()));
  for (int session = 0; session < 4 && rig.faults->injected() < faults; ++session) {
    ASSERT_TRUE(rig.open(kAttempts));
    for (const auto& client : clients) ASSERT_TRUE(rig.disk->register_memory(client->registered(), kArenaBytes));
    const std::uint64_t goal = rig.faults->injected() + (faults - rig.faults->injected()) / (session < 3 ? 2 : 1) + 1;
    add_rules(*rig.faults, random, static_cast<std::uint16_t>(rig.driver->queue_pairs()));
    const int removal = static_cast<int>(random() % 3);  // at the end of the session, under load
    std::atomic<bool> removed{false};
    std::vector<std::thread> threads;
    for (const auto& client : clients) {
      threads.emplace_back([&, c = client.get()] {
        while (rig.driver->state() == DriverState::kLive && !::testing::Test::HasFatalFailure()) {
          c->batch(*rig.disk, tally);
          if (rig.faults->injected() < goal) continue;
          if (removal == 0) break;
          if (!removed.exchange(true)) rig.controller->remove(removal == 2);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    rig.faults->clear();
    EXPECT_EQ(rig.driver->counters().quarantined, 0u);
    tally.add(*rig.driver);
    if (rig.driver->state() != DriverState::kLive) {
      EXPECT_EQ(rig.space->mapped_ranges(), 0u);
      rig.disk.reset();
      rig.driver.reset();
      rig.controller->insert();
      ASSERT_TRUE(rig.open(kAttempts));
    }
    for (const auto& client : clients) client->verify(*rig.disk);
    for (const auto& client : clients) client->look_at_watched(tally);
    if (::testing::Test::HasFatalFailure()) break;
    EXPECT_EQ(rig.driver->counters().quarantined, 0u);
    rig.disk.reset();
    rig.driver.reset();
    EXPECT_EQ(rig.controller->counters().outstanding, 0u);
  }
  tally.injected += rig.faults->injected();
}

TEST(NvmeDriverCampaign, FaultsAtRandomUnderLoad) {
  const auto faults = static_cast<std::uint64_t>(10'000 * campaign_factor());
  constexpr std::uint64_t kPerRound = 500;
  constexpr std::size_t kRoundsAtOnce = 4;  // they wait for time-outs most of the time
  Tally tally;
  std::atomic<std::uint64_t> next_seed{1};
  const std::uint64_t start = monotonic_ns();
  std::vector<std::thread> rounds;
  for (std::size_t i = 0; i < kRoundsAtOnce; ++i) {
    rounds.emplace_back([&] {
      while (tally.injected.load() < faults && !HasFailure()) {
        const std::uint64_t seed = next_seed.fetch_add(1);
        play_round(seed, std::min(kPerRound, faults / kRoundsAtOnce), tally);
        if (HasFailure()) ADD_FAILURE() << "in the round of seed " << seed << " or one beside it";
      }
    });
  }
  for (std::thread& each : rounds) each.join();
  const auto count = [](const std::atomic<std::uint64_t>& value) {
    return static_cast<unsigned long long>(value.load());
  };
  std::printf(
      "[ CAMPAIGN ] %llu faults, %llu requests, %llu with an error, longest run %llu ms, %llu MiB watched after "
      "their end, %llu time-outs, %llu aborted, %llu queues deleted, %llu resets, %llu of %llu drivers ended, "
      "%.1f s\n",
      count(tally.injected), count(tally.requests), count(tally.errors), count(tally.longest_ns) / 1'000'000,
      count(tally.watched_bytes) >> 20, count(tally.timeouts), count(tally.aborted), count(tally.deletions),
      count(tally.resets), count(tally.dead), count(tally.drivers), static_cast<double>(monotonic_ns() - start) / 1e9);
  // Otherwise it did not test what it is for.
  EXPECT_GT(tally.errors.load(), 0u);
  EXPECT_GT(tally.aborted.load(), 0u);
  EXPECT_GT(tally.deletions.load(), 0u);
  EXPECT_GT(tally.resets.load(), 0u);
  EXPECT_GT(tally.dead.load(), 0u);
}

}  // namespace
}  // namespace tardis::nvme
