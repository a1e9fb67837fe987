// SPDX-License-Identifier: Apache-2.0
#include "nvme/io_queue.h"

#include <algorithm>

#include "nvme/external_queue.h"
#include "nvme/identify.h"

namespace tardis::nvme {
namespace {

constexpr std::uint32_t kMostBounceBytes = 1u << 20;  // of one buffer: a list of one page names it

std::size_t list_offset_of(const IoQueueShape& shape) { return ExternalRings::bytes(shape.entries); }

std::size_t bounce_offset_of(const IoQueueShape& shape) {
  return list_offset_of(shape) + std::size_t{shape.commands} * kPageBytes;
}

}  // namespace

IoQueueShape IoQueueShape::within(const ControllerInfo& controller, std::uint32_t entries, std::uint32_t bounce_buffers,
                                  std::uint32_t bounce_bytes) {
  IoQueueShape shape;
  shape.entries = std::min(entries, controller.max_queue_entries);
  shape.commands = std::min(shape.entries - 1, controller.most_commands);
  shape.doorbell_stride = controller.doorbell_stride;
  shape.bounce_buffers = std::min(bounce_buffers, shape.commands);
  shape.bounce_bytes = static_cast<std::uint32_t>(
      std::min<std::uint64_t>({bounce_bytes, kMostBounceBytes, controller.max_transfer_bytes}) / kPageBytes *
      kPageBytes);
  return shape;
}

Result<std::unique_ptr<IoQueue>> IoQueue::create(DmaMapper& mapper, Doorbells& window, std::uint16_t id,
                                                 const IoQueueShape& shape, const QueueShadows& shadows) {
  const std::uint32_t tail = sq_tail_doorbell(id, shape.doorbell_stride);
  const std::uint32_t head = cq_head_doorbell(id, shape.doorbell_stride);
  if (const std::uint64_t end = doorbells_end(id, shape.doorbell_stride); end > window.bytes()) {
    return Error{Code::kInternal, "NVMe queue " + std::to_string(id) + ": expected its doorbells within the " +
                                      std::to_string(window.bytes()) +
                                      " bytes of the register window, found their end at " + std::to_string(end) +
                                      "; ask for fewer queues"};
  }
  std::unique_ptr<IoQueue> queue(new IoQueue(window, id, shape));
  queue->sq_offset_ = ExternalRings::sq_offset(shape.entries);
  queue->list_offset_ = list_offset_of(shape);
  queue->bounce_offset_ = bounce_offset_of(shape);
  auto memory = DmaMemory::allocate(mapper, memory_bytes(shape));
  if (!memory) return memory.error();
  queue->memory_ = std::move(*memory);
  queue->slots_.resize(shape.commands);
  queue->deadlines_.resize(shape.commands);
  queue->pair_.emplace(QueueMemory{
      .sq = reinterpret_cast<SubmissionEntry*>(queue->memory_.data() + queue->sq_offset_),
      .cq = reinterpret_cast<CompletionEntry*>(queue->memory_.data()),
      .commands = queue->slots_.data(),
      .sq_tail = window.doorbells() + (tail - kRegDoorbells) / 4,
      .cq_head = window.doorbells() + (head - kRegDoorbells) / 4,
      .sq_entries = shape.entries,
      .cq_entries = shape.entries,
      .max_commands = shape.commands,
      .sq_id = id,
      .sq_tail_shadow = shadows.sq_tail,
      .cq_head_shadow = shadows.cq_head,
  });
  return queue;
}

std::size_t IoQueue::memory_bytes(const IoQueueShape& shape) {
  return bounce_offset_of(shape) + std::size_t{shape.bounce_buffers} * shape.bounce_bytes;
}

PrpList IoQueue::list_page(std::uint32_t command) {
  const std::size_t offset = list_offset_ + std::size_t{command} * kPageBytes;
  return {reinterpret_cast<std::uint64_t*>(memory_.data() + offset), memory_.address() + offset};
}

IoQueue::Submit IoQueue::submit(const SubmissionEntry& command, std::uint64_t tag, std::uint64_t deadline) {
  const std::lock_guard lock(mutex_);
  if (closed_) return Submit::kClosed;
  if (stopped_ || !pair_->can_submit()) return Submit::kFull;
  deadlines_[pair_->index_of(pair_->submit(command, tag))] = deadline;
  next_deadline_ = std::min(next_deadline_, deadline);
  return Submit::kOk;
}

void IoQueue::collect_held() {
  Completion completion;
  // A fault makes the queue suspect; what else it holds is judged entry by entry all the same. Bounded, since a
  // controller that is broken may post without end.
  for (std::uint32_t taken = 0; taken < shape_.entries; ++taken) {
    const PollResult found = pair_->poll(completion);
    if (found == PollResult::kNothing) break;
    if (found == PollResult::kFault) continue;
    finished_.push_back({completion.tag, completion.quarantined ? Fate::kLate : Fate::kCompleted, completion.status});
  }
}

std::size_t IoQueue::exchange(std::vector<FinishedCommand>& done) {
  const std::lock_guard lock(mutex_);
  if (!closed_) {
    const bool rang = !stopped_ && pair_->ring();
    collect_held();
    const bool acknowledged = pair_->acknowledge();
    if (rang || acknowledged) window_.notify();
  }
  const std::size_t count = finished_.size();
  done.insert(done.end(), finished_.begin(), finished_.end());
  finished_.clear();
  return count;
}

void IoQueue::collect() {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  collect_held();
  if (pair_->acknowledge()) window_.notify();
}

bool IoQueue::suspect(std::uint64_t now) {
  const std::lock_guard lock(mutex_);
  if (closed_) return false;
  if (pair_->suspect()) return true;
  if (now < next_deadline_) return false;
  // It was the earliest of those in flight once; most often that one has completed.
  next_deadline_ = kNever;
  pair_->for_each_outstanding([this](const OutstandingCommand& command) {
    if (!command.quarantined) next_deadline_ = std::min(next_deadline_, deadlines_[pair_->index_of(command.id)]);
  });
  return now >= next_deadline_;
}

void IoQueue::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
}

std::vector<std::uint16_t> IoQueue::quarantine_overdue(std::uint64_t now) {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint16_t> ids;
  if (closed_) return ids;
  pair_->for_each_outstanding([&](const OutstandingCommand& command) {
    if (!command.quarantined && command.published && now >= deadlines_[pair_->index_of(command.id)]) {
      ids.push_back(command.id);
    }
  });
  for (const std::uint16_t id : ids) pair_->quarantine(id);
  return ids;
}

std::uint32_t IoQueue::quarantined() {
  const std::lock_guard lock(mutex_);
  return pair_->quarantined();
}

std::uint32_t IoQueue::outstanding() {
  const std::lock_guard lock(mutex_);
  return pair_->outstanding();
}

bool IoQueue::resume() {
  const std::lock_guard lock(mutex_);
  if (closed_ || pair_->suspect() || pair_->quarantined() != 0) return false;
  stopped_ = false;
  return true;
}

QueueFault IoQueue::fault() {
  const std::lock_guard lock(mutex_);
  return pair_->fault();
}

std::uint64_t IoQueue::epoch() {
  const std::lock_guard lock(mutex_);
  return epoch_;
}

void IoQueue::end_all_held(Fate fate) {
  pair_->for_each_outstanding([&](const OutstandingCommand& command) {
    const Fate own = fate == Fate::kLost && command.quarantined ? Fate::kTimedOut : fate;
    finished_.push_back({command.tag, own, {0}});
  });
  pair_->release_all();
  next_deadline_ = kNever;
  ++epoch_;
}

void IoQueue::restart_held() {
  if (closed_) return;
  collect_held();
  end_all_held(Fate::kLost);
  stopped_ = false;
}

Status IoQueue::close_held() {
  if (closed_) return {};
  // First: afterwards no completion can appear that is not seen.
  auto revoked = memory_.revoke();
  collect_held();
  end_all_held(Fate::kClosed);
  closed_ = true;
  return revoked;
}

}  // namespace tardis::nvme
