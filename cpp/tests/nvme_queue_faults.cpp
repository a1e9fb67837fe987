// SPDX-License-Identifier: Apache-2.0
// One queue pair against controllers that break the rules, and commands that take too long.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <string>

#include "nvme/queue.h"
#include "nvme_queue_support.h"

namespace tardis::nvme::testing {
namespace {

// ---- faults, one by one

class NvmeQueueOneFault : public ::testing::Test {
 protected:
  NvmeQueueOneFault() : p(8, 16, 11) {
    for (std::uint64_t i = 0; i < 3; ++i) ids[i] = p.submit(10 + i);
    p.queue.ring();
    p.post(ids[0], 1);
    EXPECT_EQ(p.poll(), PollResult::kCompletion);
  }
  // The last post showed that fault; the commands are as they were, and complete once the controller behaves.
  void expect(QueueFault fault) {
    const CompletionEntry bad = p.rings.cq[p.cq_tail - 1];
    const std::uint32_t before = p.queue.outstanding();
    p.last.tag = 99;
    ASSERT_EQ(p.poll(), PollResult::kFault);
    EXPECT_EQ(p.last.tag, 0u);
    EXPECT_EQ(p.last.id, bad.command_id);
    EXPECT_EQ(p.queue.fault(), fault) << fault_text(p.queue.fault());
    EXPECT_EQ(p.queue.fault_entry().command_id, bad.command_id);
    EXPECT_EQ(p.queue.fault_entry().sq_head, bad.sq_head);
    EXPECT_EQ(p.queue.fault_entry().sq_id, bad.sq_id);
    EXPECT_EQ(p.queue.outstanding(), before);
    EXPECT_FALSE(p.queue.can_submit());
    EXPECT_EQ(p.submit(5), kNoCommandId);
    const Stores stores = stores_of(p.rings, [&] { EXPECT_FALSE(p.queue.ring()); });
    EXPECT_FALSE(stores.tail || stores.head);
    EXPECT_EQ(p.poll(), PollResult::kNothing);

    p.post(ids[2], 3);
    ASSERT_EQ(p.poll(), PollResult::kCompletion);
    EXPECT_EQ(p.last.tag, 12u);
    EXPECT_EQ(p.queue.fault(), fault);
    EXPECT_FALSE(p.queue.can_submit());

    p.restart();
    EXPECT_EQ(p.queue.outstanding(), 0u);
    EXPECT_EQ(p.queue.fault(), QueueFault::kNone);
    const std::uint16_t id = p.submit(77);
    EXPECT_NE(id, kNoCommandId);
    EXPECT_TRUE(p.queue.ring());
    EXPECT_EQ(p.rings.doorbells[0], 1u);
    p.post(id, 1);
    EXPECT_EQ(p.poll(), PollResult::kCompletion);
    EXPECT_EQ(p.last.tag, 77u);
  }
  Puppet p;
  std::uint16_t ids[3];
};

TEST_F(NvmeQueueOneFault, OtherSubmissionQueue) {
  p.post(ids[1], 2, kQueueId + 1);
  expect(QueueFault::kWrongQueue);
}
TEST_F(NvmeQueueOneFault, HeadBeyondTheQueue) {
  p.post(ids[1], 8);
  expect(QueueFault::kSqHeadRange);
}
TEST_F(NvmeQueueOneFault, HeadBeyondWhatWasSubmitted) {
  p.post(ids[1], 4);
  expect(QueueFault::kSqHeadMoved);
}
TEST_F(NvmeQueueOneFault, HeadBackwards) {
  p.post(ids[1], 0);
  expect(QueueFault::kSqHeadMoved);
}
TEST_F(NvmeQueueOneFault, HeadAtWhatWasNotGivenYet) {
  p.submit(3);
  p.post(ids[1], 4);
  expect(QueueFault::kSqHeadMoved);
}
TEST_F(NvmeQueueOneFault, IdentifierBeyondTheTable) {
  p.post(static_cast<std::uint16_t>(ids[1] | 0xf), 2);
  expect(QueueFault::kUnknownCommand);
}
TEST_F(NvmeQueueOneFault, IdentifierOfNoCommand) {
  p.post(kNoCommandId, 2);
  expect(QueueFault::kUnknownCommand);
}
TEST_F(NvmeQueueOneFault, DuplicateCompletion) {
  p.post(ids[0], 2);
  expect(QueueFault::kNotOutstanding);
}
TEST_F(NvmeQueueOneFault, IdentifierOfAnotherUse) {
  p.post(static_cast<std::uint16_t>(ids[1] ^ 0x10), 2);
  expect(QueueFault::kNotOutstanding);
}
TEST_F(NvmeQueueOneFault, NeverSubmitted) {
  p.post(5, 2);
  expect(QueueFault::kNotOutstanding);
}
TEST_F(NvmeQueueOneFault, NotGivenYet) {
  p.post(p.submit(3), 2);
  expect(QueueFault::kNotPublished);
}

TEST_F(NvmeQueueOneFault, NotReadYet) {
  p.post(ids[2], 2);
  expect(QueueFault::kSqHeadBehind);
}

TEST(NvmeQueueFault, HeadThatIsStuckIsNoticed) {
  Puppet p(4, 4, 3);
  std::uint16_t ids[3];
  for (std::uint64_t tag = 0; tag < 3; ++tag) ids[tag] = p.submit(tag);
  p.queue.ring();
  for (int i = 0; i < 2; ++i) {
    EXPECT_FALSE(p.queue.suspect());
    p.post(ids[i], 2);
    EXPECT_EQ(p.poll(), PollResult::kCompletion);
  }
  p.post(ids[2], 2);
  EXPECT_EQ(p.poll(), PollResult::kFault);
  EXPECT_EQ(p.queue.fault(), QueueFault::kSqHeadBehind);
}

// An old command's place in the ring is that of newer ones again and again.
TEST(NvmeQueueFault, OldCommandIsReadWhereverTheHeadIs) {
  for (std::uint32_t newer = 0; newer < 12; ++newer) {
    Puppet p(4, 16, 8);
    const std::uint16_t old = p.submit(1);
    p.queue.ring();
    for (std::uint32_t i = 1; i <= newer; ++i) {
      const std::uint16_t id = p.submit(1 + i);
      p.queue.ring();
      p.post(id, (i + 1) % 4);
      ASSERT_EQ(p.poll(), PollResult::kCompletion);
    }
    for (int more = 0; more < 2; ++more) p.submit(50);
    p.queue.ring();
    p.post(old, (newer + 1) % 4);
    ASSERT_EQ(p.poll(), PollResult::kCompletion) << fault_text(p.queue.fault());
    EXPECT_EQ(p.last.tag, 1u);
  }
}

TEST(NvmeQueueFault, FaultTextsDiffer) {
  std::map<std::string, int> texts;
  for (int fault = 0; fault <= static_cast<int>(QueueFault::kDeclared) + 1; ++fault) {
    ++texts[fault_text(static_cast<QueueFault>(fault))];
  }
  EXPECT_EQ(texts.size(), static_cast<std::size_t>(QueueFault::kDeclared) + 2);
}

// ---- commands that take too long

TEST(NvmeQueueLate, QuarantineHoldsTheIdentifierUntilTheLateCompletion) {
  Puppet p(16, 4, 3);
  const std::uint16_t late = p.submit(1);
  EXPECT_FALSE(p.queue.quarantine(late)) << "the controller was not given it";
  p.queue.ring();
  EXPECT_FALSE(p.queue.quarantine(static_cast<std::uint16_t>(late + 4))) << "another use of its index";
  EXPECT_TRUE(p.queue.quarantine(late));
  EXPECT_FALSE(p.queue.quarantine(late));
  EXPECT_FALSE(p.queue.quarantine(kNoCommandId));
  EXPECT_EQ(p.queue.outstanding(), 1u);
  EXPECT_EQ(p.queue.quarantined(), 1u);
  std::uint32_t head = 1;
  for (std::uint64_t tag = 10; tag < 100; ++tag) {  // two of three commands are left
    const std::uint16_t a = p.submit(tag), b = p.submit(tag + 1000);
    ASSERT_NE(p.queue.index_of(a), p.queue.index_of(late));
    ASSERT_NE(p.queue.index_of(b), p.queue.index_of(late));
    ASSERT_EQ(p.submit(0), kNoCommandId);
    p.queue.ring();
    head = (head + 2) % 16;
    for (const std::uint16_t id : {b, a}) {
      p.post(id, head);
      ASSERT_EQ(p.poll(), PollResult::kCompletion);
      ASSERT_FALSE(p.last.quarantined);
      ASSERT_EQ(p.last.tag, id == a ? tag : tag + 1000);
    }
  }
  p.post(late, head, kQueueId, kScAbortRequested);
  ASSERT_EQ(p.poll(), PollResult::kCompletion);
  EXPECT_TRUE(p.last.quarantined);
  EXPECT_EQ(p.last.tag, 1u);
  EXPECT_EQ(p.last.status.code_and_type(), kScAbortRequested);
  EXPECT_EQ(p.queue.outstanding(), 0u);
  EXPECT_EQ(p.queue.quarantined(), 0u);
  for (std::uint64_t tag = 0; tag < 3; ++tag) EXPECT_NE(p.submit(tag), kNoCommandId);
  p.queue.ring();
  p.post(late, head);  // once more
  EXPECT_EQ(p.poll(), PollResult::kFault);
  EXPECT_EQ(p.queue.fault(), QueueFault::kNotOutstanding);
}

TEST(NvmeQueueLate, ReleaseAllEndsALostCommand) {
  Puppet p(4, 4, 3);
  const std::uint16_t lost = p.submit(1), other = p.submit(2);
  p.queue.ring();
  p.queue.quarantine(lost);
  p.queue.mark_suspect();
  EXPECT_EQ(p.queue.fault(), QueueFault::kDeclared);
  EXPECT_FALSE(p.queue.can_submit());
  p.submit(3);
  p.restart();
  EXPECT_EQ(p.queue.outstanding(), 0u);
  for (std::uint64_t tag = 5; tag < 8; ++tag) {
    const std::uint16_t id = p.submit(tag);
    EXPECT_NE(id, kNoCommandId);
    EXPECT_NE(id, lost);
    EXPECT_NE(id, other);
  }
  p.queue.ring();
  p.post(lost, 1);  // of before
  EXPECT_EQ(p.poll(), PollResult::kFault);
  EXPECT_EQ(p.queue.fault(), QueueFault::kNotOutstanding);
  EXPECT_EQ(p.queue.outstanding(), 3u);
}

TEST(NvmeQueueLate, ShowsOutstandingCommandsByAge) {
  Puppet p(16, 16, 8);
  std::uint16_t ids[6];
  OutstandingCommand oldest{};
  EXPECT_FALSE(p.queue.oldest(oldest));
  for (std::uint64_t tag = 0; tag < 5; ++tag) ids[tag] = p.submit(tag);
  p.queue.ring();
  ids[5] = p.submit(5);
  p.post(ids[1], 5);
  ASSERT_EQ(p.poll(), PollResult::kCompletion);
  EXPECT_TRUE(p.queue.quarantine(ids[3]));
  const auto shown = [&](auto also) {
    std::string tags;
    p.queue.for_each_outstanding([&](const OutstandingCommand& command) {
      EXPECT_EQ(command.id, ids[command.tag]);
      tags += std::to_string(command.tag) + (command.quarantined ? "q" : command.published ? "" : "n") + " ";
      also(command);
    });
    return tags;
  };
  EXPECT_EQ(shown([](auto&) {}), "3q 0 2 4 5n ");
  ASSERT_TRUE(p.queue.oldest(oldest));
  EXPECT_EQ(oldest.id, ids[0]);
  EXPECT_EQ(oldest.tag, 0u);
  EXPECT_EQ(shown([&](const OutstandingCommand& command) { p.queue.quarantine(command.id); }), "3q 0 2 4 5n ");
  EXPECT_EQ(shown([](auto&) {}), "3q 0q 2q 4q 5n ");
  ASSERT_TRUE(p.queue.oldest(oldest));
  EXPECT_EQ(oldest.id, ids[5]);
  EXPECT_FALSE(oldest.published);
  p.post(ids[2], 5);
  ASSERT_EQ(p.poll(), PollResult::kCompletion);
  EXPECT_EQ(shown([](auto&) {}), "3q 0q 4q 5n ");
}

// ---- random

// What a queue pair must make of each entry, from the rules alone.
class Oracle {
 public:
  struct Command {
    std::uint64_t tag;
    bool published = false, quarantined = false, read = false;
    std::uint32_t place = 0;  // in the ring
  };

  Oracle(std::uint32_t sq_entries, std::uint32_t max_commands) : sq_entries_(sq_entries), max_commands_(max_commands) {}

  bool can_submit() const { return !suspect && commands.size() < max_commands_ && after(tail, sq_entries_) != sq_head; }
  // kNone: it completes that command.
  QueueFault judge(const CompletionEntry& entry) const {
    if (entry.sq_id != kQueueId) return QueueFault::kWrongQueue;
    if (entry.sq_head >= sq_entries_) return QueueFault::kSqHeadRange;
    std::uint32_t reachable = sq_head;
    while (reachable != entry.sq_head && reachable != rung) reachable = after(reachable, sq_entries_);
    if (reachable != entry.sq_head) return QueueFault::kSqHeadMoved;
    const auto at = commands.find(entry.command_id);
    if (at != commands.end()) {
      const Command& command = at->second;
      if (!command.published) return QueueFault::kNotPublished;
      return command.read || passes(command, entry.sq_head) ? QueueFault::kNone : QueueFault::kSqHeadBehind;
    }
    std::uint32_t span = 1;  // the identifiers' low part counts this far
    while (span < max_commands_) span *= 2;
    const bool used = entry.command_id % span < max_commands_ && entry.command_id != kNoCommandId;
    return used ? QueueFault::kNotOutstanding : QueueFault::kUnknownCommand;
  }

  // Whether the head passes a command that was not read before on its way to where it is reported.
  bool passes(const Command& command, std::uint32_t reported) const {
    for (std::uint32_t at = sq_head; at != reported; at = after(at, sq_entries_)) {
      if (at == command.place) return true;
    }
    return false;
  }
  void move_head(std::uint32_t reported) {
    for (auto& [id, command] : commands) command.read |= command.published && passes(command, reported);
    sq_head = reported;
  }

  std::map<std::uint16_t, Command> commands;
  std::uint32_t tail = 0, rung = 0, sq_head = 0;
  bool suspect = false;

 private:
  std::uint32_t sq_entries_, max_commands_;
};

CompletionEntry invent(Random& random, const Oracle& oracle, std::uint32_t sq_entries, std::uint16_t recent) {
  CompletionEntry entry{};
  entry.result = static_cast<std::uint32_t>(random());
  entry.status = static_cast<std::uint16_t>(random());
  const auto reachable = ahead(oracle.sq_head, oracle.rung, sq_entries);
  const auto legal = static_cast<std::uint16_t>(
      (oracle.sq_head + (random() % 4 == 0 ? random() % (reachable + 1) : reachable)) % sq_entries);
  const std::uint64_t lie = random() % 16;  // above 3: none
  const auto any = static_cast<std::uint16_t>(random());
  entry.sq_id = lie == 0 && random() % 2 ? any : kQueueId;
  entry.sq_head = lie == 1 ? any : lie == 2 ? static_cast<std::uint16_t>(any % (sq_entries + 2)) : legal;
  if (lie == 3 || oracle.commands.empty()) {
    entry.command_id = random() % 4 == 0 ? recent : random() % 2 ? any % 32 : any;
  } else {
    const auto which = static_cast<std::ptrdiff_t>(random() % oracle.commands.size());
    entry.command_id = std::next(oracle.commands.begin(), which)->first;
  }
  return entry;
}

TEST(NvmeQueueFuzz, RandomCompletionsAreJudgedAsTheRulesSay) {
  Random random(4711);
  std::map<QueueFault, std::uint64_t> faults;
  std::uint64_t completions = 0, late = 0, tag = 1;
  constexpr std::uint32_t kSizes[] = {2, 3, 4, 7, 16, 33};
  for (std::uint64_t left = campaign(2'000'000); left > 0;) {
    const std::uint32_t sq = kSizes[random() % std::size(kSizes)], cq = kSizes[random() % std::size(kSizes)];
    const auto most = static_cast<std::uint32_t>(1 + random() % (cq - 1));
    Puppet p(sq, cq, most);
    for (int life = 0; life < 20 && left > 0; ++life) {
      Oracle oracle(sq, most);
      std::uint16_t recent = 0;
      for (auto patience = random() % 64; patience > 0 && left > 0; --left, --patience) {
        for (auto n = random() % 4; n > 0; --n) {
          const bool room = oracle.can_submit();
          ASSERT_EQ(p.queue.can_submit(), room);
          const std::uint16_t id = p.submit(tag);
          ASSERT_EQ(id != kNoCommandId, room);
          if (!room) break;
          Oracle::Command made{tag++};
          made.place = oracle.tail;
          ASSERT_TRUE(oracle.commands.try_emplace(id, made).second);
          oracle.tail = after(oracle.tail, sq);
        }
        if (random() % 4 != 0) {
          ASSERT_EQ(p.queue.ring(), !oracle.suspect && oracle.tail != oracle.rung);
          if (!oracle.suspect) {
            oracle.rung = oracle.tail;
            for (auto& [id, command] : oracle.commands) command.published = true;
          }
        }
        for (auto& [id, command] : oracle.commands) {
          if (random() % 32 != 0) continue;
          ASSERT_EQ(p.queue.quarantine(id), command.published && !command.quarantined);
          command.quarantined |= command.published;
        }
        ASSERT_EQ(p.queue.outstanding(), oracle.commands.size());

        if (oracle.commands.empty() && random() % 8 != 0) continue;
        const CompletionEntry entry = invent(random, oracle, sq, recent);
        const QueueFault fault = oracle.judge(entry);
        p.result = entry.result;
        p.post(entry.command_id, entry.sq_head, entry.sq_id, entry.status);
        const QueueFault first = p.queue.fault();
        const PollResult result = p.poll();
        if (fault != QueueFault::kNone) {
          ASSERT_EQ(result, PollResult::kFault) << fault_text(fault);
          ASSERT_EQ(p.queue.fault(), oracle.suspect ? first : fault) << fault_text(fault);
          ++faults[fault];
          oracle.suspect = true;
        } else {
          ASSERT_EQ(result, PollResult::kCompletion) << fault_text(p.queue.fault());
          const auto at = oracle.commands.find(entry.command_id);
          ASSERT_EQ(p.last.tag, at->second.tag);
          ASSERT_EQ(p.last.quarantined, at->second.quarantined);
          ASSERT_EQ(p.last.result, entry.result);
          ASSERT_EQ(p.last.status.raw, entry.status & 0x7fff);
          ++completions;
          late += at->second.quarantined;
          recent = entry.command_id;
          oracle.commands.erase(at);
          oracle.move_head(entry.sq_head);
        }
        ASSERT_EQ(p.queue.suspect(), oracle.suspect);
        ASSERT_EQ(p.poll(), PollResult::kNothing);
        if (random() % 2) p.queue.acknowledge();
        if (oracle.suspect) patience = std::min<std::uint64_t>(patience, 4);
      }
      auto shown = oracle.commands;
      p.queue.for_each_outstanding([&](const OutstandingCommand& command) {
        const auto at = shown.find(command.id);
        ASSERT_NE(at, shown.end());
        EXPECT_EQ(at->second.tag, command.tag);
        EXPECT_EQ(at->second.published, command.published);
        EXPECT_EQ(at->second.quarantined, command.quarantined);
        shown.erase(at);
      });
      ASSERT_TRUE(shown.empty());
      p.restart();
    }
  }
  RecordProperty("completions", std::to_string(completions));
  RecordProperty("late", std::to_string(late));
  for (int fault = 1; fault < static_cast<int>(QueueFault::kDeclared); ++fault) {
    EXPECT_GT(faults[static_cast<QueueFault>(fault)], 100u) << fault_text(static_cast<QueueFault>(fault));
  }
  EXPECT_GT(completions, 10'000u);
  EXPECT_GT(late, 1000u);
}

}  // namespace
}  // namespace tardis::nvme::testing
