// SPDX-License-Identifier: Apache-2.0
#include "block/uring_run.h"

#include <limits.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace tardis {
namespace {

// How often a transfer that the kernel has no resources for is tried again, a millisecond apart after the first few.
constexpr unsigned kEagainRetries = 1000;
constexpr unsigned kEagainWithoutPause = 4;
// Payload that may wait for the thread of the run before a worker is woken for it.
constexpr std::uint64_t kOwnerBytes = 2u << 20;
constexpr std::size_t kMostOwnerTakes = 64;
// With many requests in flight the drive is busy without this thread, so it waits for several completions at once.
constexpr std::size_t kInFlightPerWait = 8;
constexpr std::size_t kMostWaitedFor = 8;

void pause_millisecond() {
  const timespec pause{0, 1'000'000};
  ::nanosleep(&pause, nullptr);
}

}  // namespace

UringRun::UringRun(UringDevice& device, UringRing& ring, std::span<IoRequest> requests,
                   const BlockDevice::Completion& on_complete)
    : device_(device),
      ring_(ring),
      requests_(requests),
      on_complete_(on_complete),
      geometry_(device.setup_.geometry),
      scope_(device.run_state(), requests),
      states_(std::make_unique<State[]>(requests.size())),
      receive_([this](std::size_t index) { receive(index); }),
      job_(receive_, device.workers_->threads() + 1) {}

void UringRun::execute() {
  prepare();
  bool waiting_work = false;  // handovers that nobody may have begun
  for (;;) {
    if (!ring_.broken) issue();
    if (in_flight_ == 0) break;
    const std::size_t patience = std::clamp<std::size_t>(in_flight_ / kInFlightPerWait, 1, kMostWaitedFor);
    if (!enter(waiting_work ? 0 : static_cast<unsigned>(patience))) break;
    if (waiting_work) waiting_work = device_.workers_->help(job_);
    reap();
    if (unpublished_ > 0) {
      publish(owner_takes_);
      waiting_work = true;
    }
  }
  // The tail is for everybody: nothing is left to overlap it with. The last one is run by this thread.
  publish(1);
  device_.workers_->finish(job_);
  if (registered_requests_ > 0) device_.registered_requests_.fetch_add(registered_requests_, std::memory_order_relaxed);
}

void UringRun::publish(std::size_t owner_takes) {
  device_.workers_->publish(job_, std::exchange(unpublished_, 0), owner_takes);
}

void UringRun::prepare() {
  std::size_t most_handovers = 0;
  std::size_t most_transfers = 0;
  std::uint64_t bytes = 0;
  const std::uint64_t buffer = device_.bounce_.buffer_bytes();
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    State& state = states_[i];
    IoRequest& request = requests_[i];
    state.bytes = total_bytes(request.memory);
    bytes += state.bytes;
    state.file = device_.files_.get(request.file);
    if (state.file == nullptr) {
      fail(state, EBADF);
    } else if (const int error = device_.check_request(request, state.bytes); error != 0) {
      fail(state, error);
    } else if (state.bytes > 0) {
      state.bounced = !memory_fits(request.memory, geometry_);
      most_transfers += state.bounced ? (state.bytes + buffer - 1) / buffer : request.memory.size() / IOV_MAX + 1;
      if (state.bounced && request.op == IoRequest::Op::kRead) most_handovers += (state.bytes + buffer - 1) / buffer;
    }
    ++most_handovers;
  }
  handovers_.reserve(most_handovers);
  if (bytes > 0) {
    owner_takes_ =
        static_cast<std::size_t>(std::clamp<std::uint64_t>(kOwnerBytes * most_handovers / bytes, 1, kMostOwnerTakes));
  }
  transfers_.resize(std::min<std::size_t>(most_transfers, scope_.depth()));
  for (std::size_t i = transfers_.size(); i > 0; --i) free_transfers_.push_back(i - 1);
}

void UringRun::issue() {
  while (current_ < requests_.size()) {
    State& state = states_[current_];
    if (!current_started_) {
      current_started_ = true;
      issued_ = 0;
      issued_iovecs_ = 0;
      cursor_ = {};
    }
    if (issued_ < state.bytes && state.error.load() == 0) {
      if (free_transfers_.empty() || !scope_.may_start(in_flight_) || !issue_piece()) return;
      continue;
    }
    end_request_issue();
  }
}

bool UringRun::issue_piece() {
  State& state = states_[current_];
  const IoRequest& request = requests_[current_];
  const auto memory = request.memory;

  BouncePool::Lease bounce;
  if (state.bounced) {
    if (in_flight_ > 0) {
      // Those out may be ours, and come back only if this thread goes on to reap.
      auto got = device_.bounce_.try_acquire();
      if (!got) return false;
      bounce = std::move(*got);
    } else {
      // Ours are handed over at most: what no worker has begun, this thread does before it waits.
      publish(owner_takes_);
      while (device_.workers_->help(job_)) {
      }
      bounce = device_.bounce_.acquire();
    }
    if (bounce.data() == nullptr) {
      fail(state, ENOMEM);
      return true;
    }
  }

  const std::size_t index = free_transfers_.back();
  free_transfers_.pop_back();
  Transfer& transfer = transfers_[index];
  transfer.request = current_;
  transfer.offset = request.offset + issued_;
  transfer.retries = 0;
  transfer.plain = false;
  if (state.bounced) {
    transfer.bounce = std::move(bounce);
    transfer.left = std::min<std::uint64_t>(state.bytes - issued_, device_.bounce_.buffer_bytes());
    transfer.place = cursor_;
    transfer.flat = {transfer.bounce.data(), static_cast<std::size_t>(transfer.left)};
    transfer.memory = {&transfer.flat, 1};
    if (request.op == IoRequest::Op::kWrite) {
      gather(memory, cursor_, transfer.bounce.data(), static_cast<std::size_t>(transfer.left));
    } else {
      advance(memory, cursor_, transfer.left);
    }
  } else {
    // Runs of empty entries only would be submitted as empty transfers.
    do {
      transfer.memory = memory.subspan(issued_iovecs_, std::min<std::size_t>(IOV_MAX, memory.size() - issued_iovecs_));
      issued_iovecs_ += transfer.memory.size();
      transfer.left = total_bytes(transfer.memory);
    } while (transfer.left == 0);
  }
  transfer.piece_bytes = transfer.left;
  issued_ += transfer.left;
  state.pieces.fetch_add(1);
  ++in_flight_;
  device_.transfers_.started();
  submit(index);
  return true;
}

void UringRun::end_request_issue() {
  const std::size_t request = current_++;
  current_started_ = false;
  if (end_piece(states_[request])) hand_over(Handover(request));
}

void UringRun::submit(std::size_t index) {
  Transfer& transfer = transfers_[index];
  const IoRequest& request = requests_[transfer.request];
  // Never null: there are as many entries as transfers, and each transfer has one at most.
  io_uring_sqe* sqe = io_uring_get_sqe(ring_.raw());
  const bool read = request.op == IoRequest::Op::kRead;
  const iovec& first = transfer.memory.front();
  const auto count = static_cast<unsigned>(transfer.memory.size());
  const bool single = count == 1 && first.iov_len <= INT_MAX;
  const auto bytes = static_cast<unsigned>(single ? first.iov_len : 0);
  const UringBufferTable* buffers = transfer.plain ? nullptr : ring_.buffers.get();
  const auto slot = buffers != nullptr && (single || count > 1) ? buffers->slot_of(transfer.memory) : std::nullopt;
  transfer.registered = slot.has_value();
  if (slot && single) {
    const auto index_of_buffer = static_cast<int>(*slot);
    if (read) {
      io_uring_prep_read_fixed(sqe, 0, first.iov_base, bytes, transfer.offset, index_of_buffer);
    } else {
      io_uring_prep_write_fixed(sqe, 0, first.iov_base, bytes, transfer.offset, index_of_buffer);
    }
  } else if (slot) {
    const auto index_of_buffer = static_cast<int>(*slot);
    if (read) {
      io_uring_prep_readv_fixed(sqe, 0, transfer.memory.data(), count, transfer.offset, 0, index_of_buffer);
    } else {
      io_uring_prep_writev_fixed(sqe, 0, transfer.memory.data(), count, transfer.offset, 0, index_of_buffer);
    }
  } else if (single) {
    if (read) {
      io_uring_prep_read(sqe, 0, first.iov_base, bytes, transfer.offset);
    } else {
      io_uring_prep_write(sqe, 0, first.iov_base, bytes, transfer.offset);
    }
  } else if (read) {
    io_uring_prep_readv(sqe, 0, transfer.memory.data(), count, transfer.offset);
  } else {
    io_uring_prep_writev(sqe, 0, transfer.memory.data(), count, transfer.offset);
  }
  ring_.set_file(sqe, requests_[transfer.request].file, states_[transfer.request].file);
  io_uring_sqe_set_data64(sqe, index);
}

bool UringRun::enter(unsigned wait_for) {
  if (wait_for == 0 && io_uring_sq_ready(ring_.raw()) == 0) return true;
  const int result = io_uring_submit_and_wait(ring_.raw(), wait_for);
  if (result >= 0 || result == -EINTR) return true;
  if (result == -EAGAIN || result == -EBUSY || result == -ENOMEM) {
    // The kernel is short of memory, or wants completions taken first.
    if (io_uring_cq_ready(ring_.raw()) == 0) pause_millisecond();
    return true;
  }
  // Unknown: the ring is not used again. But memory that the kernel may still write is not given back.
  ring_.broken = true;
  while (in_flight_ > io_uring_sq_ready(ring_.raw())) {
    reap();
    if (in_flight_ > io_uring_sq_ready(ring_.raw())) pause_millisecond();
  }
  fail_all(-result);
  return false;
}

void UringRun::reap() {
  io_uring_cqe* cqes[64];
  unsigned count;
  do {
    count = io_uring_peek_batch_cqe(ring_.raw(), cqes, 64);
    for (unsigned i = 0; i < count; ++i) {
      const auto index = static_cast<std::size_t>(io_uring_cqe_get_data64(cqes[i]));
      const int result = cqes[i]->res;
      on_result(index, result);
    }
    io_uring_cq_advance(ring_.raw(), count);
  } while (count == 64);
}

void UringRun::on_result(std::size_t index, int result) {
  Transfer& transfer = transfers_[index];
  if (result == -EINTR || result == -EAGAIN) {
    if (ring_.broken || ++transfer.retries > kEagainRetries) return end_transfer(index, -result);
    if (transfer.retries > kEagainWithoutPause) pause_millisecond();
    return submit(index);
  }
  if ((result == -EFAULT || result == -EINVAL || result == -EOPNOTSUPP) && transfer.registered && !ring_.broken) {
    transfer.plain = true;
    return submit(index);
  }
  if (result < 0) return end_transfer(index, -result);
  if (transfer.registered) ++registered_requests_;
  const auto progress =
      judge_transfer(requests_[transfer.request].op, static_cast<std::uint64_t>(result), transfer.left, geometry_);
  if (progress.error != 0) return end_transfer(index, progress.error);
  transfer.left -= progress.bytes;
  if (transfer.left == 0) return end_transfer(index, 0);
  if (ring_.broken) return end_transfer(index, EIO);
  transfer.offset += progress.bytes;
  transfer.rest = without_prefix(transfer.memory, progress.bytes);
  transfer.memory = transfer.rest;
  transfer.retries = 0;
  submit(index);
}

void UringRun::end_transfer(std::size_t index, int error) {
  Transfer& transfer = transfers_[index];
  const std::size_t request = transfer.request;
  State& state = states_[request];
  --in_flight_;
  device_.transfers_.ended();
  free_transfers_.push_back(index);
  if (error != 0) fail(state, error);
  if (error == 0 && state.bounced && requests_[request].op == IoRequest::Op::kRead) {
    Handover handover(request);
    handover.bounce = std::move(transfer.bounce);
    handover.place = transfer.place;
    handover.bytes = static_cast<std::size_t>(transfer.piece_bytes);
    hand_over(std::move(handover));
    return;
  }
  transfer.bounce.reset();
  if (end_piece(state)) hand_over(Handover(request));
}

void UringRun::fail_all(int error) {
  for (std::size_t index = 0; in_flight_ > 0 && index < transfers_.size(); ++index) {
    if (std::find(free_transfers_.begin(), free_transfers_.end(), index) == free_transfers_.end())
      end_transfer(index, error);
  }
  while (current_ < requests_.size()) {
    fail(states_[current_], error);
    end_request_issue();
  }
}

void UringRun::fail(State& state, int error) {
  int none = 0;
  state.error.compare_exchange_strong(none, error);
}

bool UringRun::end_piece(State& state) { return state.pieces.fetch_sub(1) == 1; }

void UringRun::hand_over(Handover handover) {
  if (!handover.bounce && !on_complete_) return complete(handover.request);
  handovers_.push_back(std::move(handover));
  ++unpublished_;
}

void UringRun::receive(std::size_t index) {
  Handover& handover = handovers_[index];
  if (handover.bounce) {
    scatter(handover.bounce.data(), requests_[handover.request].memory, handover.place, handover.bytes);
    handover.bounce.reset();
    if (!end_piece(states_[handover.request])) return;
  }
  complete(handover.request);
}

void UringRun::complete(std::size_t index) {
  State& state = states_[index];
  IoRequest& request = requests_[index];
  request.error = state.error.load();
  device_.transfers_.finished(request, state.bytes, state.bounced);
  if (on_complete_) on_complete_(request);
}

}  // namespace tardis
