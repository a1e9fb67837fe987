// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/controller.h"

#include <string>
#include <utility>

#include "nvme/soft/core.h"

namespace tardis::nvme {
namespace {

Error setting(const std::string& name, const std::string& expected, std::uint64_t found) {
  return {Code::kInvalidArgument,
          "software NVMe controller, " + name + ": expected " + expected + ", found " + std::to_string(found)};
}

Status check(const SoftControllerOptions& options, const DmaSpace& space) {
  if (options.namespaces.empty()) return setting("namespaces", "one at least", 0);
  for (const SoftNamespace& entry : options.namespaces) {
    if (entry.medium == nullptr) continue;
    if (entry.block_shift != 9 && entry.block_shift != 12) return setting("block_shift", "9 or 12", entry.block_shift);
    if (std::uint64_t{1} << entry.block_shift < entry.medium->granularity()) {
      return setting("block_shift",
                     "blocks of the medium's " + std::to_string(entry.medium->granularity()) + " bytes at least",
                     entry.block_shift);
    }
    const std::uint64_t most = entry.medium->bytes() >> entry.block_shift;
    if (most == 0 || entry.blocks > most) return setting("blocks", "1 to " + std::to_string(most), entry.blocks);
  }
  if (options.max_queue_entries < kMinQueueEntries || options.max_queue_entries > kMaxQueueEntries) {
    return setting("max_queue_entries", "2 to 65536", options.max_queue_entries);
  }
  if (options.queue_pairs == 0 || options.queue_pairs > 0xfffe)
    return setting("queue_pairs", "1 to 65534", options.queue_pairs);
  if (options.doorbell_stride > 10) return setting("doorbell_stride", "0 to 10", options.doorbell_stride);
  if (options.max_page_shift < 12 || options.max_page_shift > 27)
    return setting("max_page_shift", "12 to 27", options.max_page_shift);
  if (options.timeout_ms > 127'500) return setting("timeout_ms", "at most 127500", options.timeout_ms);
  if (options.mdts > 30) return setting("mdts", "at most 30", options.mdts);
  if (options.sgl > kSglDword) return setting("sgl", "none, any alignment or dword", options.sgl);
  if (options.threads == 0 || options.threads > 256) return setting("threads", "1 to 256", options.threads);
  if (options.medium_threads == 0 || options.medium_threads > 256)
    return setting("medium_threads", "1 to 256", options.medium_threads);
  if (options.medium_batch == 0) return setting("medium_batch", "1 at least", 0);
  if (options.registers != nullptr) {
    if (reinterpret_cast<std::uintptr_t>(options.registers) % kPageBytes != 0) {
      return setting("registers", "memory at a multiple of 4096", reinterpret_cast<std::uintptr_t>(options.registers));
    }
    if (options.registers_bytes < register_bytes(options)) {
      return setting("registers_bytes", std::to_string(register_bytes(options)) + " at least", options.registers_bytes);
    }
  }
  if (space.page_bytes() % kPageBytes != 0)
    return setting("page_bytes of the DMA space", "a multiple of 4096", space.page_bytes());
  return {};
}

}  // namespace

std::size_t register_bytes(const SoftControllerOptions& options) {
  const std::size_t end = cq_head_doorbell(options.queue_pairs, options.doorbell_stride) + 4u;
  return (end + kPageBytes - 1) / kPageBytes * kPageBytes;
}

SoftController::SoftController(std::unique_ptr<Core> core) : core_(std::move(core)) {}
SoftController::~SoftController() = default;

Result<std::unique_ptr<SoftController>> SoftController::create(SoftControllerOptions options, DmaSpace& space) {
  if (const Status good = check(options, space); !good) return good.error();
  auto core = std::make_unique<Core>(std::move(options), space);
  if (const Status started = core->start(); !started) return started.error();
  return std::unique_ptr<SoftController>(new SoftController(std::move(core)));
}

RegisterWindow& SoftController::window() { return core_->registers(); }
DmaSpace& SoftController::space() { return core_->space(); }
const SoftControllerOptions& SoftController::options() const { return core_->options(); }

SoftController::Armed::Armed(SoftController& controller) : controller_(controller) { controller_.core_->arm(1); }
SoftController::Armed::~Armed() { controller_.core_->arm(-1); }

void SoftController::rest_while_armed(std::chrono::microseconds spin, std::chrono::microseconds sleep) {
  const auto ns = [](std::chrono::nanoseconds time) { return static_cast<std::uint64_t>(time.count()); };
  core_->rest_while_armed(ns(spin), ns(sleep));
}

Status SoftController::attach(CopyEngine& engine) { return core_->attach(engine); }
void SoftController::detach(CopyEngine& engine) { core_->detach(engine); }

std::vector<Violation> SoftController::violations() const { return core_->log().list(); }
std::vector<Violation> SoftController::take_violations() { return core_->log().take(); }
SoftControllerCounters SoftController::counters() const { return core_->counters(); }

void SoftController::fail() { core_->fail(); }
void SoftController::remove(bool reads_as_zero) { core_->remove(reads_as_zero); }
void SoftController::insert() { core_->power_cycle(); }
void SoftController::cut_power() { core_->power_cycle(); }
void SoftController::hold_ready(bool hold) { core_->hold_ready(hold); }

}  // namespace tardis::nvme
