// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/io.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "block/block_device.h"
#include "nvme/soft/queues.h"

namespace tardis::nvme {
namespace {

constexpr std::uint32_t kProtection = 0xfu << 26;  // PRINFO in CDW12

class Preparation {
 public:
  Preparation(SoftCommand& command, const IoRules& rules, ViolationLog& log, DmaSpace::Reader& reader)
      : command_(command),
        entry_(command.entry),
        rules_(rules),
        blame_{log, command.sq->id, command.entry},
        log_(log),
        reader_(reader) {}

  Sc run();

 private:
  Sc transfer(bool reads);
  Sc write_zeroes();
  Sc deallocate();
  Sc flush();
  Sc find_namespace();
  Sc check_range(std::uint64_t first, std::uint64_t blocks) const;
  Sc check_writable() const;
  void ask(const SoftNamespaceState& space, MediumRequest::Op op, std::uint64_t first, std::uint64_t blocks) {
    MediumRequest request;
    request.op = op;
    request.offset = first << space.block_shift;
    request.bytes = blocks << space.block_shift;
    request.owner = &command_;
    const bool may_force = op == MediumRequest::Op::kWrite || op == MediumRequest::Op::kWriteZeroes;
    request.durable = (may_force && (entry_.cdw12 & kForceUnitAccess) != 0) ||
                      (rules_.writes_through && (may_force || op == MediumRequest::Op::kDeallocate));
    command_.requests.push_back(request);
    command_.targets.push_back(&space);
  }

  SoftCommand& command_;
  const SubmissionEntry& entry_;
  const IoRules& rules_;
  const Blame blame_;
  ViolationLog& log_;
  DmaSpace::Reader& reader_;
  const SoftNamespaceState* namespace_ = nullptr;
};

Sc Preparation::run() {
  if ((entry_.flags & 3) != 0)
    return blame_.refuse(kScInvalidField, ViolationKind::kField, "fused commands are not supported");
  if ((entry_.flags & 0x3c) != 0)
    log_.add(ViolationKind::kField, blame_.queue, &entry_, "reserved bits 13:10 of CDW0 are set");
  switch (static_cast<IoOpcode>(entry_.opcode)) {
    case IoOpcode::kFlush:
      return flush();
    case IoOpcode::kRead:
      return transfer(true);
    case IoOpcode::kWrite:
      return transfer(false);
    case IoOpcode::kWriteZeroes:
      return write_zeroes();
    case IoOpcode::kDatasetManagement:
      return deallocate();
  }
  return blame_.refuse(kScInvalidOpcode, ViolationKind::kOpcode,
                       "opcode " + hex_address(entry_.opcode) + " of an I/O queue is not supported");
}

Sc Preparation::find_namespace() {
  const std::uint32_t id = entry_.namespace_id;
  if (id == 0 || id > rules_.namespaces.size()) {
    return blame_.refuse(
        kScInvalidNamespace, ViolationKind::kNamespace,
        "namespace: expected 1 to " + std::to_string(rules_.namespaces.size()) + ", found " + std::to_string(id));
  }
  namespace_ = &rules_.namespaces[id - 1];
  if (namespace_->medium == nullptr) {
    return blame_.refuse(kScInvalidField, ViolationKind::kNamespace,
                         "namespace " + std::to_string(id) + " is not active");
  }
  return kScSuccess;
}

Sc Preparation::check_range(std::uint64_t first, std::uint64_t blocks) const {
  if (first <= namespace_->blocks && blocks <= namespace_->blocks - first) return kScSuccess;
  return blame_.refuse(kScLbaOutOfRange, ViolationKind::kLbaRange,
                       "block " + std::to_string(first) + " + " + std::to_string(blocks) + " is beyond the " +
                           std::to_string(namespace_->blocks) + " blocks of the namespace");
}

Sc Preparation::check_writable() const {
  if (!namespace_->medium->read_only()) return kScSuccess;
  return blame_.refuse(kScWriteProtected, ViolationKind::kNamespace,
                       "namespace " + std::to_string(entry_.namespace_id) + " can only be read (NSATTR)");
}

Sc Preparation::transfer(bool reads) {
  if (const Sc bad = find_namespace()) return bad;
  const std::uint64_t blocks = entry_.blocks(), bytes = blocks << namespace_->block_shift;
  if ((entry_.cdw12 & kProtection) != 0) {
    return blame_.refuse(kScInvalidField, ViolationKind::kField,
                         "PRINFO: this namespace has no protection information");
  }
  if (rules_.max_transfer != 0 && bytes > rules_.max_transfer) {
    return blame_.refuse(kScInvalidField, ViolationKind::kTransferSize,
                         std::to_string(bytes) +
                             " bytes are more than a command may move (MDTS): " + std::to_string(rules_.max_transfer));
  }
  if (const Sc bad = check_range(entry_.start_block(), blocks)) return bad;
  if (!reads) {
    if (const Sc bad = check_writable()) return bad;
  }
  if (const Sc bad = walk_data_pointer(blame_, rules_.data_pointer, bytes, reads, reader_, command_.pieces)) return bad;
  ask(*namespace_, reads ? MediumRequest::Op::kRead : MediumRequest::Op::kWrite, entry_.start_block(), blocks);
  return kScSuccess;
}

Sc Preparation::write_zeroes() {
  if (const Sc bad = find_namespace()) return bad;
  if (const Sc bad = check_range(entry_.start_block(), entry_.blocks())) return bad;
  if (const Sc bad = check_writable()) return bad;
  ask(*namespace_, MediumRequest::Op::kWriteZeroes, entry_.start_block(), entry_.blocks());
  return kScSuccess;
}

Sc Preparation::deallocate() {
  if (const Sc bad = find_namespace()) return bad;
  const std::size_t count = (entry_.cdw10 & 0xff) + 1;
  std::vector<DeallocateRange> ranges(count);
  const std::size_t bytes = count * sizeof(DeallocateRange);
  if (const Sc bad = walk_data_pointer(blame_, rules_.data_pointer, bytes, false, reader_, command_.pieces)) return bad;
  if (const Sc bad = copy_from_pieces(command_, log_, reader_, ranges.data())) return bad;
  command_.pieces.clear();
  for (const DeallocateRange& range : ranges) {
    if (const Sc bad = check_range(range.start, range.blocks)) return bad;
  }
  if ((entry_.cdw11 & kDeallocate) == 0) return kScSuccess;  // hints of how the data will be used
  if (const Sc bad = check_writable()) return bad;
  for (const DeallocateRange& range : ranges) {
    if (range.blocks != 0) ask(*namespace_, MediumRequest::Op::kDeallocate, range.start, range.blocks);
  }
  return kScSuccess;
}

Sc Preparation::flush() {
  if (entry_.namespace_id == kAllNamespaces) {
    for (const SoftNamespaceState& space : rules_.namespaces) {
      if (space.medium != nullptr) ask(space, MediumRequest::Op::kFlush, 0, 0);
    }
    return kScSuccess;
  }
  if (const Sc bad = find_namespace()) return bad;
  ask(*namespace_, MediumRequest::Op::kFlush, 0, 0);
  return kScSuccess;
}

bool moves_data(const SoftCommand& command) { return !command.pieces.empty(); }

// Between the parts of a command and a buffer, in the order of the transfer; but parts that engines move.
bool copy_parts(const std::vector<SoftCommand::Part>& parts, std::byte* buffer, bool to_parts) {
  for (const SoftCommand::Part& part : parts) {
    if (part.range != nullptr && part.range->engine == nullptr) {
      std::byte* memory = part.range->memory + part.offset;
      MemoryMover* mover = part.range->mover;
      if (mover != nullptr) {
        if (!(to_parts ? mover->from_host(memory, buffer, part.bytes) : mover->to_host(buffer, memory, part.bytes))) {
          return false;
        }
      } else if (to_parts) {
        std::memcpy(memory, buffer, part.bytes);
      } else {
        std::memcpy(buffer, memory, part.bytes);
      }
    }
    buffer += part.bytes;
  }
  return true;
}

// Who can move the parts of a command.
struct Reach {
  bool medium = true;   // it, all of them
  bool engine = false;  // of some of them an engine alone
};

Sc find_parts(SoftCommand& command, ViolationLog& log, DmaSpace::Reader& reader, Reach& reach) {
  reach = {};
  command.parts.clear();
  for (const DmaPiece& piece : command.pieces) {
    if (piece.discard) {
      reach.medium = false;
      command.parts.push_back({nullptr, 0, static_cast<std::size_t>(piece.bytes)});
      continue;
    }
    for (std::uint64_t done = 0; done < piece.bytes;) {
      const std::uint64_t address = piece.address + done;
      DmaSpace::Range* range = reader.find(address);
      if (range == nullptr) {
        return refuse_address(Blame{log, command.sq->id, command.entry}, reader, address, "data");
      }
      const std::uint64_t offset = address - range->address;
      const std::uint64_t n = std::min(piece.bytes - done, range->bytes - offset);
      reach.medium &= range->host();
      reach.engine |= range->engine != nullptr;
      command.parts.push_back({range, offset, static_cast<std::size_t>(n)});
      done += n;
    }
  }
  return kScSuccess;
}

Sc copy_pieces(SoftCommand& command, ViolationLog& log, DmaSpace::Reader& reader, std::byte* buffer, bool to_pieces) {
  Reach reach;
  if (const Sc bad = find_parts(command, log, reader, reach)) return bad;
  if (reach.engine) return kScDataTransferError;  // not worth an engine: ranges to deallocate
  return copy_parts(command.parts, buffer, to_pieces) ? kScSuccess : kScDataTransferError;
}

Sc status_of(const SoftCommand& command, int error) {
  if (error == 0) return kScSuccess;
  if (error == ENOSPC) return kScCapacityExceeded;
  // A media error is what clients take for the end of those blocks: only what says so is one.
  switch (command.requests.front().op) {
    case MediumRequest::Op::kRead:
      if (error == ENXIO) return kScUnwrittenBlock;
      return bytes_are_lost(error) ? kScUnrecoveredRead : kScInternal;
    case MediumRequest::Op::kWrite:
    case MediumRequest::Op::kWriteZeroes:
      return bytes_are_lost(error) ? kScWriteFault : kScInternal;
    default:
      return kScInternal;
  }
}

}  // namespace

Sc prepare_io(SoftCommand& command, const IoRules& rules, ViolationLog& log, DmaSpace::Reader& reader) {
  return Preparation(command, rules, log, reader).run();
}

Sc attach_memory(SoftCommand& command, ViolationLog& log, DmaSpace::Reader& reader, bool pin) {
  if (!moves_data(command)) return kScSuccess;
  Reach reach;
  if (const Sc bad = find_parts(command, log, reader, reach)) return bad;
  command.memory.clear();
  command.by_engine = reach.engine;
  if (reach.engine) {
    pin = true;
  } else if (reach.medium) {
    for (const SoftCommand::Part& part : command.parts) {
      command.memory.push_back({part.range->memory + part.offset, part.bytes});
    }
  } else {
    command.bounced = true;
    command.bounce.resize(static_cast<std::size_t>(command.requests.front().bytes));
    if (!reads(command) && !copy_parts(command.parts, command.bounce.data(), false)) return kScDataTransferError;
    command.memory.push_back({command.bounce.data(), command.bounce.size()});
  }
  if (!command.by_engine) command.requests.front().memory = command.memory;
  if (pin) {
    command.pinned = true;
    for (const SoftCommand::Part& part : command.parts) {
      if (part.range != nullptr) part.range->pins.fetch_add(1, std::memory_order_relaxed);
    }
  }
  return kScSuccess;
}

bool reads(const SoftCommand& command) { return command.requests.front().op == MediumRequest::Op::kRead; }

bool copy_other_parts(SoftCommand& command, bool to_parts) { return copy_parts(command.parts, command.host, to_parts); }

Sc finish_io(SoftCommand& command) {
  const int error = command.error.load(std::memory_order_relaxed);
  Sc status = command.requests.empty() ? kScSuccess : status_of(command, error);
  if (command.copy_failed && status == kScSuccess) status = kScDataTransferError;
  if (command.bounced && status == kScSuccess && reads(command) &&
      !copy_parts(command.parts, command.bounce.data(), true)) {
    status = kScDataTransferError;
  }
  if (command.pinned) {
    // Release: who unmaps sees what the transfer did.
    for (const SoftCommand::Part& part : command.parts) {
      if (part.range != nullptr) part.range->pins.fetch_sub(1, std::memory_order_release);
    }
    command.pinned = false;
  }
  return status;
}

Sc copy_to_pieces(SoftCommand& command, ViolationLog& log, DmaSpace::Reader& reader, const void* from) {
  return copy_pieces(command, log, reader, static_cast<std::byte*>(const_cast<void*>(from)), true);
}

Sc copy_from_pieces(SoftCommand& command, ViolationLog& log, DmaSpace::Reader& reader, void* to) {
  return copy_pieces(command, log, reader, static_cast<std::byte*>(to), false);
}

}  // namespace tardis::nvme
