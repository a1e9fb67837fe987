// SPDX-License-Identifier: Apache-2.0
// One batch of requests, or a flush, on one I/O queue pair.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "nvme/identify.h"
#include "nvme/io_host.h"
#include "nvme/io_plan.h"
#include "nvme/io_queue.h"
#include "nvme/raw_namespace.h"

namespace tardis::nvme {

class IoRun {
 public:
  // `queue` is this thread's until the run is over. `first_block`: of the namespace, where the blocks of `space` begin.
  IoRun(IoHost& host, IoQueue& queue, const NamespaceInfo& space, const PlanLimits& limits,
        std::uint64_t first_block = 0);

  // As RawNamespace::run(). `force_unit_access`: what is written is durable when its request completes.
  void execute(std::span<NamespaceRequest> requests, const RawNamespace::Completion& on_complete,
               bool force_unit_access);
  // 0, or a positive errno.
  int flush();

 private:
  static constexpr std::uint32_t kNone = ~0u;             // no buffer
  static constexpr std::size_t kFlush = ~std::size_t{0};  // no request

  // A command, from its planning until it has ended for good.
  struct Flight {
    SubmissionEntry command;
    std::size_t request = 0;  // kFlush: none
    IovecCursor at;           // where its memory begins
    std::uint64_t bytes = 0;
    std::uint64_t not_before = 0;  // of monotonic_ns(), when it is to be sent again
    std::uint32_t bounce = kNone;  // its buffer
    std::uint32_t retries = 0;
  };
  struct State {  // of a request
    std::uint64_t bytes = 0, issued = 0;
    IovecCursor at;
    std::uint32_t in_flight = 0;
    bool issue_over = false;
  };

  void drive();
  void begin(std::size_t index);
  void issue(std::uint64_t now);
  bool issue_command();  // false: no bounce buffer is free
  bool point(Flight& flight, std::uint32_t index, CommandPlan::Way way);
  bool send_waiting(std::uint64_t now);  // false: the queue has no room
  void end(std::uint32_t index, const FinishedCommand& finished, std::uint64_t now);
  bool again(Flight& flight, const FinishedCommand& finished, std::uint64_t now);
  int error_of(const FinishedCommand& finished) const;
  void fail(std::size_t request, int error);
  void complete_if_over(std::size_t request);

  IoHost& host_;
  IoQueue& queue_;
  const NamespaceInfo& space_;
  const PlanLimits& limits_;
  const std::uint64_t begin_;  // of `space_`, in bytes
  const IoTiming timing_;
  const std::shared_ptr<const RegionTable> regions_;

  std::span<NamespaceRequest> requests_;
  const RawNamespace::Completion* on_complete_ = nullptr;
  std::uint32_t write_flags_ = 0;
  std::vector<State> states_;
  std::size_t current_ = 0;  // the request of which commands are issued
  bool current_begun_ = false;
  int flush_error_ = 0;

  std::unique_ptr<Flight[]> flights_;
  std::vector<std::uint32_t> free_flights_, free_bounces_;
  std::vector<std::uint32_t> waiting_;  // to be sent, in order
  std::uint32_t sent_ = 0;
  std::vector<FinishedCommand> done_;
  std::vector<PlanRange> ranges_;
};

}  // namespace tardis::nvme
