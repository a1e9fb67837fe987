// SPDX-License-Identifier: Apache-2.0
#include "nvme/controller_registers.h"

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <thread>

#include "base/clock.h"
#include "nvme/identify.h"

namespace tardis::nvme {
namespace {

constexpr std::uint64_t kNsPerMs = 1'000'000;
constexpr auto kRegisterPause = std::chrono::microseconds(50);
constexpr std::uint32_t kLeastReadyMs = 500;  // the unit of CAP.TO; some controllers say 0

}  // namespace

const char* text_of(BringUpStep step) {
  switch (step) {
    case BringUpStep::kProbe:
      return "looking for a controller";
    case BringUpStep::kAwaitEnabled:
      return "waiting for CSTS.RDY=1 of a controller found with CC.EN=1";
    case BringUpStep::kDisable:
      return "clearing CC.EN";
    case BringUpStep::kAwaitDisabled:
      return "waiting for CSTS.RDY=0 after CC.EN=0";
    case BringUpStep::kSetAdminQueue:
      return "setting AQA, ASQ and ACQ";
    case BringUpStep::kEnable:
      return "setting CC.EN";
    case BringUpStep::kAwaitReady:
      return "waiting for CSTS.RDY=1 after CC.EN=1";
    case BringUpStep::kReady:
      return "ready";
  }
  return "?";
}

Health ControllerRegisters::health() {
  const std::uint32_t status = window_.read32(kRegCsts);
  if (status == kRegisterGone) return Health::kGone;
  // A controller whose CSTS is 0 is switched off, unless not even its version is there.
  if (status == 0 && window_.read32(kRegVs) == 0 && window_.read64(kRegCap) == 0) return Health::kGone;
  if ((status & kCstsFatal) != 0) return Health::kFatal;
  return (status & kCstsReady) != 0 ? Health::kReady : Health::kNotReady;
}

std::string ControllerRegisters::describe() {
  char text[48];
  std::snprintf(text, sizeof text, "CSTS=%08xh CC=%08xh", window_.read32(kRegCsts), window_.read32(kRegCc));
  return text;
}

Error ControllerRegisters::failure(BringUpStep step, const std::string& expected) {
  const std::string where = std::string("NVMe controller, ") + text_of(step) + ": ";
  if (health() == Health::kGone) {
    return {Code::kIo, where + "the controller is gone (" + describe() + "); is it still plugged in and powered?",
            ENODEV};
  }
  return {Code::kIo, where + expected + ", found " + describe() + "; reset or power-cycle the drive", EIO};
}

std::uint32_t ControllerRegisters::ready_timeout_ms() {
  if (ready_ms_ != 0) return ready_ms_;
  const std::uint32_t asked = capabilities().timeout_ms();
  return asked < kLeastReadyMs ? kLeastReadyMs : asked;
}

Status ControllerRegisters::wait_for(BringUpStep step, std::uint32_t mask, std::uint32_t wanted,
                                     std::uint32_t timeout_ms, bool fatal_ends) {
  const std::uint64_t deadline = monotonic_ns() + timeout_ms * kNsPerMs;
  for (;;) {
    const bool last = monotonic_ns() >= deadline;  // before the read: one more look after a long sleep
    const std::uint32_t status = window_.read32(kRegCsts);
    if (status == kRegisterGone) return failure(step, "");
    if (fatal_ends && (status & kCstsFatal) != 0) return failure(step, "no fatal status (CSTS.CFS=0)");
    if ((status & mask) == wanted) return {};
    if (last) return failure(step, "that within " + std::to_string(timeout_ms) + " ms");
    std::this_thread::sleep_for(kRegisterPause);
  }
}

Status ControllerRegisters::disable() {
  const std::uint32_t configuration = window_.read32(kRegCc);
  if (configuration == kRegisterGone) return failure(BringUpStep::kDisable, "");
  window_.write32(kRegCc, configuration & ~(kCcEnable | kCcShnMask));
  // A fatal controller is switched off like any other: that is how it recovers.
  if (auto off = wait_for(BringUpStep::kAwaitDisabled, kCstsReady, 0, ready_timeout_ms(), false); !off) return off;
  // Where RDY was 0 before, as after an enabling that failed, it does not tell when the reset is over, and a fatal
  // status of before would be taken for one of after. One that stays is found when the controller is enabled.
  if ((window_.read32(kRegCsts) & kCstsFatal) != 0) {
    (void)wait_for(BringUpStep::kAwaitDisabled, kCstsFatal, 0, ready_timeout_ms(), false);
  }
  if (health() == Health::kGone) return failure(BringUpStep::kAwaitDisabled, "");
  return {};
}

Status ControllerRegisters::bring_up(const AdminRings& rings) {
  for (BringUpStep step = BringUpStep::kProbe;;) {
    switch (step) {
      case BringUpStep::kProbe: {
        if (health() == Health::kGone) return failure(step, "");
        if (auto fits = check_capabilities(capabilities()); !fits) return fits;
        const bool enabled = (window_.read32(kRegCc) & kCcEnable) != 0;
        step = enabled ? BringUpStep::kAwaitEnabled : BringUpStep::kAwaitDisabled;
        break;
      }
      case BringUpStep::kAwaitEnabled: {
        // Whether it became ready, failed, or did neither in its time: the way on is to switch it off.
        auto ready = wait_for(step, kCstsReady, kCstsReady, ready_timeout_ms(), true);
        if (!ready && ready.error().os_error == ENODEV) return ready;
        step = BringUpStep::kDisable;
        break;
      }
      case BringUpStep::kDisable:
        if (auto off = disable(); !off) return off;
        step = BringUpStep::kSetAdminQueue;
        break;
      case BringUpStep::kAwaitDisabled:
        // Someone may have cleared CC.EN a moment ago.
        if (auto off = wait_for(step, kCstsReady, 0, ready_timeout_ms(), false); !off) return off;
        step = BringUpStep::kSetAdminQueue;
        break;
      case BringUpStep::kSetAdminQueue:
        window_.write32(kRegAqa, admin_queue_attributes(rings.entries, rings.entries));
        window_.write64(kRegAsq, rings.submission_address);
        window_.write64(kRegAcq, rings.completion_address);
        step = BringUpStep::kEnable;
        break;
      case BringUpStep::kEnable:
        // CSS, MPS and AMS are 0: the NVM command set, 4096-byte pages, round robin.
        static_assert(kPageBytes == 4096, "CC.MPS");
        window_.write32(kRegCc,
                        kCcEnable | kSubmissionEntryShift << kCcIosqesShift | kCompletionEntryShift << kCcIocqesShift);
        step = BringUpStep::kAwaitReady;
        break;
      case BringUpStep::kAwaitReady:
        if (auto ready = wait_for(step, kCstsReady, kCstsReady, ready_timeout_ms(), true); !ready) return ready;
        step = BringUpStep::kReady;
        break;
      case BringUpStep::kReady:
        return {};
    }
  }
}

Status ControllerRegisters::shut_down(std::uint32_t timeout_ms) {
  const std::uint32_t configuration = window_.read32(kRegCc);
  if (configuration == kRegisterGone) return failure(BringUpStep::kProbe, "");
  window_.write32(kRegCc, (configuration & ~kCcShnMask) | kCcShnNormal);
  const std::uint64_t deadline = monotonic_ns() + timeout_ms * kNsPerMs;
  for (;;) {
    const bool last = monotonic_ns() >= deadline;
    const std::uint32_t status = window_.read32(kRegCsts);
    if (status != kRegisterGone && (status & kCstsShstMask) == kCstsShstComplete) return {};
    if (last || status == kRegisterGone || (status & kCstsFatal) != 0) {
      return Error{Code::kIo,
                   "NVMe controller, shutdown: expected CSTS.SHST=10b within " + std::to_string(timeout_ms) +
                       " ms, found " + describe() + "; data in its volatile cache may be lost",
                   status == kRegisterGone ? ENODEV : EIO};
    }
    std::this_thread::sleep_for(kRegisterPause);
  }
}

}  // namespace tardis::nvme
