// SPDX-License-Identifier: Apache-2.0
// Rings whose commands land in memory that only an engine can touch: any thread that does ends this process.
#include "gio/direct_landing.h"

#include <algorithm>
#include <cstring>

#include "tests/gio_direct_support.h"
#include "tests/gio_faults.h"

namespace tardis::gio {
namespace {

using namespace nvme;
using std::chrono::milliseconds;
using testing::context_of;
using testing::CpuEngine;
using testing::DirectRig;
using testing::Fault;
using testing::kFaults;
using testing::RigOptions;

constexpr std::size_t kPage = 4096;

// Memory that does not say that it is.
class OtherMedium final : public Medium {
 public:
  OtherMedium(std::unique_ptr<MemoryMedium> medium, bool immediate)
      : medium_(std::move(medium)), immediate_(immediate) {}
  std::uint64_t bytes() const override { return medium_->bytes(); }
  bool immediate() const override { return immediate_; }
  bool needs_flush() const override { return false; }
  void run(std::span<MediumRequest> requests, const Completion& done) override { medium_->run(requests, done); }
  std::byte* data() { return medium_->data(); }

 private:
  const std::unique_ptr<MemoryMedium> medium_;
  const bool immediate_;
};

enum class Where { kMemory, kStaged, kStagedBehindThreads };

struct Case {
  SglSupport sgl = kSglAnyAlignment;
  std::uint8_t sgl_blocks = 0;
  std::uint32_t shift = 12;
  std::uint32_t entries = 64, queues = 1;
  std::size_t regions = 1;
  Where where = Where::kMemory;
};

// Random commands of one and two pieces, both ways; all of the regions and of the namespace are compared.
template <std::uint32_t kWidth>
void read_and_write(const Case& with, std::uint64_t seed) {
  SCOPED_TRACE("width " + std::to_string(kWidth) + ", seed " + std::to_string(seed));
  constexpr std::size_t kCommands = 120, kMost = 32 << 10, kPlace = 2 * kMost + 4 * kPage;
  constexpr std::uint64_t kBytes = 8 << 20;
  std::mt19937_64 random(seed);
  RigOptions rig;
  rig.bytes = kBytes;
  rig.block_shift = with.shift;
  rig.soft.sgl = with.sgl;
  rig.soft.sgl_blocks = with.sgl_blocks;
  rig.soft.threads = 2;
  rig.soft.mdts = 3;  // 32 KiB
  GrantOptions options;
  options.queues = with.queues;
  options.entries = with.entries;
  options.slot_bytes = 4096;  // of no matter
  std::shared_ptr<OtherMedium> other;
  if (with.where != Where::kMemory) {
    auto made = MemoryMedium::create(kBytes);
    ASSERT_TRUE(made);
    other = std::make_shared<OtherMedium>(std::move(*made), with.where == Where::kStaged);
    rig.soft.namespaces = {{}, {other, with.shift, 0, 0}};
    options.namespace_id = 2;
  }
  DirectRig direct(rig, options, kCommands * kPlace, with.regions);
  ASSERT_TRUE(direct.gio.grant);
  std::byte* const media = other != nullptr ? other->data() : direct.gio.rig.medium->data();
  for (std::uint64_t i = 0; i < kBytes; i += 8) {
    const std::uint64_t value = random();
    std::memcpy(media + i, &value, 8);
  }
  std::vector<std::byte> disk(media, media + kBytes);
  std::vector<std::vector<std::byte>> memory(with.regions, std::vector<std::byte>(kCommands * kPlace));
  const bool prp = with.sgl == kSglNone || with.sgl_blocks == 1;
  const std::uint64_t block = 1u << with.shift;
  for (int round = 0; round < 3; ++round) {
    for (std::size_t r = 0; r < with.regions; ++r) {
      for (std::size_t i = 0; i < memory[r].size(); i += 8) {
        const std::uint64_t value = random();
        std::memcpy(memory[r].data() + i, &value, 8);
      }
      std::memcpy(direct.bytes(direct.regions[r]), memory[r].data(), memory[r].size());
    }
    std::vector<IoContext> contexts;
    const std::size_t count = random() % (kCommands + 1);
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t blocks = 1 + random() % (kMost / block), bytes = blocks * block;
      const std::uint64_t first = i * (kMost / block) + random() % (kMost / block - blocks + 1);
      std::size_t front = bytes, at[2] = {i * kPlace + 16 * (random() % 256), 0}, in[2] = {random() % with.regions, 0};
      in[1] = random() % with.regions;
      if (random() % 4 != 0) {
        front = 16 * (1 + random() % (bytes / 16 - 1));
        at[1] = i * kPlace + kMost + 2 * kPage + 16 * (random() % 256);
        if (prp) {
          at[0] += kPage - (at[0] + front) % kPage;
          at[1] = i * kPlace + kMost + 2 * kPage;
        } else if (random() % 4 == 0) {  // one after the other
          at[1] = at[0] + front;
          in[1] = in[0];
        }
      }
      const IoOp op = random() % 3 == 0 ? IoOp::kWrite : IoOp::kRead;
      contexts.push_back(context_of(op, first, direct.regions[in[0]] + at[0], front,
                                    front == bytes ? nullptr : direct.regions[in[1]] + at[1], bytes - front));
      std::byte* const there = disk.data() + first * block;
      for (const auto& [from, to, n] : {std::tuple{there, memory[in[0]].data() + at[0], front},
                                        std::tuple{there + front, memory[in[1]].data() + at[1], bytes - front}}) {
        if (op == IoOp::kRead) {
          std::memcpy(to, from, n);
        } else {
          std::memcpy(from, to, n);
        }
      }
    }
    const auto outcome = direct.gio.owner->run<kWidth>(contexts);
    ASSERT_EQ(outcome.flag, kIoDone);
    ASSERT_EQ(outcome.count(IoEnd::kDone), contexts.size());
    for (std::size_t r = 0; r < with.regions; ++r) {
      ASSERT_EQ(std::memcmp(direct.bytes(direct.regions[r]), memory[r].data(), memory[r].size()), 0) << round;
    }
    ASSERT_EQ(std::memcmp(media, disk.data(), disk.size()), 0) << round;
  }
  EXPECT_TRUE(std::all_of(direct.gio.bounce.data(), direct.gio.bounce.data() + direct.gio.bounce.size(),
                          [](std::byte byte) { return byte == std::byte{0}; }));
}

TEST(GioDirect, ReadsAndWritesBySgl) {
  read_and_write<32>({}, 1);
  read_and_write<1>({.sgl = kSglDword, .shift = 9, .entries = 7, .queues = 2, .regions = 3}, 2);
  read_and_write<5>({.entries = 2}, 3);
  read_and_write<32>({.entries = 200, .queues = 3, .regions = 2}, 4);
}
TEST(GioDirect, ReadsAndWritesByPrp) {
  read_and_write<32>({.sgl = kSglNone}, 5);
  read_and_write<1>({.sgl = kSglNone, .shift = 9, .entries = 5, .queues = 2, .regions = 3}, 6);
  read_and_write<32>({.sgl_blocks = 1, .entries = 200, .queues = 3, .regions = 2}, 7);
}
TEST(GioDirect, MediaThatAreNoMemoryAreStaged) {
  read_and_write<32>({.regions = 2, .where = Where::kStaged}, 8);
  read_and_write<32>({.sgl = kSglNone, .queues = 2, .where = Where::kStagedBehindThreads}, 9);
  read_and_write<5>({.queues = 2, .regions = 2, .where = Where::kStagedBehindThreads}, 10);
}

TEST(GioDirect, RefusesWhatCannotBeDescribed) {
  for (const SglSupport sgl : {kSglAnyAlignment, kSglNone}) {
    RigOptions rig;
    rig.soft.sgl = sgl;
    rig.soft.mdts = 2;  // 16 KiB
    GrantOptions options;
    options.slot_bytes = 64 << 10;
    constexpr std::size_t kRegion = 1 << 20;
    DirectRig direct(rig, options, kRegion, 2);
    ASSERT_TRUE(direct.gio.grant);
    direct.gio.fill_media(1);
    const std::byte* const a = direct.regions[0];
    const std::byte* const b = direct.regions[1];
    AlignedBuffer ordinary(2 * kPage);
    const std::vector<std::byte> before(direct.bytes(a), direct.bytes(a) + kRegion);
    std::vector<IoContext> contexts;
    const auto add = [&](const std::byte* first, std::size_t first_bytes, const std::byte* second = nullptr,
                         std::size_t second_bytes = 0) {
      contexts.push_back(context_of(IoOp::kRead, 8, first, first_bytes, second, second_bytes));
    };
    add(ordinary.data(), kPage);
    add(a + kRegion - kPage, 2 * kPage);    // over the end
    add(a - kPage, kPage);                  // before the beginning
    add(a, kPage, ordinary.data(), kPage);  // half of it elsewhere
    add(a, kPage, b + kRegion - 16, kPage);
    add(a, 5 * kPage);  // MDTS
    add(a, 3 * kPage, b, 2 * kPage);
    add(a + 8, kPage);   // no multiple of 16
    add(a, kPage - 16);  // no whole block
    add(reinterpret_cast<std::byte*>(16), kPage);
    const std::size_t always = contexts.size();
    add(a + 16, kPage, b, kPage);  // with PRPs, a border within a page
    add(a, kPage, b + 512, kPage);
    add(a, kPage - 512, b, kPage + 512);
    const std::size_t with_prp = contexts.size();
    auto outcome = direct.gio.owner->run<32>(contexts);
    for (std::size_t i = 0; i < contexts.size(); ++i) {
      const bool refused = i < always || (sgl == kSglNone && i < with_prp);
      EXPECT_EQ(outcome.statuses[i].end(), refused ? IoEnd::kRefused : IoEnd::kDone) << i << " sgl " << sgl;
    }
    EXPECT_EQ(outcome.error(), RingError::kCommands);
    // The ring sees none of the bytes: asked to compare them itself, it must not say that they are good.
    std::uint64_t digest = 0;
    contexts.assign(2, context_of(IoOp::kRead, 8, a, kPage));
    contexts[0].digests = reinterpret_cast<std::uintptr_t>(&digest);
    outcome = direct.gio.owner->run<32>(contexts, 20'000'000'000, true);
    EXPECT_EQ(outcome.statuses[0].end(), IoEnd::kRefused);
    EXPECT_EQ(outcome.statuses[1].end(), IoEnd::kDone);
    EXPECT_EQ(outcome.flag, kIoError);
    EXPECT_EQ(direct.gio.owner->run<32>(contexts).flag, kIoDone);  // a kernel behind it compares
    std::memcpy(direct.bytes(a), before.data(), kPage);
    if (sgl == kSglNone) {
      EXPECT_EQ(std::memcmp(direct.bytes(a), before.data(), before.size()), 0);
    }
    // As good as before.
    contexts.assign(1, context_of(IoOp::kRead, 3, a + 16 * 7, 4 * kPage));
    EXPECT_EQ(direct.gio.owner->run<32>(contexts).flag, kIoDone);
    EXPECT_EQ(std::memcmp(direct.bytes(a) + 16 * 7, direct.gio.media(3), 4 * kPage), 0);
  }
}

TEST(GioDirect, LongestCommands) {
  for (const SglSupport sgl : {kSglAnyAlignment, kSglNone}) {
    RigOptions rig;
    rig.soft.sgl = sgl;
    rig.soft.mdts = 9;  // 2 MiB
    rig.driver.max_command_bytes = 2 << 20;
    DirectRig direct(rig, {}, 8 << 20, 2);
    ASSERT_TRUE(direct.gio.grant);
    direct.gio.fill_media(2);
    constexpr std::size_t kHalf = 1 << 20;
    const std::byte* const a = direct.regions[0];
    const std::byte* const b = direct.regions[1];
    const std::vector<IoContext> contexts = {context_of(IoOp::kRead, 1, a + 3 * kPage, kHalf, b + 5 * kPage, kHalf),
                                             context_of(IoOp::kRead, 513, a + 2 * kHalf, 2 * kHalf)};
    EXPECT_EQ(direct.gio.owner->run<32>(contexts).flag, kIoDone);
    EXPECT_EQ(std::memcmp(direct.bytes(a) + 3 * kPage, direct.gio.media(1), kHalf), 0);
    EXPECT_EQ(std::memcmp(direct.bytes(b) + 5 * kPage, direct.gio.media(1) + kHalf, kHalf), 0);
    EXPECT_EQ(std::memcmp(direct.bytes(a) + 2 * kHalf, direct.gio.media(513), 2 * kHalf), 0);
  }
}

TEST(GioDirect, RegionsThatBeginWithinAPage) {
  for (const SglSupport sgl : {kSglAnyAlignment, kSglNone}) {
    RigOptions rig;
    rig.soft.sgl = sgl;
    DirectRig direct(rig, {}, 64 << 10);
    ASSERT_TRUE(direct.gio.grant);
    direct.gio.fill_media(3);
    constexpr std::size_t kBytes = 3 << 20, kInto = 528;
    auto* const memory = static_cast<std::byte*>(*direct.engine.allocate(kBytes));
    ASSERT_TRUE(direct.gio.grant->add_region(direct.provider, memory + kInto, kBytes - 2 * kInto));
    direct.start();
    const std::vector<IoContext> contexts = {
        context_of(IoOp::kRead, 1, memory + kInto, 10 * kPage),
        context_of(IoOp::kRead, 20, memory + 20 * kPage + 16, 16 * kPage - 16, memory + 64 * kPage, 16),
        context_of(IoOp::kRead, 40, memory + kBytes - kInto - 100 * kPage, 100 * kPage),
        context_of(IoOp::kRead, 1, memory, kPage),
        context_of(IoOp::kRead, 1, memory + kBytes - kPage, kPage),
    };
    const auto outcome = direct.gio.owner->run<32>(contexts);
    std::byte* const landed = direct.bytes(memory);
    EXPECT_EQ(std::memcmp(landed + kInto, direct.gio.media(1), 10 * kPage), 0);
    EXPECT_EQ(std::memcmp(landed + 20 * kPage + 16, direct.gio.media(20), 16 * kPage - 16), 0);
    EXPECT_EQ(std::memcmp(landed + 64 * kPage, direct.gio.media(36) - 16, 16), 0);
    EXPECT_EQ(std::memcmp(landed + kBytes - kInto - 100 * kPage, direct.gio.media(40), 100 * kPage), 0);
    for (std::size_t i = 0; i < contexts.size(); ++i) {
      EXPECT_EQ(outcome.statuses[i].end(), i < 3 ? IoEnd::kDone : IoEnd::kRefused) << i;
    }
  }
}

TEST(GioDirect, MoreCommandsThanStagingMemory) {
  constexpr std::size_t kBytes = 2 << 20, kCommands = 20;
  auto made = MemoryMedium::create(kCommands * kBytes);
  ASSERT_TRUE(made);
  const auto medium = std::make_shared<OtherMedium>(std::move(*made), false);
  RigOptions rig;
  rig.soft.mdts = 9;
  rig.driver.max_command_bytes = kBytes;
  rig.soft.namespaces = {{}, {medium, 12, 0, 0}};
  GrantOptions options;
  options.slot_bytes = 4096;
  options.namespace_id = 2;
  DirectRig direct(rig, options, kCommands * kBytes);
  ASSERT_TRUE(direct.gio.grant);
  std::mt19937_64 random(1);
  for (std::size_t i = 0; i < kCommands * kBytes; i += 8) {
    const std::uint64_t value = random();
    std::memcpy(medium->data() + i, &value, 8);
  }
  std::vector<IoContext> contexts;
  for (std::size_t i = 0; i < kCommands; ++i) {
    contexts.push_back(context_of(IoOp::kRead, i * (kBytes >> 12), direct.regions[0] + i * kBytes, kBytes));
  }
  EXPECT_EQ(direct.gio.owner->run<32>(contexts).flag, kIoDone);
  std::byte* const landed = direct.bytes(direct.regions[0]);
  EXPECT_EQ(std::memcmp(landed, medium->data(), kCommands * kBytes), 0);
  for (IoContext& context : contexts) context.op = IoOp::kWrite;
  std::memset(medium->data(), 0, kCommands * kBytes);
  EXPECT_EQ(direct.gio.owner->run<32>(contexts).flag, kIoDone);
  EXPECT_EQ(std::memcmp(landed, medium->data(), kCommands * kBytes), 0);
}

// K with one engine or in host memory, V with another.
TEST(GioDirect, MemoryOfSeveralKindsInACommand) {
  const auto other = std::make_shared<CpuEngine>();
  AlignedBuffer plain(1 << 20);
  GrantOptions options;
  options.entries = 16;
  options.slot_bytes = 4096;
  DirectRig direct({}, options, 1 << 20);
  ASSERT_TRUE(direct.gio.grant);
  direct.gio.fill_media(5);
  ASSERT_TRUE(direct.gio.rig.controller->attach(*other));
  EngineMemory second(*direct.gio.rig.space, *other);
  HostMemory host(*direct.gio.rig.space);
  auto* const there = static_cast<std::byte*>(*other->allocate(1 << 20));
  ASSERT_TRUE(direct.gio.grant->add_region(second, there, 1 << 20));
  ASSERT_TRUE(direct.gio.grant->add_region(host, plain.data(), plain.size()));
  direct.start();
  for (std::byte* const keys : {there, plain.data()}) {
    const auto bytes_of_keys = [&](std::size_t at) { return (keys == there ? other->at(there) : plain.data()) + at; };
    std::vector<IoContext> contexts;
    for (std::size_t i = 0; i < 40; ++i) {
      contexts.push_back(context_of(IoOp::kRead, 2 * i, keys + i * 6 * kPage, 5 * kPage - 512,
                                    direct.regions[0] + i * 6 * kPage, kPage + 512));
      contexts.back().block = 6 * i;
    }
    EXPECT_EQ(direct.gio.owner->run<32>(contexts).flag, kIoDone);
    for (std::size_t i = 0; i < contexts.size(); ++i) {
      const std::byte* const want = direct.gio.media(6 * i);
      EXPECT_EQ(std::memcmp(bytes_of_keys(i * 6 * kPage), want, 5 * kPage - 512), 0) << i;
      EXPECT_EQ(std::memcmp(direct.bytes(direct.regions[0]) + i * 6 * kPage, want + 5 * kPage - 512, kPage + 512), 0);
    }
    const std::vector<std::byte> before(direct.gio.media(0), direct.gio.media(6 * 40));
    std::memset(direct.gio.media(0), 0, before.size());
    for (IoContext& context : contexts) context.op = IoOp::kWrite;
    EXPECT_EQ(direct.gio.owner->run<32>(contexts).flag, kIoDone);
    EXPECT_EQ(std::memcmp(direct.gio.media(0), before.data(), before.size()), 0);
  }
  direct.gio.grant->remove_region(there);
  direct.gio.grant->remove_region(plain.data());
  direct.gio.rig.controller->detach(*other);
}

// ---- what goes wrong
class FaultRig {
 public:
  static constexpr std::size_t kCommands = 100, kBytes = 8192, kPlace = kBytes + kPage;

  explicit FaultRig(const GrantOptions& options, std::uint32_t admin_timeout_ms = 2000)
      : direct_(
            [&] {
              RigOptions rig;
              rig.driver.admin_timeout_ms = admin_timeout_ms;
              return rig;
            }(),
            options, kCommands * kPlace, 2) {
    direct_.gio.fill_media(options.entries);
    direct_.gio.rig.excused = {ViolationKind::kCqOverflow, ViolationKind::kDmaAfterUnmap};
    for (std::size_t i = 0; i < kCommands; ++i) {
      contexts.push_back(context_of(IoOp::kRead, 2 * i, direct_.regions[0] + i * kPlace, kPage,
                                    direct_.regions[1] + i * kPlace, kPage));
    }
    poison();
  }
  void poison() {
    for (const std::byte* region : direct_.regions) std::memset(direct_.bytes(region), 0xa5, kCommands * kPlace);
  }
  bool right(std::size_t i) {
    return std::memcmp(direct_.bytes(direct_.regions[0]) + i * kPlace, direct_.gio.media(2 * i), kPage) == 0 &&
           std::memcmp(direct_.bytes(direct_.regions[1]) + i * kPlace, direct_.gio.media(2 * i + 1), kPage) == 0;
  }
  bool untouched(std::size_t i) { return touched(i) == 0; }
  std::size_t touched(std::size_t i) {
    std::size_t bytes = 0;
    for (const std::byte* region : direct_.regions) {
      const std::byte* const at = direct_.bytes(region) + i * kPlace;
      bytes +=
          static_cast<std::size_t>(std::count_if(at, at + kPlace, [](std::byte b) { return b != std::byte{0xa5}; }));
    }
    return bytes;
  }
  bool all_untouched() {
    for (std::size_t i = 0; i < kCommands; ++i) {
      if (!untouched(i)) return false;
    }
    return true;
  }
  DirectRig& operator*() { return direct_; }
  DirectRig* operator->() { return &direct_; }

  std::vector<IoContext> contexts;

 private:
  DirectRig direct_;
};

constexpr int kDeadlineMs = 300, kSlackMs = 5000;

GrantOptions fault_options(std::uint32_t entries) {
  GrantOptions options;
  options.entries = entries;
  options.slot_bytes = 4096;
  return options;
}

template <std::uint32_t kWidth>
void meets(const Fault& fault, std::uint32_t entries) {
  SCOPED_TRACE(std::string(fault.name) + ", width " + std::to_string(kWidth));
  FaultRig rig(fault_options(entries));
  ASSERT_TRUE(rig->gio.grant);
  ASSERT_EQ(rig->gio.owner->run<kWidth>(rig.contexts).flag, kIoDone);
  rig.poison();
  FaultRule rule;
  rule.kind = fault.kind;
  rule.queue = rig->gio.owner->queues().front().id;
  rule.skip = 20;
  rule.count = fault.count;
  rule.delay = milliseconds(fault.delay_ms);
  rule.late_data = fault.late_data;
  rule.status = fault.status;
  rig->gio.rig.faults->add(rule);
  const int deadline_ms = fault.error == RingError::kDeadline ? kDeadlineMs : 10'000;
  auto outcome = rig->gio.owner->run<kWidth>(rig.contexts, deadline_ms * 1'000'000ull);
  EXPECT_LE(outcome.ns, (deadline_ms + kSlackMs) * 1'000'000ull);
  // The engine may hold the command that meets it until all others have ended: then no head is an old one.
  const bool unseen = fault.kind == FaultKind::kStuckSqHead && outcome.error() == RingError::kNone;
  EXPECT_TRUE(outcome.error() == fault.error || unseen) << static_cast<int>(outcome.error());
  EXPECT_EQ(outcome.flag, outcome.error() == RingError::kNone ? kIoDone : kIoError);
  EXPECT_EQ(outcome.count(IoEnd::kNone), 0u);
  for (std::size_t i = 0; i < FaultRig::kCommands; ++i) {
    const IoEnd end = outcome.statuses[i].end();
    if (end == IoEnd::kDone) {
      EXPECT_TRUE(rig.right(i)) << i;
    } else if (end != IoEnd::kTimedOut) {  // of those, the memory is the controller's yet
      EXPECT_TRUE(rig.untouched(i)) << i;
    }
  }
  rig->gio.rig.faults->clear();
  auto renewed = rig->gio.grant->renew();
  EXPECT_EQ(static_cast<bool>(renewed), !fault.ends_driver) << (renewed ? "" : renewed.error().message);
  // From here on the memory is its owner's again.
  rig.poison();
  std::this_thread::sleep_for(milliseconds(fault.late_data ? fault.delay_ms : 0));
  EXPECT_TRUE(rig.all_untouched());
  if (!renewed) return;
  rig->start();
  outcome = rig->gio.owner->run<kWidth>(rig.contexts);
  EXPECT_EQ(outcome.flag, kIoDone);
  for (std::size_t i = 0; i < FaultRig::kCommands; ++i) EXPECT_TRUE(rig.right(i)) << i;
}

TEST(GioDirect, MeetsFaultsWithOneLane) {
  for (const Fault& fault : kFaults) {
    if (fault.late_data) meets<1>(fault, 16);
  }
}
TEST(GioDirect, MeetsFaultsWithManyLanes) {
  for (const Fault& fault : kFaults) meets<32>(fault, 64);
}

TEST(GioDirect, CopiesThatFail) {
  for (const bool starts : {false, true}) {
    FaultRig rig(fault_options(16));
    ASSERT_TRUE(rig->gio.grant);
    rig->engine.fail(starts ? 0 : 3, starts ? 3 : 0);
    auto outcome = rig->gio.owner->run<32>(rig.contexts);
    EXPECT_EQ(outcome.error(), RingError::kCommands);
    EXPECT_GE(outcome.count(IoEnd::kFailed), 3u);
    EXPECT_EQ(outcome.count(IoEnd::kFailed) + outcome.count(IoEnd::kDone), FaultRig::kCommands);
    for (std::size_t i = 0; i < FaultRig::kCommands; ++i) {
      if (outcome.statuses[i].end() == IoEnd::kDone) {
        EXPECT_TRUE(rig.right(i)) << i;
      } else {
        EXPECT_EQ(outcome.statuses[i].status().raw & 0x7ff, kScDataTransferError) << i;
      }
    }
    // The queue pair is as good as before.
    EXPECT_EQ(rig->gio.owner->run<32>(rig.contexts).flag, kIoDone);
    for (std::size_t i = 0; i < FaultRig::kCommands; ++i) EXPECT_TRUE(rig.right(i)) << i;
  }
}

// An engine that stands still holds up its own commands and nobody else's; they end with the deadline, and only
// renew() gives their memory back: it returns when the copies have ended, whatever its own time limits are.
void stands_still(std::uint32_t admin_timeout_ms, int release_ms) {
  FaultRig rig(fault_options(16), admin_timeout_ms);
  ASSERT_TRUE(rig->gio.grant);
  rig->engine.hold(true);
  const auto outcome = rig->gio.owner->run<32>(rig.contexts, 100'000'000);
  EXPECT_EQ(outcome.error(), RingError::kDeadline);
  const std::uint32_t sent = outcome.count(IoEnd::kTimedOut);
  EXPECT_EQ(sent, 15u);
  EXPECT_EQ(outcome.count(IoEnd::kNotSent), FaultRig::kCommands - sent);
  // The host's queue pair is of the same controller thread.
  std::vector<std::byte> page(kPage);
  EXPECT_EQ(rig->gio.rig.read(0, page.data(), page.size()), 0);
  EXPECT_EQ(std::memcmp(page.data(), rig->gio.media(0), page.size()), 0);
  EXPECT_TRUE(rig.all_untouched());

  std::atomic<bool> released{false};
  std::thread late([&] {
    std::this_thread::sleep_for(milliseconds(release_ms));
    released = true;
    rig->engine.hold(false);
  });
  const auto renewed = rig->gio.grant->renew();
  EXPECT_TRUE(released);  // not before
  std::uint32_t landed = 0;
  for (std::size_t i = 0; i < FaultRig::kCommands; ++i) {
    if (outcome.statuses[i].end() == IoEnd::kTimedOut) {
      EXPECT_TRUE(rig.right(i) || rig.untouched(i)) << i;
      landed += rig.right(i);
    } else {
      EXPECT_TRUE(rig.untouched(i)) << i;  // late bytes went to memory of commands that had timed out, and nowhere else
    }
  }
  EXPECT_EQ(landed, sent);
  rig.poison();
  const std::uint64_t moved = rig->engine.moved;
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(rig->engine.moved, moved);
  EXPECT_TRUE(rig.all_untouched());
  late.join();
  if (!renewed) return;
  rig->start();
  EXPECT_EQ(rig->gio.owner->run<32>(rig.contexts).flag, kIoDone);
  for (std::size_t i = 0; i < FaultRig::kCommands; ++i) EXPECT_TRUE(rig.right(i)) << i;
}
TEST(GioDirect, RenewWaitsForLateCopies) { stands_still(5000, 300); }
TEST(GioDirect, RenewWaitsForCopiesLaterThanItsLimits) { stands_still(200, 1500); }

TEST(GioDirect, TheEndWaitsForCopies) {
  std::atomic<bool> released{false};
  std::thread late;
  {
    FaultRig rig(fault_options(16), 200);
    ASSERT_TRUE(rig->gio.grant);
    rig->engine.hold(true);
    EXPECT_EQ(rig->gio.owner->run<32>(rig.contexts, 50'000'000).error(), RingError::kDeadline);
    late = std::thread([&, engine = rig->kept] {
      std::this_thread::sleep_for(milliseconds(400));
      released = true;
      engine->hold(false);
    });
  }
  EXPECT_TRUE(released);
  late.join();
}

TEST(GioDirect, AnEngineThatIsNotAttached) {
  FaultRig rig(fault_options(16));
  ASSERT_TRUE(rig->gio.grant);
  rig->gio.rig.controller->detach(rig->engine);
  const auto outcome = rig->gio.owner->run<32>(rig.contexts);
  EXPECT_EQ(outcome.count(IoEnd::kFailed), FaultRig::kCommands);
  EXPECT_TRUE(rig.all_untouched());
  ASSERT_TRUE(rig->gio.rig.controller->attach(rig->engine));
  EXPECT_EQ(rig->gio.owner->run<32>(rig.contexts).flag, kIoDone);
}

}  // namespace
}  // namespace tardis::gio
