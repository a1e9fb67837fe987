// SPDX-License-Identifier: Apache-2.0
// Bring-up, features, reset and shutdown of a driver on a software controller, and what happens if a step fails.
#include "nvme/driver.h"

#include <atomic>
#include <functional>
#include <thread>

#include "base/clock.h"
#include "tests/nvme_driver_support.h"

namespace tardis::nvme {
namespace {

using testing::Rig;
using testing::RigOptions;
using testing::WindowBefore;
using Op = NamespaceRequest::Op;

constexpr std::uint64_t kSecond = 1'000'000'000;
// Admin commands of a bring-up with one queue pair and one namespace: Identify controller, Set Features, Identify list,
// Identify namespace, Create CQ, Create SQ.
constexpr std::uint64_t kBringUpCommands = 6;

RigOptions closed_rig() {
  RigOptions options;
  options.open = false;
  options.driver.queues = 1;
  return options;
}

TEST(NvmeDriver, FewerQueuesThanAskedForAreUsedAndReported) {
  RigOptions options;
  options.soft.queue_pairs = 2;
  options.driver.queues = 8;
  Rig rig(options);
  ASSERT_NE(rig.driver, nullptr);
  EXPECT_EQ(rig.driver->queue_pairs(), 2u);
  EXPECT_NE(rig.driver->report().find("2 queue pairs (8 asked for) of 255 commands"), std::string::npos)
      << rig.driver->report();
}

TEST(NvmeDriver, QueuesAreAsLongAsTheControllerAllows) {
  for (const std::uint32_t entries : {2u, 3u, 100u, 1024u}) {
    RigOptions options;
    options.soft.max_queue_entries = entries;
    options.driver.queue_entries = 300;
    Rig rig(options);
    ASSERT_NE(rig.driver, nullptr);
    EXPECT_EQ(rig.driver->queue_depth(), std::min(entries, 300u) - 1);
  }
}

TEST(NvmeDriver, OptionsThatCannotWorkAreRefused) {
  Rig rig(closed_rig());
  const auto refused = [&](auto change) {
    DriverOptions options;
    change(options);
    auto opened = Driver::open(rig.controller->window(), *rig.space, options);
    return !opened && opened.error().code == Code::kInvalidArgument;
  };
  EXPECT_TRUE(refused([](auto& o) { o.queues = 0; }));
  EXPECT_TRUE(refused([](auto& o) { o.queue_entries = 1; }));
  EXPECT_TRUE(refused([](auto& o) { o.bounce_buffers = 0; }));
  EXPECT_TRUE(refused([](auto& o) { o.bounce_bytes = 512; }));
  EXPECT_TRUE(refused([](auto& o) { o.io_timeout_ms = 0; }));
  EXPECT_TRUE(refused([](auto& o) { o.max_command_bytes = 512; }));  // less than a block
  EXPECT_TRUE(refused([](auto& o) { o.queues = 65536; }));           // identifiers have 16 bits
}

TEST(NvmeDriver, ControllerLeftRunningIsTakenOver) {
  Rig rig(closed_rig());
  auto rings = DmaMemory::allocate(*rig.space, 2 * kPageBytes);
  ASSERT_TRUE(rings);
  ControllerRegisters before(rig.controller->window(), 0);
  ASSERT_TRUE(before.bring_up({rings->address(), rings->address() + kPageBytes, 16}));
  ASSERT_TRUE(rig.open());
  EXPECT_EQ(rig.controller->counters().resets, 1u);
  std::byte page[4096];
  EXPECT_EQ(rig.read(0, page, sizeof page), 0);
}

TEST(NvmeDriver, SlowControllerIsAwaited) {
  RigOptions options = closed_rig();
  options.soft.ready_delay = std::chrono::milliseconds(120);
  Rig rig(options);
  const std::uint64_t start = monotonic_ns();
  EXPECT_TRUE(rig.open());
  EXPECT_GE(monotonic_ns() - start, 120'000'000u);
}

TEST(NvmeDriver, ControllerThatIsNeverReadyFails) {
  RigOptions options = closed_rig();
  options.soft.timeout_ms = 500;
  Rig rig(options);
  rig.controller->hold_ready(true);
  const std::uint64_t start = monotonic_ns();
  auto opened = Driver::open(rig.controller->window(), *rig.space, rig.driver_options);
  ASSERT_FALSE(opened);
  EXPECT_LT(monotonic_ns() - start, 5 * kSecond);
  EXPECT_NE(opened.error().message.find("waiting for CSTS.RDY=1"), std::string::npos) << opened.error().message;
  rig.controller->hold_ready(false);
  EXPECT_TRUE(rig.open(/*attempts=*/10));
}

// Each admin command of the bring-up in turn goes wrong in each way: opening fails within its deadline, all memory is
// taken back, and the next attempt succeeds.
TEST(NvmeDriver, EveryStepOfTheBringUpMayFail) {
  struct Case {
    FaultKind kind;
    int os_error;
  };
  for (const Case& wrong : {Case{FaultKind::kLostCompletion, ETIMEDOUT}, Case{FaultKind::kWrongCommandId, EIO},
                            Case{FaultKind::kStatus, EREMOTEIO}, Case{FaultKind::kFatal, EIO},
                            Case{FaultKind::kRemovedAllOnes, ENODEV}, Case{FaultKind::kRemovedZeros, ENODEV}}) {
    for (std::uint64_t step = 0; step < kBringUpCommands; ++step) {
      Rig rig(closed_rig());
      FaultRule rule;
      rule.kind = wrong.kind;
      rule.queue = 0;
      rule.skip = step;
      rig.faults->add(rule);
      // A machine that is loaded must not make another error of it.
      const std::uint32_t patience = rig.driver_options.admin_timeout_ms;
      if (wrong.kind == FaultKind::kLostCompletion) rig.driver_options.admin_timeout_ms = 100;
      const std::uint64_t start = monotonic_ns();
      auto opened = Driver::open(rig.controller->window(), *rig.space, rig.driver_options);
      ASSERT_FALSE(opened) << "fault " << int(wrong.kind) << " at " << step;
      EXPECT_EQ(opened.error().os_error, wrong.os_error) << "step " << step << ": " << opened.error().message;
      EXPECT_LT(monotonic_ns() - start, 5 * kSecond);
      EXPECT_EQ(rig.space->mapped_ranges(), 0u);
      EXPECT_EQ(rig.faults->injected(wrong.kind), 1u);
      if (wrong.os_error == ENODEV) rig.controller->insert();
      rig.driver_options.admin_timeout_ms = patience;
      ASSERT_TRUE(rig.open());
    }
  }
}

TEST(NvmeDriver, BringUpThatSucceedsSendsTheseCommands) {
  Rig rig(closed_rig());
  ASSERT_TRUE(rig.open());
  EXPECT_EQ(rig.controller->counters().commands, kBringUpCommands);
}

// Their offsets wrap around 2^32: the first would be those of the admin queue.
TEST(NvmeDriver, DoorbellsBeyondTheWindowAreNoneOfOtherQueues) {
  Rig rig(closed_rig());
  struct LargeWindow : WindowBefore {
    explicit LargeWindow(RegisterWindow& b) : window(b) {}
    RegisterWindow& behind() override { return window; }
    std::uint32_t bytes() const override { return 1u << 30; }
    RegisterWindow& window;
  } window(rig.controller->window());
  IoQueueShape shape;
  shape.entries = 4;
  shape.commands = 3;
  shape.doorbell_stride = 15;
  for (const std::uint16_t id : {16384, 16385, 32768, 65535}) {
    const auto queue = IoQueue::create(*rig.space, window, id, shape, {});
    ASSERT_FALSE(queue) << id;
    EXPECT_NE(queue.error().message.find("ask for fewer queues"), std::string::npos) << queue.error().message;
  }
  EXPECT_EQ(rig.space->mapped_ranges(), 0u);
}

TEST(NvmeDriver, NamespacesOfOtherCommandSetsAreLeftOut) {
  RigOptions options;
  options.soft.namespaces.resize(5);
  for (SoftNamespace& space : options.soft.namespaces) {
    auto medium = MemoryMedium::create(1 << 20);
    ASSERT_TRUE(medium);
    space.medium = std::move(*medium);
  }
  options.soft.namespaces[0].command_set = kCommandSetNvm;
  options.soft.namespaces[1].command_set = kCommandSetZoned;
  options.soft.namespaces[2].command_set = kCommandSetNvm;
  options.soft.namespaces[3].command_set = kCommandSetKeyValue;  // the fifth does not say
  Rig rig(options);
  ASSERT_NE(rig.driver, nullptr);
  std::vector<std::uint32_t> ids;
  for (const NamespaceInfo& info : rig.driver->namespaces()) ids.push_back(info.id);
  EXPECT_EQ(ids, (std::vector<std::uint32_t>{1, 3}));
  ASSERT_EQ(rig.driver->refused_namespaces().size(), 3u);
  for (const auto& [id, part] : {std::pair{2u, "zoned"}, {4u, "key value"}, {5u, "no descriptor"}}) {
    const auto space = NvmeNamespace::open(rig.driver, id);
    ASSERT_FALSE(space) << id;
    EXPECT_NE(space.error().message.find(part), std::string::npos) << space.error().message;
  }
  EXPECT_TRUE(rig.driver->reset()) << "the same namespaces are found again";
}

TEST(NvmeDriver, SglsAreLeftAloneWhereAQuirkSaysSo) {
  RigOptions options;
  {
    Rig rig(options);
    ASSERT_NE(rig.driver, nullptr);
    EXPECT_NE(rig.driver->controller().sgl, SglRule::kNone);
    options.driver.quirks = {{rig.driver->controller().vendor, rig.driver->controller().model, Quirk::kDoNotUseSgl}};
  }
  Rig rig(options);
  ASSERT_NE(rig.driver, nullptr);
  EXPECT_EQ(rig.driver->controller().sgl, SglRule::kNone);
}

TEST(NvmeDriver, VolatileCacheIsReadAndSet) {
  RigOptions options;
  options.soft.volatile_cache = true;
  Rig rig(options);
  ASSERT_NE(rig.driver, nullptr);
  for (const bool enabled : {false, true, false}) {
    ASSERT_TRUE(rig.driver->set_volatile_cache(enabled));
    auto found = rig.driver->volatile_cache_enabled();
    ASSERT_TRUE(found);
    EXPECT_EQ(*found, enabled);
  }
}

// Notes which writes are to be durable at once.
class NotingMedium final : public Medium {
 public:
  NotingMedium() : memory_(std::move(*MemoryMedium::create(1 << 20))) {}
  std::uint64_t bytes() const override { return memory_->bytes(); }
  bool immediate() const override { return true; }
  bool needs_flush() const override { return true; }
  void run(std::span<MediumRequest> requests, const Completion& on_complete) override {
    for (const MediumRequest& request : requests) {
      if (request.op == MediumRequest::Op::kWrite) ++(request.durable ? durable : plain);
      if (request.op == MediumRequest::Op::kFlush) ++flushes;
    }
    memory_->run(requests, on_complete);
  }
  std::atomic<int> durable{0}, plain{0}, flushes{0};

 private:
  std::unique_ptr<MemoryMedium> memory_;
};

TEST(NvmeDriver, ForcedUnitAccessAndFlush) {
  DmaSpace space;
  auto medium = std::make_shared<NotingMedium>();
  SoftControllerOptions options;
  options.namespaces.push_back({.medium = medium});
  auto controller = SoftController::create(options, space);
  ASSERT_TRUE(controller);
  auto driver = Driver::open((*controller)->window(), space);
  ASSERT_TRUE(driver);
  auto disk = NvmeNamespace::open(std::shared_ptr<Driver>(std::move(*driver)), 1);
  ASSERT_TRUE(disk);
  AlignedBuffer page(4096);
  const iovec range{page.data(), 4096};
  std::vector<NamespaceRequest> requests{{.op = Op::kWrite, .memory = {&range, 1}, .error = -1},
                                         {.op = Op::kRead, .offset = 4096, .memory = {&range, 1}, .error = -1}};
  (*disk)->run(requests, nullptr);
  EXPECT_EQ(medium->plain.load(), 1);
  (*disk)->run_durably(requests, nullptr);
  EXPECT_EQ(medium->durable.load(), 1);
  EXPECT_EQ(requests[0].error + requests[1].error, 0);
  EXPECT_EQ(medium->flushes.load(), 0);
  EXPECT_TRUE((*disk)->flush());
  EXPECT_EQ(medium->flushes.load(), 1);
  EXPECT_TRUE((*controller)->violations().empty()) << describe((*controller)->violations());
}

TEST(NvmeDriver, NothingIsSentAfterShutdown) {
  Rig rig({});
  ASSERT_NE(rig.driver, nullptr);
  AlignedBuffer page(4096);
  ASSERT_EQ(rig.write(0, page.data(), 4096), 0);
  ASSERT_TRUE(rig.driver->shut_down());
  EXPECT_EQ(rig.controller->window().read32(kRegCsts) & kCstsReady, 0u);
  const auto before = rig.controller->counters().commands;
  EXPECT_EQ(rig.write(0, page.data(), 4096), ESHUTDOWN);
  EXPECT_FALSE(rig.driver->register_memory(page.data(), 4096));
  EXPECT_FALSE(rig.driver->volatile_cache_enabled());
  EXPECT_FALSE(rig.driver->reset());
  EXPECT_TRUE(rig.driver->shut_down());  // once is enough
  EXPECT_EQ(rig.controller->counters().commands, before);
  EXPECT_EQ(rig.space->mapped_ranges(), 0u);
  EXPECT_EQ(rig.driver->state(), DriverState::kShutDown);
}

// What is in flight ends, with success or with an error that says why, and nobody waits for ever.
TEST(NvmeDriver, ShutdownUnderLoad) {
  for (int round = 0; round < 5; ++round) {
    RigOptions options;
    options.driver.queues = 2;
    Rig rig(options);
    ASSERT_NE(rig.driver, nullptr);
    std::atomic<int> under_way{0};
    std::vector<std::thread> threads;
    for (std::uint64_t i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        AlignedBuffer memory(256 << 10);
        int error = 0;
        for (int turn = 0; error == 0; ++turn) {
          if (turn == 3) ++under_way;
          error = turn % 2 == 0 ? rig.write(i << 20, memory.data(), memory.size())
                                : rig.read(i << 20, memory.data(), memory.size());
        }
        EXPECT_EQ(error, ESHUTDOWN) << std::strerror(error);
      });
    }
    while (under_way.load() < 4) std::this_thread::yield();
    const auto shut = rig.driver->shut_down();
    EXPECT_TRUE(shut) << shut.error().message;
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(rig.driver->state(), DriverState::kShutDown);
  }
}

// The controller sees CC.SHN before it is switched off.
TEST(NvmeDriver, ShutdownIsAnnounced) {
  class Noting final : public WindowBefore {
   public:
    explicit Noting(RegisterWindow& window) : window_(window) {}
    RegisterWindow& behind() override { return window_; }
    std::uint32_t read32(std::uint32_t offset) override {
      const std::uint32_t value = window_.read32(offset);
      if (offset == kRegCsts && value != kRegisterGone && (value & kCstsShstMask) == kCstsShstComplete)
        completed = true;
      return value;
    }
    void write32(std::uint32_t offset, std::uint32_t value) override {
      if (offset == kRegCc && (value & kCcShnMask) == kCcShnNormal) announced = true;
      if (offset == kRegCc && (value & kCcEnable) == 0 && announced && !completed) too_early = true;
      window_.write32(offset, value);
    }
    bool announced = false, completed = false, too_early = false;

   private:
    RegisterWindow& window_;
  };
  Rig rig(closed_rig());
  Noting window(rig.controller->window());
  {
    auto driver = Driver::open(window, *rig.space, rig.driver_options);
    ASSERT_TRUE(driver);
    EXPECT_FALSE(window.announced);
  }
  EXPECT_TRUE(window.announced);
  EXPECT_TRUE(window.completed);
  EXPECT_FALSE(window.too_early);
}

// Resets while other threads have I/O in flight: nobody notices.
TEST(NvmeDriver, ResetUnderLoad) {
  RigOptions options;
  options.driver.retries = 100;
  Rig rig(options);
  ASSERT_NE(rig.driver, nullptr);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (std::uint64_t i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      AlignedBuffer out(64 << 10), in(64 << 10);
      for (std::uint64_t round = 0; !stop.load(); ++round) {
        std::memset(out.data(), static_cast<int>(i * 50 + round % 50), out.size());
        ASSERT_EQ(rig.write(i << 20, out.data(), out.size()), 0);
        ASSERT_EQ(rig.read(i << 20, in.data(), in.size()), 0);
        ASSERT_EQ(std::memcmp(in.data(), out.data(), in.size()), 0);
      }
    });
  }
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const auto reset = rig.driver->reset();
    EXPECT_TRUE(reset) << reset.error().message;
  }
  stop.store(true);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(rig.driver->counters().resets, 20u);
  EXPECT_EQ(rig.driver->counters().errors, 0u);
  EXPECT_FALSE(rig.driver->cache_lost());
}

// Two find the controller not ready. The first resets it; the second then has nothing left to do.
TEST(NvmeDriver, OneResetIsEnough) {
  class Unready final : public WindowBefore {
   public:
    explicit Unready(RegisterWindow& window) : window_(window) {}
    RegisterWindow& behind() override { return window_; }
    std::uint32_t read32(std::uint32_t offset) override {
      if (offset != kRegCsts || std::this_thread::get_id() != reader.load()) return window_.read32(offset);
      // The first look, which leads to the recovery, and the first of that.
      if (++looks == 2) meanwhile();
      return looks <= 2 ? window_.read32(offset) & ~kCstsReady : window_.read32(offset);
    }
    std::atomic<std::thread::id> reader;
    int looks = 0;
    std::function<void()> meanwhile;

   private:
    RegisterWindow& window_;
  };
  Rig rig(closed_rig());
  Unready window(rig.controller->window());
  auto opened = Driver::open(window, *rig.space, rig.driver_options);
  ASSERT_TRUE(opened) << opened.error().message;
  const std::shared_ptr<Driver> driver(std::move(*opened));
  auto disk = NvmeNamespace::open(driver, 1);
  ASSERT_TRUE(disk);
  window.meanwhile = [&] { std::thread([&] { EXPECT_TRUE(driver->reset()); }).join(); };
  FaultRule late;
  late.kind = FaultKind::kLateCompletion;
  late.queue = 1;
  late.delay = std::chrono::seconds(1);
  rig.faults->add(late);
  AlignedBuffer page(4096);
  const iovec range{page.data(), 4096};
  NamespaceRequest request{.op = Op::kRead, .memory = {&range, 1}, .error = -1};
  window.reader = std::this_thread::get_id();
  (*disk)->run({&request, 1}, nullptr);
  window.reader = std::thread::id();
  EXPECT_EQ(request.error, 0);
  EXPECT_GE(window.looks, 2);
  const DriverCounters counters = driver->counters();
  EXPECT_EQ(counters.resets, 1u);
  EXPECT_EQ(counters.queue_deletions, 0u);
  EXPECT_EQ(counters.retries, 1u);
}

// In the slot is another drive after the power came back: what is in flight must not go to it.
TEST(NvmeDriver, AnotherDriveIsNotTakenForTheOldOne) {
  class Slot final : public WindowBefore {
   public:
    RegisterWindow& behind() override { return drive->window(); }
    std::unique_ptr<SoftController> drive;
  };
  struct Change {
    const char* what;
    std::function<void(SoftControllerOptions&)> make;
    bool same;
  };
  const Change changes[] = {
      {"nothing", [](auto&) {}, true},
      {"serial", [](auto& o) { o.serial = "ANOTHER"; }, false},
      {"size", [](auto& o) { o.namespaces[0].blocks = 100; }, false},
      {"block size", [](auto& o) { o.namespaces[0].block_shift = 9, o.namespaces[0].blocks = 256; }, false},
      {"no namespace", [](auto& o) { o.namespaces[0].medium = nullptr; }, false},
      {"one more namespace", [](auto& o) { o.namespaces.push_back(o.namespaces[0]); }, false},
      {"queues", [](auto& o) { o.queue_pairs = 1; }, false},
      {"MDTS", [](auto& o) { o.mdts = 2; }, false},
      {"SGLs", [](auto& o) { o.sgl = kSglNone; }, false},
      {"SGL blocks", [](auto& o) { o.sgl_blocks = 2; }, false},
      {"volatile cache", [](auto& o) { o.volatile_cache = true; }, false},
      {"atomic blocks", [](auto& o) { o.atomic_blocks = 3; }, false},
      {"optimal boundary", [](auto& o) { o.namespaces[0].optimal_boundary = 8; }, false},
  };
  for (const Change& change : changes) {
    DmaSpace space;
    AlignedBuffer registers(64 << 10);
    SoftControllerOptions options;
    options.namespaces.push_back({.medium = std::move(*MemoryMedium::create(1 << 20)), .blocks = 256});
    options.registers = registers.data();  // one slot, one place for doorbells
    options.registers_bytes = registers.size();
    options.queue_pairs = 2;
    Slot slot;
    auto first = SoftController::create(options, space);
    ASSERT_TRUE(first) << first.error().message;
    slot.drive = std::move(*first);
    auto driver = Driver::open(slot, space);
    ASSERT_TRUE(driver) << driver.error().message;
    const std::shared_ptr<Driver> shared(std::move(*driver));
    auto disk = NvmeNamespace::open(shared, 1);
    ASSERT_TRUE(disk);

    slot.drive.reset();
    change.make(options);
    auto second = SoftController::create(options, space);
    ASSERT_TRUE(second) << second.error().message;
    slot.drive = std::move(*second);
    std::byte page[4096];
    const iovec range{page, sizeof page};
    NamespaceRequest request{.op = Op::kRead, .memory = {&range, 1}, .error = -1};
    (*disk)->run({&request, 1}, nullptr);
    EXPECT_EQ(request.error, change.same ? 0 : ENXIO) << change.what;
    EXPECT_EQ(shared->state(), change.same ? DriverState::kLive : DriverState::kFailed) << change.what;
    EXPECT_EQ((slot.read32(kRegCsts) & kCstsReady) != 0, change.same) << "left on with memory that was taken away";
  }
}

// A controller with a volatile cache that lost power: what was not flushed may be lost, and no flush says otherwise.
TEST(NvmeDriver, FlushFailsAfterAPowerCut) {
  RigOptions options;
  options.soft.volatile_cache = true;
  Rig rig(options);
  ASSERT_NE(rig.disk, nullptr);
  AlignedBuffer page(4096);
  ASSERT_EQ(rig.write(0, page.data(), 4096), 0);
  ASSERT_TRUE(rig.disk->flush());
  rig.controller->cut_power();
  EXPECT_EQ(rig.read(0, page.data(), 4096), 0) << "sent again after the reset";
  EXPECT_EQ(rig.driver->state(), DriverState::kLive);
  for (int i = 0; i < 2; ++i) {
    const auto flushed = rig.disk->flush();
    ASSERT_FALSE(flushed);
    EXPECT_EQ(flushed.error().os_error, EIO);
  }
}

}  // namespace
}  // namespace tardis::nvme
