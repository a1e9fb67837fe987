// SPDX-License-Identifier: Apache-2.0
// What the software controller does wrong to rings, and how they are to end.
#pragma once

#include <cstdint>

#include "gio/iocb.h"
#include "nvme/soft/faults.h"

namespace tardis::gio::testing {

using nvme::FaultKind;

struct Fault {
  const char* name;
  FaultKind kind;
  int delay_ms = 0;
  bool late_data = false;
  std::uint64_t count = 1;
  std::uint16_t status = nvme::kScInternal;
  RingError error = RingError::kDeadline;  // kNone: it goes well
  bool ends_driver = false;
};

inline const Fault kFaults[] = {
    {"completion lost", FaultKind::kLostCompletion},
    {"completion lost, data late", FaultKind::kLostCompletion, 500, true},
    {"completion late, within the deadline", FaultKind::kLateCompletion, 50, false, 1, 0, RingError::kNone},
    {"completion later than the deadline", FaultKind::kLateCompletion, 600},
    {"data and completion later than the deadline", FaultKind::kLateCompletion, 600, true},
    {"completion posted twice", FaultKind::kDuplicate, 0, false, 1, 0, RingError::kQueueFault},
    {"completions in any order", FaultKind::kReorder, 0, false, 60, 0, RingError::kNone},
    {"completion under a wrong identifier", FaultKind::kWrongCommandId, 0, false, 1, 0, RingError::kQueueFault},
    {"error status", FaultKind::kStatus, 0, false, 3, nvme::kScInternal, RingError::kCommands},
    {"SC = 0 with SCT != 0", FaultKind::kStatus, 0, false, 1, 0x300, RingError::kCommands},
    {"media error", FaultKind::kMediaError, 0, false, 2, 0, RingError::kCommands},
    {"submission queue head stuck", FaultKind::kStuckSqHead, 0, false, 1, 0, RingError::kQueueFault},
    {"drive stalls for longer than the deadline", FaultKind::kSlow, 600},
    {"CFS", FaultKind::kFatal},
    {"removed, reads as ones", FaultKind::kRemovedAllOnes, 0, false, 1, 0, RingError::kDeadline, true},
    {"removed, reads as zeros", FaultKind::kRemovedZeros, 0, false, 1, 0, RingError::kDeadline, true},
};

}  // namespace tardis::gio::testing
