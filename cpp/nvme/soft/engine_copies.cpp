// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/engine_copies.h"

#include <utility>

namespace tardis::nvme {

Result<std::unique_ptr<EngineCopies>> EngineCopies::open(CopyEngine& engine, std::size_t staging_bytes) {
  PinnedBuffer memory;
  if (staging_bytes != 0) {
    auto made = PinnedBuffer::allocate(engine, staging_bytes);
    if (!made) return made.error();
    memory = std::move(*made);
  }
  auto lane = engine.open_lane();
  if (!lane) return lane.error();
  return std::unique_ptr<EngineCopies>(new EngineCopies(engine, std::move(memory), std::move(*lane)));
}

EngineCopies::~EngineCopies() = default;

std::size_t EngineCopies::take_batch(CopyDirection direction) {
  if (free_.empty()) {
    free_.push_back(batches_.size());
    batches_.push_back(std::make_unique<Batch>());
  }
  const std::size_t number = free_.back();
  free_.pop_back();
  batches_[number]->direction = direction;
  ++busy_;
  return number;
}

void EngineCopies::add(SoftCommand& command, CopyDirection direction, const tardis_copy& copy) {
  Side& side = side_of(direction);
  if (side.open == kNone) side.open = take_batch(direction);
  Batch& batch = *batches_[side.open];
  batch.copies.push_back(copy);
  batch.bytes += copy.bytes;
  if (batch.commands.empty() || batch.commands.back() != &command) {
    batch.commands.push_back(&command);
    ++command.copies_left;
  }
  if (batch.copies.size() >= kMostCopies || batch.bytes >= kMostBytes) {
    side.full.push_back(std::exchange(side.open, kNone));
  }
}

void EngineCopies::submit(Side& side) {
  while (side.running < kMostRunning) {
    if (side.full.empty()) {
      if (side.open == kNone) return;
      side.full.push_back(std::exchange(side.open, kNone));
    }
    const std::size_t number = side.full.front();
    side.full.pop_front();
    ++side.running;
    // Its commands end with the next look, not here: others may be amid something with them.
    const Batch& batch = *batches_[number];
    if (!lane_->start(batch.direction, batch.copies, number)) refused_.push_back(number);
  }
}

void EngineCopies::submit() {
  for (Side& side : sides_) submit(side);
}

void EngineCopies::end(std::size_t number, bool failed, std::vector<SoftCommand*>& commands) {
  Batch& batch = *batches_[number];
  for (SoftCommand* command : batch.commands) {
    command->copy_failed |= failed;
    if (--command->copies_left == 0) commands.push_back(command);
  }
  batch.copies.clear();
  batch.commands.clear();
  batch.bytes = 0;
  free_.push_back(number);
  --side_of(batch.direction).running;
  --busy_;
}

bool EngineCopies::take_ended(std::vector<SoftCommand*>& commands) {
  const std::size_t before = busy_;
  if (before == 0) return false;
  for (const std::size_t batch : std::exchange(refused_, {})) end(batch, true, commands);
  std::array<tardis_copy_end, 16> ends;
  std::size_t count;
  while (busy_ != 0 && (count = lane_->poll(ends)) != 0) {
    for (std::size_t i = 0; i < count; ++i) {
      end(static_cast<std::size_t>(ends[i].batch), ends[i].error != 0, commands);
    }
  }
  return busy_ != before;
}

}  // namespace tardis::nvme
