// SPDX-License-Identifier: Apache-2.0
// One process that stores, loads, flushes, evicts, clears, closes and opens from several threads until it is killed.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <thread>

#include "base/clock.h"
#include "torture_gate.h"
#include "torture_store.h"

namespace tardis::testing {

// Memory that the processes of a torture share.
struct TortureBoard {
  static constexpr std::size_t kProcesses = 16;
  std::array<std::atomic<std::uint64_t>, kProcesses> calls;  // that the process has finished
  // Chains that somebody stored lately, so that everybody reads everybody's: id, and space << 32 | length. A pair that
  // is half of one and half of another is a miss.
  std::array<std::atomic<std::uint64_t>, 512> chains;
  std::atomic<std::uint32_t> next_chain;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

class TortureWriter {
 public:
  TortureWriter(const std::string& folder, const std::string& engine, const Mode& mode, std::uint64_t seed,
                const std::string& log, TortureBoard& board, std::size_t self, bool others)
      : mode_(mode),
        seed_(seed),
        gate_file_(log + ".gate"),
        log_(::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666)),
        board_(board),
        self_(self),
        may_lose_segments_(others && mode.evict),
        open_(folder, engine, mode, seed) {
    if (!log_) die("cannot open " + log, 4);
  }

  void run(double seconds) {
    end_ = monotonic_ns() + static_cast<std::uint64_t>(seconds * 1e9);
    std::vector<std::thread> threads;
    for (std::uint64_t i = 0; i < 2; ++i) threads.emplace_back([this, i] { write_pages(i); });
    threads.emplace_back([this] { read_pages(); });
    for (std::thread& thread : threads) thread.join();
    open_.close();
  }

 private:
  static constexpr std::size_t kMaxBatch = 8;
  static constexpr std::uint64_t kCommonChains = 16;  // stored by all processes at once

  struct Chain {
    std::uint32_t space;
    std::uint64_t id;
    std::uint32_t length;
  };

  void append(Event event, std::uint32_t space, std::uint64_t chain, std::uint32_t first, std::uint32_t count) {
    Record record{event, space, chain, first, count, 0};
    record.check = record.sum();
    if (::write(log_.get(), &record, sizeof record) != sizeof record) die("writing the log", 4);
  }

  void write_pages(std::uint64_t thread) {
    std::mt19937_64 random(mix(seed_ * 2 + thread));
    Gate gate(gate_file_);
    std::vector<Chain> own;
    for (std::uint64_t round = 0; monotonic_ns() < end_; ++round) {
      if (random() % 96 == 0 || clear_wanted_.load()) {
        clear(gate, random);
        own.clear();
      } else if (random() % 128 == 0) {
        reopen();
      } else {
        const std::shared_lock no_clear(gate);
        const std::shared_lock use(open_mutex_);
        write_some(thread, round, random, own);
      }
      board_.calls[self_].fetch_add(1);
      // A shared_mutex lets readers pass a waiting writer.
      while (reopening_.load()) std::this_thread::yield();
    }
  }

  void write_some(std::uint64_t thread, std::uint64_t round, std::mt19937_64& random, std::vector<Chain>& own) {
    if (own.empty() || random() % 4 == 0) {
      const auto space = static_cast<std::uint32_t>(random() % 2);
      own.push_back({space, random() % 8 == 0 ? random() % kCommonChains : seed_ << 24 | thread << 20 | round, 0});
    }
    Chain& chain = random() % 3 == 0 ? own[random() % own.size()] : own.back();
    // Usually the chain grows; now and then its end is stored again.
    const std::uint32_t again =
        chain.length > 0 ? static_cast<std::uint32_t>(random() % std::min(chain.length, 3u)) : 0;
    const std::uint32_t first = chain.length - again;
    const auto count = static_cast<std::uint32_t>(again + 1 + random() % (kMaxBatch - again));
    const TortureLayout& layout = mode_.layouts[chain.space];
    PageMemory memory(layout.parts, layout.regions, count, random() % 2 * 52, random() % 3 * 32);
    std::vector<Hash256> keys(count);
    for (std::uint32_t i = 0; i < count; ++i) {
      keys[i] = page_key(chain.id, first + i);
      memory.write(i, page_seed(chain.space, keys[i]));
    }
    append(Event::kAttempt, chain.space, chain.id, first, count);
    const std::size_t place = board_.next_chain.fetch_add(1) % (board_.chains.size() / 2) * 2;
    board_.chains[place].store(chain.id);
    board_.chains[place + 1].store(std::uint64_t{chain.space} << 32 | (first + count));
    const Hash256 before = first > 0 ? page_key(chain.id, first - 1) : Hash256{};
    std::vector<std::uint8_t> ok(count);
    char* error = nullptr;
    const tardis_code code = tardis_set(open_.store, open_.spaces[chain.space], keys[0].data(),
                                        first > 0 ? before.data() : nullptr, memory.pieces(), count, ok.data(), &error);
    const auto stored = static_cast<std::uint32_t>(std::find(ok.begin(), ok.end(), 0) - ok.begin());
    // Busy: more writers than segments.
    if (code != TARDIS_OK && code != TARDIS_NO_SPACE && code != TARDIS_BUSY) die(std::string("set: ") + error, 3);
    tardis_free(error);
    if (!mode_.evict && code == TARDIS_NO_SPACE) clear_wanted_ = true;
    chain.length = first + stored;
    if (random() % 4 == 0) {
      if (tardis_flush(open_.store, &error) != TARDIS_OK) die(std::string("flush: ") + error, 3);
      append(Event::kFlushed, chain.space, chain.id, first, stored);
    }
    if (!mode_.evict) {
      tardis_stats stats;
      (void)tardis_get_stats(open_.store, &stats);
      if (stats.slots_live * 10 > stats.capacity_bytes / (4u << 20) * kSlotsPerSegment * 7) clear_wanted_ = true;
    }
  }
  static constexpr std::uint64_t kSlotsPerSegment = 40;  // or a few more, in `keep`

  // Clears while nobody stores, so that what was stored before is known to be gone after; in `evict` also amid
  // everything.
  void clear(Gate& gate, std::mt19937_64& random) {
    std::uint64_t pages = 0;
    char* error = nullptr;
    if (mode_.evict && random() % 2 == 0) {
      const std::shared_lock use(open_mutex_);
      (void)tardis_clear(open_.store, nullptr, &pages, nullptr);
      return;
    }
    const std::unique_lock alone(gate);
    const std::shared_lock use(open_mutex_);
    const bool all = clear_wanted_.exchange(false) || random() % 2 == 0;
    const auto space = static_cast<std::uint32_t>(random() % 2);
    for (std::uint32_t i = 0; i < 2; ++i) {
      if (all || i == space) append(Event::kClearing, i, 0, 0, 0);
    }
    const tardis_code code =
        tardis_clear(open_.store, all ? nullptr : open_.fingerprints[space].data(), &pages, &error);
    if (code == TARDIS_CORRUPT && may_lose_segments_) {
      tardis_free(error);
      return;
    }
    if (code != TARDIS_OK) die(std::string("clear: ") + error, 3);
    for (std::uint32_t i = 0; i < 2; ++i) {
      if (all || i == space) append(Event::kCleared, i, 0, 0, 0);
    }
  }

  void reopen() {
    reopening_ = true;
    {
      const std::unique_lock alone(open_mutex_);
      open_.close();
      open_.open();
    }
    reopening_ = false;
  }

  void read_pages() {
    std::mt19937_64 random(mix(seed_ * 3 + 1));
    while (monotonic_ns() < end_) {
      while (reopening_.load()) std::this_thread::yield();
      const std::size_t place = random() % (board_.chains.size() / 2) * 2;
      const std::uint64_t id = board_.chains[place].load(), rest = board_.chains[place + 1].load();
      const auto space = static_cast<std::uint32_t>(rest >> 32), length = static_cast<std::uint32_t>(rest);
      if (length == 0) {
        std::this_thread::yield();
        continue;
      }
      const std::uint32_t count = std::min<std::uint32_t>(length, kMaxBatch), first = length - count;
      const TortureLayout& layout = mode_.layouts[space];
      PageMemory memory(layout.parts, layout.regions, count, random() % 2 * 12);
      std::vector<Hash256> keys(count);
      for (std::uint32_t i = 0; i < count; ++i) keys[i] = page_key(id, first + i);
      std::vector<std::uint8_t> ok(count);
      char* error = nullptr;
      {
        const std::shared_lock use(open_mutex_);
        const tardis_code code =
            tardis_get(open_.store, open_.spaces[space], keys[0].data(), memory.pieces(), count, ok.data(), &error);
        if (code != TARDIS_OK) die(std::string("get: ") + error, 3);
      }
      for (std::uint32_t i = 0; i < count; ++i) {
        if (ok[i] != 0 && !memory.holds(i, page_seed(space, keys[i]))) die("get: wrong bytes", 3);
      }
    }
  }

  const Mode& mode_;
  std::uint64_t seed_;
  std::string gate_file_;
  UniqueFd log_;
  TortureBoard& board_;
  std::size_t self_;
  // A segment whose process is killed while it changes the slot class is out of use until the store is opened anew.
  bool may_lose_segments_;
  OpenStore open_;
  std::uint64_t end_ = 0;
  std::shared_mutex open_mutex_;  // alone: the store is closed and opened again
  std::atomic<bool> reopening_{false};
  std::atomic<bool> clear_wanted_{false};
};

}  // namespace tardis::testing
