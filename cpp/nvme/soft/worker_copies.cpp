// SPDX-License-Identifier: Apache-2.0
// Commands with memory that engines move: between it and the bytes of the medium where those lie in memory, else
// through staging memory. They count as in the drive from their start to their end.
#include <algorithm>
#include <chrono>
#include <thread>

#include "nvme/soft/core.h"
#include "nvme/soft/worker.h"

namespace tardis::nvme {

EngineCopies* SoftWorker::copies_of(const DmaSpace::Range* range) {
  const auto found = std::find_if(engines_.begin(), engines_.end(),
                                  [&](const auto& copies) { return &copies->engine() == range->engine; });
  return found == engines_.end() ? nullptr : found->get();
}

EngineCopies& SoftWorker::staging_of(const SoftCommand& command) {
  return *copies_of(std::find_if(command.parts.begin(), command.parts.end(), [](const SoftCommand::Part& part) {
                      return part.range != nullptr && part.range->engine != nullptr;
                    })->range);
}

void SoftWorker::start_by_engine(SoftCommand& command) {
  ++command.sq->in_drive;
  // In the order of their coming: who needs much would wait for ever.
  if (!unstaged_.empty() || !begin_by_engine(command)) unstaged_.push_back(&command);
}

bool SoftWorker::begin_by_engine(SoftCommand& command) {
  const auto give_up = [&] {
    command.copy_failed = command.copied = true;
    finish(command);
    return true;
  };
  if (ending_) return give_up();
  bool only_engines = true;
  for (const SoftCommand::Part& part : command.parts) {
    if (part.range == nullptr) continue;
    if (part.range->engine == nullptr) {
      only_engines = false;
    } else if (copies_of(part.range) == nullptr) {
      return give_up();
    }
  }
  MediumRequest& request = command.requests.front();
  std::byte* const medium = command.targets.front()->medium->in_memory();
  if (medium != nullptr && only_engines) {
    command.host = medium + request.offset;
    add_copies(command);
    return true;
  }
  StagingRing& staging = staging_of(command).staging();
  const auto bytes = static_cast<std::size_t>(request.bytes);
  if (bytes > staging.bytes()) return give_up();
  command.host = staging.take(bytes);
  if (command.host == nullptr) return false;
  command.in_staging = true;
  command.memory.assign(1, {command.host, bytes});
  request.memory = command.memory;
  if (reads(command)) {
    ask_media(command);
  } else if (copy_other_parts(command, false)) {
    add_copies(command);
  } else {
    return give_up();
  }
  return true;
}

void SoftWorker::add_copies(SoftCommand& command) {
  const CopyDirection direction = reads(command) ? CopyDirection::kToRemote : CopyDirection::kToHost;
  if (command.in_staging && reads(command) && !copy_other_parts(command, true)) command.copy_failed = true;
  std::byte* host = command.host;
  for (const SoftCommand::Part& part : command.parts) {
    if (part.range != nullptr && part.range->engine != nullptr) {
      copies_of(part.range)->add(command, direction, {host, part.range->memory + part.offset, part.bytes});
    }
    host += part.bytes;
  }
}

void SoftWorker::copies_ended(SoftCommand& command) {
  command.copied = true;
  if (command.in_staging && !reads(command) && !command.copy_failed) {
    if (!ending_ && !core_.halted()) return ask_media(command);
    command.copy_failed = true;
  }
  finish(command);
}

void SoftWorker::finish_by_engine(SoftCommand& command) {
  if (!command.copied && command.error.load(std::memory_order_relaxed) == 0) {
    if (!ending_) return add_copies(command);
    command.copy_failed = true;
  }
  SoftSubmissionQueue& sq = *command.sq;
  if (command.in_staging) staging_of(command).staging().give_back(command.host);
  conclude(command);
  left_drive(sq);
}

bool SoftWorker::take_copied() {
  bool some = false;
  for (const auto& copies : engines_) some |= copies->take_ended(copied_now_);
  for (SoftCommand* command : copied_now_) copies_ended(*command);
  copied_now_.clear();
  while (!unstaged_.empty() && begin_by_engine(*unstaged_.front())) {
    unstaged_.pop_front();
    some = true;
  }
  return some;
}

bool SoftWorker::copies_run() const {
  return std::any_of(engines_.begin(), engines_.end(), [](const auto& copies) { return copies->running(); });
}

bool SoftWorker::detach(const CopyEngine& engine) {
  const auto at =
      std::find_if(engines_.begin(), engines_.end(), [&](const auto& copies) { return &copies->engine() == &engine; });
  if (at == engines_.end()) return true;
  if ((*at)->running() || !unstaged_.empty()) return false;
  engines_.erase(at);
  return true;
}

void SoftWorker::give_memory_back() {
  ending_ = true;
  quiesce_all(true);
  take_finished();
  // Copies end by themselves, and touch memory until they do.
  while (copies_run() || !unstaged_.empty()) {
    for (const auto& copies : engines_) copies->submit();
    if (!take_copied()) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

}  // namespace tardis::nvme
