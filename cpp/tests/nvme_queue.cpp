// SPDX-License-Identifier: Apache-2.0
// One queue pair against a controller written from the specification with spec.h alone, and step by step.
#include "nvme/queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "nvme_queue_support.h"

namespace tardis::nvme::testing {
namespace {

static_assert(std::is_trivially_copyable_v<QueuePair>);  // handed to a GPU as bytes

// Keeps the first rule that was broken.
class Rules {
 public:
  void require(bool kept, const char* rule) {
    if (!kept && broken_.empty()) broken_ = rule;
  }
  bool kept() const { return broken_.empty(); }
  const std::string& broken() const { return broken_; }

 private:
  std::string broken_;
};

// Fetches in order, completes in any order, and tells no more of how far it has read than it must. Knows what the host
// wrote, and looks whether it is still there when it gives the slots back.
class ReferenceController {
 public:
  struct Posted {
    std::uint64_t tag;
    CompletionEntry entry;
  };

  ReferenceController(const QueueMemory& memory, Random& random, Rules& rules)
      : memory_(memory), random_(random), rules_(rules), written_(memory.sq_entries), posted_(memory.cq_entries) {}

  // The host's side, told by the test.
  void wrote(std::uint32_t slot, const SubmissionEntry& entry, std::uint64_t tag) { written_[slot] = {entry, tag}; }
  const Posted& posted(std::uint32_t slot) const { return posted_[slot]; }

  void stored(const Stores& stores) {
    if (stores.head) {
      rules_.require(*stores.head < memory_.cq_entries && *stores.head != cq_head_, "head doorbell: a new legal value");
      rules_.require(ahead(cq_head_, *stores.head, memory_.cq_entries) <= ahead(cq_head_, cq_tail_, memory_.cq_entries),
                     "head doorbell: not beyond what was posted");
      cq_head_ = *stores.head;
    }
    if (stores.tail) {
      rules_.require(*stores.tail < memory_.sq_entries && *stores.tail != tail_, "tail doorbell: a new legal value");
      rules_.require(ahead(told_, *stores.tail, memory_.sq_entries) > ahead(told_, tail_, memory_.sq_entries),
                     "tail doorbell: forward, and not past the head");
      tail_ = *stores.tail;
    }
  }

  std::uint32_t waiting() const { return ahead(head_, tail_, memory_.sq_entries); }
  std::size_t fetched() const { return fetched_.size(); }

  void fetch() {
    const auto& [entry, tag] = written_[head_];
    const SubmissionEntry& found = memory_.sq[head_];
    rules_.require(std::memcmp(&found, &entry, sizeof found) == 0, "entry: as written, when it is fetched");
    rules_.require(found.command_id != kNoCommandId, "identifier: never ffffh");
    rules_.require(!in_use_[found.command_id], "identifier: unique among outstanding commands");
    in_use_[found.command_id] = true;
    fetched_.push_back({found.command_id, tag, fetches_++});
    head_ = after(head_, memory_.sq_entries);
  }

  void post() {
    std::swap(fetched_[random_() % fetched_.size()], fetched_.back());
    const auto [id, tag, number] = fetched_.back();
    fetched_.pop_back();
    const std::uint64_t untold = fetches_ - tellings_, least = number < tellings_ ? 0 : number + 1 - tellings_;
    for (auto tell = random_() % 4 != 0 ? untold : least + random_() % (untold - least + 1); tell > 0; --tell) {
      rules_.require(std::memcmp(&memory_.sq[told_], &written_[told_].entry, sizeof(SubmissionEntry)) == 0,
                     "entry: untouched until the head has passed it");
      told_ = after(told_, memory_.sq_entries);
      ++tellings_;
    }
    rules_.require(after(cq_tail_, memory_.cq_entries) != cq_head_, "completion queue: room for every command");
    const CompletionEntry entry{static_cast<std::uint32_t>(random_()),
                                static_cast<std::uint32_t>(random_()),
                                static_cast<std::uint16_t>(told_),
                                kQueueId,
                                id,
                                static_cast<std::uint16_t>(random_() << 1 | phase_)};
    memory_.cq[cq_tail_] = entry;
    posted_[cq_tail_] = {tag, entry};
    in_use_[id] = false;
    cq_tail_ = after(cq_tail_, memory_.cq_entries);
    if (cq_tail_ == 0) phase_ ^= 1;
  }

 private:
  struct Written {
    SubmissionEntry entry;
    std::uint64_t tag;
  };
  struct Fetched {
    std::uint16_t id;
    std::uint64_t tag, number;
  };
  const QueueMemory memory_;
  Random& random_;
  Rules& rules_;
  std::vector<Written> written_;
  std::vector<Posted> posted_;
  std::vector<Fetched> fetched_;
  std::vector<bool> in_use_ = std::vector<bool>(65536);
  std::uint64_t fetches_ = 0, tellings_ = 0;  // entries read, and told of
  std::uint32_t tail_ = 0, head_ = 0, told_ = 0, cq_tail_ = 0, cq_head_ = 0, phase_ = 1;
};

// Runs that many commands through one queue pair. Returns the rule that was broken, if any.
std::string run_model(std::uint32_t sq_entries, std::uint32_t cq_entries, std::uint32_t max_commands,
                      std::uint64_t commands, std::uint64_t seed) {
  Random random(seed);
  Rules rules;
  Rings rings(sq_entries, cq_entries, max_commands);
  QueuePair queue(rings.memory);
  ReferenceController controller(rings.memory, random, rules);
  constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15;  // tags are its multiples: all different, and no small numbers
  std::vector<std::uint8_t> completions(commands);
  std::uint64_t submitted = 0, completed = 0, idle_steps = 0, sq_wraps = 0, cq_wraps = 0;
  std::uint32_t tail = 0, unrung = 0, cq_head = 0, sq_head = 0;
  const auto some = [&](std::uint64_t most) {  // mostly few, at times all
    return random() % 4 != 0 ? std::min<std::uint64_t>(random() % 8, most) : most;
  };

  while (completed < commands && rules.kept()) {
    for (auto n = some(std::max(sq_entries, max_commands)); n > 0 && submitted < commands; --n) {
      const bool room = submitted - completed < max_commands && after(tail, sq_entries) != sq_head;
      rules.require(queue.can_submit() == room, "can_submit: exactly while there are an identifier and a slot");
      const std::uint64_t tag = submitted * kOdd;
      SubmissionEntry entry = entry_of(tag);
      entry.command_id = queue.submit(entry, tag);
      rules.require((entry.command_id != kNoCommandId) == room, "submit: exactly while can_submit");
      if (!room) break;
      controller.wrote(tail, entry, tag);
      tail = after(tail, sq_entries);
      sq_wraps += tail == 0;
      ++submitted;
      ++unrung;
    }
    if (random() % 4 != 0) {
      bool rang = false;
      const Stores stores = stores_of(rings, [&] { rang = queue.ring(); });
      rules.require(rang == (unrung != 0) && rang == stores.tail.has_value(), "ring: a store exactly if there is news");
      rules.require(!rang || stores.tail == tail, "ring: all that was submitted");
      controller.stored(stores);
      unrung = 0;
    }
    for (auto n = some(controller.waiting()); n > 0; --n) controller.fetch();
    for (auto n = some(controller.fetched()); n > 0; --n) controller.post();

    ++idle_steps;
    for (auto n = some(cq_entries); n > 0; --n) {
      Completion completion;
      const PollResult result = queue.poll(completion);
      rules.require(result != PollResult::kFault && !queue.suspect(), "poll: no fault of an obedient controller");
      if (result != PollResult::kCompletion) break;
      const auto& [tag, entry] = controller.posted(cq_head);
      rules.require(completion.tag == tag && completion.id == entry.command_id, "completion: of its own command");
      rules.require(
          completion.result == entry.result && completion.status.raw == entry.status >> 1 && !completion.quarantined,
          "completion: as posted");
      // The inverse of kOdd modulo 2^64, by Newton's iteration.
      std::uint64_t inverse = kOdd;
      for (int i = 0; i < 5; ++i) inverse *= 2 - kOdd * inverse;
      const std::uint64_t number = completion.tag * inverse;
      rules.require(number < commands && ++completions[number] == 1, "completion: once for each command");
      sq_head = entry.sq_head;
      cq_head = after(cq_head, cq_entries);
      cq_wraps += cq_head == 0;
      ++completed;
      idle_steps = 0;
    }
    if (random() % 4 == 0) {
      bool rang = false;
      const Stores stores = stores_of(rings, [&] { rang = queue.acknowledge(); });
      rules.require(rang == stores.head.has_value() && !stores.tail, "acknowledge: a store exactly if it says so");
      rules.require(!rang || stores.head == cq_head, "acknowledge: all that was taken");
      controller.stored(stores);
    }
    rules.require(queue.outstanding() == submitted - completed, "outstanding: submitted and not completed");
    rules.require(idle_steps < 10000, "progress");
  }
  rules.require(sq_wraps >= 3 && cq_wraps >= 3, "the test: three wraps");
  return rules.broken();
}

TEST(NvmeQueue, EveryCommandCompletesOnceAtAnyDepth) {
  constexpr std::uint32_t kDepths[] = {2, 3, 7, 64, 1023, 1024, 4096};
  const std::uint64_t commands = campaign(10'000'000) / (std::size(kDepths) * std::size(kDepths)) + 1;
  std::uint64_t seed = 1;
  for (const std::uint32_t sq : kDepths) {
    for (const std::uint32_t cq : kDepths) {
      const std::uint32_t most = seed % 3 == 0 ? (cq + 1) / 2 : cq - 1;  // also fewer commands than there is room for
      const std::string broken = run_model(sq, cq, most, commands, seed++);
      EXPECT_EQ(broken, "") << "sq " << sq << ", cq " << cq << ", commands " << most;
    }
  }
}

// ---- by hand

TEST(NvmeQueue, ChecksItsMemory) {
  Rings rings(2, 65536, 65535);
  EXPECT_TRUE(QueuePair::valid(rings.memory));
  const auto refuses = [&](auto change) {
    QueueMemory memory = rings.memory;
    change(memory);
    return !QueuePair::valid(memory);
  };
  EXPECT_TRUE(refuses([](QueueMemory& m) { m.sq_entries = 1; }));
  EXPECT_TRUE(refuses([](QueueMemory& m) { m.sq_entries = 65537; }));
  EXPECT_TRUE(refuses([](QueueMemory& m) { m.cq_entries = 1, m.max_commands = 1; }));
  EXPECT_TRUE(refuses([](QueueMemory& m) { m.cq_entries = 65537; }));
  EXPECT_TRUE(refuses([](QueueMemory& m) { m.max_commands = 0; }));
  EXPECT_TRUE(refuses([](QueueMemory& m) { m.max_commands = 65536; }));
  EXPECT_TRUE(refuses([](QueueMemory& m) { m.sq = nullptr; }));
  EXPECT_TRUE(refuses([](QueueMemory& m) { m.cq = reinterpret_cast<CompletionEntry*>(8); }));
  EXPECT_TRUE(refuses([](QueueMemory& m) { m.commands = nullptr; }));
  EXPECT_TRUE(refuses([](QueueMemory& m) { m.sq_tail = nullptr; }));
  EXPECT_TRUE(refuses([](QueueMemory& m) { m.cq_head = nullptr; }));
}

TEST(NvmeQueue, LargestQueueUsesEveryIdentifierButOne) {
  Puppet p(65536, 65536, 65535);
  std::vector<bool> seen(65536);
  for (std::uint64_t i = 0; i < 65535; ++i) {
    const std::uint16_t id = p.submit(i);
    ASSERT_NE(id, kNoCommandId) << i;
    ASSERT_FALSE(seen[id]);
    seen[id] = true;
  }
  EXPECT_FALSE(p.queue.can_submit());
  EXPECT_EQ(p.submit(1), kNoCommandId);
  EXPECT_TRUE(p.queue.ring());
  EXPECT_EQ(p.rings.doorbells[0], 65535u);
}

TEST(NvmeQueue, IdentifiersStandForAnIndexAndDoNotComeBackSoon) {
  for (const std::uint32_t most : {1u, 2u, 3u, 5u, 64u}) {
    Puppet p(128, 128, most);
    std::map<std::uint16_t, std::uint64_t> used;
    for (std::uint64_t n = 0; n < 70'000; ++n) {
      const std::uint16_t id = p.submit(n);
      ASSERT_NE(id, kNoCommandId);
      ASSERT_LT(p.queue.index_of(id), most);
      const auto [at, first] = used.try_emplace(id, n);
      // One index in turn with the others, one use in turn with those that its spare bits tell apart.
      ASSERT_TRUE(first || n - at->second >= 32'000) << most << " commands, identifier " << id;
      at->second = n;
      p.queue.ring();
      p.post(id, static_cast<std::uint32_t>((n + 1) % 128));
      ASSERT_EQ(p.poll(), PollResult::kCompletion);
      ASSERT_EQ(p.last.tag, n);
    }
  }
}

TEST(NvmeQueue, RingsOncePerBatch) {
  Puppet p(8, 8, 7);
  EXPECT_FALSE(p.queue.ring());
  EXPECT_FALSE(p.queue.acknowledge());
  const std::uint16_t a = p.submit(1), b = p.submit(2);
  EXPECT_EQ(p.rings.doorbells[0], 0u);
  EXPECT_TRUE(p.queue.ring());
  EXPECT_EQ(p.rings.doorbells[0], 2u);
  EXPECT_FALSE(p.queue.ring());
  p.post(b, 2);
  p.post(a, 2);
  EXPECT_EQ(p.poll(), PollResult::kCompletion);
  EXPECT_EQ(p.poll(), PollResult::kCompletion);
  EXPECT_EQ(p.poll(), PollResult::kNothing);
  EXPECT_EQ(p.rings.doorbells[1], 0u);
  EXPECT_TRUE(p.queue.acknowledge());
  EXPECT_EQ(p.rings.doorbells[1], 2u);
  EXPECT_FALSE(p.queue.acknowledge());
}

// A doorbell in memory gets every value; the real one only those that pass what the controller asked for.
TEST(NvmeQueue, ShadowDoorbellsSpareTheRealOnes) {
  std::mt19937 random(9);
  for (const std::uint32_t entries : {2u, 3u, 7u, 64u, 65536u}) {
    std::uint32_t shadows[2] = {77, 77}, events[2] = {77, 77};
    Rings rings(entries, entries, entries - 1);
    rings.memory.sq_tail_shadow = {&shadows[0], &events[0]};
    rings.memory.cq_head_shadow = {&shadows[1], &events[1]};
    QueuePair queue(rings.memory);
    EXPECT_EQ(shadows[0] + shadows[1] + events[0] + events[1], 0u) << "a new queue's";
    std::uint32_t tail = 0, phase = 1, rung = 0, spared = 0;
    for (int round = 0; round < 3000; ++round) {
      const std::uint32_t batch = 1 + random() % std::min(entries - 1, 9u), before = tail;
      for (std::uint32_t i = 0; i < batch; ++i) ASSERT_NE(queue.submit(entry_of(i), i), kNoCommandId);
      tail = (tail + batch) % entries;
      events[0] = random() % 3 == 0 ? before : random() % entries;
      // By counting: is the event among the values that the doorbell leaves behind?
      bool passes = false;
      for (std::uint32_t value = before; value != tail; value = (value + 1) % entries) passes |= value == events[0];
      const Stores stores = stores_of(rings, [&] { EXPECT_TRUE(queue.ring()); });
      ASSERT_EQ(shadows[0], tail);
      // At the end of the ring, where the values jump, a store too many is no harm.
      if (passes || tail > before) {
        ASSERT_EQ(stores.tail.has_value(), passes) << before << " to " << tail << ", event " << events[0];
      }
      if (stores.tail) {
        ASSERT_EQ(*stores.tail, tail);
      }
      ++(stores.tail ? rung : spared);
      Completion completion;
      for (std::uint32_t i = 0; i < batch; ++i) {
        const std::uint32_t at = (before + i) % entries;
        rings.cq[at] = {0,
                        0,
                        static_cast<std::uint16_t>(tail),
                        kQueueId,
                        rings.sq[at].command_id,
                        static_cast<std::uint16_t>(phase)};
        ASSERT_EQ(queue.poll(completion), PollResult::kCompletion);
        if (at + 1 == entries) phase ^= 1;
      }
      events[1] = before;
      const Stores heads = stores_of(rings, [&] { EXPECT_TRUE(queue.acknowledge()); });
      ASSERT_EQ(shadows[1], tail);
      ASSERT_EQ(heads.head, std::optional(tail)) << "it was asked for";
    }
    EXPECT_GT(rung, 0u);
    if (entries > 7) {
      EXPECT_GT(spared, 0u);
    }
    queue.release_all();
    EXPECT_EQ(shadows[0] + shadows[1] + events[0] + events[1], 0u) << "begun again";
  }
}

TEST(NvmeQueue, MakesRoomForCompletionsBeforeItRings) {
  Rings rings(8, 4, 3);
  rings.memory.cq_head = rings.memory.sq_tail;  // one word for both: it keeps the later store
  QueuePair queue(rings.memory);
  Completion completion;
  for (std::uint64_t tag = 0; tag < 3; ++tag) queue.submit(entry_of(tag), tag);
  queue.ring();
  for (std::uint16_t i = 0; i < 3; ++i) {
    rings.cq[i] = {0, 0, 3, kQueueId, rings.sq[i].command_id, 1};
    ASSERT_EQ(queue.poll(completion), PollResult::kCompletion);
  }
  ASSERT_NE(queue.submit(entry_of(3), 3), kNoCommandId);
  EXPECT_TRUE(queue.ring());
  EXPECT_EQ(rings.doorbells[0], 4u);
  EXPECT_FALSE(queue.acknowledge()) << "done by ring()";
}

TEST(NvmeQueue, StatusKeepsTypeAndCode) {
  Puppet p(4, 4, 3);
  const std::uint16_t id = p.submit(9);
  p.queue.ring();
  p.result = 0x12345678;
  p.post(id, 1, kQueueId, 0x4281);  // DNR, SCT 2, SC 81h
  ASSERT_EQ(p.poll(), PollResult::kCompletion);
  EXPECT_FALSE(p.last.status.ok());
  EXPECT_EQ(p.last.status.code_and_type(), kScUnrecoveredRead);
  EXPECT_TRUE(p.last.status.do_not_retry());
  EXPECT_EQ(p.last.result, 0x12345678u);
}

TEST(NvmeQueue, SlotsComeBackWithTheHeadAndNotWithTheirCommand) {
  Puppet p(4, 64, 63);
  const std::uint16_t a = p.submit(1), b = p.submit(2), c = p.submit(3);
  p.queue.ring();
  EXPECT_FALSE(p.queue.can_submit());
  p.post(a, 1);
  ASSERT_EQ(p.poll(), PollResult::kCompletion);
  EXPECT_NE(p.submit(4), kNoCommandId);
  EXPECT_FALSE(p.queue.can_submit());
  p.post(b, 3);  // all have been read, the last of them is still at work
  ASSERT_EQ(p.poll(), PollResult::kCompletion);
  for (std::uint64_t tag = 5; tag < 7; ++tag) EXPECT_NE(p.submit(tag), kNoCommandId);
  EXPECT_FALSE(p.queue.can_submit());
  p.queue.ring();
  p.post(c, 3);  // completed, and its slot is in use again
  ASSERT_EQ(p.poll(), PollResult::kCompletion);
  EXPECT_EQ(p.last.tag, 3u);
  EXPECT_FALSE(p.queue.can_submit());
}

TEST(NvmeQueue, WaitsUntilItsDeadline) {
  Puppet p(4, 4, 3);
  const std::uint16_t id = p.submit(7);
  p.queue.ring();
  std::uint64_t time = 0;
  EXPECT_EQ(p.queue.wait(p.last, 100, [&] { return time += 10; }), PollResult::kNothing);
  EXPECT_EQ(time, 100u);
  // What arrives while this thread does not run is found, however late it is.
  const auto sleep = [&] {
    p.post(id, 1);
    return time = 1000;
  };
  EXPECT_EQ(p.queue.wait(p.last, 200, sleep), PollResult::kCompletion);
  EXPECT_EQ(p.last.tag, 7u);
  // What is there is taken without a look at the clock.
  p.submit(8);
  p.queue.ring();
  p.post(p.rings.sq[1].command_id, 2);
  time = 0;
  EXPECT_EQ(p.queue.wait(p.last, 0, [&] { return ++time; }), PollResult::kCompletion);
  EXPECT_EQ(time, 0u);
  p.post(p.last.id, 2);
  EXPECT_EQ(p.queue.wait(p.last, 1000, [&] { return ++time; }), PollResult::kFault);
}

}  // namespace
}  // namespace tardis::nvme::testing
