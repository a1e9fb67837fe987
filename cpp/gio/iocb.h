// SPDX-License-Identifier: Apache-2.0
// What a ring is asked to do (IOCB: up to 2,048 IOCTX) and what it answers. Plain values in memory that the GPU reads
// and writes; for host and device code (C++17).
#pragma once

#include <cstddef>
#include <cstdint>

#include "nvme/queue.h"
#include "nvme/spec.h"

namespace tardis::gio {

inline constexpr std::uint32_t kMostContexts = 2048;       // of an IOCB
inline constexpr std::uint32_t kMostQueues = 16;           // that work on one IOCB
inline constexpr std::uint32_t kPieces = 2;                // of memory that one command fills: K and V of a page
inline constexpr std::uint32_t kDigestedBytes = 16 << 10;  // of one digest (docs/on-disk-format.md)

enum class IoOp : std::uint8_t { kWrite = 1, kRead = 2 };  // as nvme::IoOpcode

// IOCTX: one command. Its bytes follow each other on the drive and in a bounce slot; in memory they are one or two
// pieces.
struct alignas(16) IoContext {
  std::uint64_t block;            // SLBA
  std::uint64_t memory[kPieces];  // addresses that a GPU (or, with the host's mover, the CPU) uses, 16-byte aligned
  std::uint32_t bytes[kPieces];   // multiples of 16; together whole blocks. The second may be 0.
  std::uint32_t tag;              // the owner's own
  IoOp op;
  std::uint8_t reserved[3];
  // Address of a digest for each 16 KiB of the command's bytes, from its first byte (the last may be shorter; one may
  // span both pieces): read, what the bytes must be; written, where the ring puts those it made. 0: none. A multiple of
  // 8; near the GPU (HBM), or each chunk waits for the link. Only where IoControlBlock::digested says so.
  std::uint64_t digests;
};
static_assert(sizeof(IoContext) == 48 && offsetof(IoContext, op) == 36 && offsetof(IoContext, digests) == 40);

// How one context ended. Written once by the ring that took it.
enum class IoEnd : std::uint8_t {
  kNone,      // not yet, or never taken: what the owner wrote before
  kDone,      // read: the bytes are where they belong; written: the controller has them
  kRefused,   // not a command of this queue (size, alignment, range); nothing was sent
  kFailed,    // the controller's status says why; nothing was landed
  kTimedOut,  // sent, and the ring ended without its completion: its bounce slot (landing directly: its memory) may yet
              // be written to
  kNotSent,   // the ring ended before
  kDamaged,   // read, and a digest is not the expected one; what landed is not to be used
};
struct IoStatus {
  std::uint32_t raw;
  TARDIS_HD static constexpr IoStatus of(IoEnd end, std::uint16_t nvme_status = 0) {
    return {static_cast<std::uint32_t>(end) << 16 | nvme_status};
  }
  TARDIS_HD constexpr IoEnd end() const { return static_cast<IoEnd>(raw >> 16 & 0xff); }
  TARDIS_HD constexpr nvme::CommandStatus status() const { return {static_cast<std::uint16_t>(raw & 0x7fff)}; }
};

// How a ring ended.
enum class RingError : std::uint32_t {
  kNone,
  kCommands,    // some contexts were refused, failed or damaged; the queue pair is as good as before
  kDeadline,    // the queue pair is of no use until it was granted anew, as with those below
  kQueueFault,  // the controller did what it must not do: RingReport::fault
  kQueueDown,   // of a ring that ended badly earlier: nothing was tried
  kTooMany,     // more contexts than kMostContexts: nothing was tried
};
TARDIS_HD constexpr bool ends_queue(RingError error) {
  return error == RingError::kDeadline || error == RingError::kQueueFault || error == RingError::kQueueDown;
}

struct alignas(16) RingReport {
  RingError error;
  std::uint32_t fault;  // nvme::QueueFault
  std::uint32_t done, refused, failed, timed_out, not_sent;
  std::uint32_t doorbells;  // stores to the tail doorbell
  std::uint32_t damaged;
  std::uint32_t reserved[3];
  nvme::CompletionEntry entry;  // that showed the fault
};
static_assert(sizeof(RingReport) == 64 && offsetof(RingReport, damaged) == 32 && offsetof(RingReport, entry) == 48);

// When a context's command was given to the controller, and when its end was noted: of the clock of whoever runs the
// ring.
struct IoTimes {
  std::uint64_t sent, ended;
};

// What a waiter compares: cleared before the ring is started, then written once.
enum IoFlag : std::uint32_t { kIoPending = 0, kIoDone = 1, kIoError = 2 };

// IOCB. The memory is the caller's; `count` and the contexts are read when the ring starts, so that what replays of a
// graph do is what they hold by then.
struct IoControlBlock {
  const IoContext* contexts;
  const std::uint32_t* count;
  std::uint32_t* statuses;    // of each context: IoStatus
  RingReport* reports;        // one for each queue that works on it
  std::uint32_t* ended;       // rings that have ended; 0 before, and again when all have
  std::uint32_t* flag;        // IoFlag, written after everything else when the last ring has ended
  std::uint64_t deadline_ns;  // from the start of a ring to its end, whatever the controller does
  IoTimes* times;             // of each context; null: nobody wants to know
  // 1: contexts may name digests, and the ring sees to them; 0: those that do are refused. Landing directly it is the
  // other way round, since a kernel behind the ring sees to them (verify_kernel.h).
  std::uint32_t digested = 0;
};
static_assert(sizeof(IoControlBlock) == 72 && offsetof(IoControlBlock, digested) == 64);

}  // namespace tardis::gio
