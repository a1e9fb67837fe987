// SPDX-License-Identifier: Apache-2.0
// One queue pair beside a controller on another thread: an obedient one, and one that scribbles.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "nvme/queue.h"
#include "nvme_queue_support.h"

namespace tardis::nvme::testing {
namespace {

std::uint64_t nanoseconds() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}
std::uint64_t yielding_clock() {
  std::this_thread::yield();  // the other thread may need this core
  return nanoseconds();
}
constexpr std::uint64_t kLong = 30'000'000'000;  // nothing takes as long, however busy the machine is
constexpr std::uint64_t kEnough =
    1'000'000'000;  // spent on one case; on a quiet machine its numbers are reached before

// What a command reads and writes, without any synchronisation of its own.
struct Payload {
  std::uint64_t in = 0, out = 0;
};

// Serves until `stop`, in batches and in any order. Returns how often the completion queue had no room for all that the
// tail doorbell announced: what makes room is stored before.
std::uint64_t serve(const QueueMemory& memory, const std::atomic<bool>& stop) {
  Random random(memory.sq_entries * 65537 + memory.cq_entries);
  std::vector<SubmissionEntry> fetched;
  std::uint32_t head = 0, cq_tail = 0, phase = 1;
  std::uint64_t crowded = 0;
  const auto doorbell = [](volatile std::uint32_t* word) {
    return std::atomic_ref<std::uint32_t>(const_cast<std::uint32_t&>(*word)).load(std::memory_order_acquire);
  };
  const auto store = [](auto* field, std::uint32_t value, std::memory_order order) {
    std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(field)).store(value, order);
  };
  while (!stop) {
    for (const std::uint32_t tail = doorbell(memory.sq_tail); head != tail; head = after(head, memory.sq_entries)) {
      fetched.push_back(memory.sq[head]);
    }
    const std::uint32_t taken = ahead(doorbell(memory.cq_head), cq_tail, memory.cq_entries);
    if (fetched.size() + taken >= memory.cq_entries) ++crowded;
    if (fetched.empty()) std::this_thread::yield();
    for (auto n = random() % (fetched.size() + 1); n > 0; --n) {
      std::swap(fetched[random() % fetched.size()], fetched.back());
      const SubmissionEntry command = fetched.back();
      fetched.pop_back();
      auto* const payload = reinterpret_cast<Payload*>(command.prp.prp1);
      payload->out = payload->in * 3 + 1;
      CompletionEntry* const entry = &memory.cq[cq_tail];
      store(&entry->result, command.cdw10, std::memory_order_relaxed);
      store(&entry->sq_head, head | std::uint32_t{kQueueId} << 16, std::memory_order_relaxed);
      store(&entry->command_id, command.command_id | phase << 16, std::memory_order_release);
      cq_tail = after(cq_tail, memory.cq_entries);
      if (cq_tail == 0) phase ^= 1;
    }
  }
  return crowded;
}

// So many commands, or as many as there is time for. Returns how many completed as they should; 0 if one did not.
std::uint64_t run_beside(std::uint32_t sq_entries, std::uint32_t cq_entries, std::uint64_t commands) {
  Rings rings(sq_entries, cq_entries, cq_entries - 1);
  QueuePair queue(rings.memory);
  std::atomic<bool> stop{false};
  std::uint64_t crowded = 0;
  std::thread controller([&] { crowded = serve(rings.memory, stop); });
  std::vector<Payload> payloads(cq_entries - 1);
  std::vector<std::size_t> unused;
  for (std::size_t i = 0; i < payloads.size(); ++i) unused.push_back(i);
  std::uint64_t submitted = 0, completed = 0;
  bool good = true;
  const std::uint64_t deadline = nanoseconds() + campaign(kEnough);
  const auto more = [&] { return submitted < commands && (nanoseconds() < deadline || submitted < cq_entries); };
  while (good && (completed < submitted || more())) {
    for (; queue.can_submit() && more(); ++submitted) {
      const std::size_t index = unused.back();
      unused.pop_back();
      payloads[index].in = submitted;
      SubmissionEntry entry{};
      entry.prp.prp1 = reinterpret_cast<std::uint64_t>(&payloads[index]);
      entry.cdw10 = static_cast<std::uint32_t>(submitted);
      queue.submit(entry, index);
    }
    if (queue.outstanding() == 0) break;  // the time was over just now
    queue.ring();
    Completion completion;
    PollResult result = queue.wait(completion, nanoseconds() + kLong, yielding_clock);
    good = result == PollResult::kCompletion;
    for (; result == PollResult::kCompletion; result = queue.poll(completion)) {
      const Payload& payload = payloads[completion.tag];
      if (completion.result != payload.in || payload.out != payload.in * 3 + 1) good = false;
      ++completed;
      unused.push_back(completion.tag);
    }
    if (completed % 4 == 0) queue.acknowledge();  // else ring() does, when it must
  }
  stop = true;
  controller.join();
  EXPECT_EQ(crowded, 0u);
  return good ? completed : 0;
}

TEST(NvmeQueueThreads, CompletesBesideAController) {
  const std::uint64_t commands = campaign(200'000);
  for (const auto& [sq, cq] : {std::pair{2u, 2u}, {3u, 64u}, {64u, 3u}, {64u, 64u}, {1023u, 1024u}}) {
    EXPECT_GE(run_beside(sq, cq, commands), cq) << "sq " << sq << ", cq " << cq;
  }
}

// Completions that change while they are read, and never stop. Tags come back only while they are outstanding.
TEST(NvmeQueueThreads, SurvivesAControllerThatScribbles) {
  constexpr std::uint32_t kEntries = 8;
  constexpr std::uint64_t kFew = 10;
  const std::uint64_t many = campaign(5'000);
  Rings rings(kEntries, kEntries, kEntries - 1);
  QueuePair queue(rings.memory);
  std::atomic<bool> stop{false};
  std::atomic<std::uint16_t> near{0};  // where the identifiers in use are
  std::thread controller([&] {
    Random random(1);
    auto* const words = reinterpret_cast<std::uint32_t*>(rings.cq.get());
    while (!stop) {
      const std::size_t entry = random() % kEntries * 4;
      const auto small = static_cast<std::uint32_t>(random() % (kEntries + 1));
      std::atomic_ref(words[entry + 2]).store(small | std::uint32_t{kQueueId} << 16, std::memory_order_relaxed);
      const auto id = static_cast<std::uint16_t>(near.load(std::memory_order_relaxed) + random() % 32 - 16);
      const auto phase = static_cast<std::uint32_t>(random() % 2);
      std::atomic_ref(words[entry + 3]).store(id | phase << 16, std::memory_order_release);
    }
  });
  std::map<std::uint16_t, std::uint64_t> outstanding;
  std::uint64_t tag = 1, wrong = 0, completions = 0, faults = 0;
  const std::uint64_t start = nanoseconds();
  const auto missing = [&](std::uint64_t number, std::uint64_t time) {
    return std::min(completions, faults) < number && nanoseconds() - start < time;
  };
  for (std::uint64_t n = 0; missing(many, campaign(kEnough)) || missing(kFew, kLong); ++n) {
    while (queue.can_submit()) {
      const std::uint16_t id = queue.submit(entry_of(tag), tag);
      if (!outstanding.try_emplace(id, tag++).second) ++wrong;
      near.store(id, std::memory_order_relaxed);
    }
    queue.ring();
    Completion completion;
    switch (queue.poll(completion)) {
      case PollResult::kNothing:
        std::this_thread::yield();
        break;
      case PollResult::kFault:
        ++faults;
        break;
      case PollResult::kCompletion: {
        ++completions;
        const auto at = outstanding.find(completion.id);
        if (at == outstanding.end() || at->second != completion.tag) ++wrong;
        if (at != outstanding.end()) outstanding.erase(at);
      }
    }
    if (queue.suspect() && n % 16 == 0) {
      queue.release_all();
      outstanding.clear();
    }
    queue.acknowledge();
  }
  stop = true;
  controller.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_GE(completions, kFew);
  EXPECT_GE(faults, kFew);
}

}  // namespace
}  // namespace tardis::nvme::testing
