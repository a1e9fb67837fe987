// SPDX-License-Identifier: Apache-2.0
// A controller that a script leads: registers of any value, Identify data of any content, completions of any kind. It
// has no thread; it moves when its client touches its registers.
#pragma once

#include <sys/mman.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "nvme/dma.h"
#include "nvme/register_window.h"
#include "nvme/spec.h"
#include "nvme_fuzz_engine.h"
#include "nvme_fuzz_fake_data.h"

namespace tardis::nvme::fuzz {

// Addresses are pointers; what is not mapped is not reached.
class TrackingMapper final : public DmaMapper {
 public:
  explicit TrackingMapper(const Findings& findings) : findings_(findings) {}

  Result<std::uint64_t> map(void* memory, std::size_t bytes) override {
    const auto address = reinterpret_cast<std::uint64_t>(memory);
    const auto next = ranges_.upper_bound(address);
    findings_.expect(next == ranges_.end() || next->first >= address + bytes, "overlapping ranges are mapped");
    ranges_[address] = bytes;
    return address;
  }
  Status unmap(void* memory) override {
    findings_.expect(ranges_.erase(reinterpret_cast<std::uint64_t>(memory)) == 1, "what is not mapped is unmapped");
    return {};
  }
  std::byte* reach(std::uint64_t address, std::size_t bytes) const {
    auto after = ranges_.upper_bound(address);
    if (after == ranges_.begin()) return nullptr;
    --after;
    const std::uint64_t offset = address - after->first;
    if (offset > after->second || bytes > after->second - offset) return nullptr;
    return reinterpret_cast<std::byte*>(address);
  }
  bool empty() const { return ranges_.empty(); }

 private:
  const Findings& findings_;
  std::map<std::uint64_t, std::size_t> ranges_;
};

class FakeController final : public RegisterWindow {
 public:
  enum class Action : std::uint8_t {
    kGood,
    kStatus,  // `value` is the status
    kLost,
    kLate,  // answered when the registers are touched next
    kTwice,
    kRaw,  // `entry` instead, mended as `argument` says
    kGoodThenRaw,
    kFatal,     // CSTS.CFS, and no answer
    kGone,      // all registers are ones, or zeros
    kRegister,  // the register `place` becomes `value`; answered
    kPatch,     // not an action: `value` at `place` of the Identify data that `argument` names
  };
  static constexpr int kActions = 11;
  struct Step {
    std::uint8_t action, good_before;  // so many commands are answered well before
    std::uint8_t argument, width;
    std::uint16_t place, reserved;
    std::uint32_t value;
    CompletionEntry entry;
  };
  static_assert(sizeof(Step) == 32);
  // What it does with CC, and when the script is over.
  enum Mood : std::uint8_t {
    kNeverReady = 1,
    kFatalWhenEnabled = 2,
    kAlwaysReady = 4,
    kNoShutdown = 8,
    kSilentAtEnd = 16,
  };
  struct Head {
    std::uint64_t capabilities;  // changed bits
    std::uint32_t version, status, configuration;
    std::uint8_t mood, block_shift;
    std::uint16_t options;  // of who drives it
  };
  static_assert(sizeof(Head) == 24);

  static constexpr std::uint32_t kBytes = 8192;

  FakeController(const Head& head, std::vector<Step> script, TrackingMapper& mapper, const Findings& findings)
      : mapper_(mapper), findings_(findings), mood_(head.mood) {
    // Behind the window is nothing that may be touched.
    memory_ = static_cast<std::byte*>(
        ::mmap(nullptr, kReserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    findings.expect(memory_ != MAP_FAILED && ::mprotect(memory_, kBytes, PROT_READ | PROT_WRITE) == 0, "no memory");
    const std::uint64_t capabilities = Capabilities::of(64, 500, 0, 12, 16).raw ^ head.capabilities;
    std::memcpy(memory_ + kRegCap, &capabilities, sizeof capabilities);
    word(kRegVs) = 0x00010400 ^ head.version;
    word(kRegCsts) = head.status;
    word(kRegCc) = head.configuration;
    fill_identify(head.block_shift % 2 == 0 ? 12 : 9);
    for (const Step& step : script) {
      if (step.action % kActions == static_cast<int>(Action::kPatch)) {
        patch(step);
      } else {
        script_.push_back(step);
      }
    }
    skip_ = script_.empty() ? 0 : script_.front().good_before % 64;
  }
  ~FakeController() override { ::munmap(memory_, kReserved); }

  std::uint32_t read32(std::uint32_t offset) override {
    findings_.expect(offset % 4 == 0 && offset < kRegDoorbells, "a register is read that does not exist");
    serve();
    return word(offset);
  }
  std::uint64_t read64(std::uint32_t offset) override {
    return read32(offset) | std::uint64_t{read32(offset + 4)} << 32;
  }
  void write32(std::uint32_t offset, std::uint32_t value) override {
    findings_.expect(offset % 4 == 0 && offset < kRegDoorbells, "a register is written that does not exist");
    if (gone_) return;
    word(offset) = value;
    if (offset == kRegCc) configure(value);
  }
  void write64(std::uint32_t offset, std::uint64_t value) override {
    write32(offset, static_cast<std::uint32_t>(value));
    write32(offset + 4, static_cast<std::uint32_t>(value >> 32));
  }
  volatile std::uint32_t* doorbells() override { return &word(kRegDoorbells); }
  std::uint32_t bytes() const override { return kBytes; }
  void notify() override { serve(); }

  // Blocks of which some completion said that all is well.
  using Blocks = std::set<std::pair<std::uint8_t, std::uint64_t>>;  // opcode and block
  Blocks& succeeded() { return succeeded_; }
  std::uint64_t flushes() const { return flushes_; }
  // It said of something that it was done, and has not done it: then data need not be right.
  bool lied() const { return lied_; }
  void set_block_bytes(std::uint32_t bytes) { block_bytes_ = bytes; }  // of the namespaces, as its client knows them

 private:
  static constexpr std::size_t kReserved = 1 << 20;
  struct Queue {
    std::uint64_t sq = 0, cq = 0;
    std::uint32_t sq_entries = 0, cq_entries = 0, sq_head = 0, cq_tail = 0;
    bool phase = true;
    std::map<std::uint16_t, SubmissionEntry> outstanding;
  };

  std::uint32_t& word(std::uint32_t offset) { return *reinterpret_cast<std::uint32_t*>(memory_ + offset); }
  // Not as the register says now: where the script changes it later, the client goes on with the doorbells that it
  // knows, and what lies at others is no tail. Commands would be executed that nobody gave.
  std::uint32_t stride() const { return known_capabilities_.doorbell_stride(); }

  void fill_identify(std::uint8_t block_shift) {
    auto& controller = *reinterpret_cast<IdentifyController*>(pages_[0].data());
    controller.vendor = 0x1b36;
    controller.mdts = 3;
    controller.sqes = 0x66;
    controller.cqes = 0x44;
    controller.max_commands = 64;
    controller.namespaces = 2;
    controller.volatile_cache = 1;
    controller.sgls = kSglAnyAlignment;
    controller.retry_delay_100ms[0] = 0;
    auto& space = *reinterpret_cast<IdentifyNamespace*>(pages_[1].data());
    space.size_blocks = space.capacity_blocks = 2048;
    space.format_table[0].block_shift = block_shift;
    auto* const list = reinterpret_cast<std::uint32_t*>(pages_[2].data());
    list[0] = 1;
    list[1] = 5;
  }
  void patch(const Step& step) {
    auto& page = pages_[step.argument % pages_.size()];
    const std::size_t bytes = std::size_t{1} << step.width % 3;
    // Offsets with a meaning are below 2 KiB; a namespace has most below 256.
    const std::size_t place = step.place % (page.size() - bytes);
    std::memcpy(page.data() + place, &step.value, bytes);
  }

  void configure(std::uint32_t value) {
    std::uint32_t& status = word(kRegCsts);
    if ((value & kCcEnable) == 0) {
      queues_.clear();
      late_.clear();
      if ((mood_ & kAlwaysReady) == 0) status = 0;
      return;
    }
    if (queues_.empty()) {
      Queue& admin = queues_[0];
      std::memcpy(&admin.sq, memory_ + kRegAsq, 8);
      std::memcpy(&admin.cq, memory_ + kRegAcq, 8);
      admin.sq_entries = (word(kRegAqa) & 0xfff) + 1;
      admin.cq_entries = (word(kRegAqa) >> 16 & 0xfff) + 1;
      for (std::uint32_t offset = kRegDoorbells; offset < kBytes; offset += 4) word(offset) = 0;
      if ((mood_ & kNeverReady) == 0) status |= kCstsReady;
      if ((mood_ & kFatalWhenEnabled) != 0) status |= kCstsFatal;
    }
    if ((value & kCcShnMask) != 0 && (mood_ & kNoShutdown) == 0) status |= kCstsShstComplete;
  }

  void serve() {
    if (gone_) return;
    for (auto& [id, entry] : std::exchange(late_, {})) post(id, entry);
    std::vector<std::uint16_t> ids;
    for (const auto& [id, queue] : queues_) ids.push_back(id);
    for (const std::uint16_t id : ids) {
      for (std::uint32_t taken = 0; taken < 4096; ++taken) {
        const auto found = queues_.find(id);
        if (found == queues_.end() || gone_) break;
        Queue& queue = found->second;
        const std::uint32_t offset = sq_tail_doorbell(id, stride());
        if (queue.sq_entries == 0 || offset >= kBytes) break;
        const std::uint32_t tail = word(offset);
        if (tail == queue.sq_head || tail >= queue.sq_entries) break;
        const std::byte* at =
            mapper_.reach(queue.sq + queue.sq_head * sizeof(SubmissionEntry), sizeof(SubmissionEntry));
        if (at == nullptr) break;
        SubmissionEntry entry;
        std::memcpy(&entry, at, sizeof entry);
        queue.sq_head = (queue.sq_head + 1) % queue.sq_entries;
        queue.outstanding[entry.command_id] = entry;
        act(id, entry);
      }
    }
  }

  void act(std::uint16_t id, const SubmissionEntry& command) {
    Step step{};
    if (script_.empty()) {
      if ((mood_ & kSilentAtEnd) != 0) return;
    } else if (skip_ > 0) {
      --skip_;
    } else {
      step = script_.front();
      script_.pop_front();
      skip_ = script_.empty() ? 0 : script_.front().good_before % 64;
    }
    switch (static_cast<Action>(step.action % kActions)) {
      case Action::kGood:
      case Action::kPatch:
        return post(id, good(id, command));
      case Action::kStatus: {
        CompletionEntry entry = answer(id, command);
        entry.status = static_cast<std::uint16_t>(step.value << 1);
        lied_ |= CommandStatus::of(entry).ok();
        return post(id, entry);
      }
      case Action::kLost:
        return;
      case Action::kLate:
        late_.push_back({id, good(id, command)});
        return;
      case Action::kTwice: {
        const CompletionEntry entry = good(id, command);
        post(id, entry);
        return post(id, entry);
      }
      case Action::kGoodThenRaw:
        post(id, good(id, command));
        [[fallthrough]];
      case Action::kRaw: {
        CompletionEntry entry = step.entry;
        if ((step.argument & 1) != 0) entry.command_id = command.command_id;
        if ((step.argument & 2) != 0) entry.sq_id = id;
        if ((step.argument & 4) != 0) entry.sq_head = static_cast<std::uint16_t>(queues_[id].sq_head);
        lied_ |= CommandStatus::of(entry).ok();
        return post(id, entry, (step.argument & 8) != 0);
      }
      case Action::kFatal:
        word(kRegCsts) |= kCstsFatal;
        return;
      case Action::kGone:
        gone_ = true;
        for (std::uint32_t offset = 0; offset < kRegDoorbells; offset += 4) {
          word(offset) = (step.argument & 1) != 0 ? 0 : kRegisterGone;
        }
        return;
      case Action::kRegister:
        word(step.place % 20 * 4) = step.value;
        return post(id, good(id, command));
    }
  }

  CompletionEntry answer(std::uint16_t id, const SubmissionEntry& command) {
    CompletionEntry entry{};
    entry.command_id = command.command_id;
    entry.sq_id = id;
    entry.sq_head = static_cast<std::uint16_t>(queues_[id].sq_head);
    return entry;
  }
  // Executes it, as far as a fake does.
  CompletionEntry good(std::uint16_t id, const SubmissionEntry& command) {
    CompletionEntry entry = answer(id, command);
    if (id != 0) {
      if (!lied_) move_data(command);
      return entry;
    }
    const auto queue = static_cast<std::uint16_t>(command.cdw10);
    switch (static_cast<AdminOpcode>(command.opcode)) {
      case AdminOpcode::kIdentify: {
        static constexpr std::size_t kPageOf[] = {1, 0, 2};
        if (kPageOf[command.cdw10 % 3] == 0) {
          // Its client reads the register next, before it has other queues than this one, whose tail is at one place
          // whatever the stride.
          std::memcpy(&known_capabilities_.raw, memory_ + kRegCap, sizeof known_capabilities_.raw);
        }
        std::byte* to = mapper_.reach(command.prp.prp1, kIdentifyBytes);
        findings_.expect(to != nullptr, "Identify names memory that is not mapped");
        std::memcpy(to, pages_[kPageOf[command.cdw10 % 3]].data(), kIdentifyBytes);
        break;
      }
      case AdminOpcode::kSetFeatures:
        entry.result = command.cdw11;
        break;
      case AdminOpcode::kCreateCq:
        queues_[queue].cq = command.prp.prp1;
        queues_[queue].cq_entries = (command.cdw10 >> 16) + 1;
        findings_.expect(
            mapper_.reach(command.prp.prp1, queues_[queue].cq_entries * sizeof(CompletionEntry)) != nullptr,
            "a completion queue lies in memory that is not mapped");
        break;
      case AdminOpcode::kCreateSq:
        queues_[queue].sq = command.prp.prp1;
        queues_[queue].sq_entries = (command.cdw10 >> 16) + 1;
        word(sq_tail_doorbell(queue, stride()) % kBytes) = 0;
        findings_.expect(
            mapper_.reach(command.prp.prp1, queues_[queue].sq_entries * sizeof(SubmissionEntry)) != nullptr,
            "a submission queue lies in memory that is not mapped");
        break;
      case AdminOpcode::kDeleteSq:
        if (queue != 0) queues_.erase(queue);
        break;
      default:
        break;
    }
    return entry;
  }

  void move_data(const SubmissionEntry& command) {
    const bool read = command.opcode == static_cast<std::uint8_t>(IoOpcode::kRead);
    if (!read && command.opcode != static_cast<std::uint8_t>(IoOpcode::kWrite)) return;
    const std::size_t bytes = std::size_t{command.blocks()} * block_bytes_;
    const auto& identity = *reinterpret_cast<const IdentifyController*>(pages_[0].data());
    const std::uint32_t shift = identity.mdts + known_capabilities_.min_page_shift();
    findings_.expect(identity.mdts == 0 || shift > 62 || bytes <= std::uint64_t{1} << shift,
                     "a command moves more than MDTS allows");
    const CommandMemory memory(mapper_, command, bytes, findings_);
    std::vector<std::uint8_t> data(bytes);
    fill_pattern(command.start_block() * block_bytes_, data.data(), bytes);
    if (read) {
      memory.write(data.data());
    } else {
      findings_.expect(memory.holds(data.data()), "a command writes other data than its client did");
    }
  }

  void post(std::uint16_t id, CompletionEntry entry, bool own_phase = false) {
    const auto found = queues_.find(id);
    if (found == queues_.end() || found->second.cq_entries == 0) return;
    Queue& queue = found->second;
    std::byte* at = mapper_.reach(queue.cq + queue.cq_tail * sizeof entry, sizeof entry);
    if (at == nullptr) return;
    if (!own_phase) entry.status = static_cast<std::uint16_t>((entry.status & ~1) | (queue.phase ? 1 : 0));
    std::memcpy(at, &entry, sizeof entry);
    if (++queue.cq_tail == queue.cq_entries) {
      queue.cq_tail = 0;
      queue.phase = !queue.phase;
    }
    const auto command = queue.outstanding.find(entry.command_id);
    if (id == 0 || command == queue.outstanding.end() || !CommandStatus::of(entry).ok()) return;
    const SubmissionEntry& done = command->second;
    if (done.opcode == static_cast<std::uint8_t>(IoOpcode::kFlush)) {
      ++flushes_;
      return;
    }
    for (std::uint32_t i = 0; i < done.blocks(); ++i) succeeded_.insert({done.opcode, done.start_block() + i});
  }

  TrackingMapper& mapper_;
  const Findings& findings_;
  const std::uint8_t mood_;
  std::byte* memory_ = nullptr;
  std::array<std::array<std::byte, kIdentifyBytes>, 3> pages_{};  // controller, namespace, list of namespaces
  std::deque<Step> script_;
  std::uint32_t skip_ = 0;
  bool gone_ = false, lied_ = false;
  std::uint32_t block_bytes_ = 512;
  Capabilities known_capabilities_{};  // as its client reads them with the controller's Identify data
  std::map<std::uint16_t, Queue> queues_;
  std::vector<std::pair<std::uint16_t, CompletionEntry>> late_;
  Blocks succeeded_;
  std::uint64_t flushes_ = 0;
};

}  // namespace tardis::nvme::fuzz
