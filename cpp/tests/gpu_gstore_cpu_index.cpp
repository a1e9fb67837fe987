// SPDX-License-Identifier: Apache-2.0
#include "gpu_gstore_cpu_index.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "live_segment_support.h"
#include "store/index.h"

namespace tardis::gstore::testing {
namespace {

constexpr SlotClass kClass{8192, 1};
constexpr std::uint64_t kSegmentBytes = 1u << 30;
constexpr std::uint32_t kSmallestSlice = 16;  // cache misses that one core has in flight

[[noreturn]] void stop(const std::string& message) {
  std::fprintf(stderr, "the store's index: %s\n", message.c_str());
  std::exit(1);
}

void check(const Status& status) {
  if (!status) stop(status.error().message);
}

Hash256 hash_of(const Key& key) {
  Hash256 hash;
  static_assert(sizeof hash == sizeof key);
  std::memcpy(hash.data(), &key, sizeof key);
  return hash;
}

double seconds_since(std::uint64_t start) { return static_cast<double>(monotonic_ns() - start) * 1e-9; }

}  // namespace

struct CpuIndex::State {
  State(const std::string& folder, std::uint64_t entries, unsigned threads)
      : slots(SegmentGeometry::of(kSegmentBytes, kClass.slot_bytes, kClass.digests_per_slot).slots),
        segments(static_cast<std::uint32_t>((entries + entries / 16 + slots - 1) / slots)),
        entries(entries),
        threads(threads),
        table(make(folder)),
        index(table, 0, 1, [](std::uint32_t place) { return place == 0; }) {}

  LiveTable make(const std::string& folder) const {
    const LiveIdentity identity{Uuid{11}, 1, 1};
    auto made = LiveTable::create(folder, identity,
                                  {segments * kSegmentBytes, kSegmentBytes, segments, std::uint64_t{segments} * slots});
    if (!made) stop(made.error().message);
    check(made->reserve_process(0));
    return std::move(*made);
  }

  GlobalSlot slot_of(std::uint64_t number) const {
    return index.global({static_cast<std::uint32_t>(number / slots), static_cast<std::uint32_t>(number % slots)});
  }

  void load() {
    table.process(0).owner.store(1);
    table.header().processes_end.store(1);
    table.header().namespaces_end.store(1);
    for (std::uint32_t id = 0; id < segments; ++id) {
      check(tardis::testing::add_live_segment(table, id, kClass, kSegmentBytes));
    }
    std::atomic<std::uint32_t> next{0};
    const auto part = [&] {
      std::vector<CheckpointEntry> list;
      for (std::uint32_t id = next.fetch_add(1); id < segments; id = next.fetch_add(1)) {
        list.clear();
        const std::uint64_t first = std::uint64_t{id} * slots, end = std::min(entries, first + slots);
        for (std::uint64_t number = first; number < end; ++number) {
          CheckpointEntry entry{};
          entry.key = hash_of(key_of(number));
          entry.generation = number + 1;
          entry.payload_bytes = 8192;
          entry.slot = static_cast<std::uint32_t>(number % slots);
          entry.state = CheckpointState::kLive;
          list.push_back(entry);
        }
        index.restore(id, list, {0});
      }
    };
    std::vector<std::thread> helpers;
    for (unsigned i = 1; i < threads; ++i) helpers.emplace_back(part);
    part();
    for (std::thread& helper : helpers) helper.join();
  }

  bool find_slice(unsigned part) const {
    const std::uint32_t slice = std::max(kSmallestSlice, (job_n + threads - 1) / threads);
    const std::uint64_t begin = std::uint64_t{part} * slice;
    if (begin >= job_n) return true;
    const auto n = static_cast<std::uint32_t>(std::min<std::uint64_t>(slice, job_n - begin));
    return index.run(0, reinterpret_cast<const Hash256*>(job_keys + begin), n) == n;
  }

  void work(unsigned part) {
    for (std::uint64_t seen = 0;;) {
      std::uint64_t now = job.load(std::memory_order_acquire);
      while (now == seen) {
        __builtin_ia32_pause();
        now = job.load(std::memory_order_acquire);
      }
      seen = now;
      if (stopping.load()) return;
      if (!find_slice(part)) missing.store(true);
      done.fetch_add(1, std::memory_order_acq_rel);
    }
  }

  const std::uint32_t slots, segments;
  const std::uint64_t entries;
  const unsigned threads;
  LiveTable table;
  Index index;
  double load_seconds = 0;

  std::vector<std::thread> pool;
  alignas(64) std::atomic<std::uint64_t> job{0};
  alignas(64) std::atomic<unsigned> done{0};
  alignas(64) std::atomic<bool> missing{false}, stopping{false};
  const Key* job_keys = nullptr;
  std::uint32_t job_n = 0;
};

CpuIndex::CpuIndex(const std::string& shared_folder, std::uint64_t entries, unsigned threads)
    : state_(std::make_unique<State>(shared_folder, entries, threads)) {
  const std::uint64_t started = monotonic_ns();
  state_->load();
  state_->load_seconds = seconds_since(started);
}

CpuIndex::~CpuIndex() {
  stop_threads();
  state_->table.remove_file();
}

double CpuIndex::load_seconds() const { return state_->load_seconds; }
unsigned CpuIndex::threads() const { return state_->threads; }

CpuIndex::Changes CpuIndex::change(std::uint32_t n) {
  State& s = *state_;
  std::vector<IndexEntry> list(n);
  for (std::uint32_t i = 0; i < n; ++i) {
    const std::uint64_t number = s.entries + i;
    const Stamp writing(SlotState::kWriting, number + 1);
    list[i] = {.slot = s.slot_of(number),
               .stamp = writing,
               .key = hash_of(key_of(number)),
               .space = 0,
               .payload_bytes = 8192,
               .root = number,
               .parent = 0};
  }
  Changes seconds{};
  std::uint64_t started = monotonic_ns();
  for (const IndexEntry& entry : list) {
    if (!s.index.change(entry.slot, s.index.stamp(entry.slot), entry.stamp)) stop("a slot is not free");
    if (s.index.publish(entry, false, 1) != Index::Published::kYes) stop("an object was not published");
  }
  seconds.publish = seconds_since(started);
  started = monotonic_ns();
  for (const IndexEntry& entry : list) {
    if (!s.index.unpublish(entry)) stop("an object was not there");
  }
  seconds.unpublish = seconds_since(started);
  return seconds;
}

bool CpuIndex::find_all(const Key* keys, std::uint32_t n) const {
  return state_->index.run(0, reinterpret_cast<const Hash256*>(keys), n) == n;
}

void CpuIndex::start_threads() {
  State& s = *state_;
  for (unsigned i = 1; i < s.threads; ++i) s.pool.emplace_back([&s, i] { s.work(i); });
}

void CpuIndex::stop_threads() {
  State& s = *state_;
  s.stopping.store(true);
  s.job.fetch_add(1, std::memory_order_acq_rel);
  for (std::thread& thread : s.pool) thread.join();
  s.pool.clear();
  s.stopping.store(false);
}

bool CpuIndex::find_all_together(const Key* keys, std::uint32_t n) {
  State& s = *state_;
  s.job_keys = keys;
  s.job_n = n;
  s.missing.store(false);
  s.done.store(0);
  s.job.fetch_add(1, std::memory_order_acq_rel);
  if (!s.find_slice(0)) s.missing.store(true);
  while (s.done.load(std::memory_order_acquire) != s.pool.size()) __builtin_ia32_pause();
  return !s.missing.load();
}

}  // namespace tardis::gstore::testing
