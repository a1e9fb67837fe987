// SPDX-License-Identifier: Apache-2.0
// The register page of a software controller, and the window through which clients see it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "nvme/register_window.h"
#include "nvme/soft/violations.h"
#include "nvme/spec.h"

namespace tardis::nvme {

// Words that clients and controller threads share. Acquire: what a client wrote before the word is seen after it.
inline std::uint32_t load_word(const std::uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
// Release: what was written before the word is seen by whoever reads the word.
inline void store_word(std::uint32_t* word, std::uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

class SoftRegisters final : public RegisterWindow {
 public:
  // `memory`: zeroed, of `bytes`; it outlives this. By threads of clients: `changed` is called after each write,
  // `bad_doorbell` if one names no doorbell or has the value of the one before.
  SoftRegisters(void* memory, std::size_t bytes, std::uint32_t stride, std::uint32_t queues, ViolationLog& log,
                std::function<void()> changed, std::function<void(AsyncEvent)> bad_doorbell);

  // The controller's side.
  std::uint32_t get(std::uint32_t offset) const { return load_word(word(offset)); }
  std::uint64_t get64(std::uint32_t offset) const { return get(offset) | std::uint64_t{get(offset + 4)} << 32; }
  void set(std::uint32_t offset, std::uint32_t value) { store_word(word(offset), value); }
  std::uint32_t* tail_doorbell(std::uint32_t queue) const { return word(sq_tail_doorbell(queue, stride_)); }
  std::uint32_t* head_doorbell(std::uint32_t queue) const { return word(cq_head_doorbell(queue, stride_)); }
  // Doorbells of queues that do not exist are not to be written.
  void set_doorbell_exists(std::uint32_t queue, bool submission, bool exists);
  void power_on(std::uint64_t capabilities, std::uint32_t version);
  void vanish(bool reads_as_zero);
  bool gone() const { return gone_.load(); }
  // Whether CC.EN was cleared since last asked, also if it is set again by now. CC is to be read after it.
  bool take_disabled() { return disabled_.exchange(false); }

  // The client's side.
  std::uint32_t read32(std::uint32_t offset) override;
  std::uint64_t read64(std::uint32_t offset) override {
    return read32(offset) | std::uint64_t{read32(offset + 4)} << 32;
  }
  void write32(std::uint32_t offset, std::uint32_t value) override;
  void write64(std::uint32_t offset, std::uint64_t value) override;
  volatile std::uint32_t* doorbells() override { return word(kRegDoorbells); }
  std::uint32_t bytes() const override { return static_cast<std::uint32_t>(bytes_); }
  void notify() override { changed_(); }

 private:
  std::uint32_t* word(std::uint32_t offset) const { return reinterpret_cast<std::uint32_t*>(memory_ + offset); }
  bool write_register(std::uint32_t offset, std::uint32_t value);  // false: it was not written
  void write_doorbell(std::uint32_t offset, std::uint32_t value);
  void complain(ViolationKind kind, std::uint32_t queue, std::uint32_t offset, std::uint32_t value, const char* why);

  std::mutex mutex_;  // of registers, not of doorbells: what reads as gone was written by nobody
  std::byte* const memory_;
  const std::size_t bytes_;
  const std::uint32_t stride_;
  ViolationLog& log_;
  const std::function<void()> changed_;
  const std::function<void(AsyncEvent)> bad_doorbell_;
  std::vector<std::atomic<bool>> exists_;  // doorbells, in their order
  std::atomic<bool> gone_{false}, disabled_{false};
};

}  // namespace tardis::nvme
