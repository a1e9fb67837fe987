// SPDX-License-Identifier: Apache-2.0
// One thread of a software controller: the queues that it serves, and the commands in its hands.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/status.h"
#include "nvme/soft/command.h"
#include "nvme/soft/controller.h"
#include "nvme/soft/engine_copies.h"
#include "nvme/soft/queues.h"
#include "nvme/soft/turn_lock.h"
#include "nvme/soft/wakeup.h"

namespace tardis::nvme {

// What is named (turn) is for whoever holds turn(): this worker in its pass, or another thread that took the lock.
class SoftWorker {
 public:
  SoftWorker(SoftController::Core& core, std::size_t index);

  Status start(const std::vector<int>& cpus);
  void stop();  // returns when the thread has ended
  std::uint64_t cpu_ns() const { return thread_.joinable() ? thread_cpu(thread_) : 0; }

  TurnLock& turn() { return turn_; }
  Wakeup& wakeup() { return wakeup_; }
  std::size_t index() const { return index_; }
  DmaSpace::Reader& reader() { return reader_; }

  // (turn)
  SoftCompletionQueue& add_cq(std::uint16_t id, std::uint32_t entries, std::uint64_t address, CompletionEntry* ring);
  SoftSubmissionQueue& add_sq(std::uint16_t id, SoftCompletionQueue& cq, std::uint32_t entries, std::uint64_t address,
                              const SubmissionEntry* ring);
  SoftCompletionQueue* cq(std::uint16_t id);
  bool has_io_queues() const;
  SoftSubmissionQueue* sq(std::uint16_t id);
  void remove_cq(SoftCompletionQueue& cq);
  void remove_sq(SoftSubmissionQueue& sq);  // quiesced, and nothing in the drive
  // The queue fetches nothing more, what is held back comes to its end: late data moves now (unless `cut`: it never
  // does), late completions are posted (unless `silent`).
  void quiesce(SoftSubmissionQueue& sq, bool silent, bool cut);
  void quiesce_all(bool cut);
  std::uint32_t in_drive() const;
  std::uint32_t outstanding() const;
  std::size_t waiting(AdminOpcode opcode) const;  // admin commands whose completion is held back or lost
  void forget_queues();                           // nothing is in the drive
  void give_memory_back();                        // at the end, when neither this thread nor a medium's runs any more
  // False if the command is not held back, but done or with the drive.
  bool abort(SoftSubmissionQueue& sq, std::uint16_t command_id);
  // An admin command that took longer. Status and result are set.
  void complete(SoftCommand& command);

  // (turn) Commands with memory of the engine can be served from then on.
  void attach(std::unique_ptr<EngineCopies> copies) { engines_.push_back(std::move(copies)); }
  // False: copies of it run.
  bool detach(const CopyEngine& engine);

  // Of any thread: the last request of the command has finished.
  void medium_done(SoftCommand& command);

  struct Counts {
    std::atomic<std::uint64_t> commands{0}, completions{0}, read_bytes{0}, written_bytes{0};
  };
  const Counts& counts() const { return counts_; }

 private:
  static std::uint64_t thread_cpu(const std::thread& thread);
  void loop();
  bool pass();
  bool serve(std::uint64_t now);
  bool rings_hold();
  bool take_finished();
  bool run_due(std::uint64_t now);
  bool fetch(SoftSubmissionQueue& sq, std::uint64_t now);
  void submit_pending();

  void left_drive(SoftSubmissionQueue& sq);

  // worker_copies.cpp: commands with memory that engines move.
  void start_by_engine(SoftCommand& command);
  bool begin_by_engine(SoftCommand& command);  // false: there is no staging memory for it at present
  void add_copies(SoftCommand& command);
  void copies_ended(SoftCommand& command);
  void finish_by_engine(SoftCommand& command);
  EngineCopies* copies_of(const DmaSpace::Range* range);  // null: its engine is not attached
  EngineCopies& staging_of(const SoftCommand& command);
  bool take_copied();
  bool copies_run() const;

  std::uint64_t earliest_due() const;

  SoftCommand& take(SoftSubmissionQueue& sq, const SubmissionEntry& entry);
  void recycle(SoftCommand& command) { free_.push_back(&command); }
  void begin(SoftCommand& command);
  bool inject_before(SoftCommand& command);
  bool prepare(SoftCommand& command);
  void start(SoftCommand& command);
  void ask_media(SoftCommand& command);
  void finish(SoftCommand& command);
  void conclude(SoftCommand& command);
  bool inject_after(SoftCommand& command);
  void post(SoftCommand& command);
  void post(SoftSubmissionQueue& sq, const CompletionEntry& entry, bool accounted);
  CompletionEntry entry_of(const SoftCommand& command);
  void hold(SoftCommand& command, HeldFor what, std::uint64_t due);
  void resume(SoftCommand& command);
  void release_gathered(SoftSubmissionQueue& sq);
  std::uint16_t wrong_id(const SoftSubmissionQueue& sq);
  template <class Matches>
  std::vector<SoftCommand*> take_held(Matches matches);

  SoftController::Core& core_;
  const std::size_t index_;
  TurnLock turn_;
  DmaSpace::Reader reader_;
  Wakeup wakeup_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
  Counts counts_;

  std::vector<std::unique_ptr<SoftCompletionQueue>> cqs_;
  std::vector<std::unique_ptr<SoftSubmissionQueue>> sqs_;
  std::uint64_t rings_generation_ = 0;  // of the DMA space, when the rings were last looked up
  std::uint64_t due_ = 0;               // of the last pass, for loop(): when the next thing is due
  bool has_queues_ = false;

  std::vector<std::unique_ptr<SoftCommand>> commands_;
  std::vector<SoftCommand*> free_;
  std::vector<SoftCommand*> held_;  // a heap, the one that is due first in front
  std::vector<SoftCommand*> lost_;
  struct Pending {
    MediumRunner* runner;
    std::vector<MediumRequest> requests;
  };
  std::vector<Pending> pending_;  // requests of this pass

  std::vector<std::unique_ptr<EngineCopies>> engines_;
  std::vector<SoftCommand*> copied_now_;
  std::deque<SoftCommand*> unstaged_;  // that wait for staging memory
  bool ending_ = false;                // media are gone

  std::mutex finished_mutex_;
  std::vector<SoftCommand*> finished_;
  std::atomic<std::size_t> finished_count_{0};
  std::vector<SoftCommand*> finished_now_;
};

}  // namespace tardis::nvme
