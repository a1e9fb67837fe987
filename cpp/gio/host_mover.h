// SPDX-License-Identifier: Apache-2.0
// Moves the bytes of a ring's commands, and makes their digests, where host threads can: between bounce slots and
// memory of this process.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/checksum.h"
#include "gio/granted_queue.h"
#include "gio/ring.h"

namespace tardis::gio {

// Of what is in memory, where no controller writes: compared with those that the context names, or written there.
inline void digest_on_host(RingSlot& slot) {
  auto* const digests = reinterpret_cast<std::uint64_t*>(static_cast<std::uintptr_t>(slot.digests));
  const std::uint32_t front = slot.bytes[0], bytes = front + slot.bytes[1];
  for (std::uint32_t at = 0; at < bytes; at += kDigestedBytes) {
    const std::uint32_t end = std::min(at + kDigestedBytes, bytes), split = std::clamp(front, at, end);
    Xxh3Stream stream;
    stream.update(reinterpret_cast<const void*>(static_cast<std::uintptr_t>(slot.memory[0] + at)), split - at);
    stream.update(reinterpret_cast<const void*>(static_cast<std::uintptr_t>(slot.memory[1] + (split - front))),
                  end - split);
    const std::uint64_t digest = stream.digest();
    if (slot.op == IoOp::kWrite) {
      digests[at / kDigestedBytes] = digest;
    } else if (digests[at / kDigestedBytes] != digest) {
      slot.damaged = 1;
    }
  }
}

inline void move_on_host(const GrantedQueue& queue, const RingWork& work, std::uint32_t index) {
  RingSlot& slot = work.slots[index];
  std::byte* bounce = queue.bounce + std::uint64_t{index} * queue.slot_bytes;
  for (std::uint32_t i = 0; i < kPieces; ++i) {
    auto* const memory = reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(slot.memory[i]));
    if (slot.bytes[i] == 0) continue;
    if (slot.op == IoOp::kRead) {
      std::memcpy(memory, bounce, slot.bytes[i]);
    } else {
      std::memcpy(bounce, memory, slot.bytes[i]);
    }
    bounce += slot.bytes[i];
  }
  if (slot.digests != 0) digest_on_host(slot);
}

// At once, by the thread that runs the ring.
class HostMover {
 public:
  HostMover(const GrantedQueue& queue, const RingWork& work) : queue_(queue), work_(work) {}

  static std::uint32_t shares(std::uint32_t, bool) { return 1; }
  void publish(std::uint32_t jobs) {
    for (; jobs != 0; --jobs) {
      const std::uint32_t slot = work_.jobs[next_++ % queue_.commands];
      move_on_host(queue_, work_, slot);
      work_.slots[slot].movers_left = 0;
    }
  }
  bool finished(std::uint32_t slot) const { return work_.slots[slot].movers_left == 0; }

 private:
  const GrantedQueue& queue_;
  const RingWork work_;
  std::uint32_t next_ = 0;
};

}  // namespace tardis::gio
