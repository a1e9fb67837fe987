// SPDX-License-Identifier: Apache-2.0
// Memory and queues of a client that may do anything to a software controller. What the controller must not touch, the
// processor guards.
#pragma once

#include <sys/mman.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "nvme/soft/controller.h"
#include "nvme_fuzz_engine.h"

namespace tardis::nvme::fuzz {

// Asleep, so that the controller's threads run even where others keep the processors busy.
inline void pause() { std::this_thread::sleep_for(std::chrono::microseconds(5)); }

// Regions with nothing between them. One that is not mapped cannot be touched by anybody.
class HostileMemory {
 public:
  enum Region : std::uint32_t { kAdminSq, kAdminCq, kSqs, kCqs, kData, kMoreData, kNeverMapped, kRegions };

  HostileMemory(DmaSpace& space, const Findings& findings) : space_(space), findings_(findings) {
    base_ = static_cast<std::byte*>(
        ::mmap(nullptr, kRegions * kStep, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    findings.expect(base_ != MAP_FAILED, "no memory");
    for (std::uint32_t region = 0; region < kNeverMapped; ++region) map(region);
  }
  ~HostileMemory() {
    for (std::uint32_t region = 0; region < kNeverMapped; ++region) unmap(region);
    ::munmap(base_, kRegions * kStep);
  }
  HostileMemory(const HostileMemory&) = delete;
  HostileMemory& operator=(const HostileMemory&) = delete;

  std::byte* at(std::uint32_t region) const { return base_ + region * kStep; }
  static std::size_t bytes(std::uint32_t region) { return kBytes[region]; }
  bool mapped(std::uint32_t region) const { return mapped_[region]; }
  std::uint64_t address(std::uint32_t region) const { return addresses_[region]; }

  void map(std::uint32_t region) {
    if (mapped_[region] || region == kNeverMapped) return;
    findings_.expect(::mprotect(at(region), kBytes[region], PROT_READ | PROT_WRITE) == 0, "mprotect");
    const Result<std::uint64_t> address = space_.map(at(region), kBytes[region]);
    findings_.expect(static_cast<bool>(address), "memory cannot be mapped");
    addresses_[region] = *address;
    mapped_[region] = true;
  }
  void unmap(std::uint32_t region) {
    if (!mapped_[region]) return;
    findings_.expect(static_cast<bool>(space_.unmap(at(region))), "memory cannot be unmapped");
    mapped_[region] = false;
    findings_.expect(::mprotect(at(region), kBytes[region], PROT_NONE) == 0, "mprotect");
  }

  // In an input, an address of this memory is written as a mark, a region and an offset; other words mean themselves.
  static constexpr std::uint64_t kMark = 0xa5;
  static std::uint64_t symbol(std::uint32_t region, std::uint64_t offset) {
    return kMark << 56 | std::uint64_t{region} << 48 | offset;
  }
  std::optional<std::uint32_t> region_of(std::uint64_t word) const {
    if (word >> 56 != kMark) return std::nullopt;
    return static_cast<std::uint32_t>((word >> 48 & 0xff) % kRegions);
  }
  std::uint64_t resolve(std::uint64_t word) const {
    const auto region = region_of(word);
    if (!region) return word;
    const std::uint64_t start =
        *region == kNeverMapped ? reinterpret_cast<std::uint64_t>(at(*region)) : addresses_[*region];
    return start + (word & (kStep / 2 - 1));  // never within another region
  }

 private:
  static constexpr std::size_t kStep = 2 << 20;
  static constexpr std::array<std::size_t, kRegions> kBytes = {4096, 4096, 8192, 8192, 65536, 16384, 4096};

  DmaSpace& space_;
  const Findings& findings_;
  std::byte* base_ = nullptr;
  std::array<bool, kRegions> mapped_{};
  std::array<std::uint64_t, kRegions> addresses_{};
};

// One submission queue and its completion queue, at their places in that memory.
class HostileQueue {
 public:
  static constexpr std::uint32_t kEntries = 16;

  HostileQueue(SoftController& controller, HostileMemory& memory, std::uint16_t id)
      : controller_(controller),
        memory_(memory),
        id_(id),
        sq_region_(id == 0 ? HostileMemory::kAdminSq : HostileMemory::kSqs),
        cq_region_(id == 0 ? HostileMemory::kAdminCq : HostileMemory::kCqs),
        offset_(id < 2 ? 0 : 4096) {}

  std::uint16_t id() const { return id_; }
  std::uint64_t sq_address() const { return memory_.address(sq_region_) + offset_; }
  std::uint64_t cq_address() const { return memory_.address(cq_region_) + offset_; }
  bool rings_mapped() const { return memory_.mapped(sq_region_) && memory_.mapped(cq_region_); }

  void restart() {
    tail_ = head_ = 0;
    phase_ = true;
    if (memory_.mapped(cq_region_)) std::memset(memory_.at(cq_region_) + offset_, 0, kEntries * 16);
  }
  void put(const SubmissionEntry& entry) {
    if (!memory_.mapped(sq_region_)) return;
    std::memcpy(memory_.at(sq_region_) + offset_ + tail_ * sizeof entry, &entry, sizeof entry);
    tail_ = (tail_ + 1) % kEntries;
  }
  void ring() { controller_.window().write32(sq_tail_doorbell(id_, controller_.options().doorbell_stride), tail_); }

  std::optional<CompletionEntry> poll() {
    if (!memory_.mapped(cq_region_)) return std::nullopt;
    const auto* words = reinterpret_cast<const std::uint32_t*>(memory_.at(cq_region_) + offset_ + head_ * 16);
    // Acquire: no other word of the entry is read before the one with the phase.
    const std::uint32_t last = __atomic_load_n(words + 3, __ATOMIC_ACQUIRE);
    if ((last >> 16 & 1) != (phase_ ? 1u : 0u)) return std::nullopt;
    CompletionEntry entry;
    std::memcpy(&entry, words, sizeof entry);
    head_ = (head_ + 1) % kEntries;
    if (head_ == 0) phase_ = !phase_;
    controller_.window().write32(cq_head_doorbell(id_, controller_.options().doorbell_stride), head_);
    return entry;
  }
  std::optional<CompletionEntry> wait(std::uint64_t patience_ns) {
    const std::uint64_t end = monotonic_ns() + patience_ns;
    while (true) {
      const bool over = monotonic_ns() > end;  // before the look: one more after a long sleep
      if (auto entry = poll()) return entry;
      if (over) return std::nullopt;
      pause();
    }
  }

 private:
  SoftController& controller_;
  HostileMemory& memory_;
  const std::uint16_t id_;
  const std::uint32_t sq_region_, cq_region_;
  const std::size_t offset_;
  std::uint32_t tail_ = 0, head_ = 0;
  bool phase_ = true;
};

}  // namespace tardis::nvme::fuzz
