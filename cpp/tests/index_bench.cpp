// SPDX-License-Identifier: Apache-2.0
// The shared index with synthetic entries: how fast it answers, what it costs, how fast a checkpoint comes back.
//   tardis_index_bench SHARED_MEMORY_FOLDER CHECKPOINT_FOLDER [objects]
// Prints one JSON object.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "live_segment_support.h"
#include "store/checkpoint.h"
#include "store/index.h"
#include "store_pages.h"

namespace tardis {
namespace {

constexpr SlotClass kClass{8192, 1};
constexpr std::uint64_t kSegmentBytes = 1u << 30;
constexpr std::size_t kBatch = 128, kBatches = 20'000;
constexpr Uuid kStore{9};

[[noreturn]] void stop(const std::string& message) {
  std::fprintf(stderr, "tardis_index_bench: %s\n", message.c_str());
  std::exit(1);
}

void check(const Status& status) {
  if (!status) stop(status.error().message);
}

struct Table {
  Table(const std::string& folder, std::uint64_t objects)
      : slots(SegmentGeometry::of(kSegmentBytes, kClass.slot_bytes, kClass.digests_per_slot).slots),
        segments(static_cast<std::uint32_t>((objects + slots - 1) / slots)),
        table(make(folder, objects)),
        index(table, 0, 1, [](std::uint32_t place) { return place == 0; }) {
    table.process(0).owner.store(1);
    table.header().processes_end.store(1);
    table.header().namespaces_end.store(1);
    for (std::uint32_t id = 0; id < segments; ++id) {
      check(testing::add_live_segment(table, id, kClass, kSegmentBytes));
    }
  }
  ~Table() { table.remove_file(); }

  LiveTable make(const std::string& folder, std::uint64_t objects) const {
    auto made = LiveTable::create(folder, {kStore, 1, 1}, {segments * kSegmentBytes, kSegmentBytes, segments, objects});
    if (!made) stop(made.error().message);
    check(made->reserve_process(0));
    return std::move(*made);
  }

  const std::uint32_t slots, segments;
  LiveTable table;
  Index index;
};

double seconds_since(std::uint64_t start) { return static_cast<double>(monotonic_ns() - start) * 1e-9; }

int run(const std::string& shared, const std::string& folder, std::uint64_t objects) {
  std::printf("{\"objects\": %llu", static_cast<unsigned long long>(objects));
  {
    Table made(shared, objects);
    const std::uint64_t started = monotonic_ns();
    for (std::uint64_t i = 0; i < objects; ++i) {
      const GlobalSlot at =
          made.index.global({static_cast<std::uint32_t>(i / made.slots), static_cast<std::uint32_t>(i % made.slots)});
      const Stamp writing(SlotState::kWriting, i + 1);
      if (!made.index.change(at, Stamp(), writing)) stop("a slot is not free");
      const IndexEntry entry{.slot = at,
                             .stamp = writing,
                             .key = testing::page_key(i / kBatch, i % kBatch),
                             .space = 0,
                             .payload_bytes = 8192,
                             .root = i,
                             .parent = i % kBatch == 0 ? 0 : short_key(testing::page_key(i / kBatch, i % kBatch - 1))};
      if (made.index.publish(entry, false, i) != Index::Published::kYes) stop("an object was not published");
    }
    std::printf(", \"inserts_per_second\": %.0f", static_cast<double>(objects) / seconds_since(started));
    const std::uint64_t bytes = made.table.buckets() * sizeof(IndexBucket) + objects * sizeof(SlotRecord);
    std::printf(", \"bytes_per_object\": %.1f", static_cast<double>(bytes) / static_cast<double>(objects));

    std::mt19937_64 random(1);
    std::vector<std::uint64_t> times;
    std::vector<Hash256> keys(kBatch);
    for (std::size_t b = 0; b < kBatches; ++b) {
      const std::uint64_t chain = random() % (objects / kBatch);
      for (std::size_t i = 0; i < kBatch; ++i) keys[i] = testing::page_key(chain, i);
      const std::uint64_t before = monotonic_ns();
      if (made.index.run(0, keys.data(), kBatch) != kBatch) stop("a stored object was not found");
      times.push_back(monotonic_ns() - before);
    }
    std::uint64_t sum = 0;
    for (const std::uint64_t time : times) sum += time;
    std::sort(times.begin(), times.end());
    std::printf(", \"lookup_keys_per_second\": %.0f",
                static_cast<double>(kBatch * kBatches) * 1e9 / static_cast<double>(sum));
    std::printf(", \"batch_p50_us\": %.2f, \"batch_p99_us\": %.2f", static_cast<double>(times[times.size() / 2]) * 1e-3,
                static_cast<double>(times[times.size() * 99 / 100]) * 1e-3);

    const std::uint64_t saving = monotonic_ns();
    std::uint32_t id = 0;
    CheckpointHeader header{};
    header.store_uuid = kStore;
    check(write_checkpoint(folder, {Fingerprint{}}, header,
                           [&](CheckpointSegment& segment, std::vector<CheckpointEntry>& entries) {
                             if (id == made.segments) return false;
                             segment.segment = id;
                             for (std::uint32_t slot = 0; slot < made.slots; ++slot) {
                               if (auto entry = made.index.save(made.index.global({id, slot}))) {
                                 entry->slot = slot;
                                 entries.push_back(*entry);
                               }
                             }
                             ++id;
                             return true;
                           }));
    std::printf(", \"checkpoint_write_seconds\": %.2f", seconds_since(saving));
  }
  struct stat status {};
  const std::string path = folder + "/" + kCheckpointFile;
  if (::stat(path.c_str(), &status) != 0) stop(path);
  std::printf(", \"checkpoint_bytes\": %lld", static_cast<long long>(status.st_size));
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const bool cold = fd >= 0 && ::fdatasync(fd) == 0 && ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0;
  if (fd >= 0) ::close(fd);
  std::printf(", \"checkpoint_dropped_from_cache\": %s", cold ? "true" : "false");

  const std::uint64_t loading = monotonic_ns();
  Table again(shared, objects);
  const Checkpoint checkpoint = Checkpoint::load(path, kStore);
  if (checkpoint.header() == nullptr) stop("the checkpoint cannot be read");
  std::atomic<std::uint32_t> next{0};
  const auto load = [&] {
    std::vector<CheckpointEntry> entries;
    for (std::uint32_t id = next.fetch_add(1); id < again.segments; id = next.fetch_add(1)) {
      if (!checkpoint.read({0, id}, entries)) stop("a segment's entries fail their digest");
      again.index.restore(id, entries, {0});
    }
  };
  std::vector<std::thread> threads;
  for (unsigned t = 1; t < std::clamp(std::thread::hardware_concurrency(), 1u, 8u); ++t) threads.emplace_back(load);
  load();
  for (std::thread& thread : threads) thread.join();
  std::printf(", \"checkpoint_load_seconds\": %.2f, \"load_threads\": %zu", seconds_since(loading), threads.size() + 1);
  const Hash256 last = testing::page_key((objects - 1) / kBatch, (objects - 1) % kBatch);
  if (!again.index.find(0, last)) stop("an object of the checkpoint was not found");
  std::printf("}\n");
  ::unlink(path.c_str());
  return 0;
}

}  // namespace
}  // namespace tardis

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: tardis_index_bench SHARED_MEMORY_FOLDER CHECKPOINT_FOLDER [objects]\n");
    return 2;
  }
  return tardis::run(argv[1], argv[2], argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1'000'000);
}
