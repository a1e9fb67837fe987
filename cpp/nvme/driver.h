// SPDX-License-Identifier: Apache-2.0
// An NVMe controller driven from user space, through whatever gives access to its registers and to memory. Everything
// that waits has a deadline, and memory is given back only when the controller cannot touch it any more.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "nvme/admin_queue.h"
#include "nvme/controller_registers.h"
#include "nvme/dma.h"
#include "nvme/external_queue.h"
#include "nvme/identify.h"
#include "nvme/io_host.h"
#include "nvme/io_queue.h"
#include "nvme/queue_pool.h"
#include "nvme/registered_memory.h"

namespace tardis::nvme {

struct DriverOptions {
  std::uint32_t queues = 4;           // I/O queue pairs asked for; the controller may grant fewer
  std::uint32_t queue_entries = 256;  // of each; bounded by CAP.MQES, and one less is usable
  std::uint32_t external_queues = 0;  // more of them, for owners outside the driver (external_queue.h)
  std::uint32_t bounce_buffers = 16;  // of each of the driver's own
  std::uint32_t bounce_bytes = 128u << 10;
  std::uint32_t max_command_bytes = 1u << 20;  // whatever the controller allows
  bool zero_copy = true;  // registered memory is named to the controller; needs a mapper whose unmap() ends access
  bool use_sgl = true;    // where the controller has them
  bool split_at_boundary = true;  // NOIOB
  // Where the controller reads doorbells from memory (virtual ones do), and no queue is for an owner outside.
  bool shadow_doorbells = true;
  std::vector<Quirk> quirks;

  // All in milliseconds. A command's time, then what each step of the recovery may take.
  std::uint32_t io_timeout_ms = 10'000;
  std::uint32_t abort_grace_ms = 1'000;
  std::uint32_t admin_timeout_ms = 5'000;
  std::uint32_t ready_timeout_ms = 0;        // 0: as CAP.TO says
  std::uint32_t shutdown_timeout_ms = 0;     // 0: as RTD3E says
  std::uint32_t max_retry_delay_ms = 5'000;  // longer waits that a controller asks for (CRDT) end in the error
  std::uint32_t retries = 4;                 // of one command, where its status allows it

  // Stops the controller by other means if CC.EN=0 does not, e.g. a function level reset under VFIO. On success it
  // touches no memory, and may be brought up again.
  std::function<Status()> function_reset;
};

struct DriverCounters {
  std::uint64_t commands = 0;  // reads, writes and flushes that completed, well or not
  std::uint64_t read_bytes = 0, written_bytes = 0;
  std::uint64_t bounced_commands = 0, bounced_bytes = 0;
  std::uint64_t errors = 0;               // commands that failed for good
  std::uint64_t retries = 0;              // commands sent again
  std::uint64_t timeouts = 0;             // commands whose time was over
  std::uint64_t queue_faults = 0;         // completions that were not to be believed
  std::uint64_t aborts = 0, aborted = 0;  // Abort commands sent; those that did abort
  std::uint64_t queue_deletions = 0;      // queues deleted and made again to end what was in flight
  std::uint64_t resets = 0;               // of the controller
  std::uint64_t quarantined = 0;          // command identifiers kept from reuse at present
};

enum class DriverState : std::uint8_t {
  kLive,
  kGone,    // the controller was removed
  kFailed,  // it could not be brought back; its access to memory was ended
  kShutDown,
};

// Thread-safe.
class Driver final : public IoHost {
 public:
  // Brings the controller up from any state. `window` and `mapper` must outlive the driver.
  static Result<std::unique_ptr<Driver>> open(RegisterWindow& window, DmaMapper& mapper, DriverOptions options = {});
  ~Driver() override;  // shuts down
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  const ControllerInfo& controller() const { return controller_; }
  const std::vector<NamespaceInfo>& namespaces() const { return namespaces_; }
  // Why namespaces that exist are not in the list.
  const std::vector<std::string>& refused_namespaces() const { return refused_; }
  const NamespaceInfo* find_namespace(std::uint32_t id) const;
  const DriverOptions& options() const { return options_; }
  std::uint32_t queue_pairs() const { return static_cast<std::uint32_t>(queues_.size()); }
  std::uint32_t queue_depth() const { return queues_.front()->commands(); }  // commands in flight of one queue pair

  std::uint32_t external_queues() const {  // that can be open at once
    return std::min(options_.external_queues, granted_queues_ - queue_pairs());
  }

  std::uint32_t bounce_bytes() const { return queues_.front()->bounce_bytes(); }

  DriverState state() const { return state_.load(); }
  std::string report() const;  // one line: the controller and the path that data takes
  DriverCounters counters() const;

  // Host memory that many requests will use.
  Status register_memory(void* base, std::size_t bytes) { return register_memory(host_memory_, base, bytes); }
  Status register_memory(MemoryProvider& provider, void* base, std::size_t bytes);
  void unregister_memory(void* base) { registered_.remove(base); }

  // A queue pair for an owner outside the driver. If the controller is reset, it ends and is not made again.
  Result<ExternalQueue> open_external(const ExternalRings& rings) { return open_external(host_memory_, rings); }
  // `provider` must stay until close_external(); memory that the CPU cannot reach is zeroed by the caller.
  Result<ExternalQueue> open_external(MemoryProvider& provider, const ExternalRings& rings);
  // Deletes it and makes it again as a new one, with its memory where it is; also one that ended with a reset. Once it
  // has returned, whatever it returns, the controller works on nothing that was submitted before.
  Status renew_external(std::uint16_t id);
  // Its owner stores to no doorbell any more. Once this has returned, whatever it returns, the controller touches
  // neither the rings nor memory of commands that were in flight.
  Status close_external(std::uint16_t id);
  bool external_alive(std::uint16_t id);

  // driver_data.cpp: what the controller says of itself, as it says it.
  Capabilities capabilities() { return registers_.capabilities(); }
  Status read_identify(IdentifyCns cns, std::uint32_t namespace_id, std::span<std::byte> out);
  // Of the whole controller; whole dwords, a page at most. Events stay.
  Status read_log(LogPage page, std::span<std::byte> out);
  std::uint32_t granted_queues() const { return granted_queues_; }  // I/O queue pairs, of those that were asked for

  // Feature 06h. Only of controllers that have a volatile cache.
  Result<bool> volatile_cache_enabled();
  Status set_volatile_cache(bool enabled);
  // The controller lost data that had not been flushed, or may have: flushes fail from then on.
  bool cache_lost() const { return cache_losses() != 0; }
  std::uint32_t cache_losses() const { return cache_losses_.load(); }

  // What is in flight is sent again afterwards.
  Status reset();
  // Ends I/O, deletes the queues and tells the controller to get ready for power-off. Nothing can be sent afterwards.
  Status shut_down();

  // ---- for I/O (io_run.h)
  // A queue pair for one thread, which is waited for.
  class QueueLease : public QueuePool::Lease {
   public:
    explicit QueueLease(Driver& driver) : Lease(driver.pool_) {}
  };
  void recover(IoQueue& queue) override;
  bool healthy(IoQueue&) override { return healthy(); }
  // Looks at CSTS.
  bool healthy() { return registers_.health() == Health::kReady; }
  int closed_error() const override;
  std::shared_ptr<const RegionTable> regions() const override { return registered_.table(); }
  IoTiming timing() const override {
    return {options_.io_timeout_ms, options_.retries, options_.max_retry_delay_ms, controller_.retry_delay_ms};
  }

 private:
  Driver(RegisterWindow& window, DmaMapper& mapper, DriverOptions options);

  // driver.cpp: bring-up
  Status start();
  Status start_controller();
  Status identify_controller(ControllerInfo& info);
  Result<std::vector<NamespaceInfo>> find_namespaces(std::vector<std::string>& refused);
  Status find_command_set(std::uint32_t id);  // kUnsupportedFormat: not one that this driver has
  Status request_queues(std::uint32_t& granted);
  Status check_unchanged();

  // queue_commands.cpp
  Result<AdminReply> admin(const SubmissionEntry& command);
  static Status answered(const Result<AdminReply>& reply, const std::string& what);  // and with success
  Status create_queue(IoQueue& queue);
  // Gives the controller the shadows of the doorbells, if there are any; before its queues are made.
  Status configure_shadows();
  QueueShadows shadows_of(std::uint16_t id);
  Result<AdminReply> create_completion_queue(std::uint16_t id, std::uint32_t entries, std::uint64_t address);
  Result<AdminReply> create_submission_queue(std::uint16_t id, std::uint32_t entries, std::uint64_t address);
  Status delete_submission_queue(std::uint16_t id);
  Status delete_completion_queue(std::uint16_t id);
  bool send_abort(IoQueue& queue, std::uint16_t command_id);  // false: no answer

  // recovery.cpp. Those that end with _locked hold recovery_, give_up_held() the locks of all queues too.
  bool abort_overdue(IoQueue& queue, std::uint64_t deadline);  // false: no answer
  void wait_for_late(IoQueue& queue, std::uint64_t deadline);
  bool replace_queue_locked(IoQueue& queue);
  Status reset_locked();
  std::vector<std::unique_lock<std::mutex>> hold_all();
  Status stop_controller();
  void give_up_held(DriverState state, bool stopped);

  // external_queues.cpp
  struct External {
    std::uint16_t id;
    std::byte* memory;
    MemoryProvider* provider;
    std::uint32_t entries;
    std::uint64_t address;  // of the memory, for the controller
    bool mapped, alive;
  };
  std::vector<External>::iterator find_external_locked(std::uint16_t id);
  Status create_external_locked(External& external);
  // Afterwards the controller does not work on it.
  void stop_external_locked(External& external);
  Status end_external_locked(External& external);
  Status delete_externals_locked();
  bool revoke_externals_locked();  // false: some of their memory may still be written to

  RegisterWindow& window_;
  DmaMapper& mapper_;
  const DriverOptions options_;
  ControllerRegisters registers_;
  HostMemory host_memory_;
  RegisteredMemory registered_;
  std::unique_ptr<AdminQueue> admin_;
  DmaMemory shadow_;  // doorbells in memory, a page, and the controller's page of events; none: they are not used
  std::vector<std::unique_ptr<IoQueue>> queues_;
  ControllerInfo controller_;
  std::vector<NamespaceInfo> namespaces_;
  std::vector<std::string> refused_;
  std::uint32_t granted_queues_ = 0;
  bool started_ = false;  // by open(), to the end
  std::atomic<DriverState> state_{DriverState::kLive};
  std::atomic<std::uint32_t> cache_losses_{0};

  // Held while queues are deleted and made, and the controller is reset. Taken before a queue's own lock.
  std::mutex recovery_;
  std::vector<External> externals_;  // under recovery_

  QueuePool pool_;
};

}  // namespace tardis::nvme
