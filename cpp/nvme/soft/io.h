// SPDX-License-Identifier: Apache-2.0
// The I/O commands of a software controller: what they may ask for, and what media are asked for them.
#pragma once

#include <cstdint>
#include <vector>

#include "nvme/soft/command.h"
#include "nvme/soft/options.h"
#include "nvme/soft/violations.h"

namespace tardis::nvme {

struct IoRules {
  std::uint32_t page_shift = 12;   // CC.MPS
  std::uint64_t max_transfer = 0;  // bytes; 0: no limit
  bool writes_through = false;     // no volatile cache, or it is off
  std::vector<SoftNamespaceState> namespaces;
  DataPointerRules data_pointer;
};

// Checks the command and sets its pieces and requests. `reader` must be locked, here and below.
Sc prepare_io(SoftCommand& command, const IoRules& rules, ViolationLog& log, DmaSpace::Reader& reader);

// Finds the memory of the pieces, for the requests. `pin`: it must stay after the reader is unlocked, until
// finish_io().
Sc attach_memory(SoftCommand& command, ViolationLog& log, DmaSpace::Reader& reader, bool pin);

// Of a command by_engine: between `host` and what threads can touch of its parts.
bool copy_other_parts(SoftCommand& command, bool to_parts);
bool reads(const SoftCommand& command);

// After the last request: brings data of a read to where it belongs, gives the memory back.
Sc finish_io(SoftCommand& command);

// Between a buffer of the controller's and the pieces of a command, as admin commands do.
Sc copy_to_pieces(SoftCommand& command, ViolationLog& log, DmaSpace::Reader& reader, const void* from);
Sc copy_from_pieces(SoftCommand& command, ViolationLog& log, DmaSpace::Reader& reader, void* to);

}  // namespace tardis::nvme
