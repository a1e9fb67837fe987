// SPDX-License-Identifier: Apache-2.0
// The admin commands of a software controller. All of it under the turn of worker 0.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "nvme/soft/command.h"
#include "nvme/soft/controller.h"

namespace tardis::nvme {

class SoftAdmin {
 public:
  explicit SoftAdmin(SoftController::Core& core) : core_(core) {}

  // True: status and result are set, complete it. False: it stays until poll() or abort().
  bool execute(SoftCommand& command);
  // Completes what can be completed by now: deletions, asynchronous events. True if something was.
  bool poll();
  // After a reset: nothing is pending, features are as after power-on.
  void reset();
  // Of any thread: what was wrong with the write of a doorbell.
  void doorbell_event(AsyncEvent event);

 private:
  Sc identify(SoftCommand& command);
  Sc identify_controller(SoftCommand& command);
  Sc identify_namespace(SoftCommand& command);
  Sc identify_active(SoftCommand& command);
  Sc identify_descriptors(SoftCommand& command);
  std::array<std::uint8_t, 16> nguid_of(std::uint32_t id) const;
  Sc get_log_page(SoftCommand& command);
  Sc set_features(SoftCommand& command);
  Sc get_features(SoftCommand& command);
  Sc create_cq(SoftCommand& command);
  Sc create_sq(SoftCommand& command);
  Sc check_queue(const SoftCommand& command, std::uint32_t expected_shift, std::uint32_t shift_field);
  Sc check_queue_id(const SoftCommand& command, std::uint32_t id) const;
  std::uint32_t queue_pairs() const;  // that may be created
  Sc delete_cq(SoftCommand& command);
  bool delete_sq(SoftCommand& command);
  Sc abort(SoftCommand& command);
  bool async_event(SoftCommand& command);
  Sc answer(SoftCommand& command, const void* page, std::uint64_t bytes);
  Sc refuse(const SoftCommand& command, Sc status, const std::string& text) const;
  bool io_queues_exist() const;

  SoftController::Core& core_;
  struct Deletion {
    SoftCommand* command;
    std::uint16_t queue;
    SoftWorker* worker;
  };
  std::vector<Deletion> deletions_;
  std::vector<SoftCommand*> events_;      // requests that wait for one
  std::atomic<std::uint32_t> untold_{0};  // events, a bit for the information of each
  bool events_masked_ = false;            // until the log page is read
  std::uint32_t event_configuration_ = 0;
  std::uint32_t granted_ = 0;  // queue pairs; 0: all, nobody has asked yet
};

}  // namespace tardis::nvme
