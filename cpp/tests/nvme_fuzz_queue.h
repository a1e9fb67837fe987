// SPDX-License-Identifier: Apache-2.0
// Fuzz target: a queue pair whose controller writes any completion at any time. The model knows what is outstanding.
#pragma once

#include <array>
#include <map>
#include <vector>

#include "nvme/queue.h"
#include "nvme_fuzz_engine.h"

namespace tardis::nvme::fuzz {

class QueueTarget final : public Target {
 public:
  const char* name() const override { return "queue"; }
  // Header: entries of both rings, most commands. Record: action, argument, a command's place, a completion.
  Shape shape() const override {
    return {4, 20, 96, {{0, 1}, {1, 1}, {2, 2}, {4, 4}, {12, 2}, {14, 2}, {16, 2}, {18, 2}}};
  }

  void make_record(Random& random, std::span<std::uint8_t> record) const override {
    static constexpr std::array<Action, 16> kOften = {
        Action::kSubmit, Action::kSubmit, Action::kSubmit, Action::kRing,       Action::kRing, Action::kRing,
        Action::kAnswer, Action::kAnswer, Action::kAnswer, Action::kAnswer,     Action::kPoll, Action::kPoll,
        Action::kPoll,   Action::kPost,   Action::kPost,   Action::kAcknowledge};
    for (auto& byte : record) byte = static_cast<std::uint8_t>(random() % 3 == 0 ? random() : random() % 8);
    record[0] = static_cast<std::uint8_t>(random() % 4 == 0 ? random() % kActions : int(kOften[random() % 16]));
  }

  void execute(Input input, Findings& findings) override {
    Reader reader(input);
    const std::uint32_t sq_entries = kMinQueueEntries + reader.get<std::uint8_t>() % 40;
    const std::uint32_t cq_entries = kMinQueueEntries + reader.get<std::uint8_t>() % 40;
    const std::uint32_t most = 1 + reader.get<std::uint8_t>() % (cq_entries - 1);
    reader.get<std::uint8_t>();
    Run run(sq_entries, cq_entries, most, findings);
    while (!reader.empty()) run.step(reader);
  }

 private:
  enum class Action : std::uint8_t {
    kSubmit,  // several
    kRing,
    kPoll,  // several
    kAcknowledge,
    kQuarantine,
    kReleaseAll,  // and the controller is as new
    kAnswer,      // a completion as it should be, of one of the outstanding commands
    kPost,        // one of the outstanding or any id, the rest as given, where the host looks next
    kScribble,    // bytes as given, anywhere in the ring
  };
  static constexpr int kActions = 9;
  static constexpr std::uint16_t kId = 3;

  struct Known {
    std::uint64_t tag, number;
    bool published = false, quarantined = false;
  };

  class Run {
   public:
    Run(std::uint32_t sq_entries, std::uint32_t cq_entries, std::uint32_t most, Findings& findings)
        : findings_(findings),
          sq_(std::make_unique<SubmissionEntry[]>(sq_entries)),
          cq_(std::make_unique<CompletionEntry[]>(cq_entries)),
          slots_(std::make_unique<CommandSlot[]>(most)),
          shadow_(sq_entries),
          pair_(QueueMemory{sq_.get(), cq_.get(), slots_.get(), &doorbells_[0], &doorbells_[1], sq_entries, cq_entries,
                            most, kId}) {}

    void step(Reader& reader) {
      const auto action = static_cast<Action>(reader.get<std::uint8_t>() % kActions);
      const auto argument = reader.get<std::uint8_t>();
      const auto place = reader.get<std::uint16_t>();
      const auto raw = reader.get<CompletionEntry>();
      switch (action) {
        case Action::kSubmit:
          for (int n = 1 + argument % 8; n > 0; --n) submit();
          break;
        case Action::kRing:
          ring();
          break;
        case Action::kPoll:
          for (int n = 1 + argument % 8; n > 0; --n) poll();
          break;
        case Action::kAcknowledge:
          pair_.acknowledge();
          break;
        case Action::kQuarantine:
          quarantine(place);
          break;
        case Action::kReleaseAll:
          pair_.release_all();
          known_.clear();
          published_ = tail_ = head_ = 0;
          cq_tail_ = taken_ = 0;
          phase_ = host_phase_ = true;
          break;
        case Action::kAnswer:
          answer(place);
          break;
        case Action::kPost: {
          CompletionEntry entry = raw;
          // Near what would be right: the field-aware mutations reach what is just beside it.
          if ((argument & 1) != 0) entry.command_id = static_cast<std::uint16_t>(id_at(place) + (argument >> 5));
          if ((argument & 2) != 0) entry.sq_id = kId;
          if ((argument & 4) != 0) entry.sq_head = static_cast<std::uint16_t>(entry.sq_head % memory().sq_entries);
          if ((argument & 8) == 0) entry.status = static_cast<std::uint16_t>((entry.status & ~1) | (phase_ ? 1 : 0));
          post(entry);
          break;
        }
        case Action::kScribble:
          cq_[place % memory().cq_entries] = raw;
          break;
      }
      check();
      note_state();
    }

   private:
    const QueueMemory& memory() const { return pair_.memory(); }
    std::uint16_t id_at(std::uint16_t place) const {
      if (known_.empty()) return place;
      auto at = known_.begin();
      std::advance(at, place % known_.size());
      return at->first;
    }
    std::uint32_t distance(std::uint32_t from, std::uint32_t to) const {
      return (to + memory().sq_entries - from) % memory().sq_entries;
    }

    void submit() {
      SubmissionEntry entry{};
      const std::uint64_t tag = ++tag_ * 0x9e3779b97f4a7c15u;
      entry.cdw10 = static_cast<std::uint32_t>(tag);
      entry.cdw15 = static_cast<std::uint32_t>(tag >> 32);
      entry.opcode = 2;
      const bool room = pair_.can_submit();
      const std::uint16_t id = pair_.submit(entry, tag);
      findings_.expect(room == (id != kNoCommandId), "can_submit() and submit() say different things");
      if (!room) return findings_.note("full", known_.size() == memory().max_commands);
      findings_.expect(!known_.contains(id), "a command id is used twice");
      findings_.expect(distance(head_, tail_) + 1 < memory().sq_entries, "an entry that may be unread is overwritten");
      entry.command_id = id;
      shadow_[tail_] = entry;
      tail_ = (tail_ + 1) % memory().sq_entries;
      known_[id] = {tag, submitted_++};
    }
    void ring() {
      const std::uint32_t before = tail_doorbell();
      const bool rang = pair_.ring();
      findings_.expect(!rang || tail_doorbell() == tail_, "the tail doorbell is not where entries end");
      findings_.expect(rang || tail_doorbell() == before, "a doorbell was written, and ring() says it was not");
      findings_.note("ring", rang, pair_.suspect());
      if (!rang) return;
      published_ = tail_;
      for (auto& [id, known] : known_) known.published = true;
    }
    void quarantine(std::uint16_t place) {
      const std::uint16_t id = id_at(place);
      const auto found = known_.find(id);
      const bool may = found != known_.end() && found->second.published && !found->second.quarantined;
      findings_.expect(pair_.quarantine(id) == may, "quarantine() takes the wrong commands");
      if (may) found->second.quarantined = true;
    }

    void answer(std::uint16_t place) {
      std::vector<std::uint16_t> ids;
      for (const auto& [id, known] : known_) {
        if (known.published) ids.push_back(id);
      }
      if (ids.empty()) return;
      CompletionEntry entry{};
      entry.command_id = ids[place % ids.size()];
      entry.sq_id = kId;
      entry.sq_head = static_cast<std::uint16_t>(published_);
      entry.status = phase_ ? 1 : 0;
      post(entry);
    }
    void post(const CompletionEntry& entry) {
      cq_[cq_tail_] = entry;
      if (++cq_tail_ == memory().cq_entries) {
        cq_tail_ = 0;
        phase_ = !phase_;
      }
    }

    // Whether the host has to believe what the controller says.
    bool credible(const CompletionEntry& entry) const {
      const auto found = known_.find(entry.command_id);
      return entry.sq_id == kId && entry.sq_head < memory().sq_entries &&
             distance(head_, entry.sq_head) <= distance(head_, published_) && found != known_.end() &&
             found->second.published && submitted_ - found->second.number > distance(entry.sq_head, tail_);
    }
    void poll() {
      const CompletionEntry entry = cq_[taken_];
      const bool is_new = entry.phase() == host_phase_;
      const bool believed = credible(entry);
      Completion out{};
      const PollResult result = pair_.poll(out);
      findings_.expect((result != PollResult::kNothing) == is_new, "what is taken is not what is new");
      if (result == PollResult::kNothing) return;
      findings_.expect((result == PollResult::kCompletion) == believed, "a completion is judged wrongly");
      if (++taken_ == memory().cq_entries) {
        taken_ = 0;
        host_phase_ = !host_phase_;
      }
      if (result == PollResult::kFault) {
        findings_.expect(out.tag == 0, "a fault hands out a tag");
        findings_.expect(pair_.suspect(), "a fault leaves the queue trusted");
        return findings_.note("fault", static_cast<std::uint64_t>(pair_.fault()));
      }
      const auto found = known_.find(out.id);
      findings_.expect(out.id == entry.command_id && found->second.tag == out.tag,
                       "a completion has another command's tag");
      findings_.expect(found->second.quarantined == out.quarantined, "a completion's quarantine is wrong");
      findings_.expect(out.result == entry.result && out.status.ok() == CommandStatus::of(entry).ok(),
                       "a completion is not what the controller wrote");
      findings_.note("completion", out.quarantined, out.status.ok());
      known_.erase(found);
      head_ = entry.sq_head;  // what lies before it is free
    }
    // How full it is, and where: of each number only what is special.
    void note_state() {
      const auto some = [](std::uint64_t n, std::uint64_t most) {
        return n == 0 ? 0u : n == 1 ? 1u : n < most ? 2u : 3u;
      };
      const std::uint32_t in_ring = distance(head_, tail_);
      findings_.note(
          "commands",
          some(pair_.outstanding(), memory().max_commands) * 4 + some(pair_.quarantined(), memory().max_commands),
          some(in_ring, memory().sq_entries - 1) * 4 + some(distance(published_, tail_), in_ring));
      findings_.note("rings", (tail_ < head_ ? 2u : 0u) + (phase_ ? 1u : 0u),
                     static_cast<std::uint64_t>(pair_.fault()) * 2 + (taken_ == cq_tail_ ? 0 : 1));
      findings_.note("turn", some(known_.empty() ? 0 : known_.rbegin()->first / 64, 8), memory().sq_entries == 2);
    }
    void check() {
      findings_.expect(pair_.outstanding() == known_.size(), "outstanding() is not what is outstanding");
      findings_.expect(known_.size() <= memory().max_commands, "more commands than there may be");
      std::uint32_t quarantined = 0;
      for (const auto& [id, known] : known_) quarantined += known.quarantined ? 1 : 0;
      findings_.expect(pair_.quarantined() == quarantined, "quarantined() is not what is in quarantine");
      std::size_t seen = 0;
      pair_.for_each_outstanding([&](const OutstandingCommand& command) {
        ++seen;
        const auto found = known_.find(command.id);
        findings_.expect(found != known_.end() && found->second.tag == command.tag &&
                             found->second.published == command.published &&
                             found->second.quarantined == command.quarantined,
                         "for_each_outstanding() shows what is not so");
      });
      findings_.expect(seen == known_.size(), "for_each_outstanding() leaves some out");
      for (std::uint32_t at = head_; at != tail_; at = (at + 1) % memory().sq_entries) {
        findings_.expect(std::memcmp(&sq_[at], &shadow_[at], sizeof shadow_[at]) == 0,
                         "an entry changed that the controller may still read");
      }
      findings_.expect(tail_doorbell() < memory().sq_entries && doorbells_[1] < memory().cq_entries,
                       "a doorbell was written with a value beyond its queue");
    }

    std::uint32_t tail_doorbell() const { return doorbells_[0]; }

    Findings& findings_;
    std::uint32_t doorbells_[2] = {0, 0};
    std::unique_ptr<SubmissionEntry[]> sq_;
    std::unique_ptr<CompletionEntry[]> cq_;
    std::unique_ptr<CommandSlot[]> slots_;
    std::vector<SubmissionEntry> shadow_;
    QueuePair pair_;

    std::map<std::uint16_t, Known> known_;
    std::uint64_t tag_ = 0, submitted_ = 0;
    std::uint32_t tail_ = 0, published_ = 0, head_ = 0;  // of the submission queue, as a model has them
    std::uint32_t cq_tail_ = 0, taken_ = 0;              // where the controller writes; what the host took
    bool phase_ = true, host_phase_ = true;
  };
};

}  // namespace tardis::nvme::fuzz
