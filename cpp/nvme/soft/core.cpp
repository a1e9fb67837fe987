// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/core.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace tardis::nvme {
namespace {

constexpr std::uint64_t kNever = ~std::uint64_t{0};
constexpr std::uint64_t kRecheckNs = 1'000'000;
constexpr std::size_t kStagingBytes = 16 << 20, kMostStagingBytes = 64 << 20;  // of a worker and an engine
constexpr std::uint32_t kFixedWhileEnabled = 0x7fu << kCcCssShift | 0xfu << kCcMpsShift | 7u << kCcAmsShift;

std::uint32_t page_shift_of(std::uint32_t cc) { return 12 + (cc >> kCcMpsShift & 0xf); }

}  // namespace

SoftController::Core::Core(SoftControllerOptions options, DmaSpace& space)
    : options_(std::move(options)), space_(space), log_(options_.violations_kept), admin_(*this) {}

SoftController::Core::~Core() {
  for (auto& worker : workers_) worker->stop();
  runners_.clear();  // waits for drives
  space_.remove_listener(*this);
  for (auto& worker : workers_) worker->give_memory_back();
}

void SoftController::Core::mapped(void* memory, std::size_t bytes) {
  for (Medium* medium : waiting_media_) medium->memory_mapped(memory, bytes);
}

void SoftController::Core::unmapped(void* memory) {
  for (Medium* medium : waiting_media_) medium->memory_unmapped(memory);
}

Status SoftController::Core::start() {
  const std::size_t bytes = register_bytes(options_);
  void* memory = options_.registers;
  if (memory == nullptr) {
    Result<AlignedBuffer> own = AlignedBuffer::allocate(bytes);
    if (!own) return own.error();
    own_registers_ = std::move(*own);
    memory = own_registers_.data();
  }
  registers_ = std::make_unique<SoftRegisters>(
      memory, bytes, options_.doorbell_stride, options_.queue_pairs + 1, log_, [this] { notify(); },
      [this](AsyncEvent event) { admin_.doorbell_event(event); });
  bool needs_flush = false;
  for (const SoftNamespace& space : options_.namespaces) {
    SoftNamespaceState state;
    if (space.medium != nullptr) {
      state = {space.medium.get(), nullptr, space.block_shift,
               space.blocks != 0 ? space.blocks : space.medium->bytes() >> space.block_shift, space.optimal_boundary};
      needs_flush |= space.medium->needs_flush();
      if (!space.medium->immediate()) {
        const auto shared = std::find_if(runners_.begin(), runners_.end(),
                                         [&](const auto& runner) { return &runner->medium() == space.medium.get(); });
        if (shared == runners_.end()) {
          runners_.push_back(
              std::make_unique<MediumRunner>(*space.medium, options_.medium_batch, [](MediumRequest& request) {
                auto& command = *static_cast<SoftCommand*>(request.owner);
                if (request.error != 0) command.error.store(request.error, std::memory_order_relaxed);
                std::uint64_t latest = command.not_before.load(std::memory_order_relaxed);
                while (latest < request.not_before &&
                       !command.not_before.compare_exchange_weak(latest, request.not_before)) {
                }
                // Acquire and release: whoever finds the command done sees what all its requests did.
                if (command.running.fetch_sub(1, std::memory_order_acq_rel) == 1) command.worker->medium_done(command);
              }));
          if (const Status started = runners_.back()->start(options_.medium_threads); !started) return started;
          state.runner = runners_.back().get();
          waiting_media_.push_back(space.medium.get());
        } else {
          state.runner = shared->get();
        }
      }
    }
    rules_.namespaces.push_back(state);
  }
  has_cache_ = options_.volatile_cache.value_or(needs_flush);
  rules_.max_transfer = options_.mdts == 0 ? 0 : std::uint64_t{kPageBytes} << options_.mdts;
  rules_.data_pointer.sgl = options_.sgl;
  rules_.data_pointer.sgl_longer_than_data = options_.sgl_longer_than_data;
  rules_.data_pointer.sgl_bit_bucket = options_.sgl_bit_bucket;
  rules_.data_pointer.sgl_blocks = options_.sgl_blocks;
  power_on();
  for (std::uint32_t i = 0; i < options_.threads; ++i) workers_.push_back(std::make_unique<SoftWorker>(*this, i));
  for (auto& worker : workers_) {
    if (const Status started = worker->start(options_.cpus); !started) return started;
  }
  space_.add_listener(*this);
  return {};
}

void SoftController::Core::power_on() {
  const std::lock_guard lock(status_mutex_);
  Capabilities capabilities = Capabilities::of(options_.max_queue_entries, options_.timeout_ms,
                                               options_.doorbell_stride, 12, options_.max_page_shift);
  const auto& spaces = options_.namespaces;
  if (std::any_of(spaces.begin(), spaces.end(), [](const auto& space) { return space.command_set.has_value(); })) {
    capabilities.raw |= Capabilities::kCommandSets;
  }
  registers_->power_on(capabilities.raw, kSoftVersion);
  cache_enabled_ = has_cache_;
  rules_.writes_through = !has_cache_;
  state_ = State::kDisabled;
  seen_cc_ = 0;
  state_due_ = kNever;
  halted_.store(false, std::memory_order_release);
}

void SoftController::Core::set_status(std::uint32_t clear, std::uint32_t set, std::optional<bool> halted) {
  const std::lock_guard lock(status_mutex_);
  if (registers_->gone()) return;
  if (halted) halted_.store(*halted, std::memory_order_release);
  registers_->set(kRegCsts, (registers_->get(kRegCsts) & ~clear) | set);
}

void SoftController::Core::fail() { set_status(0, kCstsFatal, true); }

void SoftController::Core::remove(bool reads_as_zero) {
  const std::lock_guard lock(status_mutex_);
  halted_.store(true, std::memory_order_release);
  registers_->vanish(reads_as_zero);
}

void SoftController::Core::enable_cache(bool enabled) {
  for (std::size_t i = 1; i < workers_.size(); ++i) workers_[i]->turn().lock();
  cache_enabled_ = enabled;
  rules_.writes_through = !enabled;
  for (std::size_t i = workers_.size(); i > 1; --i) workers_[i - 1]->turn().unlock();
}

bool SoftController::Core::control(std::uint64_t now) {
  const bool disabled = registers_->take_disabled();
  const std::uint32_t cc = registers_->get(kRegCc);
  // After the read: what the registers of a removed controller read as was not written by anyone.
  if (registers_->gone()) return false;
  const bool enabled = (cc & kCcEnable) != 0, was_enabled = (seen_cc_ & kCcEnable) != 0;
  if (was_enabled && !enabled && !disabled) return false;  // written just now: the next look finds both
  const std::uint32_t before = std::exchange(seen_cc_, cc);
  const bool changed = cc != before || disabled;
  const auto delay = static_cast<std::uint64_t>(std::chrono::nanoseconds(options_.ready_delay).count());
  if (disabled) {
    begin_reset();
    state_ = State::kResetting;
    state_due_ = now + delay;
  } else if (enabled && !was_enabled && state_ != State::kResetting) {
    state_ = State::kEnabling;
    state_due_ = now + delay;
  } else if (enabled && was_enabled && ((cc ^ before) & kFixedWhileEnabled) != 0) {
    log_.add(ViolationKind::kRegister, 0, nullptr,
             "CC: CSS, MPS and AMS are not to change while EN is 1, found " + hex_address(cc));
  }
  if ((cc & kCcShnMask) != 0 && (before & kCcShnMask) == 0) shut_down((cc & kCcShnMask) == kCcShnNormal);
  if (state_due_ > now) return changed;
  if (hold_ready_.load() || (state_ == State::kResetting && !drained())) {
    state_due_ = now + kRecheckNs;
    return changed;
  }
  state_due_ = kNever;
  if (state_ == State::kEnabling) {
    enable(cc);
    return true;
  }
  end_reset();
  if (enabled) {  // again, too early
    state_ = State::kEnabling;
    state_due_ = now + delay;
  }
  return true;
}

void SoftController::Core::enable(std::uint32_t cc) {
  state_ = State::kReady;
  const std::string problem = admin_queue_problem(cc);
  if (problem.empty()) {
    set_status(kCstsShstMask, kCstsReady);
  } else {
    log_.add(ViolationKind::kRegister, 0, nullptr, problem);
    fail();
  }
}

// Creates the admin queues; what is wrong with the registers, or nothing.
std::string SoftController::Core::admin_queue_problem(std::uint32_t cc) {
  const std::uint32_t shift = page_shift_of(cc), aqa = registers_->get(kRegAqa);
  const std::uint64_t asq = registers_->get64(kRegAsq), acq = registers_->get64(kRegAcq);
  const std::uint32_t sq_entries = (aqa & 0xfff) + 1, cq_entries = (aqa >> 16 & 0xfff) + 1;
  const auto field_ok = [&](std::uint32_t at, std::uint32_t expected) {
    const std::uint32_t found = cc >> at & 0xf;
    return found == 0 || found == expected;
  };
  if ((cc >> kCcCssShift & 7) != 0) return "CC.CSS: expected the NVM command set, found CC " + hex_address(cc);
  if ((cc >> kCcAmsShift & 7) != 0) return "CC.AMS: expected round robin, found CC " + hex_address(cc);
  if (shift > options_.max_page_shift) return "CC.MPS is above CAP.MPSMAX, found CC " + hex_address(cc);
  if (!field_ok(kCcIosqesShift, kSubmissionEntryShift) || !field_ok(kCcIocqesShift, kCompletionEntryShift)) {
    return "CC.IOSQES and IOCQES: expected 6 and 4, found CC " + hex_address(cc);
  }
  if (sq_entries < kMinQueueEntries || cq_entries < kMinQueueEntries)
    return "AQA: expected 2 entries at least, found " + hex_address(aqa);
  const std::uint64_t page = std::uint64_t{1} << shift;
  if (asq % page != 0 || acq % page != 0) {
    return "ASQ and ACQ: expected the start of a page, found " + hex_address(asq) + " and " + hex_address(acq);
  }
  SoftWorker& worker = *workers_.front();
  const std::lock_guard no_unmap(worker.reader());
  auto* sq_ring =
      reinterpret_cast<SubmissionEntry*>(worker.reader().translate(asq, sq_entries * sizeof(SubmissionEntry)));
  auto* cq_ring =
      reinterpret_cast<CompletionEntry*>(worker.reader().translate(acq, cq_entries * sizeof(CompletionEntry)));
  if (sq_ring == nullptr || cq_ring == nullptr) {
    return "ASQ and ACQ: expected mapped memory, found " + hex_address(asq) + " and " + hex_address(acq);
  }
  rules_.page_shift = rules_.data_pointer.page_shift = shift;
  SoftCompletionQueue& cq = worker.add_cq(0, cq_entries, acq, cq_ring);
  if (cq.looks_posted()) {
    log_.add(ViolationKind::kCqNotZeroed, 0, nullptr, "the admin completion queue is expected to be of zeros");
  }
  worker.add_sq(0, cq, sq_entries, asq, sq_ring);
  return {};
}

void SoftController::Core::begin_reset() {
  resets_.fetch_add(1);
  const std::lock_guard no_unmap(workers_.front()->reader());
  for (auto& worker : workers_) {
    const Turn turn(*worker);
    worker->quiesce_all(registers_->gone());
  }
}

bool SoftController::Core::drained() {
  return std::all_of(workers_.begin(), workers_.end(), [](const auto& worker) {
    const Turn turn(*worker);
    return worker->in_drive() == 0;
  });
}

void SoftController::Core::end_reset() {
  for (auto& worker : workers_) {
    const Turn turn(*worker);
    worker->forget_queues();
  }
  admin_.reset();
  enable_cache(has_cache_);
  state_ = State::kDisabled;
  set_status(~0u, 0, false);
}

void SoftController::Core::shut_down(bool normal) {
  set_status(kCstsShstMask, kCstsShstOccurring);
  if (normal) {
    for (const SoftNamespaceState& space : rules_.namespaces) {
      if (space.medium == nullptr || !space.medium->needs_flush()) continue;
      MediumRequest flush;
      flush.op = MediumRequest::Op::kFlush;
      int error = 0;
      space.medium->run({&flush, 1}, [&](MediumRequest& request) { error = request.error; });
      if (error != 0) return fail();
    }
  }
  set_status(kCstsShstMask, kCstsShstComplete);
}

void SoftController::Core::power_cycle() {
  halted_.store(true, std::memory_order_release);
  while (true) {
    for (auto& worker : workers_) worker->turn().lock();
    bool still = true;
    for (auto& worker : workers_) {
      worker->quiesce_all(true);
      still &= worker->in_drive() == 0;
    }
    if (still) {
      for (auto& worker : workers_) worker->forget_queues();
      admin_.reset();
      power_on();
    }
    for (auto& worker : workers_) worker->turn().unlock();
    if (still) return;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

SoftControllerCounters SoftController::Core::counters() {
  SoftControllerCounters sum;
  for (auto& worker : workers_) {
    const SoftWorker::Counts& counts = worker->counts();
    sum.commands += counts.commands.load();
    sum.completions += counts.completions.load();
    sum.read_bytes += counts.read_bytes.load();
    sum.written_bytes += counts.written_bytes.load();
    sum.cpu_ns += worker->cpu_ns();
    worker->turn().lock();
    sum.outstanding += worker->outstanding();
    worker->turn().unlock();
  }
  for (const auto& runner : runners_) sum.cpu_ns += runner->cpu_ns();
  sum.resets = resets_.load();
  return sum;
}

Status SoftController::Core::attach(CopyEngine& engine) {
  // Some for commands with host memory in them too; media that are no memory need it for every command.
  const bool in_memory = std::all_of(rules_.namespaces.begin(), rules_.namespaces.end(), [](const auto& space) {
    return space.medium == nullptr || space.medium->in_memory() != nullptr;
  });
  const std::size_t staging =
      std::clamp<std::size_t>(2 * rules_.max_transfer, in_memory ? 1 << 20 : kStagingBytes, kMostStagingBytes);
  for (auto& worker : workers_) {
    auto copies = EngineCopies::open(engine, staging);
    if (!copies) {
      detach(engine);
      return copies.error();
    }
    const std::lock_guard turn(worker->turn());
    worker->attach(std::move(*copies));
  }
  return {};
}

void SoftController::Core::detach(CopyEngine& engine) {
  for (auto& worker : workers_) {
    while (true) {
      {
        const std::lock_guard turn(worker->turn());
        if (worker->detach(engine)) break;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
}

}  // namespace tardis::nvme
