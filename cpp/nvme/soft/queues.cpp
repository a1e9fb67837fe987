// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/queues.h"

#include <cstring>

namespace tardis::nvme {
namespace {

std::uint32_t distance(std::uint32_t from, std::uint32_t to, std::uint32_t entries) {
  return to >= from ? to - from : to + entries - from;
}

}  // namespace

Doorbell SoftCompletionQueue::refresh(ViolationLog& log) {
  const std::uint32_t value = load_word(doorbell);
  if (value == head || value == refused_head) return Doorbell::kSame;
  const bool in_range = value < entries;
  if (!in_range || distance(head, value, entries) > distance(head, tail, entries)) {
    refused_head = value;
    log.add(in_range ? ViolationKind::kCqHead : ViolationKind::kDoorbellRange, id, nullptr,
            "head doorbell of a completion queue of " + std::to_string(entries) + " entries: expected " +
                std::to_string(head) + " to " + std::to_string(tail) + ", found " + std::to_string(value));
    return Doorbell::kWrong;
  }
  refused_head = kNone;
  head = value;
  if (head == tail) surplus = false;
  return Doorbell::kMoved;
}

void SoftCompletionQueue::put(CompletionEntry entry) {
  entry.status = static_cast<std::uint16_t>((entry.status & ~1u) | (phase ? 1u : 0u));
  std::uint32_t words[4];
  std::memcpy(words, &entry, sizeof words);
  auto* at = reinterpret_cast<std::uint32_t*>(ring + tail);
  for (int i = 0; i < 3; ++i) __atomic_store_n(at + i, words[i], __ATOMIC_RELAXED);
  store_word(at + 3, words[3]);  // release: the phase is seen only with the rest of the entry and the command's data
  if (++tail == entries) {
    tail = 0;
    phase = !phase;
  }
}

void SoftCompletionQueue::post(const CompletionEntry& entry, bool accounted, ViolationLog& log) {
  surplus |= !accounted;
  if (full()) refresh(log);
  if (waiting.empty() && !full()) {
    put(entry);
    return;
  }
  if (!surplus && waiting.empty()) {
    log.add(ViolationKind::kCqOverflow, id, nullptr,
            "a completion of queue " + std::to_string(entry.sq_id) + " finds all " + std::to_string(entries - 1) +
                " entries taken; head " + std::to_string(head) + ", tail " + std::to_string(tail));
  }
  waiting.push_back(entry);
}

bool SoftCompletionQueue::drain() {
  const bool some = !waiting.empty() && !full();
  while (!waiting.empty() && !full()) {
    put(waiting.front());
    waiting.pop_front();
  }
  return some;
}

Doorbell SoftSubmissionQueue::refresh(ViolationLog& log) {
  const std::uint32_t value = load_word(doorbell);
  if (value == tail || value == refused_tail) return Doorbell::kSame;
  const bool in_range = value < entries;
  const std::uint32_t unknown = distance(reported_head, tail, entries);  // entries that the client must not touch
  if (!in_range || unknown + distance(tail, value, entries) > entries - 1) {
    refused_tail = value;
    log.add(in_range ? ViolationKind::kSqOverrun : ViolationKind::kDoorbellRange, id, nullptr,
            "tail doorbell of a submission queue of " + std::to_string(entries) + " entries: the tail was " +
                std::to_string(tail) + ", the last head that a completion reported " + std::to_string(reported_head) +
                ", found " + std::to_string(value));
    return Doorbell::kWrong;
  }
  refused_tail = kNone;
  tail = value;
  return Doorbell::kMoved;
}

}  // namespace tardis::nvme
