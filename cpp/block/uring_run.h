// SPDX-License-Identifier: Apache-2.0
// One run() of the io_uring engine.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "block/iovec_range.h"
#include "block/uring_device.h"

namespace tardis {

// A request is moved in pieces: at most IOV_MAX iovecs of it, or one bounce buffer full. A piece in flight is a
// transfer: one SQE, submitted again for what a short result left. The thread that called run() issues and reaps;
// whatever touches payload bytes after a read (copying out of a bounce buffer, the caller's completion) is published to
// the worker pool. As long as little of that is waiting, this thread does it itself between two looks at the ring:
// waking a worker costs more than it saves. Workers are woken for what is beyond that, so for a drive that delivers
// faster than one thread digests.
class UringRun {
 public:
  UringRun(UringDevice& device, UringRing& ring, std::span<IoRequest> requests,
           const BlockDevice::Completion& on_complete);

  void execute();

 private:
  struct State {  // of a request
    std::shared_ptr<OpenFile> file;
    std::uint64_t bytes = 0;
    bool bounced = false;
    // Pieces not yet finished, and one while more of them may come.
    std::atomic<std::uint32_t> pieces{1};
    std::atomic<int> error{0};
  };

  struct Transfer {
    std::size_t request = 0;
    std::uint64_t offset = 0;  // in the file, of what is left
    std::uint64_t left = 0;    // bytes
    std::span<const iovec> memory;
    std::vector<iovec> rest;  // backs `memory` after a short transfer
    iovec flat{};             // backs `memory` of a bounced piece
    BouncePool::Lease bounce;
    IovecCursor place;  // of a bounced piece in the request's memory
    std::uint64_t piece_bytes = 0;
    unsigned retries = 0;
    bool registered = false;  // submitted as registered memory
    bool plain = false;       // the kernel did not want it so: as plain memory from now on
  };

  // Work for the pool: deliver a bounced read, then complete the request if that was its last piece; or only the
  // latter.
  struct Handover {
    explicit Handover(std::size_t of) : request(of) {}
    std::size_t request;
    BouncePool::Lease bounce;
    IovecCursor place;
    std::size_t bytes = 0;
  };

  void prepare();
  void issue();                       // as much as the queue depth and the bounce pool allow
  bool issue_piece();                 // the next piece of request current_; false: no bounce buffer now
  void end_request_issue();           // no more pieces of request current_
  void submit(std::size_t transfer);  // puts it in the submission queue
  // Tells the kernel and waits for that many completions; false: the ring is of no use.
  bool enter(unsigned wait_for);
  void publish(std::size_t owner_takes);  // what reap() left
  void reap();
  void on_result(std::size_t transfer, int result);
  void end_transfer(std::size_t transfer, int error);
  void fail_all(int error);            // the ring is gone and nothing of ours is in the kernel
  void fail(State& state, int error);  // the first error stays
  bool end_piece(State& state);        // true: it was the last
  void complete(std::size_t request);  // sets the result and calls back
  void hand_over(Handover handover);
  void receive(std::size_t index);  // on a worker

  UringDevice& device_;
  UringRing& ring_;
  const std::span<IoRequest> requests_;
  const BlockDevice::Completion& on_complete_;
  const IoGeometry geometry_;
  RunScope scope_;

  std::unique_ptr<State[]> states_;
  std::vector<Transfer> transfers_;
  std::vector<std::size_t> free_transfers_;
  std::size_t in_flight_ = 0;  // transfers in the submission queue or the kernel

  std::size_t current_ = 0;  // request being issued
  bool current_started_ = false;
  std::uint64_t issued_ = 0;  // bytes of it
  std::size_t issued_iovecs_ = 0;
  IovecCursor cursor_;  // of a bounced one

  // Each entry is written before it is published and read only by the worker that claimed it. Reserved in full
  // beforehand.
  std::vector<Handover> handovers_;
  std::size_t unpublished_ = 0;
  std::size_t owner_takes_ = 1;
  std::uint64_t registered_requests_ = 0;
  const std::function<void(std::size_t)> receive_;
  WorkerPool::Job job_;
};

}  // namespace tardis
