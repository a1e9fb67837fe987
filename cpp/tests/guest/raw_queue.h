// SPDX-License-Identifier: Apache-2.0
// Commands that no driver would send, and memory at addresses of a test's own choosing.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/clock.h"
#include "nvme/driver.h"
#include "nvme/queue.h"
#include "nvme/vfio/iommu_domain.h"
#include "tests/nvme_pointers.h"

namespace tardis::nvme::testing {

inline SubmissionEntry guest_io(IoOpcode opcode, std::uint32_t space, std::uint64_t block, std::uint64_t blocks) {
  SubmissionEntry entry{};
  entry.opcode = static_cast<std::uint8_t>(opcode);
  entry.namespace_id = space;
  entry.set_start_block(block);
  entry.cdw12 = static_cast<std::uint32_t>(blocks - 1);
  return entry;
}

// An external queue that this thread owns.
class RawQueue {
 public:
  RawQueue(Driver& driver, std::uint32_t entries)
      : driver_(driver), memory_(ExternalRings::bytes(entries)), commands_(entries - 1) {
    auto opened = driver.open_external({memory_.data(), entries});
    EXPECT_TRUE(opened) << (opened ? "" : opened.error().message);
    if (!opened) return;
    queue_ = *opened;
    pair_ = std::make_unique<QueuePair>(QueueMemory{.sq = queue_.sq,
                                                    .cq = queue_.cq,
                                                    .commands = commands_.data(),
                                                    .sq_tail = queue_.sq_tail,
                                                    .cq_head = queue_.cq_head,
                                                    .sq_entries = entries,
                                                    .cq_entries = entries,
                                                    .max_commands = entries - 1,
                                                    .sq_id = queue_.id});
  }
  ~RawQueue() {
    if (pair_) (void)driver_.close_external(queue_.id);
  }
  RawQueue(const RawQueue&) = delete;
  RawQueue& operator=(const RawQueue&) = delete;

  bool ready() const { return pair_ != nullptr; }
  QueuePair& pair() { return *pair_; }
  std::byte* memory() { return memory_.data(); }
  std::uint16_t id() const { return queue_.id; }

  // SCT and SC; 0xffff if nothing came.
  std::uint16_t run(const SubmissionEntry& entry, std::uint64_t patience_ns = 20'000'000'000) {
    pair_->submit(entry, 0);
    pair_->ring();
    Completion done{};
    const auto result = pair_->wait(done, monotonic_ns() + patience_ns, [] { return monotonic_ns(); });
    pair_->acknowledge();
    return result == PollResult::kCompletion ? done.status.code_and_type() : 0xffff;
  }

 private:
  Driver& driver_;
  AlignedBuffer memory_;
  std::vector<CommandSlot> commands_;
  ExternalQueue queue_;
  std::unique_ptr<QueuePair> pair_;
};

// Pages that a controller finds where a vector says. The driver's own addresses are lower.
class BusPages {
 public:
  explicit BusPages(IommuDomain& domain) : domain_(domain) {}
  ~BusPages() {
    for (const auto& [bus, page] : pages_) EXPECT_EQ(domain_.unmap(bus, kPageBytes), 0);
  }
  BusPages(const BusPages&) = delete;
  BusPages& operator=(const BusPages&) = delete;

  // The memory at a bus address, to the end of its page; mapped if it is not yet.
  std::byte* at(std::uint64_t bus) {
    const std::uint64_t page = bus - bus % kPageBytes;
    auto found = pages_.find(page);
    if (found == pages_.end()) {
      AlignedBuffer memory(kPageBytes);
      std::memset(memory.data(), kPoison, kPageBytes);
      EXPECT_EQ(domain_.map(page, memory.data(), kPageBytes), 0) << std::hex << page;
      found = pages_.emplace(page, std::move(memory)).first;
    }
    return found->second.data() + bus % kPageBytes;
  }
  template <class T>
  void store(std::uint64_t bus, const T& value) {
    copy(bus, sizeof value, [&](std::byte* to, std::size_t done, std::size_t bytes) {
      std::memcpy(to, reinterpret_cast<const std::byte*>(&value) + done, bytes);
    });
  }
  void fill(const std::vector<pointers::Piece>& pieces, const std::byte* from) {
    for (const pointers::Piece& piece : pieces) {
      copy(piece.address, piece.length,
           [&](std::byte* to, std::size_t done, std::size_t bytes) { std::memcpy(to, from + done, bytes); });
      from += piece.length;
    }
  }
  std::vector<std::byte> bytes_of(const std::vector<pointers::Piece>& pieces) {
    std::vector<std::byte> all;
    for (const pointers::Piece& piece : pieces) {
      copy(piece.address, piece.length,
           [&](const std::byte* at, std::size_t, std::size_t bytes) { all.insert(all.end(), at, at + bytes); });
    }
    return all;
  }
  void poison(const std::vector<pointers::Piece>& pieces) {
    for (const pointers::Piece& piece : pieces) {
      copy(piece.address, piece.length,
           [](std::byte* at, std::size_t, std::size_t bytes) { std::memset(at, kPoison, bytes); });
    }
  }
  std::size_t poisoned_bytes() const {
    std::size_t count = 0;
    for (const auto& [bus, page] : pages_) {
      count += static_cast<std::size_t>(std::count(page.data(), page.data() + kPageBytes, std::byte{kPoison}));
    }
    return count;
  }

 private:
  static constexpr unsigned char kPoison = 0x5b;
  template <class Body>
  void copy(std::uint64_t bus, std::uint64_t bytes, Body body) {
    for (std::uint64_t done = 0; done < bytes;) {
      const std::uint64_t step = std::min(bytes - done, kPageBytes - (bus + done) % kPageBytes);
      body(at(bus + done), static_cast<std::size_t>(done), static_cast<std::size_t>(step));
      done += step;
    }
  }

  IommuDomain& domain_;
  std::map<std::uint64_t, AlignedBuffer> pages_;
};

}  // namespace tardis::nvme::testing
