// SPDX-License-Identifier: Apache-2.0
// Bring-up, reset and shutdown against register windows that behave in every way a controller may.
#include "nvme/controller_registers.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <optional>
#include <vector>

#include "base/clock.h"

namespace tardis::nvme {
namespace {

// RDY follows CC.EN after so many reads of CSTS, unless it is told otherwise.
class ScriptedWindow final : public RegisterWindow {
 public:
  ScriptedWindow() {
    cap = Capabilities::of(64, 500, 0, 12, 16).raw;
    version = 0x20000;
  }

  std::uint32_t read32(std::uint32_t offset) override {
    if (gone) return *gone;
    switch (offset) {
      case kRegVs:
        return version;
      case kRegCc:
        return cc;
      case kRegCsts:
        return next_status();
      default:
        return 0;
    }
  }
  std::uint64_t read64(std::uint32_t offset) override {
    if (gone) return *gone == 0 ? 0 : ~std::uint64_t{0};
    return offset == kRegCap ? cap : 0;
  }
  void write32(std::uint32_t offset, std::uint32_t value) override {
    written.push_back(offset);
    if (offset == kRegAqa) aqa = value;
    if (offset != kRegCc) return;
    const bool was = (cc & kCcEnable) != 0, is = (value & kCcEnable) != 0;
    if (was && !is && (csts & kCstsReady) == 0) disabled_before_ready = true;
    if (was != is) countdown = delay_reads;
    if (was && !is && fatal_clears) csts &= ~kCstsFatal;
    if ((value & kCcShnMask) != 0 && (cc & kCcShnMask) == 0) shutdown_countdown = delay_reads;
    cc = value;
    ccs.push_back(value);
  }
  void write64(std::uint32_t offset, std::uint64_t value) override {
    written.push_back(offset);
    (offset == kRegAsq ? asq : acq) = value;
  }
  volatile std::uint32_t* doorbells() override { return &doorbell; }
  std::uint32_t bytes() const override { return 8192; }

  std::uint32_t next_status() {
    if (gone_after_reads > 0 && --gone_after_reads == 0) {
      gone = kRegisterGone;
      return kRegisterGone;
    }
    if (stuck) return csts;
    if ((cc & kCcEnable) == 0 && fatal_countdown > 0 && --fatal_countdown == 0) csts &= ~kCstsFatal;
    if (countdown > 0) {
      --countdown;
    } else {
      csts = (csts & ~kCstsReady) | ((cc & kCcEnable) != 0 ? kCstsReady + 0u : 0u);
      if ((cc & kCcEnable) != 0 && fatal_on_enable) csts |= kCstsFatal;
    }
    if ((cc & kCcShnMask) != 0) {
      csts = (csts & ~kCstsShstMask) | (shutdown_countdown > 0 ? kCstsShstOccurring : kCstsShstComplete);
      if (shutdown_countdown > 0) --shutdown_countdown;
    }
    return csts;
  }

  std::uint64_t cap = 0, asq = 0, acq = 0;
  std::uint32_t version = 0, cc = 0, csts = 0, aqa = 0;
  int delay_reads = 3, countdown = 0, shutdown_countdown = 0, gone_after_reads = 0, fatal_countdown = 0;
  bool stuck = false, fatal_clears = true, fatal_on_enable = false, disabled_before_ready = false;
  std::optional<std::uint32_t> gone;
  std::vector<std::uint32_t> written, ccs;
  volatile std::uint32_t doorbell = 0;
};

constexpr AdminRings kRings{0x1000, 0x2000, 16};
constexpr std::uint32_t kCcRunning = kCcEnable | 6u << kCcIosqesShift | 4u << kCcIocqesShift;

TEST(NvmeDriverRegisters, FreshController) {
  ScriptedWindow window;
  ControllerRegisters registers(window, 0);
  EXPECT_EQ(registers.health(), Health::kNotReady);
  const auto up = registers.bring_up(kRings);
  ASSERT_TRUE(up) << up.error().message;
  EXPECT_EQ(window.written, (std::vector<std::uint32_t>{kRegAqa, kRegAsq, kRegAcq, kRegCc}));
  EXPECT_EQ(window.aqa, 15u | 15u << 16);
  EXPECT_EQ(window.asq, 0x1000u);
  EXPECT_EQ(window.acq, 0x2000u);
  EXPECT_EQ(window.cc, kCcRunning);
  EXPECT_EQ(registers.health(), Health::kReady);
}

// Left running by someone else, or on its way to ready: it may be switched off only when it is ready.
TEST(NvmeDriverRegisters, EnabledControllerIsAwaitedThenDisabled) {
  for (const bool ready : {true, false}) {
    ScriptedWindow window;
    window.cc = kCcEnable;
    window.csts = ready ? kCstsReady + 0u : 0;
    window.countdown = ready ? 0 : 5;
    ControllerRegisters registers(window, 0);
    ASSERT_TRUE(registers.bring_up(kRings));
    EXPECT_FALSE(window.disabled_before_ready);
    EXPECT_EQ(window.ccs, (std::vector<std::uint32_t>{0, kCcRunning}));
  }
}

TEST(NvmeDriverRegisters, DisabledControllerThatIsStillReadyIsAwaited) {
  ScriptedWindow window;
  window.csts = kCstsReady;
  window.countdown = 4;
  ASSERT_TRUE(ControllerRegisters(window, 0).bring_up(kRings));
  EXPECT_EQ(window.ccs, (std::vector<std::uint32_t>{kCcRunning}));
}

TEST(NvmeDriverRegisters, FatalControllerIsRecoveredByDisabling) {
  ScriptedWindow window;
  window.cc = kCcEnable;
  window.csts = kCstsFatal;
  window.countdown = 1 << 20;  // would not become ready
  ControllerRegisters registers(window, 20'000);
  EXPECT_EQ(registers.health(), Health::kFatal);
  const auto start = monotonic_ns();
  ASSERT_TRUE(registers.bring_up(kRings));
  EXPECT_LT(monotonic_ns() - start, 10'000'000'000u) << "waited for what cannot come";
}

// CSTS.RDY is 0 all the while, so only CFS tells when the reset is over.
TEST(NvmeDriverRegisters, FatalStatusOfAnEnablingThatFailedIsAwaited) {
  for (const int reads : {1, 2, 5, 0}) {
    ScriptedWindow window;
    window.cc = kCcEnable;
    window.csts = kCstsFatal;
    window.delay_reads = 0;
    window.countdown = 1 << 20;
    window.fatal_clears = false;
    window.fatal_countdown = reads;
    const auto start = monotonic_ns();
    const auto up = ControllerRegisters(window, reads == 0 ? 30 : 20'000).bring_up(kRings);
    EXPECT_LT(monotonic_ns() - start, 10'000'000'000u);
    EXPECT_EQ(static_cast<bool>(up), reads != 0) << reads << ": " << (up ? "" : up.error().message);
  }
}

TEST(NvmeDriverRegisters, FatalAfterEnablingFailsAtOnce) {
  ScriptedWindow window;
  window.fatal_on_enable = true;
  const auto start = monotonic_ns();
  const auto up = ControllerRegisters(window, 20'000).bring_up(kRings);
  ASSERT_FALSE(up);
  EXPECT_LT(monotonic_ns() - start, 10'000'000'000u);
  EXPECT_EQ(up.error().os_error, EIO);
  EXPECT_NE(up.error().message.find("CSTS.CFS=0"), std::string::npos) << up.error().message;
}

TEST(NvmeDriverRegisters, EveryWaitEnds) {
  // Ready never comes; then it never goes.
  for (const bool enabled : {false, true}) {
    ScriptedWindow window;
    window.stuck = true;
    window.cc = enabled ? kCcEnable + 0u : 0;
    window.csts = enabled ? kCstsReady + 0u : 0;
    const auto start = monotonic_ns();
    const auto up = ControllerRegisters(window, 60).bring_up(kRings);
    const auto took = monotonic_ns() - start;
    ASSERT_FALSE(up);
    EXPECT_GE(took, 60'000'000u);
    EXPECT_LT(took, 2'000'000'000u);
    EXPECT_EQ(up.error().os_error, EIO);
    EXPECT_NE(up.error().message.find(enabled ? "waiting for CSTS.RDY=0" : "waiting for CSTS.RDY=1"), std::string::npos)
        << up.error().message;
  }
}

TEST(NvmeDriverRegisters, TimeOutIsThatOfTheController) {
  ScriptedWindow window;  // CAP.TO = 1: 500 ms
  window.stuck = true;
  const auto start = monotonic_ns();
  ASSERT_FALSE(ControllerRegisters(window, 0).bring_up(kRings));
  EXPECT_GE(monotonic_ns() - start, 500'000'000u);
}

TEST(NvmeDriverRegisters, RemovedControllerIsGone) {
  for (const std::uint32_t value : {kRegisterGone, 0u}) {
    ScriptedWindow window;
    window.gone = value;
    ControllerRegisters registers(window, 0);
    EXPECT_EQ(registers.health(), Health::kGone);
    for (const Status& status : {registers.bring_up(kRings), registers.disable()}) {
      ASSERT_FALSE(status);
      EXPECT_EQ(status.error().os_error, ENODEV) << status.error().message;
    }
    const auto shut = registers.shut_down(30);
    ASSERT_FALSE(shut);
    EXPECT_EQ(shut.error().os_error == ENODEV, value == kRegisterGone);
  }
}

// Removal between any two reads of CSTS.
TEST(NvmeDriverRegisters, RemovalDuringBringUp) {
  int failures = 0;
  for (int reads = 1; reads < 40; ++reads) {
    ScriptedWindow window;
    window.cc = kCcEnable;
    window.gone_after_reads = reads;
    const auto up = ControllerRegisters(window, 0).bring_up(kRings);
    if (up) break;
    ++failures;
    ASSERT_EQ(up.error().os_error, ENODEV) << up.error().message;
  }
  EXPECT_GT(failures, 5);
}

TEST(NvmeDriverRegisters, ControllersThatDoNotFitAreLeftAlone) {
  ScriptedWindow window;
  window.cap = Capabilities::of(64, 500, 0, 14, 16).raw;
  const auto up = ControllerRegisters(window, 0).bring_up(kRings);
  ASSERT_FALSE(up);
  EXPECT_EQ(up.error().code, Code::kUnsupportedFormat);
  EXPECT_TRUE(window.written.empty());
}

TEST(NvmeDriverRegisters, Shutdown) {
  ScriptedWindow window;
  ControllerRegisters registers(window, 0);
  ASSERT_TRUE(registers.bring_up(kRings));
  ASSERT_TRUE(registers.shut_down(1'000));
  EXPECT_EQ(window.cc & kCcShnMask, kCcShnNormal);
  EXPECT_EQ(window.cc & kCcEnable, kCcEnable);
  ASSERT_TRUE(registers.disable());
  EXPECT_EQ(window.cc & (kCcEnable | kCcShnMask), 0u);
  // And up again.
  window.csts &= ~kCstsShstMask;
  ASSERT_TRUE(registers.bring_up(kRings));

  window.stuck = true;
  const auto shut = registers.shut_down(40);
  ASSERT_FALSE(shut);
  EXPECT_NE(shut.error().message.find("SHST=10b within 40 ms"), std::string::npos) << shut.error().message;
}

}  // namespace
}  // namespace tardis::nvme
