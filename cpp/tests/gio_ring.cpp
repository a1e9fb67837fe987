// SPDX-License-Identifier: Apache-2.0
// The ring that a GPU runs, on host threads: one lane and many at a time, against the software controller and what it
// breaks.
#include "gio/ring.h"

#include <algorithm>
#include <cstring>

#include "tests/gio_faults.h"
#include "tests/gio_support.h"

namespace tardis::gio {
namespace {

using namespace nvme;
using std::chrono::milliseconds;
using testing::context_of;
using testing::Fault;
using testing::GrantRig;
using testing::HostOwner;
using testing::kFaults;
using testing::RigOptions;

constexpr std::uint64_t kPoison = 0xa5a5a5a5a5a5a5a5;

// Pages for commands, each with a gap that nobody may touch.
class Pages {
 public:
  Pages(std::size_t count, std::size_t bytes) : bytes_(bytes), memory_(count * (bytes + kGap)) { poison(); }

  void poison() { std::memset(memory_.data(), 0xa5, memory_.size()); }
  std::byte* at(std::size_t page) { return memory_.data() + page * (bytes_ + kGap); }
  bool untouched(std::size_t page, std::size_t from = 0) {
    return std::all_of(at(page) + from, at(page) + bytes_ + kGap,
                       [](std::byte byte) { return byte == static_cast<std::byte>(kPoison & 0xff); });
  }

 private:
  static constexpr std::size_t kGap = 64;
  std::size_t bytes_;
  AlignedBuffer memory_;
};

template <std::uint32_t kWidth>
void read_and_write(std::uint32_t entries, std::uint32_t queues, SglSupport sgl, std::uint32_t shift,
                    std::uint64_t seed) {
  SCOPED_TRACE("width " + std::to_string(kWidth) + ", " + std::to_string(entries) + " entries, " +
               std::to_string(queues) + " queues, sgl " + std::to_string(sgl));
  std::mt19937_64 random(seed);
  RigOptions rig;
  rig.bytes = 16 << 20;
  rig.block_shift = shift;
  rig.soft.sgl = sgl;
  rig.soft.threads = 2;
  GrantOptions options;
  options.queues = queues;
  options.entries = entries;
  options.slot_bytes = 16 << 10;
  GrantRig gio(rig, options);
  ASSERT_TRUE(gio.grant);
  gio.fill_media(seed);
  std::vector<std::byte> expected(gio.rig.medium->data(), gio.rig.medium->data() + rig.bytes);

  constexpr std::size_t kPages = 300;
  const std::uint64_t block = 1u << shift;
  const auto slots = static_cast<std::uint32_t>(options.slot_bytes >> shift);
  Pages pages(2 * kPages, options.slot_bytes);
  for (int round = 0; round < 4; ++round) {
    pages.poison();
    std::vector<IoContext> contexts;
    const std::size_t count = random() % (kPages + 1);
    for (std::size_t i = 0; i < count; ++i) {
      // Blocks of their own: the order of commands is not said.
      const std::uint64_t blocks = 1 + random() % slots, first = i * slots + random() % (slots - blocks + 1);
      const std::uint64_t bytes = blocks * block;
      const std::uint64_t front = random() % 3 == 0 ? bytes : 16 * (1 + random() % (bytes / 16 - 1));
      const IoOp op = random() % 3 == 0 ? IoOp::kWrite : IoOp::kRead;
      contexts.push_back(
          context_of(op, first, pages.at(2 * i), front, front == bytes ? nullptr : pages.at(2 * i + 1), bytes - front));
      if (op == IoOp::kRead) continue;
      for (std::uint64_t at = 0; at < bytes; at += 8) {
        const std::uint64_t value = random();
        std::memcpy(at < front ? pages.at(2 * i) + at : pages.at(2 * i + 1) + (at - front), &value, 8);
        std::memcpy(expected.data() + first * block + at, &value, 8);
      }
    }
    const auto outcome = gio.owner->run<kWidth>(contexts);
    ASSERT_EQ(outcome.flag, kIoDone);
    ASSERT_EQ(outcome.count(IoEnd::kDone), contexts.size());
    std::uint32_t done = 0;
    for (const RingReport& report : outcome.reports) done += report.done;
    EXPECT_EQ(done, contexts.size());
    for (std::size_t i = 0; i < count; ++i) {
      const IoContext& each = contexts[i];
      const std::byte* const want = expected.data() + each.block * block;
      ASSERT_EQ(std::memcmp(pages.at(2 * i), want, each.bytes[0]), 0) << i;
      ASSERT_EQ(std::memcmp(pages.at(2 * i + 1), want + each.bytes[0], each.bytes[1]), 0) << i;
      ASSERT_TRUE(pages.untouched(2 * i, each.bytes[0])) << i;
      ASSERT_TRUE(pages.untouched(2 * i + 1, each.bytes[1])) << i;
    }
    ASSERT_EQ(std::memcmp(expected.data(), gio.rig.medium->data(), expected.size()), 0);
  }
}

TEST(GioRing, ReadsAndWritesOneLane) {
  std::uint64_t seed = 1;
  for (const std::uint32_t entries : {2u, 3u, 7u, 64u}) read_and_write<1>(entries, 1, kSglAnyAlignment, 12, ++seed);
  read_and_write<1>(1023, 2, kSglNone, 9, ++seed);
}

TEST(GioRing, ReadsAndWritesManyLanes) {
  std::uint64_t seed = 100;
  for (const std::uint32_t entries : {2u, 3u, 7u, 31u, 32u, 33u, 64u, 1023u}) {
    read_and_write<32>(entries, 1 + entries % 3, kSglAnyAlignment, 12, ++seed);
    read_and_write<5>(entries, 1, kSglNone, 9, ++seed);
  }
  read_and_write<32>(128, 6, kSglDword, 12, ++seed);
}

TEST(GioRing, RefusesWhatIsNoCommand) {
  GrantOptions options;
  options.entries = 8;
  options.slot_bytes = 16 << 10;
  GrantRig gio({}, options);
  ASSERT_TRUE(gio.grant);
  gio.fill_media(1);
  Pages pages(16, 32 << 10);
  const std::uint64_t blocks = gio.rig.driver->find_namespace(1)->blocks;
  std::vector<IoContext> contexts;
  for (std::size_t i = 0; i < 12; ++i) contexts.push_back(context_of(IoOp::kRead, i, pages.at(i), 4096));
  contexts[0].bytes[0] = 0;
  contexts[1].bytes[0] = 4080;
  contexts[2].bytes[0] = 20 << 10;
  contexts[3].memory[0] += 8;
  contexts[4].memory[0] = 0;
  contexts[5].bytes[1] = 4096;  // without memory
  contexts[6].block = blocks;
  contexts[7].block = ~std::uint64_t{0};
  contexts[8].op = static_cast<IoOp>(8);
  contexts[9].bytes[0] = 4088, contexts[9].bytes[1] = 8, contexts[9].memory[1] = contexts[9].memory[0];
  contexts[10].block = blocks - 1;
  for (const std::size_t i : {10u, 11u}) pages.at(i);
  const auto outcome = gio.owner->run<32>(contexts);
  EXPECT_EQ(outcome.flag, kIoError);
  EXPECT_EQ(outcome.error(), RingError::kCommands);
  for (std::size_t i = 0; i < 12; ++i) {
    EXPECT_EQ(outcome.statuses[i].end(), i < 10 ? IoEnd::kRefused : IoEnd::kDone) << i;
    EXPECT_EQ(pages.untouched(i), i < 10) << i;
  }
  // As good as before.
  contexts.erase(contexts.begin(), contexts.begin() + 10);
  EXPECT_EQ(gio.owner->run<32>(contexts).flag, kIoDone);
}

TEST(GioRing, RefusesTooManyContexts) {
  GrantOptions options;
  options.slot_bytes = 4096;
  GrantRig gio({}, options);
  ASSERT_TRUE(gio.grant);
  Pages pages(1, 4096);
  std::vector<IoContext> contexts(kMostContexts + 1, context_of(IoOp::kRead, 1, pages.at(0), 4096));
  auto outcome = gio.owner->run<32>(contexts);
  EXPECT_EQ(outcome.flag, kIoError);
  EXPECT_EQ(outcome.error(), RingError::kTooMany);
  EXPECT_TRUE(pages.untouched(0));
  contexts.pop_back();
  outcome = gio.owner->run<32>(contexts);
  EXPECT_EQ(outcome.flag, kIoDone);
  EXPECT_EQ(outcome.count(IoEnd::kDone), kMostContexts);
}

// ---- faults: the error flag within the deadline, no byte of a command that has no good completion, and a grant that
// works afterwards.
constexpr int kDeadlineMs = 300, kSlackMs = 5000;

template <std::uint32_t kWidth>
void meets(const Fault& fault, std::uint32_t entries) {
  SCOPED_TRACE(std::string(fault.name) + ", width " + std::to_string(kWidth) + ", " + std::to_string(entries) +
               " entries");
  RigOptions rig;
  rig.driver.admin_timeout_ms = 2000;
  GrantOptions options;
  options.entries = entries;
  options.slot_bytes = 8192;
  GrantRig gio(rig, options);
  ASSERT_TRUE(gio.grant);
  gio.fill_media(entries);
  // A ring that ended takes nothing any more; what was removed finds its rings unmapped.
  gio.rig.excused = {ViolationKind::kCqOverflow, ViolationKind::kDmaAfterUnmap};
  constexpr std::size_t kPages = 100;
  Pages pages(kPages, 8192);
  std::vector<IoContext> contexts;
  for (std::size_t i = 0; i < kPages; ++i) contexts.push_back(context_of(IoOp::kRead, 2 * i, pages.at(i), 8192));
  const auto right = [&](std::size_t i) { return std::memcmp(pages.at(i), gio.media(2 * i), 8192) == 0; };
  ASSERT_EQ(gio.owner->run<kWidth>(contexts).flag, kIoDone);
  pages.poison();

  FaultRule rule;
  rule.kind = fault.kind;
  rule.queue = gio.owner->queues().front().id;
  rule.skip = 20;
  rule.count = fault.count;
  rule.delay = milliseconds(fault.delay_ms);
  rule.late_data = fault.late_data;
  rule.status = fault.status;
  gio.rig.faults->add(rule);
  // What ends before the deadline has time to, on a machine that is loaded.
  const int deadline_ms = fault.error == RingError::kDeadline ? kDeadlineMs : 10'000;
  auto outcome = gio.owner->run<kWidth>(contexts, deadline_ms * 1'000'000ull);
  EXPECT_LE(outcome.ns, (deadline_ms + kSlackMs) * 1'000'000ull);
  EXPECT_TRUE(fault.error != RingError::kDeadline || outcome.ns >= kDeadlineMs * 1000000ull);
  EXPECT_EQ(outcome.error(), fault.error);
  EXPECT_EQ(outcome.flag, fault.error == RingError::kNone ? kIoDone : kIoError);
  EXPECT_EQ(gio.rig.faults->injected(fault.kind), fault.count);
  EXPECT_EQ(outcome.count(IoEnd::kNone), 0u);
  for (std::size_t i = 0; i < kPages; ++i) {
    const bool done = outcome.statuses[i].end() == IoEnd::kDone;
    EXPECT_TRUE(done ? right(i) : pages.untouched(i)) << i;
  }
  if (ends_queue(fault.error)) {
    const auto again = gio.owner->run<kWidth>(contexts);
    EXPECT_EQ(again.error(), RingError::kQueueDown);
    EXPECT_EQ(again.count(IoEnd::kNotSent), kPages);
  }
  gio.rig.faults->clear();
  auto renewed = gio.grant->renew();
  EXPECT_EQ(static_cast<bool>(renewed), !fault.ends_driver) << (renewed ? "" : renewed.error().message);
  // Nothing of before is written any more.
  std::memset(gio.bounce.data(), 0x77, gio.bounce.size());
  std::this_thread::sleep_for(milliseconds(fault.late_data ? fault.delay_ms : 0));
  for (std::size_t i = 0; i < gio.bounce.size(); ++i) ASSERT_EQ(gio.bounce.data()[i], std::byte{0x77}) << i;
  if (!renewed) return;
  gio.owner->start(*gio.grant);
  pages.poison();
  outcome = gio.owner->run<kWidth>(contexts);
  EXPECT_EQ(outcome.flag, kIoDone);
  for (std::size_t i = 0; i < kPages; ++i) EXPECT_TRUE(right(i)) << i;
}

TEST(GioRing, MeetsFaultsWithOneLane) {
  for (const Fault& fault : kFaults) meets<1>(fault, 16);
}
TEST(GioRing, MeetsFaultsWithManyLanes) {
  for (const Fault& fault : kFaults) meets<32>(fault, 64);
}

}  // namespace
}  // namespace tardis::gio
