// SPDX-License-Identifier: Apache-2.0
// What is done to a controller through its registers alone: finding out whether it is there, switching it on and off,
// shutting it down. Every wait has a deadline.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "nvme/register_window.h"
#include "nvme/spec.h"

namespace tardis::nvme {

enum class Health : std::uint8_t {
  kReady,
  kNotReady,  // alive, and has lost its queues (RDY=0)
  kFatal,     // CFS=1
  kGone,      // removed: its registers read as all ones, or, behind some hypervisors, as zeros
};

// From a controller in any state to one that takes admin commands (Base 3.5.1).
enum class BringUpStep : std::uint8_t {
  kProbe,         // is anything there, and does it fit?
  kAwaitEnabled,  // CC.EN=1 was found: it must become ready before it may be switched off
  kDisable,
  kAwaitDisabled,
  kSetAdminQueue,  // AQA, ASQ, ACQ
  kEnable,         // CC, all of it before any I/O queue exists
  kAwaitReady,
  kReady,
};
const char* text_of(BringUpStep step);

struct AdminRings {
  std::uint64_t submission_address = 0, completion_address = 0;  // page-aligned
  std::uint32_t entries = 0;                                     // of each
};

class ControllerRegisters {
 public:
  // `ready_ms`: replaces CAP.TO if not 0.
  ControllerRegisters(RegisterWindow& window, std::uint32_t ready_ms) : window_(window), ready_ms_(ready_ms) {}

  Health health();
  Capabilities capabilities() { return {window_.read64(kRegCap)}; }
  std::uint32_t version() { return window_.read32(kRegVs); }

  // An error has os_error ENODEV if the controller is gone.
  Status bring_up(const AdminRings& rings);
  // CC.EN=0 and CSTS.RDY=0: afterwards the controller touches no memory.
  Status disable();
  // CC.SHN=01b and CSTS.SHST=10b.
  Status shut_down(std::uint32_t timeout_ms);

  std::string describe();  // CSTS and CC, for messages

 private:
  Status wait_for(BringUpStep step, std::uint32_t mask, std::uint32_t wanted, std::uint32_t timeout_ms,
                  bool fatal_ends);
  std::uint32_t ready_timeout_ms();
  Error failure(BringUpStep step, const std::string& expected);

  RegisterWindow& window_;
  const std::uint32_t ready_ms_;
};

}  // namespace tardis::nvme
