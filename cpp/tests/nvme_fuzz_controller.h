// SPDX-License-Identifier: Apache-2.0
// Fuzz target: a software controller with a client that writes any command, doorbell and register, and takes its memory
// away. The controller never touches what is not mapped, answers a command once at most, and after a reset serves as
// well as ever. As long as the client keeps to the rules of queues, whatever its commands say, each gets an answer.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "nvme_fuzz_hostile.h"

namespace tardis::nvme::fuzz {

class ControllerTarget final : public Target {
 public:
  enum class Action : std::uint8_t {
    kCommand,
    kCommands,  // the same several times, under consecutive ids
    kData,      // 64 bytes of memory, e.g. of a PRP list or an SGL segment
    kWait,
    kDoorbell,       // any value, through the window
    kQuietDoorbell,  // stored to the page
    kRegister,
    kRegister64,
    kReadRegister,
    kReset,
    kUnmap,
    kMap,
    kPower,  // cut, or removed and put in again
  };
  static constexpr int kActions = 13;
  struct Record {
    Action action;
    std::uint8_t queue;
    std::uint16_t argument;
    std::uint32_t value;
    SubmissionEntry entry;
  };
  struct Head {
    std::uint8_t identity, block_shift, threads, sgl, sgl_rules, mdts, stride, queues;
    std::uint8_t fault, fault_odds, fault_delay, fault_data;
    std::uint16_t fault_status;
    std::uint8_t sgl_blocks, end;  // see Session::reset()
  };
  static_assert(sizeof(Head) == 16);
  static constexpr std::size_t kRecordBytes = 72;

  const char* name() const override { return "controller"; }
  Shape shape() const override {
    return {sizeof(Head), kRecordBytes, 24, {{0, 1},  {1, 1},  {2, 2},  {4, 4},  {8, 1},  {9, 1},  {10, 2}, {12, 4},
                                             {24, 8}, {32, 8}, {32, 4}, {39, 1}, {40, 4}, {40, 8}, {47, 1}, {48, 4},
                                             {48, 2}, {50, 2}, {52, 4}, {56, 4}, {60, 4}, {32, 2}, {40, 2}}};
  }

  void make_record(Random& random, std::span<std::uint8_t> record) const override {
    const auto action = static_cast<Action>(random() % 4 == 0 ? random() % kActions : random() % 4);
    SubmissionEntry entry{};
    std::uint32_t value = static_cast<std::uint32_t>(interesting(random));
    const auto queue = static_cast<std::uint8_t>(random() % 3);
    if (action == Action::kData) {
      make_data(random, entry);
      value = static_cast<std::uint32_t>(random() % 16 * 4096 + (random() % 2 == 0 ? 0 : 4096 - 64));
    } else {
      queue == 0 ? make_admin(random, entry) : make_io(random, entry);
    }
    record[0] = static_cast<std::uint8_t>(action);
    record[1] = queue;
    const auto argument = static_cast<std::uint16_t>(random());
    std::memcpy(&record[2], &argument, 2);
    std::memcpy(&record[4], &value, 4);
    std::memcpy(&record[8], &entry, sizeof entry);
  }

  void execute(Input input, Findings& findings) override {
    Reader reader(input);
    const auto head = reader.get<Head>();
    DmaSpaceOptions addresses;
    addresses.addresses =
        head.identity % 2 == 0 ? DmaSpaceOptions::Addresses::kTranslated : DmaSpaceOptions::Addresses::kIdentity;
    DmaSpace space(addresses);
    Session session(head, space, findings);
    while (!reader.empty()) {
      Record record{};
      record.action = static_cast<Action>(reader.get<std::uint8_t>() % kActions);
      record.queue = reader.get<std::uint8_t>();
      record.argument = reader.get<std::uint16_t>();
      record.value = reader.get<std::uint32_t>();
      record.entry = reader.get<SubmissionEntry>();
      session.step(record);
    }
    session.finish();
  }

 private:
  static std::uint64_t some_address(Random& random, bool aligned) {
    const std::uint32_t region = random() % 12 == 0  ? static_cast<std::uint32_t>(random() % HostileMemory::kRegions)
                                 : random() % 4 == 0 ? HostileMemory::kMoreData
                                                     : HostileMemory::kData;
    std::uint64_t offset = random() % 17 * 4096 + (aligned ? 0 : random() % 4096 / 4 * 4);
    if (!aligned && random() % 4 == 0) offset = HostileMemory::bytes(region) - (std::uint64_t{4} << random() % 10);
    return HostileMemory::symbol(region, offset);
  }
  static void make_data(Random& random, SubmissionEntry& entry) {
    std::array<std::uint64_t, 8> words{};
    if (random() % 2 == 0) {
      for (auto& word : words) word = some_address(random, random() % 8 != 0);  // of a PRP list
    } else {
      for (std::size_t i = 0; i < 8; i += 2) {
        const SglDescriptor descriptor = some_descriptor(random);
        std::memcpy(&words[i], &descriptor, sizeof descriptor);
      }
    }
    std::memcpy(static_cast<void*>(&entry), words.data(), sizeof entry);
  }
  static SglDescriptor some_descriptor(Random& random) {
    static constexpr std::uint32_t kLengths[] = {0, 4, 16, 32, 48, 64, 512, 1024, 4080, 4096, 8192, 65536};
    auto descriptor = SglDescriptor::of(static_cast<SglType>(random() % 4), some_address(random, random() % 2 == 0),
                                        kLengths[random() % std::size(kLengths)]);
    if (random() % 16 == 0) descriptor.type = static_cast<std::uint8_t>(random());
    return descriptor;
  }
  static void make_io(Random& random, SubmissionEntry& entry) {
    static constexpr IoOpcode kOpcodes[] = {IoOpcode::kFlush, IoOpcode::kWrite,       IoOpcode::kRead,
                                            IoOpcode::kRead,  IoOpcode::kWriteZeroes, IoOpcode::kDatasetManagement};
    entry.opcode = random() % 16 == 0 ? static_cast<std::uint8_t>(random())
                                      : static_cast<std::uint8_t>(kOpcodes[random() % std::size(kOpcodes)]);
    entry.command_id = static_cast<std::uint16_t>(random() % 32);
    entry.namespace_id = random() % 8 == 0 ? static_cast<std::uint32_t>(interesting(random)) : 1;
    entry.prp = {some_address(random, random() % 4 == 0), some_address(random, random() % 4 != 0)};
    if (random() % 3 == 0) {
      entry.set_data_pointer(random() % 8 == 0 ? DataPointer::kSglMetadata : DataPointer::kSgl);
      entry.sgl = some_descriptor(random);
    }
    entry.set_start_block(random() % 8 == 0 ? interesting(random) : random() % 64);
    entry.cdw12 = static_cast<std::uint32_t>(random() % 4 == 0 ? interesting(random) : random() % 20);
  }
  static void make_admin(Random& random, SubmissionEntry& entry) {
    static constexpr std::uint8_t kOpcodes[] = {0, 1, 2, 4, 5, 6, 6, 8, 9, 10, 12};
    entry.opcode = random() % 16 == 0 ? static_cast<std::uint8_t>(random()) : kOpcodes[random() % std::size(kOpcodes)];
    entry.command_id = static_cast<std::uint16_t>(random() % 32);
    entry.namespace_id = static_cast<std::uint32_t>(random() % 3);
    entry.prp = {some_address(random, random() % 4 != 0), some_address(random, true)};
    entry.cdw10 = static_cast<std::uint32_t>(random() % 3 == 0 ? interesting(random) : random() % 12);
    if (random() % 2 == 0) entry.cdw10 |= static_cast<std::uint32_t>(random() % (random() % 4 == 0 ? 320 : 20)) << 16;
    entry.cdw11 = static_cast<std::uint32_t>(random() % 3 == 0 ? interesting(random) : random() % 4);
    if (random() % 2 == 0) entry.cdw11 |= static_cast<std::uint32_t>(random() % 4) << 16;
  }

  class Session {
   public:
    Session(const Head& head, DmaSpace& space, Findings& findings)
        : findings_(findings), memory_(space, findings), cuts_power_(head.end % 4 == 3) {
      SoftControllerOptions options;
      auto medium = MemoryMedium::create(kMediumBytes);
      findings.expect(static_cast<bool>(medium), "no medium");
      options.namespaces.push_back(
          {std::shared_ptr<Medium>(std::move(*medium)), head.block_shift % 2 == 0 ? 12u : 9u, 0, 0});
      options.max_queue_entries = 300;  // a ring of so many is longer than what is mapped for rings
      options.queue_pairs = 4;
      options.threads = 1 + head.threads % 2;
      static constexpr SglSupport kSgl[] = {kSglAnyAlignment, kSglDword, kSglNone};
      options.sgl = kSgl[head.sgl % 3];
      options.sgl_bit_bucket = (head.sgl_rules & 1) != 0;
      options.sgl_longer_than_data = (head.sgl_rules & 2) != 0;
      options.sgl_blocks = head.sgl_blocks % 8;
      options.mdts = head.mdts % 6;
      options.async_event_limit = kPendingEvents - 1;
      options.doorbell_stride = head.stride % 3;
      options.timeout_ms = 500;
      options.spin = std::chrono::microseconds(0);  // there may be one processor for all threads
      options.violations_kept = 64;
      faults_ = options.faults = std::make_shared<FaultPlan>();
      const bool fault = head.fault % 16 < kFaultKinds && head.fault >= 128;
      const bool early = head.fault_data % 4 >= 2;  // it may keep the queues from being created
      if (fault && early) add_fault(head);
      auto made = SoftController::create(std::move(options), space);
      findings.expect(static_cast<bool>(made), "a controller cannot be made");
      controller_ = std::move(*made);
      for (std::uint16_t id = 0; id < kQueues; ++id) {
        queues_[id] = std::make_unique<HostileQueue>(*controller_, memory_, id);
      }
      enable(kUsualCc);
      if (head.queues < 224) {
        for (std::uint16_t id = 1; id < kQueues; ++id) {
          const bool created = create_queue(id);
          findings.expect(created || faulty_, "a queue of a new controller cannot be created");
        }
      } else {
        lawful_ = false;  // the doorbells of its queues do not exist
      }
      if (fault && !early) add_fault(head);
    }

    void step(const Record& record) {
      switch (record.action) {
        case Action::kCommand:
          submit(record.queue % kQueues, record.entry, 1);
          break;
        case Action::kCommands:
          submit(record.queue % kQueues, record.entry, 1 + record.argument % 8);
          break;
        case Action::kData:
          write_data(record);
          break;
        case Action::kWait:
          settle();
          break;
        case Action::kDoorbell:
        case Action::kQuietDoorbell:
          doorbell(record);
          break;
        case Action::kRegister:
          lawful_ = false;
          controller_->window().write32(record.argument % 3 == 0 ? record.value % 0x1100 : record.argument % 0x70 & ~3u,
                                        record.argument % 2 == 0 ? record.value : record.entry.cdw10);
          break;
        case Action::kRegister64:
          lawful_ = false;
          controller_->window().write64(record.argument % 2 == 0 ? kRegAsq : record.argument % 0x40u,
                                        memory_.resolve(record.entry.prp.prp1));
          break;
        case Action::kReadRegister:
          controller_->window().read32(record.value % 0x1100);
          break;
        case Action::kReset:
          lawful_ = false;
          controller_->window().write32(kRegCc, 0);
          if (record.argument % 2 == 0) enable(record.argument % 8 == 0 ? record.value : kUsualCc);
          break;
        case Action::kUnmap:
          lawful_ = false;
          memory_.unmap(record.argument % HostileMemory::kNeverMapped);
          break;
        case Action::kMap:
          lawful_ = false;
          memory_.map(record.argument % HostileMemory::kNeverMapped);
          break;
        case Action::kPower:
          lawful_ = false;
          if (record.argument % 4 == 0) {
            controller_->cut_power();
          } else if (record.argument % 4 == 1) {
            controller_->remove(record.argument % 8 == 1);
          } else if (record.argument % 4 == 2) {
            controller_->insert();
          } else {
            controller_->fail();
          }
          break;
      }
    }

    // After all of it the controller works, and works right.
    void finish() {
      settle();
      for (const Violation& violation : controller_->take_violations()) {
        findings_.note("violation", static_cast<std::uint64_t>(violation.kind), violation.queue == 0);
      }
      faults_->clear();
      for (std::uint32_t region = 0; region < HostileMemory::kNeverMapped; ++region) memory_.map(region);
      reset();
      enable(kUsualCc);
      findings_.expect(wait_ready(true), "CSTS.RDY does not become 1 after a reset");
      findings_.expect((controller_->window().read32(kRegCsts) & kCstsFatal) == 0, "CSTS.CFS outlives a reset");
      const SoftControllerCounters counters = controller_->counters();
      findings_.expect(counters.outstanding == 0, "commands are outstanding after a reset");
      findings_.expect(faulty_ || counters.completions <= counters.commands, "more completions than commands");
      (void)controller_->take_violations();
      findings_.expect(create_queue(1), "a queue cannot be created after a reset");
      // Two pages are written and read back under ids that have been used, each answered once.
      std::byte* const data = memory_.at(HostileMemory::kData);
      for (std::size_t i = 0; i < 4096; ++i) data[i] = static_cast<std::byte>(i * 7 + i / 256);
      std::memset(data + 8192, 0xee, 4096);
      const std::uint64_t address = memory_.address(HostileMemory::kData);
      check_one(IoOpcode::kWrite, address);
      check_one(IoOpcode::kRead, address + 8192);
      findings_.expect(std::memcmp(data, data + 8192, 4096) == 0, "a wrong byte is read after a reset");
      findings_.expect(!queues_[1]->wait(0), "a command is answered twice after a reset");
      const std::vector<Violation> violations = controller_->take_violations();
      findings_.expect(violations.empty(), "a client that does nothing wrong is blamed: " + describe(violations));
    }

   private:
    static constexpr std::uint16_t kQueues = 3;
    static constexpr std::uint64_t kMediumBytes = 1 << 20;
    static constexpr std::uint64_t kPatienceNs = 10'000'000'000, kFaultyPatienceNs = 2'000'000;
    static constexpr std::uint32_t kUsualCc =
        kCcEnable | kSubmissionEntryShift << kCcIosqesShift | kCompletionEntryShift << kCcIocqesShift;

    void add_fault(const Head& head) {
      faulty_ = true;
      lawful_ = false;
      FaultRule rule;
      rule.kind = static_cast<FaultKind>(head.fault % 16);
      rule.probability = (1 + head.fault_odds % 8) / 8.0;
      rule.count = 4;
      rule.delay = std::chrono::microseconds(head.fault_delay);
      rule.late_data = head.fault_data % 2 != 0;
      rule.status = head.fault_status;
      faults_->add(rule);
    }

    // From whatever state it is in, with or without its power being cut first.
    void reset() {
      RegisterWindow& window = controller_->window();
      if (cuts_power_) controller_->insert();
      do {  // again if a command that it still had removed it
        if (gone()) controller_->insert();
        if ((window.read32(kRegCc) & kCcEnable) == 0) {
          enable(kUsualCc);
          findings_.expect(wait_ready(true) || gone(), "CSTS.RDY does not become 1 after CC.EN=1");
        }
        window.write32(kRegCc, 0);
        findings_.expect(wait_ready(false) || gone(), "CSTS.RDY does not become 0 after CC.EN=0");
      } while (gone());
    }
    bool wait_ready(bool ready) {
      const std::uint64_t end = monotonic_ns() + kPatienceNs;
      while (((controller_->window().read32(kRegCsts) & kCstsReady) != 0) != ready) {
        if (gone() || monotonic_ns() > end) return false;
        pause();
      }
      return true;
    }
    bool gone() {
      const std::uint32_t version = controller_->window().read32(kRegVs);
      return version == 0 || version == kRegisterGone;
    }
    // Waits for it only where it must work.
    void enable(std::uint32_t cc) {
      RegisterWindow& window = controller_->window();
      if (cc == kUsualCc && !gone() && (window.read32(kRegCc) & kCcEnable) == 0) (void)wait_ready(false);
      for (auto& queue : queues_) queue->restart();
      window.write32(kRegAqa, admin_queue_attributes(HostileQueue::kEntries, HostileQueue::kEntries));
      window.write64(kRegAsq, queues_[0]->sq_address());
      window.write64(kRegAcq, queues_[0]->cq_address());
      window.write32(kRegCc, cc);
      if ((cc & kCcEnable) == 0) return;
      const std::uint64_t end = monotonic_ns() + kPatienceNs;
      while ((window.read32(kRegCsts) & (kCstsReady | kCstsFatal)) == 0 && !gone()) {
        findings_.expect(monotonic_ns() < end, "after CC.EN=1 neither CSTS.RDY nor CFS becomes 1");
        pause();
      }
    }
    bool create_queue(std::uint16_t id) {
      HostileQueue& queue = *queues_[id];
      queue.restart();
      const std::uint32_t identity = queue_identity(HostileQueue::kEntries, id);
      return admin(AdminOpcode::kCreateCq, identity, kQueueContiguous, queue.cq_address()) &&
             admin(AdminOpcode::kCreateSq, identity, kQueueContiguous | std::uint32_t{id} << 16, queue.sq_address());
    }
    bool admin(AdminOpcode opcode, std::uint32_t cdw10, std::uint32_t cdw11, std::uint64_t address) {
      SubmissionEntry entry{};
      entry.opcode = static_cast<std::uint8_t>(opcode);
      entry.command_id = 0x4000;
      entry.cdw10 = cdw10;
      entry.cdw11 = cdw11;
      entry.prp.prp1 = address;
      queues_[0]->put(entry);
      queues_[0]->ring();
      const auto done = queues_[0]->wait(faults_->empty() ? kPatienceNs : kFaultyPatienceNs);
      return done && CommandStatus::of(*done).ok();
    }
    void check_one(IoOpcode opcode, std::uint64_t address) {
      SubmissionEntry entry{};
      entry.opcode = static_cast<std::uint8_t>(opcode);
      entry.command_id = 7;
      entry.namespace_id = 1;
      entry.prp.prp1 = address;
      entry.cdw12 = (4096u >> (controller_->options().namespaces[0].block_shift)) - 1;
      queues_[1]->put(entry);
      queues_[1]->ring();
      const auto done = queues_[1]->wait(kPatienceNs);
      findings_.expect(done.has_value(), "no answer after a reset");
      findings_.expect(done->command_id == 7 && done->sq_id == 1 && CommandStatus::of(*done).ok(),
                       "a wrong answer after a reset");
    }

    // Requests for events have ids of their own, since they need not be answered soon.
    static constexpr std::uint16_t kFirstEventId = 0x5000;
    static constexpr std::uint8_t kPendingEvents = 4;  // more of them are answered with an error
    static bool is_event(std::uint16_t queue, std::uint16_t id) {
      return queue == 0 && id / 256 == kFirstEventId / 256;
    }

    bool names_rings(std::uint64_t word) const {
      const auto region = memory_.region_of(word);
      return region && *region < HostileMemory::kData;
    }
    void submit(std::uint16_t id, const SubmissionEntry& given, std::uint32_t count) {
      SubmissionEntry entry;
      std::array<std::uint64_t, 8> words;
      std::memcpy(words.data(), &given, sizeof given);
      for (const std::size_t i : {2, 3, 4}) {
        if (names_rings(words[i])) lawful_ = false;  // it may write commands and completions itself
        words[i] = memory_.resolve(words[i]);
      }
      std::memcpy(static_cast<void*>(&entry), words.data(), sizeof entry);
      if (id == 0 && (entry.opcode <= 1 || entry.opcode == 4 || entry.opcode == 5)) lawful_ = false;
      const bool event = id == 0 && entry.opcode == static_cast<std::uint8_t>(AdminOpcode::kAsyncEvent);
      for (std::uint32_t i = 0; i < count; ++i) {
        SubmissionEntry one = entry;
        one.command_id = static_cast<std::uint16_t>(entry.command_id + i);
        if (event) {
          one.command_id = static_cast<std::uint16_t>(kFirstEventId + events_++ % 256);
        } else {
          if (is_event(id, one.command_id)) one.command_id ^= 256;
          ++waited_for_;
        }
        queues_[id]->put(one);
        ++submitted_[{id, one.command_id}];
      }
      opcode_ = entry.opcode < 16 ? entry.opcode : 16;
      queues_[id]->ring();
      settle();
    }

    // Takes completions: all that must come, or those that come soon.
    void settle() {
      const std::uint64_t start = monotonic_ns();
      std::uint64_t last = start;
      while (true) {
        const std::uint64_t now = monotonic_ns();
        bool some = false;
        for (auto& queue : queues_) {
          while (const auto done = queue->poll()) {
            some = true;
            completed(*queue, *done);
          }
        }
        if (some) last = now;
        if (lawful_) {
          if (answered_ >= waited_for_ && events_ - answered_events_ <= kPendingEvents) return;
          findings_.expect(now - start < kPatienceNs, "a command of a lawful client is not answered");
        } else if (now - last > kQuietNs || now - start > 100 * kQuietNs) {
          return;
        }
        pause();
      }
    }
    static constexpr std::uint64_t kQuietNs = 50'000;

    void completed(const HostileQueue& queue, const CompletionEntry& entry) {
      findings_.note("status", CommandStatus::of(entry).code_and_type(), opcode_ * 2 + (queue.id() == 0 ? 0 : 1));
      if (!lawful_) return;
      ++(is_event(entry.sq_id, entry.command_id) ? answered_events_ : answered_);
      findings_.expect(entry.sq_id == queue.id(), "a completion names another queue");
      auto known = submitted_.find({entry.sq_id, entry.command_id});
      findings_.expect(known != submitted_.end() && known->second > 0,
                       "a command is answered more often than it was sent");
      --known->second;
    }

    void write_data(const Record& record) {
      const std::uint32_t region = record.argument % 4 == 0 ? HostileMemory::kMoreData : HostileMemory::kData;
      if (!memory_.mapped(region)) return;
      std::array<std::uint64_t, 8> words;
      std::memcpy(words.data(), &record.entry, sizeof words);
      for (std::uint64_t& word : words) {
        if (names_rings(word)) lawful_ = false;
        word = memory_.resolve(word);
      }
      std::memcpy(memory_.at(region) + record.value % (HostileMemory::bytes(region) - sizeof words) / 8 * 8,
                  words.data(), sizeof words);
    }

    void doorbell(const Record& record) {
      lawful_ = false;
      const std::uint32_t stride = controller_->options().doorbell_stride;
      const std::uint32_t offset = record.argument % 2 == 0 ? sq_tail_doorbell(record.queue % 6u, stride)
                                                            : cq_head_doorbell(record.queue % 6u, stride);
      const std::uint32_t value = record.argument % 8 < 4 ? record.value % 32 : record.value;
      if (record.action == Action::kDoorbell) {
        controller_->window().write32(offset, value);
      } else if (offset < controller_->window().bytes()) {
        // Release: what was put into the ring comes before it.
        __atomic_store_n(controller_->window().doorbells() + (offset - kRegDoorbells) / 4, value, __ATOMIC_RELEASE);
      }
    }

    Findings& findings_;
    HostileMemory memory_;
    const bool cuts_power_;
    std::shared_ptr<FaultPlan> faults_;
    std::unique_ptr<SoftController> controller_;
    std::array<std::unique_ptr<HostileQueue>, kQueues> queues_;
    bool faulty_ = false;
    bool lawful_ = true;  // the client has kept the rules of queues, and the controller breaks none on purpose
    std::map<std::pair<std::uint16_t, std::uint16_t>, std::uint32_t> submitted_;
    std::uint64_t waited_for_ = 0, answered_ = 0, events_ = 0, answered_events_ = 0;
    std::uint64_t opcode_ = 0;
  };
};

}  // namespace tardis::nvme::fuzz
