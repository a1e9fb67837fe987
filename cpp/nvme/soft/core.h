// SPDX-License-Identifier: Apache-2.0
// What the parts of a software controller share, and its states.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "nvme/soft/admin.h"
#include "nvme/soft/controller.h"
#include "nvme/soft/io.h"
#include "nvme/soft/medium_runner.h"
#include "nvme/soft/registers.h"
#include "nvme/soft/worker.h"

namespace tardis::nvme {

inline constexpr std::uint32_t kSoftVersion = 0x00020000;  // VS: 2.0

// Order of locks: the turn of worker 0 (admin and registers), its reader, then the turns and readers of the others.
class SoftController::Core : private DmaSpace::Listener {
 public:
  Core(SoftControllerOptions options, DmaSpace& space);
  ~Core() override;
  Status start();

  const SoftControllerOptions& options() const { return options_; }
  DmaSpace& space() { return space_; }
  ViolationLog& log() { return log_; }
  SoftRegisters& registers() { return *registers_; }
  FaultPlan* faults() { return options_.faults.get(); }
  SoftAdmin& admin() { return admin_; }
  const IoRules& rules() const { return rules_; }
  const std::vector<std::unique_ptr<SoftWorker>>& workers() const { return workers_; }
  // Completion queues, and with them submission queues, are spread over the workers.
  SoftWorker& worker_of(std::uint16_t cq) { return *workers_[cq == 0 ? 0 : (cq - 1u) % workers_.size()]; }

  bool has_cache() const { return has_cache_; }
  bool cache_enabled() const { return cache_enabled_; }
  void enable_cache(bool enabled);  // the turn of worker 0 is held

  // Nothing is fetched or posted while it is so.
  bool halted() const { return halted_.load(std::memory_order_acquire); }
  bool armed() const { return armed_.load(std::memory_order_relaxed) != 0; }
  void arm(int change) {
    armed_.fetch_add(change);
    notify();
  }
  // Of an armed controller: 0 of sleep, its threads look for doorbells without a pause.
  std::uint64_t armed_spin_ns() const { return armed_spin_ns_.load(std::memory_order_relaxed); }
  std::uint64_t armed_sleep_ns() const { return armed_sleep_ns_.load(std::memory_order_relaxed); }
  void rest_while_armed(std::uint64_t spin_ns, std::uint64_t sleep_ns) {
    armed_spin_ns_.store(spin_ns);
    armed_sleep_ns_.store(sleep_ns);
    notify();
  }
  void notify() {
    for (auto& worker : workers_) worker->wakeup().notify();
  }

  void fail();  // any thread
  void remove(bool reads_as_zero);
  void power_cycle();  // no turn is held by the caller
  void hold_ready(bool hold) {
    hold_ready_.store(hold);
    notify();
  }
  SoftControllerCounters counters();
  Status attach(CopyEngine& engine);
  void detach(CopyEngine& engine);

  // The register side of worker 0's pass, whose turn is held, but not its reader. True if something changed.
  bool control(std::uint64_t now);
  std::uint64_t control_due() const { return state_due_; }

  // Takes the turn of `worker`, unless it is worker 0's, whose the caller holds.
  class Turn {
   public:
    explicit Turn(SoftWorker& worker) : lock_(worker.index() == 0 ? nullptr : &worker.turn()) {
      if (lock_ != nullptr) lock_->lock();
    }
    ~Turn() {
      if (lock_ != nullptr) lock_->unlock();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    TurnLock* const lock_;
  };

 private:
  enum class State : std::uint8_t { kDisabled, kEnabling, kReady, kResetting };

  void mapped(void* memory, std::size_t bytes) override;
  void unmapped(void* memory) override;
  void power_on();
  void enable(std::uint32_t cc);
  std::string admin_queue_problem(std::uint32_t cc);
  void begin_reset();
  void end_reset();
  void set_status(std::uint32_t clear, std::uint32_t set, std::optional<bool> halted = std::nullopt);
  void shut_down(bool normal);
  bool drained();

  const SoftControllerOptions options_;
  DmaSpace& space_;
  ViolationLog log_;
  AlignedBuffer own_registers_;
  std::unique_ptr<SoftRegisters> registers_;
  std::vector<std::unique_ptr<MediumRunner>> runners_;
  std::vector<Medium*> waiting_media_;  // of the runners
  std::vector<std::unique_ptr<SoftWorker>> workers_;
  IoRules rules_;
  bool has_cache_ = false;
  bool cache_enabled_ = false;
  SoftAdmin admin_;

  std::mutex status_mutex_;  // of CSTS, and of halted_ with it
  std::atomic<bool> halted_{false};
  std::atomic<int> armed_{0};
  std::atomic<std::uint64_t> armed_spin_ns_{0}, armed_sleep_ns_{0};
  std::atomic<bool> hold_ready_{false};
  std::atomic<std::uint64_t> resets_{0};

  // Of worker 0's turn.
  State state_ = State::kDisabled;
  std::uint32_t seen_cc_ = 0;
  std::uint64_t state_due_ = ~std::uint64_t{0};
};

}  // namespace tardis::nvme
