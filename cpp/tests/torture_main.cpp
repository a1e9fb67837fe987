// SPDX-License-Identifier: Apache-2.0
// tardis_torture: uses a store in every way at once until it is killed, and says afterwards whether the store kept its
// word. bench/kill_campaign.py drives it. Only the C ABI is used.
//
//   tardis_torture write FOLDER SEED ENGINE LOG MODE   until killed, or for SECONDS (the environment variable
//   TORTURE_SECONDS) tardis_torture check FOLDER SEED ENGINE LOG MODE   one line of JSON; exit status 1 if a promise
//   was broken
//
// ENGINE: io_uring, sync, or auto. MODE: `keep` (a capacity that never evicts: what was flushed must be there) or
// `evict` (two page sizes in a store that is always full: only wrong bytes and lost slots count). With `-dirty` behind
// it, `check` leaves the store unclosed; with `-repair`, it ends with tardis_verify(repair).
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "store_pages.h"
#include "tardis/tardis.h"

namespace {

using namespace tardis;
using namespace tardis::testing;

constexpr std::size_t kMaxBatch = 8;

enum class Event : std::uint32_t {
  kAttempt = 1,   // pages may be in the store from now on
  kFlushed = 2,   // pages were stored and flushed
  kClearing = 3,  // pages of the namespace may be gone from now on
  kCleared = 4,   // pages of the namespace that were attempted before are gone for good
};

// One record of the log. A write() of it is in the page cache when it returns and so survives SIGKILL.
struct Record {
  Event event;
  std::uint32_t space;
  std::uint64_t chain;
  std::uint32_t first, count;
  std::uint64_t check;
  std::uint64_t sum() const {
    return mix(mix(mix(static_cast<std::uint64_t>(event) << 32 | space) ^ chain) ^
               (std::uint64_t{first} << 32 | count));
  }
};

[[noreturn]] void die(const std::string& why, int status) {
  std::fprintf(stderr, "tardis_torture: %s\n", why.c_str());
  std::_Exit(status);
}

struct Layout {
  std::uint32_t parts;
  std::vector<std::uint64_t> regions;
};

struct Mode {
  bool evict, dirty, repair;
  std::uint64_t capacity;
  std::array<Layout, 2> layouts;
};

Mode parse_mode(const std::string& text) {
  Mode mode{text.starts_with("evict"), text.ends_with("-dirty"), text.ends_with("-repair"), 0, {}};
  if (!mode.evict && !text.starts_with("keep")) die("MODE: expected keep or evict, found " + text, 2);
  // Padded parts, regions of odd length, digest chunks that straddle regions. In `keep` both fill the same slot class.
  mode.layouts = {Layout{2, {20000, 12345}}, mode.evict ? Layout{3, {40000}} : Layout{1, {40000, 25536}}};
  mode.capacity = (mode.evict ? 4u : 16u) * (std::uint64_t{4} << 20) + (1u << 20);
  return mode;
}

class OpenStore {
 public:
  OpenStore(const std::string& folder, const std::string& engine, const Mode& mode, std::uint64_t seed) {
    tardis_options options;
    tardis_default_options(&options);
    options.engine = engine == "io_uring" ? TARDIS_ENGINE_IO_URING
                     : engine == "sync"   ? TARDIS_ENGINE_SYNC
                                          : TARDIS_ENGINE_AUTO;
    options.capacity_bytes = mode.capacity;
    options.segment_bytes = 4u << 20;
    options.io_workers = 2;
    options.flush_milliseconds = 1 + seed % 30;
    char* error = nullptr;
    if (tardis_open(folder.c_str(), &options, 1, &store, &error) != TARDIS_OK) die(std::string("open: ") + error, 4);
    for (std::uint32_t i = 0; i < 2; ++i) {
      const Layout& layout = mode.layouts[i];
      tardis_object_layout c{layout.parts, static_cast<std::uint32_t>(layout.regions.size()), {}};
      std::copy(layout.regions.begin(), layout.regions.end(), c.region_bytes);
      fingerprints[i] = {static_cast<std::uint8_t>(i + 1), mode.evict};
      const std::string text = "{\"torture\": " + std::to_string(i) + "}";
      if (tardis_namespace_open(store, fingerprints[i].data(), text.c_str(), &c, &spaces[i], &error) != TARDIS_OK) {
        die(std::string("namespace: ") + error, 4);
      }
    }
  }
  tardis_store* store = nullptr;
  std::array<std::array<std::uint8_t, 16>, 2> fingerprints{};
  std::array<std::uint32_t, 2> spaces{};
};

class Writer {
 public:
  Writer(const std::string& folder, const std::string& engine, const Mode& mode, std::uint64_t seed,
         const std::string& log)
      : mode_(mode),
        seed_(seed),
        open_(folder, engine, mode, seed),
        log_(::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666)) {
    if (log_ < 0) die("cannot open " + log, 4);
  }

  void run(double seconds) {
    const std::uint64_t end = monotonic_ns() + static_cast<std::uint64_t>(seconds * 1e9);
    std::vector<std::thread> threads;
    for (std::uint64_t i = 0; i < 2; ++i) threads.emplace_back([this, i, end] { write_pages(i, end); });
    threads.emplace_back([this, end] { read_pages(end); });
    for (std::thread& thread : threads) thread.join();
    char* error = nullptr;
    if (tardis_close(open_.store, &error) != TARDIS_OK) die(std::string("close: ") + error, 3);
    tardis_destroy(open_.store);
  }

 private:
  struct Chain {
    std::uint32_t space;
    std::uint64_t id;
    std::uint32_t length;
  };

  void append(Event event, std::uint32_t space, std::uint64_t chain, std::uint32_t first, std::uint32_t count) {
    Record record{event, space, chain, first, count, 0};
    record.check = record.sum();
    if (::write(log_, &record, sizeof record) != sizeof record) die("writing the log", 4);
  }

  void write_pages(std::uint64_t thread, std::uint64_t end) {
    std::mt19937_64 random(seed_ * 2 + thread);
    std::vector<Chain> own;
    for (std::uint64_t round = 0; monotonic_ns() < end; ++round) {
      const std::shared_lock no_clear(clear_mutex_);
      if (own.empty() || random() % 4 == 0) {
        own.push_back({static_cast<std::uint32_t>(random() % 2), seed_ << 24 | thread << 20 | round, 0});
      }
      Chain& chain = random() % 3 == 0 ? own[random() % own.size()] : own.back();
      // Usually the chain grows; now and then its end is stored again.
      const std::uint32_t again =
          chain.length > 0 ? static_cast<std::uint32_t>(random() % std::min(chain.length, 3u)) : 0;
      const std::uint32_t first = chain.length - again;
      const auto count = static_cast<std::uint32_t>(again + 1 + random() % (kMaxBatch - again));
      const Layout& layout = mode_.layouts[chain.space];
      PageMemory memory(layout.parts, layout.regions, count, random() % 2 * 52, random() % 3 * 32);
      std::vector<Hash256> keys(count);
      for (std::uint32_t i = 0; i < count; ++i) {
        keys[i] = page_key(chain.id, first + i);
        memory.write(i, page_seed(chain.space, keys[i]));
      }
      append(Event::kAttempt, chain.space, chain.id, first, count);
      {
        const std::lock_guard lock(known_mutex_);
        known_.push_back({chain.space, chain.id, first + count});
        if (known_.size() > 256) known_.erase(known_.begin(), known_.begin() + 128);
      }
      const Hash256 before = first > 0 ? page_key(chain.id, first - 1) : Hash256{};
      std::vector<std::uint8_t> ok(count);
      char* error = nullptr;
      const tardis_code code =
          tardis_set(open_.store, open_.spaces[chain.space], keys[0].data(), first > 0 ? before.data() : nullptr,
                     memory.pieces(), count, ok.data(), &error);
      const auto stored = static_cast<std::uint32_t>(std::find(ok.begin(), ok.end(), 0) - ok.begin());
      if (code != TARDIS_OK && code != TARDIS_NO_SPACE) die(std::string("set: ") + error, 3);
      tardis_free(error);
      if (!mode_.evict && code != TARDIS_OK) clear_wanted_ = true;
      chain.length = first + stored;
      if (random() % 4 == 0) {
        if (tardis_flush(open_.store, &error) != TARDIS_OK) die(std::string("flush: ") + error, 3);
        append(Event::kFlushed, chain.space, chain.id, first, stored);
      }
      if (!mode_.evict) {
        tardis_stats stats;
        (void)tardis_get_stats(open_.store, &stats);
        if (stats.slots_live * 10 > 600 * 7) clear_wanted_ = true;
      }
      no_clear_ended(no_clear, random, own);
    }
  }

  // Clears while nobody stores, so that what was stored before is known to be gone after; in `evict` also amid
  // everything.
  void no_clear_ended(const std::shared_lock<std::shared_mutex>& held, std::mt19937_64& random,
                      std::vector<Chain>& own) {
    if (random() % 64 != 0 && !clear_wanted_) return;
    if (mode_.evict && random() % 2 == 0) {
      std::uint64_t pages = 0;
      (void)tardis_clear(open_.store, nullptr, &pages, nullptr);
      own.clear();
      return;
    }
    held.mutex()->unlock_shared();
    {
      const std::unique_lock alone(clear_mutex_);
      const bool all = clear_wanted_.exchange(false) || random() % 2 == 0;
      const auto space = static_cast<std::uint32_t>(random() % 2);
      for (std::uint32_t i = 0; i < 2; ++i) {
        if (all || i == space) append(Event::kClearing, i, 0, 0, 0);
      }
      std::uint64_t pages = 0;
      char* error = nullptr;
      if (tardis_clear(open_.store, all ? nullptr : open_.fingerprints[space].data(), &pages, &error) != TARDIS_OK)
        die(std::string("clear: ") + error, 3);
      for (std::uint32_t i = 0; i < 2; ++i) {
        if (all || i == space) append(Event::kCleared, i, 0, 0, 0);
      }
    }
    held.mutex()->lock_shared();
    own.clear();
  }

  void read_pages(std::uint64_t end) {
    std::mt19937_64 random(seed_ * 3 + 1);
    while (monotonic_ns() < end) {
      Chain chain;
      {
        const std::lock_guard lock(known_mutex_);
        if (known_.empty()) {
          std::this_thread::yield();
          continue;
        }
        chain = known_[random() % known_.size()];
      }
      const std::uint32_t count = std::min<std::uint32_t>(chain.length, kMaxBatch);
      const std::uint32_t first = chain.length - count;
      const Layout& layout = mode_.layouts[chain.space];
      PageMemory memory(layout.parts, layout.regions, count, random() % 2 * 12);
      std::vector<Hash256> keys(count);
      for (std::uint32_t i = 0; i < count; ++i) keys[i] = page_key(chain.id, first + i);
      std::vector<std::uint8_t> ok(count);
      char* error = nullptr;
      const tardis_code code =
          tardis_get(open_.store, open_.spaces[chain.space], keys[0].data(), memory.pieces(), count, ok.data(), &error);
      if (code != TARDIS_OK) die(std::string("get: ") + error, 3);
      for (std::uint32_t i = 0; i < count; ++i) {
        if (ok[i] != 0 && !memory.holds(i, page_seed(chain.space, keys[i]))) die("get: wrong bytes", 3);
      }
    }
  }

  const Mode& mode_;
  std::uint64_t seed_;
  OpenStore open_;
  int log_;
  std::shared_mutex clear_mutex_;
  std::atomic<bool> clear_wanted_{false};
  std::mutex known_mutex_;
  std::vector<Chain> known_;
};

struct Expected {
  std::vector<bool> attempted, flushed;
};

struct Expectations {
  std::map<std::pair<std::uint32_t, std::uint64_t>, Expected> chains;            // what may or must be there
  std::map<std::pair<std::uint32_t, std::uint64_t>, std::vector<bool>> cleared;  // what must not
};

Expectations read_log(const std::string& path) {
  Expectations result;
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return result;  // killed before the first record
  Record r;
  while (std::fread(&r, sizeof r, 1, file) == 1) {
    if (r.check != r.sum()) die("the log is damaged", 4);
    if (r.event == Event::kAttempt || r.event == Event::kFlushed) {
      Expected& chain = result.chains[{r.space, r.chain}];
      std::vector<bool>& marks = r.event == Event::kAttempt ? chain.attempted : chain.flushed;
      if (marks.size() < r.first + r.count) marks.resize(r.first + r.count);
      std::fill_n(marks.begin() + r.first, r.count, true);
      continue;
    }
    for (auto it = result.chains.begin(); it != result.chains.end();) {
      if (it->first.first != r.space) {
        ++it;
        continue;
      }
      it->second.flushed.clear();
      if (r.event == Event::kCleared) {
        std::vector<bool>& gone = result.cleared[it->first];
        gone.resize(std::max(gone.size(), it->second.attempted.size()));
        for (std::size_t i = 0; i < it->second.attempted.size(); ++i) gone[i] = gone[i] || it->second.attempted[i];
        it = result.chains.erase(it);
      } else {
        ++it;
      }
    }
  }
  std::fclose(file);
  return result;
}

int check(const std::string& folder, const std::string& engine, const Mode& mode, std::uint64_t seed,
          const std::string& log) {
  const Expectations expected = read_log(log);
  const std::uint64_t started = monotonic_ns();
  OpenStore open(folder, engine, mode, seed);
  const double recovery_ms = static_cast<double>(monotonic_ns() - started) / 1e6;
  std::uint64_t found = 0, wrong = 0, flushed = 0, missing = 0, resurrected = 0;
  for (const auto& [key, chain] : expected.chains) {
    const auto [space, id] = key;
    const Layout& layout = mode.layouts[space];
    PageMemory memory(layout.parts, layout.regions, 1);
    for (std::uint32_t i = 0; i < chain.attempted.size(); ++i) {
      if (!chain.attempted[i]) continue;
      const Hash256 hash = page_key(id, i);
      std::uint8_t ok = 0;
      char* error = nullptr;
      const tardis_code code = tardis_get(open.store, open.spaces[space], hash.data(), memory.pieces(), 1, &ok, &error);
      if (code != TARDIS_OK) die(std::string("get: ") + error, 1);
      found += ok;
      wrong += ok != 0 && !memory.holds(0, page_seed(space, hash));
      if (!mode.evict && i < chain.flushed.size() && chain.flushed[i]) {
        ++flushed;
        missing += ok == 0;
      }
    }
  }
  for (const auto& [key, attempted] : expected.cleared) {
    const auto again = expected.chains.find(key);  // stored anew after the clear
    for (std::uint32_t i = 0; i < attempted.size(); ++i) {
      if (!attempted[i]) continue;
      if (again != expected.chains.end() && i < again->second.attempted.size() && again->second.attempted[i]) continue;
      const Hash256 hash = page_key(key.second, i);
      std::size_t run = 0;
      (void)tardis_lookup(open.store, open.spaces[key.first], hash.data(), 1, &run);
      resurrected += run;
    }
  }
  tardis_stats s;
  (void)tardis_get_stats(open.store, &s);
  const bool conserved =
      s.slots_total == s.slots_live + s.slots_free + s.slots_quarantined + s.slots_writing && s.slots_writing == 0;
  tardis_verify_report report{};
  if (!mode.dirty) {
    char* error = nullptr;
    if (tardis_close(open.store, &error) != TARDIS_OK) die(std::string("close: ") + error, 1);
    tardis_destroy(open.store);
    char* problems = nullptr;
    if (tardis_verify(folder.c_str(), mode.repair, nullptr, nullptr, &report, &problems, &error) != TARDIS_OK) {
      die(std::string("verify: ") + error, 1);
    }
    if (report.bad_headers + report.bad_payloads > 0) std::fprintf(stderr, "verify: %s\n", problems);
    tardis_free(problems);
  }
  const std::uint64_t bad = report.bad_headers + report.bad_payloads + report.quarantined + report.unreadable_segments;
  std::printf(
      "{\"found\": %lu, \"wrong\": %lu, \"flushed\": %lu, \"missing\": %lu, \"resurrected\": %lu, \"slots\": %lu, "
      "\"conserved\": %s, \"quarantined\": %lu, \"unreadable\": %lu, \"verify_bad\": %lu, \"torn\": %lu, \"verified\": "
      "%lu, "
      "\"rejected\": %lu, \"recovery_ms\": %.3f}\n",
      found, wrong, flushed, missing, resurrected, s.slots_total, conserved ? "true" : "false", s.slots_quarantined,
      s.segments_unreadable, bad, s.get_pages_torn, s.recovered_verified, s.recovered_rejected, recovery_ms);
  std::fflush(stdout);
  const bool kept = wrong == 0 && missing == 0 && resurrected == 0 && conserved && s.slots_quarantined == 0 &&
                    s.segments_unreadable == 0 && bad == 0;
  if (mode.dirty) std::_Exit(kept ? 0 : 1);
  return kept ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) die("usage: tardis_torture write|check FOLDER SEED ENGINE LOG keep|evict[-dirty|-repair]", 2);
  const std::string what = argv[1], folder = argv[2], engine = argv[4], log = argv[5];
  const std::uint64_t seed = std::strtoull(argv[3], nullptr, 10);
  const Mode mode = parse_mode(argv[6]);
  if (what == "check") return check(folder, engine, mode, seed, log);
  if (what != "write") die("expected write or check, found " + what, 2);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // not to outlive a campaign that was stopped
  const char* seconds = std::getenv("TORTURE_SECONDS");
  Writer(folder, engine, mode, seed, log).run(seconds != nullptr ? std::strtod(seconds, nullptr) : 3600);
  return 0;
}
