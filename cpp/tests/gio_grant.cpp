// SPDX-License-Identifier: Apache-2.0
// Queue pairs for owners outside the driver: how they are given, and that nothing touches their memory afterwards.
#include "gio/grant.h"

#include <cstring>

#include "gio/prepare.h"
#include "tests/gio_support.h"

namespace tardis::gio {
namespace {

using namespace nvme;
using std::chrono::milliseconds;
using testing::GrantRig;
using testing::Rig;
using testing::RigOptions;

GrantOptions small() {
  GrantOptions options;
  options.entries = 16;
  options.slot_bytes = 8192;
  return options;
}

std::vector<IoContext> reads(std::size_t count, std::byte* to) {
  std::vector<IoContext> contexts(count);
  for (std::size_t i = 0; i < count; ++i) {
    contexts[i].op = IoOp::kRead;
    contexts[i].block = 2 * i;
    contexts[i].memory[0] = reinterpret_cast<std::uintptr_t>(to + i * 8192);
    contexts[i].bytes[0] = 8192;
  }
  return contexts;
}

TEST(GioGrant, SaysWhatItCannotGive) {
  RigOptions rig_options;
  rig_options.driver.queues = 1;
  rig_options.driver.external_queues = 2;
  rig_options.soft.queue_pairs = 2;
  rig_options.soft.max_queue_entries = 64;
  Rig rig(rig_options);
  EXPECT_EQ(rig.driver->external_queues(), 1u);  // the driver's own comes first
  EXPECT_NE(rig.driver->report().find("1 for owners outside"), std::string::npos) << rig.driver->report();
  AlignedBuffer memory(1 << 20);
  const GrantMemory good{memory.data(), memory.data() + (256 << 10)};
  const auto refused = [&](GrantOptions options, GrantMemory at) {
    auto opened = Grant::open(rig.driver, at, options);
    return opened ? std::string("it was given") : opened.error().message;
  };
  GrantOptions options = small();
  options.queues = 2;
  EXPECT_NE(refused(options, good).find("expected 1 to 1, found 2"), std::string::npos) << refused(options, good);
  options = small();
  options.entries = 65;
  EXPECT_NE(refused(options, good).find("expected 2 to 64"), std::string::npos) << refused(options, good);
  options = small();
  options.commands = 16;
  EXPECT_NE(refused(options, good).find("expected 1 to 15"), std::string::npos) << refused(options, good);
  options = small();
  options.slot_bytes = 5000;
  EXPECT_NE(refused(options, good).find("whole pages"), std::string::npos);
  options = small();
  options.namespace_id = 2;
  EXPECT_NE(refused(options, good).find("namespace"), std::string::npos);
  EXPECT_NE(refused(small(), {memory.data() + 512, good.bounce}).find("page-aligned"), std::string::npos);
  EXPECT_NE(refused(small(), {nullptr, good.bounce}).find("page-aligned"), std::string::npos);
  // What was refused leaves nothing behind.
  auto granted = Grant::open(rig.driver, good, small());
  ASSERT_TRUE(granted) << granted.error().message;
  EXPECT_NE(refused(small(), {memory.data() + (512 << 10), memory.data() + (768 << 10)}).find("in use"),
            std::string::npos);
}

TEST(GioGrant, TheHostGoesOnBesideIt) {
  GrantOptions options = small();
  options.queues = 2;
  GrantRig gio({}, options);
  ASSERT_TRUE(gio.grant);
  gio.fill_media(1);
  AlignedBuffer pages(64 * 8192), page(4096);
  std::atomic<bool> stop{false};
  std::thread host([&] {
    while (!stop.load()) EXPECT_EQ(gio.rig.read(4096 * 5, page.data(), 4096), 0);
  });
  for (int i = 0; i < 5; ++i) EXPECT_EQ(gio.owner->run<32>(reads(64, pages.data())).flag, kIoDone);
  stop.store(true);
  host.join();
  EXPECT_EQ(std::memcmp(pages.data(), gio.media(0), pages.size()), 0);
  EXPECT_EQ(std::memcmp(page.data(), gio.media(5), 4096), 0);
}

// A command of which data and completion come after the owner has given up.
void closes(bool renew, bool deletion_fails) {
  SCOPED_TRACE(std::string(renew ? "renew" : "close") + (deletion_fails ? ", deletion refused" : ""));
  RigOptions rig_options;
  rig_options.driver.admin_timeout_ms = 1000;
  GrantRig gio(rig_options, small());
  ASSERT_TRUE(gio.grant);
  gio.fill_media(2);
  const std::uint16_t id = gio.grant->queues().front().id;
  FaultRule late;
  late.kind = FaultKind::kLateCompletion;
  late.queue = id;
  late.count = 5;
  late.delay = milliseconds(400);
  late.late_data = true;
  gio.rig.faults->add(late);
  if (deletion_fails) {
    FaultRule refused;
    refused.kind = FaultKind::kStatus;
    refused.queue = 0;
    refused.opcode = static_cast<std::uint8_t>(AdminOpcode::kDeleteSq);
    gio.rig.faults->add(refused);
  }
  AlignedBuffer pages(32 * 8192);
  const auto contexts = reads(32, pages.data());
  const auto outcome = gio.owner->run<32>(contexts, 20'000'000);
  EXPECT_EQ(outcome.error(), RingError::kDeadline);
  EXPECT_GE(outcome.count(IoEnd::kTimedOut), 1u);
  auto ended = renew ? gio.grant->renew() : gio.grant->close();
  EXPECT_TRUE(ended) << ended.error().message;
  EXPECT_EQ(gio.rig.driver->counters().resets, deletion_fails ? 1u : 0u);
  std::memset(gio.bounce.data(), 0x5a, gio.bounce.size());
  if (!renew) std::memset(gio.rings.data(), 0x5a, gio.rings.size());
  std::this_thread::sleep_for(milliseconds(500));
  for (std::size_t i = 0; i < gio.bounce.size(); ++i) ASSERT_EQ(gio.bounce.data()[i], std::byte{0x5a});
  for (std::size_t i = 0; !renew && i < gio.rings.size(); ++i) ASSERT_EQ(gio.rings.data()[i], std::byte{0x5a});
  EXPECT_EQ(gio.grant->alive(), renew);
  if (!renew) return;
  gio.owner->start(*gio.grant);
  EXPECT_EQ(gio.owner->run<32>(contexts).flag, kIoDone);
  EXPECT_EQ(std::memcmp(pages.data(), gio.media(0), pages.size()), 0);
}

TEST(GioGrant, NothingIsTouchedAfterItsEnd) {
  for (const bool renew : {false, true}) {
    for (const bool deletion_fails : {false, true}) closes(renew, deletion_fails);
  }
}

TEST(GioGrant, EndsWithAResetAndIsMadeAnew) {
  GrantRig gio({}, small());
  ASSERT_TRUE(gio.grant);
  gio.fill_media(3);
  AlignedBuffer pages(8 * 8192);
  const auto contexts = reads(8, pages.data());
  EXPECT_EQ(gio.owner->run<32>(contexts).flag, kIoDone);
  EXPECT_TRUE(gio.grant->alive());
  ASSERT_TRUE(gio.rig.driver->reset());
  EXPECT_FALSE(gio.grant->alive());
  // Nobody told the owner: its doorbells are those of no queue.
  EXPECT_EQ(gio.owner->run<32>(contexts, 50'000'000).error(), RingError::kDeadline);
  ASSERT_TRUE(gio.grant->renew());
  EXPECT_TRUE(gio.grant->alive());
  gio.owner->start(*gio.grant);
  EXPECT_EQ(gio.owner->run<32>(contexts).flag, kIoDone);
  EXPECT_EQ(std::memcmp(pages.data(), gio.media(0), pages.size()), 0);
}

TEST(GioGrant, EndsWithTheDriver) {
  for (const bool removed : {false, true}) {
    GrantRig gio({}, small());
    ASSERT_TRUE(gio.grant);
    if (removed) {
      gio.rig.controller->remove(false);
      EXPECT_FALSE(gio.grant->renew());
      EXPECT_EQ(gio.rig.driver->state(), DriverState::kGone);
    } else {
      EXPECT_TRUE(gio.rig.driver->shut_down());
      EXPECT_FALSE(gio.grant->alive());
      EXPECT_FALSE(gio.grant->renew());
    }
    EXPECT_TRUE(gio.grant->close());
    EXPECT_EQ(gio.rig.space->mapped_ranges(), 0u);
  }
}

// A creation that the controller refuses or does not answer.
TEST(GioGrant, CreationThatFails) {
  for (const FaultKind kind : {FaultKind::kStatus, FaultKind::kLostCompletion}) {
    for (const AdminOpcode opcode : {AdminOpcode::kCreateCq, AdminOpcode::kCreateSq}) {
      RigOptions rig_options;
      rig_options.driver.external_queues = 1;
      rig_options.driver.admin_timeout_ms = 1000;
      Rig rig(rig_options);
      AlignedBuffer memory(1 << 20);
      const GrantMemory at{memory.data(), memory.data() + (256 << 10)};
      FaultRule rule;
      rule.kind = kind;
      rule.queue = 0;
      rule.opcode = static_cast<std::uint8_t>(opcode);
      rig.faults->add(rule);
      EXPECT_FALSE(Grant::open(rig.driver, at, small()));
      EXPECT_EQ(rig.driver->counters().resets, kind == FaultKind::kStatus ? 0u : 1u);
      auto again = Grant::open(rig.driver, at, small());
      EXPECT_TRUE(again) << again.error().message;
    }
  }
}

// ---- contexts of a layer's pages
TEST(GioPrepare, CutsPagesIntoCommands) {
  for (const std::uint32_t halves : {1u, 2u}) {
    for (const std::uint32_t page_bytes : {4096u, 12288u, 65536u, 73728u}) {
      for (const std::uint32_t most : {4096u, 8192u, 65536u, 1u << 20}) {
        std::vector<std::uint32_t> memory_pages{3, 0, 7}, file_pages{11, 2, 5};
        const std::uint32_t count = 3;
        LayerPages layer{};
        layer.memory_pages = memory_pages.data();
        layer.file_pages = file_pages.data();
        layer.count = &count;
        layer.pools[0] = 1 << 20;
        layer.pools[1] = 1 << 24;
        layer.page_stride[0] = layer.page_stride[1] = page_bytes + 256;
        layer.page_bytes[0] = page_bytes;
        layer.page_bytes[1] = halves == 2 ? page_bytes : 0;
        layer.first_block = 1000;
        layer.blocks_per_page = 10 * halves * page_bytes / 4096;
        layer.block_shift = 12;
        layer.most_bytes = most;
        layer.op = IoOp::kRead;
        EXPECT_EQ(layer.commands_per_page(), (halves * page_bytes + most - 1) / most);
        for (std::uint32_t i = 0; i < count; ++i) {
          std::uint64_t at = 0;  // in K followed by V
          for (std::uint32_t command = 0; command < layer.commands_per_page(); ++command) {
            const IoContext context = layer.context(i, command);
            EXPECT_EQ(context.block, 1000 + file_pages[i] * layer.blocks_per_page + at / 4096);
            EXPECT_EQ(context.tag, i);
            EXPECT_LE(context.bytes[0] + context.bytes[1], most);
            for (std::uint32_t piece = 0; piece < kPieces; ++piece) {
              if (context.bytes[piece] == 0) continue;
              const std::uint32_t half = at >= page_bytes ? 1 : 0;
              EXPECT_EQ(context.memory[piece],
                        layer.pools[half] + memory_pages[i] * layer.page_stride[half] + at - half * page_bytes);
              at += context.bytes[piece];
              EXPECT_TRUE(half == 1 || at <= page_bytes);
            }
          }
          EXPECT_EQ(at, halves * page_bytes);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tardis::gio
