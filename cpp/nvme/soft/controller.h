// SPDX-License-Identifier: Apache-2.0
// An NVMe controller in software: threads of this process serve the same register page and rings that a drive would, in
// ordinary or pinned memory. It checks its clients, and breaks on demand.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "nvme/register_window.h"
#include "nvme/soft/dma_space.h"
#include "nvme/soft/options.h"
#include "nvme/soft/violations.h"

namespace tardis::nvme {

struct SoftControllerCounters {
  std::uint64_t commands = 0;     // fetched, admin commands too
  std::uint64_t completions = 0;  // posted
  std::uint64_t read_bytes = 0, written_bytes = 0;
  std::uint64_t outstanding = 0;  // fetched, their completion not posted
  std::uint64_t resets = 0;       // CC.EN cleared
  std::uint64_t cpu_ns = 0;       // of all threads of the controller
};

// Thread-safe.
class SoftController {
 public:
  // `space` must outlive it.
  static Result<std::unique_ptr<SoftController>> create(SoftControllerOptions options, DmaSpace& space);
  ~SoftController();
  SoftController(const SoftController&) = delete;
  SoftController& operator=(const SoftController&) = delete;

  // For any number of clients. Reads and writes registers in the register page; doorbells may also be stored to there
  // directly, and are found without notify() too, a moment later.
  RegisterWindow& window();
  DmaSpace& space();
  const SoftControllerOptions& options() const;

  // Threads look for doorbells without a pause while one of these lives: for clients that cannot call notify(). But see
  // rest_while_armed().
  class Armed {
   public:
    explicit Armed(SoftController& controller);
    ~Armed();
    Armed(const Armed&) = delete;
    Armed& operator=(const Armed&) = delete;

   private:
    SoftController& controller_;
  };

  // From now on an armed thread that found nothing for `spin` sleeps between looks, for `sleep` at most: so long the
  // first command after a pause may wait. 0 of `sleep`, as it is at first: never.
  void rest_while_armed(std::chrono::microseconds spin, std::chrono::microseconds sleep);

  // Memory of the engine (DmaSpace::map) can be the target of commands while it is attached; elsewhere such commands
  // end with Data Transfer Error. Detached when none of its memory is mapped any more, before the engine goes.
  Status attach(CopyEngine& engine);
  void detach(CopyEngine& engine);

  // What clients did wrong, oldest first. take_violations() forgets them.
  std::vector<Violation> violations() const;
  std::vector<Violation> take_violations();
  SoftControllerCounters counters() const;

  // At once, not with a command as a rule of the fault plan would. fail(): CSTS.CFS until a reset. remove(): until
  // insert(), after which the controller is as if new.
  void fail();
  void remove(bool reads_as_zero);
  void insert();
  // Every queue and command is forgotten at once and the registers are as after power-on. What the media lose is
  // theirs.
  void cut_power();
  // CSTS.RDY stays as it is, whatever CC.EN says.
  void hold_ready(bool hold);

  class Core;

 private:
  explicit SoftController(std::unique_ptr<Core> core);
  const std::unique_ptr<Core> core_;
};

}  // namespace tardis::nvme
