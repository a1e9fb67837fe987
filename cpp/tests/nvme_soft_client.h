// SPDX-License-Identifier: Apache-2.0
// A client of the software controller that writes every entry by hand: nothing in it is the driver's, and it may do
// anything wrong.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/clock.h"
#include "nvme/soft/controller.h"

namespace tardis::nvme::testing {

inline constexpr std::uint64_t kPatienceNs = 5'000'000'000;

// Memory that a controller may reach, at the start of a page, be it one of 64 KiB.
class SharedMemory {
 public:
  SharedMemory(DmaSpace& space, std::size_t bytes) : space_(space), buffer_(bytes, 65536) {
    Result<std::uint64_t> mapped = space.map(buffer_.data(), bytes);
    EXPECT_TRUE(mapped) << (mapped ? "" : mapped.error().message);
    address_ = mapped ? *mapped : 0;
  }
  ~SharedMemory() { unmap(); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void unmap() {
    if (std::exchange(address_, 0) == 0) return;
    EXPECT_TRUE(space_.unmap(buffer_.data()));
  }
  std::uint64_t address(std::size_t offset = 0) const { return address_ + offset; }
  std::byte* data() { return buffer_.data(); }
  std::size_t size() const { return buffer_.size(); }
  std::string text(std::size_t offset, std::size_t bytes) const {
    return {reinterpret_cast<const char*>(buffer_.data()) + offset, bytes};
  }
  template <class T>
  T& at(std::size_t offset) {
    return *reinterpret_cast<T*>(buffer_.data() + offset);
  }
  void fill(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (std::size_t i = 0; i + 8 <= size(); i += 8) at<std::uint64_t>(i) = random();
  }

 private:
  DmaSpace& space_;
  AlignedBuffer buffer_;
  std::uint64_t address_ = 0;
};

// One submission queue with a completion queue of its own.
class HandQueue {
 public:
  HandQueue(SoftController& controller, std::uint16_t id, std::uint32_t entries, std::uint32_t cq_entries = 0)
      : controller_(controller),
        id_(id),
        entries_(entries),
        cq_entries_(cq_entries != 0 ? cq_entries : entries),
        sq_(controller.space(), entries_ * sizeof(SubmissionEntry)),
        cq_(controller.space(), cq_entries_ * sizeof(CompletionEntry)) {}

  std::uint16_t id() const { return id_; }
  std::uint32_t entries() const { return entries_; }
  std::uint32_t cq_entries() const { return cq_entries_; }
  SharedMemory& sq() { return sq_; }
  SharedMemory& cq() { return cq_; }

  void put(const SubmissionEntry& entry) {
    sq_.at<SubmissionEntry>(tail_ * sizeof entry) = entry;
    tail_ = (tail_ + 1) % entries_;
  }
  void ring() { ring(tail_); }
  void ring(std::uint32_t value) { controller_.window().write32(sq_tail_doorbell(id_, stride()), value); }
  void ring_quietly() { store_doorbell(sq_tail_doorbell(id_, stride()), tail_); }
  void submit(const SubmissionEntry& entry) {
    put(entry);
    ring();
  }

  // The next completion; its place is given back at once, unless `keep`.
  std::optional<CompletionEntry> poll(bool keep = false) {
    const auto* words = &cq_.at<std::uint32_t>(head_ * sizeof(CompletionEntry));
    const std::uint32_t last = __atomic_load_n(words + 3, __ATOMIC_ACQUIRE);
    if ((last >> 16 & 1) != (phase_ ? 1u : 0u)) return std::nullopt;
    CompletionEntry entry;
    std::memcpy(&entry, words, sizeof entry);
    if (++head_ == cq_entries_) {
      head_ = 0;
      phase_ = !phase_;
    }
    if (!keep) acknowledge();
    return entry;
  }
  void acknowledge() { acknowledge(head_); }
  void acknowledge(std::uint32_t value) { controller_.window().write32(cq_head_doorbell(id_, stride()), value); }
  void acknowledge_quietly() { store_doorbell(cq_head_doorbell(id_, stride()), head_); }

  std::optional<CompletionEntry> wait(std::uint64_t patience_ns = kPatienceNs) {
    const std::uint64_t end = monotonic_ns() + patience_ns;
    while (true) {
      if (auto entry = poll()) return entry;
      if (monotonic_ns() > end) return std::nullopt;
      std::this_thread::yield();
    }
  }
  // SCT and SC of one command that is expected to come next; 0xffff if nothing came.
  std::uint16_t status(const SubmissionEntry& entry, std::uint32_t* result = nullptr) {
    submit(entry);
    const auto done = wait();
    if (!done) return 0xffff;
    EXPECT_EQ(done->command_id, entry.command_id);
    EXPECT_EQ(done->sq_id, id_);
    if (result != nullptr) *result = done->result;
    return CommandStatus::of(*done).code_and_type();
  }
  void restart() {
    tail_ = head_ = 0;
    phase_ = true;
    std::memset(cq_.data(), 0, cq_.size());
  }

 private:
  std::uint32_t stride() const { return controller_.options().doorbell_stride; }
  void store_doorbell(std::uint32_t offset, std::uint32_t value) {
    volatile std::uint32_t* doorbells = controller_.window().doorbells();
    __atomic_store_n(doorbells + (offset - kRegDoorbells) / 4, value, __ATOMIC_RELEASE);
  }

  SoftController& controller_;
  const std::uint16_t id_;
  const std::uint32_t entries_, cq_entries_;
  SharedMemory sq_, cq_;
  std::uint32_t tail_ = 0, head_ = 0;
  bool phase_ = true;
};

inline SubmissionEntry admin_command(AdminOpcode opcode, std::uint32_t cdw10 = 0, std::uint32_t cdw11 = 0,
                                     std::uint64_t prp1 = 0) {
  static std::atomic<std::uint16_t> next{0};
  SubmissionEntry entry{};
  entry.opcode = static_cast<std::uint8_t>(opcode);
  entry.command_id = static_cast<std::uint16_t>(next.fetch_add(1) & 0x7fff);
  entry.cdw10 = cdw10;
  entry.cdw11 = cdw11;
  entry.prp.prp1 = prp1;
  return entry;
}

inline SubmissionEntry io_command(IoOpcode opcode, std::uint16_t id, std::uint64_t block = 0, std::uint32_t blocks = 1,
                                  std::uint64_t prp1 = 0, std::uint64_t prp2 = 0, std::uint32_t space = 1) {
  SubmissionEntry entry{};
  entry.opcode = static_cast<std::uint8_t>(opcode);
  entry.command_id = id;
  entry.namespace_id = space;
  entry.prp = {prp1, prp2};
  entry.set_start_block(block);
  entry.cdw12 = blocks - 1;
  return entry;
}

inline constexpr std::uint32_t kUsualCc =
    kCcEnable | kSubmissionEntryShift << kCcIosqesShift | kCompletionEntryShift << kCcIocqesShift;

inline DmaSpaceOptions translated() {
  DmaSpaceOptions options;
  options.addresses = DmaSpaceOptions::Addresses::kTranslated;
  return options;
}

// A controller with one namespace in memory.
inline SoftControllerOptions memory_options(std::uint64_t bytes = 16 << 20, std::uint32_t shift = 12) {
  SoftControllerOptions options;
  Result<std::unique_ptr<MemoryMedium>> medium = MemoryMedium::create(bytes);
  EXPECT_TRUE(medium);
  options.namespaces.push_back({std::shared_ptr<Medium>(std::move(*medium)), shift, 0, 0});
  options.faults = std::make_shared<FaultPlan>();
  return options;
}

// A controller and its admin queue.
class HandClient {
 public:
  explicit HandClient(SoftControllerOptions options = memory_options(), DmaSpaceOptions addresses = translated())
      : space_(addresses) {
    Result<std::unique_ptr<SoftController>> made = SoftController::create(std::move(options), space_);
    EXPECT_TRUE(made) << (made ? "" : made.error().message);
    if (made) controller_ = std::move(*made);
    admin_ = std::make_unique<HandQueue>(*controller_, std::uint16_t{0}, 32u);
  }

  SoftController& controller() { return *controller_; }
  DmaSpace& space() { return space_; }
  RegisterWindow& window() { return controller_->window(); }
  HandQueue& admin() { return *admin_; }
  FaultPlan& faults() { return *controller_->options().faults; }

  bool wait_status(std::uint32_t mask, std::uint32_t value, std::uint64_t patience_ns = kPatienceNs) {
    const std::uint64_t end = monotonic_ns() + patience_ns;
    while ((window().read32(kRegCsts) & mask) != value) {
      if (monotonic_ns() > end) return false;
      std::this_thread::yield();
    }
    return true;
  }
  void set_admin_registers() {
    window().write32(kRegAqa, admin_queue_attributes(admin_->entries(), admin_->cq_entries()));
    window().write64(kRegAsq, admin_->sq().address());
    window().write64(kRegAcq, admin_->cq().address());
  }
  bool enable(std::uint32_t cc = kUsualCc) {
    admin_->restart();
    set_admin_registers();
    window().write32(kRegCc, cc);
    return wait_status(kCstsReady, kCstsReady);
  }
  bool disable() {
    window().write32(kRegCc, kUsualCc & ~kCcEnable);
    return wait_status(kCstsReady, 0);
  }

  std::uint16_t create_cq(HandQueue& queue) {
    return admin_->status(admin_command(AdminOpcode::kCreateCq, queue_identity(queue.cq_entries(), queue.id()),
                                        kQueueContiguous, queue.cq().address()));
  }
  std::uint16_t create_sq(HandQueue& queue, std::uint32_t cq) {
    return admin_->status(admin_command(AdminOpcode::kCreateSq, queue_identity(queue.entries(), queue.id()),
                                        cq << 16 | kQueueContiguous, queue.sq().address()));
  }
  std::uint16_t delete_sq(std::uint32_t id) { return admin_->status(admin_command(AdminOpcode::kDeleteSq, id)); }
  std::uint16_t delete_cq(std::uint32_t id) { return admin_->status(admin_command(AdminOpcode::kDeleteCq, id)); }
  std::unique_ptr<HandQueue> queue(std::uint16_t id, std::uint32_t entries = 64, std::uint32_t cq_entries = 0) {
    auto made = std::make_unique<HandQueue>(*controller_, id, entries, cq_entries);
    EXPECT_EQ(create_cq(*made), kScSuccess);
    EXPECT_EQ(create_sq(*made, id), kScSuccess);
    return made;
  }

  // Empty if nothing is to be complained of.
  std::string complaints() { return describe(controller_->take_violations()); }
  // The kinds since last asked, in order, names joined by commas.
  std::string kinds() {
    std::string text;
    for (const Violation& violation : controller_->take_violations()) {
      text += (text.empty() ? "" : ", ") + std::string(violation_name(violation.kind));
    }
    return text;
  }

 private:
  DmaSpace space_;
  std::unique_ptr<SoftController> controller_;
  std::unique_ptr<HandQueue> admin_;
};

}  // namespace tardis::nvme::testing
