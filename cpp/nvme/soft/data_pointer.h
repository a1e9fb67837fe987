// SPDX-License-Identifier: Apache-2.0
// Reads the data pointer of a command as a controller does, and says what is wrong with it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nvme/soft/dma_space.h"
#include "nvme/soft/violations.h"
#include "nvme/spec.h"

namespace tardis::nvme {

// A part of a transfer, in bus addresses.
struct DmaPiece {
  std::uint64_t address;
  std::uint64_t bytes;
  bool discard;  // a bit bucket: data of a read that nobody wants
};

struct DataPointerRules {
  std::uint32_t page_shift = 12;  // CC.MPS
  std::uint32_t sgl = kSglNone;
  bool sgl_longer_than_data = false;
  bool sgl_bit_bucket = false;
  std::uint32_t sgl_blocks = 0;
};

// Whom to blame.
struct Blame {
  ViolationLog& log;
  std::uint16_t queue;
  const SubmissionEntry& command;
  Sc refuse(Sc status, ViolationKind kind, const std::string& text) const {
    log.add(kind, queue, &command, text);
    return status;
  }
};

// Appends the pieces of the first `bytes` bytes to `out`, neighbours joined. `reads`: the command moves data to the
// host. `reader` must be locked.
Sc walk_data_pointer(const Blame& blame, const DataPointerRules& rules, std::uint64_t bytes, bool reads,
                     DmaSpace::Reader& reader, std::vector<DmaPiece>& out);

// "0x1234 is not mapped (any more)".
Sc refuse_address(const Blame& blame, const DmaSpace::Reader& reader, std::uint64_t address, const char* what);

std::string hex_address(std::uint64_t value);

}  // namespace tardis::nvme
