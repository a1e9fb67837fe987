// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/faults.h"

#include <algorithm>

namespace tardis::nvme {
namespace {

bool names_blocks(const FaultRule& rule) { return rule.first_block != 0 || rule.last_block != ~std::uint64_t{0}; }

bool touches(const FaultRule& rule, const SubmissionEntry& command) {
  const auto opcode = static_cast<IoOpcode>(command.opcode);
  if (opcode != IoOpcode::kRead && opcode != IoOpcode::kWrite && opcode != IoOpcode::kWriteZeroes) return false;
  const std::uint64_t first = command.start_block(), last = first + command.blocks() - 1;
  return first <= rule.last_block && last >= rule.first_block;
}

}  // namespace

std::uint64_t FaultPlan::add(const FaultRule& rule) {
  const std::lock_guard lock(mutex_);
  rules_.push_back({next_id_, rule, 0, 0});
  rules_present_.store(rules_.size());
  return next_id_++;
}

void FaultPlan::remove(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  std::erase_if(rules_, [&](const Entry& entry) { return entry.id == id; });
  rules_present_.store(rules_.size());
}

void FaultPlan::clear() {
  const std::lock_guard lock(mutex_);
  rules_.clear();
  rules_present_.store(0);
}

std::uint64_t FaultPlan::injected() const {
  std::uint64_t sum = 0;
  for (const auto& count : injected_) sum += count.load();
  return sum;
}

std::optional<FaultRule> FaultPlan::match(std::uint16_t queue, const SubmissionEntry& command) {
  const std::lock_guard lock(mutex_);
  for (auto entry = rules_.begin(); entry != rules_.end(); ++entry) {
    const FaultRule rule = entry->rule;
    if (rule.queue && *rule.queue != queue) continue;
    if (rule.opcode && *rule.opcode != command.opcode) continue;
    if (names_blocks(rule) && (queue == 0 || !touches(rule, command))) continue;
    if (entry->seen++ < rule.skip) continue;
    if (rule.probability < 1 && std::uniform_real_distribution<>(0, 1)(random_) >= rule.probability) continue;
    if (++entry->hit == rule.count) rules_.erase(entry);
    rules_present_.store(rules_.size());
    injected_[static_cast<std::size_t>(rule.kind)].fetch_add(1);
    return rule;
  }
  return std::nullopt;
}

std::uint32_t FaultPlan::random() {
  const std::lock_guard lock(mutex_);
  return static_cast<std::uint32_t>(random_());
}

}  // namespace tardis::nvme
