// SPDX-License-Identifier: Apache-2.0
// On a GPU: the index against a std::unordered_map and against objects that follow from a number.
//   tardis_gpu_gstore_check [millions of lookups, default 100] [random changes, default 1000000]
//                           [how many times as long as usual who waits for another waits, default 1]
// Under a sanitizer, which slows kernels down: 0 20000 1000.
// Exit status 0: no wrong answer; 1: some, or a CUDA error; 77: no GPU here.
#include <algorithm>
#include <cstring>
#include <random>
#include <unordered_map>
#include <vector>

#include "gpu_gstore_support.cuh"
#include "gstore/index_reader.h"

namespace tardis::gstore::testing {
namespace {

constexpr std::uint32_t kBatch = 1 << 20;

struct KeyHash {
  std::size_t operator()(const Key& key) const { return key.word[0] ^ key.word[1] ^ key.word[2] * 3; }
};
struct KeyEqual {
  bool operator()(const Key& a, const Key& b) const { return std::memcmp(&a, &b, sizeof a) == 0; }
};
using Model = std::unordered_map<Key, tardis_gpu_index_entry, KeyHash, KeyEqual>;

int failures = 0;  // of this program
std::uint32_t patience = 1;

void expect(bool good, const char* what, unsigned long long found = 0, unsigned long long expected = 0) {
  if (good) return;
  if (++failures < 20) std::fprintf(stderr, "WRONG: %s: found %llu, expected %llu\n", what, found, expected);
}

// A place in which batches run one after the other, all arrays in mapped memory.
struct Lane {
  explicit Lane(std::uint32_t room)
      : room(room),
        keys(mapped_array<Key>(room)),
        answers(mapped_array<tardis_gpu_index_answer>(room)),
        changes(mapped_array<tardis_gpu_index_entry>(room)),
        statuses(mapped_array<std::uint8_t>(room)),
        count(mapped_array<std::uint32_t>(1)),
        report(mapped_array<tardis_gpu_report>(1)),
        ticket(device_array<tardis_gpu_ticket>(1)) {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~Lane() { cudaStreamDestroy(stream); }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  void lookup(const Table& table, std::uint16_t space) {
    check(tardis_gpu_index_lookup(&table.index, keys.get(), count.get(), room, space, answers.get(), ticket.get(),
                                  report.get(), 0, stream),
          "tardis_gpu_index_lookup");
  }
  void apply(const Table& table) {
    check(tardis_gpu_index_apply(&table.index, changes.get(), count.get(), room, statuses.get(), ticket.get(),
                                 report.get(), 0, stream),
          "tardis_gpu_index_apply");
  }
  void wait() {
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    told();
  }
  // Without the stream's help: whatever the report's epoch says is done must be there.
  void wait_for_report() {
    const std::uint64_t* epoch = &report[0].epoch;
    for (std::uint64_t looks = 0; __atomic_load_n(epoch, __ATOMIC_ACQUIRE) == batches; ++looks) {
      if (looks == 5'000'000'000) check(cudaErrorLaunchTimeout, "a report");
    }
    told();
  }
  void told() {
    ++batches;
    expect(report[0].epoch == batches, "epoch of a report", report[0].epoch, batches);
    expect(report[0].count == std::min(count[0], room), "count of a report", report[0].count, count[0]);
  }

  const std::uint32_t room;
  MappedArray<Key> keys;
  MappedArray<tardis_gpu_index_answer> answers;
  MappedArray<tardis_gpu_index_entry> changes;
  MappedArray<std::uint8_t> statuses;
  MappedArray<std::uint32_t> count;
  MappedArray<tardis_gpu_report> report;
  DeviceArray<tardis_gpu_ticket> ticket;
  cudaStream_t stream = nullptr;
  std::uint64_t batches = 0;
};

// Everything that the table holds, read without the index's own code for finding, is what the model holds.
void compare_state(const Table& table, const Model& model, std::uint16_t space) {
  std::vector<std::uint64_t> memory(table.bytes / 8);
  check(cudaMemcpy(memory.data(), table.memory.get(), memory.size() * 8, cudaMemcpyDeviceToHost), "cudaMemcpy");
  const std::uint32_t buckets = table.index.buckets;
  const std::uint64_t* records = memory.data() + std::size_t{buckets} * kLanes;
  std::vector<std::uint32_t> overflow(buckets);
  std::size_t live = 0;
  for (std::uint32_t b = 0; b < buckets; ++b) {
    for (int lane = 1; lane < kLanes; ++lane) {
      const std::uint64_t word = memory[std::size_t{b} * kLanes + lane];
      if (state_of(word) == EntryState::kEmpty) continue;
      expect(state_of(word) == EntryState::kLive, "state of an entry at rest", word & kStateMask, 2);
      ++live;
      tardis_gpu_index_entry entry;
      std::memcpy(&entry, records + (std::size_t{b} * kLanes + lane) * kRecordWords, sizeof entry);
      Key key;
      std::memcpy(&key, entry.key, sizeof key);
      const auto known = model.find(key);
      expect(known != model.end() && std::memcmp(&known->second, &entry, sizeof entry) == 0, "an entry of the table",
             b);
      const Place place = place_of(key, space, buckets);
      expect(place.first == b || place.second == b, "the bucket of an entry", b, place.first);
      if (place.first != b) ++overflow[place.first];
    }
  }
  expect(live == model.size(), "entries of the table", live, model.size());
  for (std::uint32_t b = 0; b < buckets; ++b) {
    const std::uint64_t header = memory[std::size_t{b} * kLanes];
    expect(header == overflow[b], "header of a bucket", header, overflow[b]);
  }
}

void random_operations(std::uint32_t operations) {
  constexpr std::uint32_t kRoom = 4096, kUniverse = 60'000;
  constexpr std::uint16_t kSpace = 77;
  Table table(40'000);  // room for 50,000: some changes find both buckets full
  table.index.patience = patience;
  Lane lane(kRoom);
  Model model;
  std::mt19937_64 random(1);
  std::vector<Key> universe;
  for (std::uint64_t i = 0; universe.size() < kUniverse; ++i) {
    universe.push_back(key_of(i));
    for (std::uint64_t which = 1; i % 8 == 0 && which <= 5; ++which) universe.push_back(near_key(i, which));
  }
  std::uint64_t by_status[TARDIS_GPU_INDEX_STATUSES] = {};
  std::vector<std::uint32_t> order(universe.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::uint32_t done = 0;
  for (std::uint64_t round = 0; done < operations; ++round) {
    const std::uint32_t n = std::min<std::uint32_t>(1 + random() % kRoom, operations - done);
    for (std::uint32_t i = 0; i < n; ++i) {
      std::swap(order[i], order[i + random() % (order.size() - i)]);
      const auto op = static_cast<std::uint8_t>(round % 16 < 8 || random() % 16 < 9 ? random() % 2 : 2);
      lane.changes[i] = entry_of(universe[order[i]], round + random() % 3, kSpace, op);
    }
    std::memset(lane.statuses.get(), 0xEE, kRoom);
    lane.count[0] = n;
    lane.apply(table);
    lane.wait();
    std::uint32_t totals[TARDIS_GPU_INDEX_STATUSES] = {};
    for (std::uint32_t i = 0; i < n; ++i) {
      tardis_gpu_index_entry change = lane.changes[i];
      const std::uint8_t op = change.op;
      change.op = 0;
      const Key key = universe[order[i]];
      const auto known = model.find(key);
      std::uint32_t expected = TARDIS_GPU_INDEX_INSERTED;
      if (lane.statuses[i] == TARDIS_GPU_INDEX_BUSY) {  // counted below, and nothing was changed
        expected = TARDIS_GPU_INDEX_BUSY;
      } else if (known == model.end()) {
        if (op == TARDIS_GPU_INDEX_ERASE) expected = TARDIS_GPU_INDEX_ABSENT;
        if (op != TARDIS_GPU_INDEX_ERASE && lane.statuses[i] == TARDIS_GPU_INDEX_FULL) expected = TARDIS_GPU_INDEX_FULL;
        if (expected == TARDIS_GPU_INDEX_INSERTED) model.emplace(key, change);
      } else if (op == TARDIS_GPU_INDEX_ADD) {
        expected = TARDIS_GPU_INDEX_EXISTS;
      } else if (known->second.generation > change.generation) {
        expected = TARDIS_GPU_INDEX_STALE;
      } else if (op == TARDIS_GPU_INDEX_ERASE) {
        expected = TARDIS_GPU_INDEX_ERASED;
        model.erase(known);
      } else {
        expected = TARDIS_GPU_INDEX_REPLACED;
        known->second = change;
      }
      expect(lane.statuses[i] == expected, "status of a change", lane.statuses[i], expected);
      ++totals[expected];
      ++by_status[expected];
    }
    if (n < kRoom) expect(lane.statuses[n] == 0xEE, "a status beyond the count", lane.statuses[n], 0xEE);
    expect(std::memcmp(totals, lane.report[0].totals, sizeof totals) == 0, "totals of a report");
    done += n;
    if (round % 40 == 0 || done == operations) {
      compare_state(table, model, kSpace);
      for (std::size_t from = 0; from < universe.size(); from += kRoom) {
        lane.count[0] = static_cast<std::uint32_t>(std::min<std::size_t>(kRoom, universe.size() - from));
        std::memcpy(lane.keys.get(), &universe[from], lane.count[0] * sizeof(Key));
        std::memset(lane.answers.get(), 0xEE, kRoom * sizeof(tardis_gpu_index_answer));
        lane.lookup(table, kSpace);
        lane.wait();
        std::uint32_t run = 0;
        while (run < lane.count[0] && model.count(universe[from + run]) != 0) ++run;
        expect(lane.report[0].run == run, "run of a report", lane.report[0].run, run);
        for (std::uint32_t i = 0; i < lane.count[0]; ++i) {
          const auto known = model.find(universe[from + i]);
          const tardis_gpu_index_answer& answer = lane.answers[i];
          expect(answer.status == (known != model.end()), "a lookup", answer.status, known != model.end());
          if (known == model.end()) continue;
          expect(answer.location == known->second.location && answer.generation == known->second.generation &&
                     answer.root == known->second.root && answer.payload_bytes == known->second.payload_bytes,
                 "what a lookup found");
        }
        if (from == 0) {  // the same keys in another namespace are other keys
          lane.lookup(table, kSpace + 1);
          lane.wait();
          expect(lane.report[0].totals[TARDIS_GPU_INDEX_MISS] == lane.count[0], "misses of another namespace");
        }
      }
    }
  }
  expect(by_status[TARDIS_GPU_INDEX_BUSY] == 0, "changes that gave up", by_status[TARDIS_GPU_INDEX_BUSY], 0);
  std::printf(
      "%u random changes, %zu entries at the end, load %.2f; inserted %llu, replaced %llu, erased %llu, exists "
      "%llu, stale %llu, absent %llu, full %llu\n",
      done, model.size(), static_cast<double>(model.size()) / (table.index.buckets * 31.0),
      static_cast<unsigned long long>(by_status[0]), static_cast<unsigned long long>(by_status[1]),
      static_cast<unsigned long long>(by_status[2]), static_cast<unsigned long long>(by_status[3]),
      static_cast<unsigned long long>(by_status[4]), static_cast<unsigned long long>(by_status[5]),
      static_cast<unsigned long long>(by_status[6]));
}

// More keys than the table can hold: each is stored or told to be not.
void full_table() {
  constexpr std::uint32_t kKeys = 20'000;
  Table table(16 * kBucketBytes * 16, 0);
  table.index.patience = patience;
  const std::uint32_t room = table.index.buckets * kEntriesPerBucket;
  Lane lane(kKeys);
  for (std::uint32_t i = 0; i < kKeys; ++i) {
    lane.keys[i] = i % 2 == 0 ? key_of(i) : near_key(i % 128, i);
    lane.changes[i] = entry_of(lane.keys[i], 1, 0, TARDIS_GPU_INDEX_PUT);
  }
  lane.count[0] = kKeys;
  lane.apply(table);
  lane.wait();
  const std::uint32_t inserted = lane.report[0].totals[TARDIS_GPU_INDEX_INSERTED];
  expect(inserted + lane.report[0].totals[TARDIS_GPU_INDEX_FULL] == kKeys, "inserted or full", inserted, kKeys);
  expect(inserted == room, "entries of a table that has no room", inserted, room);
  lane.lookup(table, 0);
  lane.wait();
  for (std::uint32_t i = 0; i < kKeys; ++i) {
    const bool there = lane.statuses[i] == TARDIS_GPU_INDEX_INSERTED;
    expect(lane.answers[i].status == there, "a lookup in a full table", lane.answers[i].status, there);
    if (there) expect(fits(lane.answers[i], lane.keys[i], 0), "an answer of a full table");
  }
  for (std::uint32_t i = 0; i < kKeys; ++i) lane.changes[i].op = TARDIS_GPU_INDEX_ERASE;
  lane.apply(table);
  lane.wait();
  expect(lane.report[0].totals[TARDIS_GPU_INDEX_ERASED] == inserted, "erased of a full table");
  compare_state(table, {}, 0);
  std::printf("full table: %u of %u inserted, %u refused\n", inserted, kKeys, kKeys - inserted);
}

// ---- millions, by number. Even numbers < 2 n are stored; of every eighth one also a near key.
__global__ void make_entries(tardis_gpu_index_entry* out, std::uint64_t first, std::uint32_t n, std::uint16_t space) {
  for (std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    const std::uint64_t number = first + i;
    out[i] = entry_of(number % 8 == 7 ? near_key(number - 7, 2) : key_of(number), number + 1, space, 0);
  }
}

enum class Ask : std::uint32_t { kStored, kNever, kNearMiss, kNearStored };

struct Query {
  Ask ask;
  std::uint64_t number;  // of the entry, if it is stored
  Key key;
};

__device__ Query query_of(std::uint64_t seed, std::uint64_t entries) {
  const std::uint64_t draw = scramble(seed);
  const std::uint64_t number = scramble(draw) % (entries / 8) * 8 + draw % 7;  // not a near key
  switch (draw >> 32 & 3) {
    case 0:
      return {Ask::kNever, 0, key_of(entries + draw % (entries * 16))};
    case 1:
      return {Ask::kNearMiss, 0, near_key(number, 3 + draw % 61)};
    case 2:
      if (draw >> 40 & 1) return {Ask::kNearStored, number / 8 * 8 + 7, near_key(number / 8 * 8, 2)};
      [[fallthrough]];
    default:
      return {Ask::kStored, number, key_of(number)};
  }
}

__global__ void make_queries(Key* keys, std::uint64_t seed, std::uint64_t entries, std::uint32_t n) {
  for (std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    keys[i] = query_of(seed + i, entries).key;
  }
}

struct Tally {
  unsigned long long wrong, stored, near_stored, never, near_miss;
  Query query;  // one that was answered wrongly
  tardis_gpu_index_answer answer;
};

__global__ void judge(const tardis_gpu_index_answer* answers, std::uint64_t seed, std::uint64_t entries,
                      std::uint32_t n, std::uint16_t space, Tally* tally) {
  for (std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    const Query query = query_of(seed + i, entries);
    const tardis_gpu_index_answer answer = answers[i];
    const bool stored = query.ask == Ask::kStored || query.ask == Ask::kNearStored;
    bool good = answer.status == (stored ? 1 : 0);
    if (stored) good = good && answer.generation == query.number + 1 && fits(answer, query.key, space);
    if (!stored) good = good && answer.location == kNowhere;
    if (!good && atomicAdd(&tally->wrong, 1ull) == 0) {
      tally->query = query;
      tally->answer = answer;
    }
    unsigned long long* of[] = {&tally->stored, &tally->never, &tally->near_miss, &tally->near_stored};
    atomicAdd(of[static_cast<int>(query.ask)], 1ull);
  }
}

void load_table(const Table& table, std::uint64_t entries, std::uint16_t space) {
  auto batch = device_array<tardis_gpu_index_entry>(kBatch);
  auto ticket = device_array<tardis_gpu_ticket>(1);
  auto count = mapped_array<std::uint32_t>(1);
  auto report = mapped_array<tardis_gpu_report>(1);
  for (std::uint64_t first = 0; first < entries; first += kBatch) {
    count[0] = static_cast<std::uint32_t>(std::min<std::uint64_t>(kBatch, entries - first));
    make_entries<<<1024, 256>>>(batch.get(), first, count[0], space);
    check(cudaGetLastError(), "make_entries");
    check(tardis_gpu_index_apply(&table.index, batch.get(), count.get(), kBatch, nullptr, ticket.get(), report.get(), 0,
                                 nullptr),
          "tardis_gpu_index_apply");
    check(cudaDeviceSynchronize(), "loading");
    expect(report[0].totals[TARDIS_GPU_INDEX_INSERTED] == count[0], "entries that were inserted at a load of 0.8",
           report[0].totals[TARDIS_GPU_INDEX_INSERTED], count[0]);
  }
}

void many_lookups(std::uint64_t millions) {
  constexpr std::uint64_t kEntries = 16 << 20;
  constexpr std::uint16_t kSpace = 3;
  Table table(kEntries);
  table.index.patience = patience;
  load_table(table, kEntries, kSpace);
  auto keys = device_array<Key>(kBatch);
  auto answers = device_array<tardis_gpu_index_answer>(kBatch);
  auto ticket = device_array<tardis_gpu_ticket>(1);
  auto tally = device_array<Tally>(1);
  auto count = mapped_array<std::uint32_t>(1);
  count[0] = kBatch;
  std::uint64_t asked = 0;
  for (std::uint64_t seed = 1; asked < millions * 1'000'000; seed += kBatch, asked += kBatch) {
    check(cudaMemsetAsync(answers.get(), 0xEE, kBatch * sizeof(tardis_gpu_index_answer)), "cudaMemsetAsync");
    make_queries<<<1024, 256>>>(keys.get(), seed, kEntries, kBatch);
    check(tardis_gpu_index_lookup(&table.index, keys.get(), count.get(), kBatch, kSpace, answers.get(), ticket.get(),
                                  nullptr, 0, nullptr),
          "tardis_gpu_index_lookup");
    judge<<<1024, 256>>>(answers.get(), seed, kEntries, kBatch, kSpace, tally.get());
    check(cudaGetLastError(), "judge");
  }
  Tally found{};
  check(cudaMemcpy(&found, tally.get(), sizeof found, cudaMemcpyDeviceToHost), "cudaMemcpy");
  expect(found.wrong == 0, "wrong answers", found.wrong, 0);
  if (found.wrong != 0) {
    const Place place = place_of(found.query.key, kSpace, table.index.buckets);
    std::fprintf(stderr, "kind %u, number %llu, buckets %u and %u, tag %x: status %u, location %llx, generation %llu\n",
                 static_cast<unsigned>(found.query.ask), static_cast<unsigned long long>(found.query.number),
                 place.first, place.second, place.tag, found.answer.status,
                 static_cast<unsigned long long>(found.answer.location),
                 static_cast<unsigned long long>(found.answer.generation));
  }
  std::printf(
      "%llu lookups in %llu entries (load %.3f): %llu wrong; stored %llu, stored near keys %llu, never stored "
      "%llu, near misses %llu\n",
      static_cast<unsigned long long>(asked), static_cast<unsigned long long>(kEntries),
      static_cast<double>(kEntries) / (table.index.buckets * 31.0), found.wrong, found.stored, found.near_stored,
      found.never, found.near_miss);
}

// ---- lookups beside changes. Numbers < kSteady: never changed; < kReplaced: replaced over and over; the rest, each
// with a near key: inserted and erased.
constexpr std::uint32_t kSteady = 100'000, kReplaced = 110'000, kAll = 150'000;

__device__ Key concurrent_key(std::uint32_t number) {
  return number % 2 == 1 && number >= kSteady ? near_key(number - 1, 2) : key_of(number);
}

__global__ void make_changes(tardis_gpu_index_entry* out, std::uint32_t n, std::uint64_t round) {
  for (std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    const std::uint32_t number = kSteady + i;
    const bool erase = number >= kReplaced && (scramble(number + round / 2 * 7919) & 1) != 0 && round % 2 == 1;
    out[i] = entry_of(concurrent_key(number), round + 2, 0, erase ? TARDIS_GPU_INDEX_ERASE : TARDIS_GPU_INDEX_PUT);
  }
}

__global__ void make_concurrent_queries(Key* keys, std::uint32_t n, std::uint64_t seed) {
  for (std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    const std::uint64_t draw = scramble(seed + i);
    keys[i] = concurrent_key(
        static_cast<std::uint32_t>(draw % 2 == 0 ? kSteady + (draw >> 8) % (kAll - kSteady) : (draw >> 8) % kAll));
  }
}

struct ConcurrentTally {
  unsigned long long torn, lost, old, unknown, found, missed, newest;
};

__global__ void judge_concurrent(const Key* keys, const tardis_gpu_index_answer* answers, std::uint32_t n,
                                 std::uint64_t seed, std::uint64_t* least, ConcurrentTally* tally) {
  for (std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    const std::uint64_t draw = scramble(seed + i);
    const auto number =
        static_cast<std::uint32_t>(draw % 2 == 0 ? kSteady + (draw >> 8) % (kAll - kSteady) : (draw >> 8) % kAll);
    const tardis_gpu_index_answer answer = answers[i];
    if (answer.status == TARDIS_GPU_INDEX_FOUND) {
      atomicAdd(&tally->found, 1ull);
      atomicMax(&tally->newest, static_cast<unsigned long long>(answer.generation));
      if (!fits(answer, keys[i], 0)) atomicAdd(&tally->torn, 1ull);
      // Generations of a key only grow; lookups of one batch may overlap, so compare with earlier batches only.
      if (answer.generation < least[number]) atomicAdd(&tally->old, 1ull);
    } else if (answer.status == TARDIS_GPU_INDEX_UNKNOWN) {
      atomicAdd(&tally->unknown, 1ull);
    } else {
      atomicAdd(&tally->missed, 1ull);
      if (number < kReplaced) atomicAdd(&tally->lost, 1ull);
    }
  }
}

__global__ void remember(const tardis_gpu_index_answer* answers, std::uint32_t n, std::uint64_t seed,
                         std::uint64_t* least) {
  for (std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    const std::uint64_t draw = scramble(seed + i);
    const auto number =
        static_cast<std::uint32_t>(draw % 2 == 0 ? kSteady + (draw >> 8) % (kAll - kSteady) : (draw >> 8) % kAll);
    if (answers[i].status == TARDIS_GPU_INDEX_FOUND) {
      atomicMax(reinterpret_cast<unsigned long long*>(&least[number]),
                static_cast<unsigned long long>(answers[i].generation));
    }
  }
}

void concurrent(std::uint64_t rounds) {
  constexpr std::uint32_t kChanges = kAll - kSteady, kLookups = 1 << 18, kCtas = 264;
  Table table(kAll);
  table.index.patience = patience;
  auto changes = device_array<tardis_gpu_index_entry>(kAll);
  auto keys = device_array<Key>(kLookups);
  auto answers = device_array<tardis_gpu_index_answer>(kLookups);
  auto least = device_array<std::uint64_t>(kAll);
  auto tickets = device_array<tardis_gpu_ticket>(2);
  auto reports = mapped_array<tardis_gpu_report>(2);
  auto tally = device_array<ConcurrentTally>(1);
  auto counts = mapped_array<std::uint32_t>(2);
  cudaStream_t writer, reader;
  check(cudaStreamCreateWithFlags(&writer, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaStreamCreateWithFlags(&reader, cudaStreamNonBlocking), "cudaStreamCreate");
  // Everything in, generation 1, by numbers as concurrent_key has them.
  std::vector<tardis_gpu_index_entry> first;
  for (std::uint32_t i = 0; i < kAll; ++i) {
    const bool near = i % 2 == 1 && i >= kSteady;
    first.push_back(entry_of(near ? near_key(i - 1, 2) : key_of(i), 1, 0, TARDIS_GPU_INDEX_PUT));
  }
  check(cudaMemcpy(changes.get(), first.data(), kAll * sizeof first[0], cudaMemcpyHostToDevice), "cudaMemcpy");
  counts[0] = kAll;
  check(tardis_gpu_index_apply(&table.index, changes.get(), &counts[0], kAll, nullptr, &tickets[0], &reports[0], 0,
                               nullptr),
        "tardis_gpu_index_apply");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  expect(reports[0].totals[TARDIS_GPU_INDEX_INSERTED] == kAll, "inserted", reports[0].totals[0], kAll);
  counts[0] = kChanges;
  counts[1] = kLookups;
  for (std::uint64_t round = 0; round < rounds; ++round) {
    make_changes<<<64, 256, 0, writer>>>(changes.get(), kChanges, round);
    check(tardis_gpu_index_apply(&table.index, changes.get(), &counts[0], kChanges, nullptr, &tickets[0], &reports[0],
                                 kCtas, writer),
          "tardis_gpu_index_apply");
    const std::uint64_t seed = 1 + round * kLookups;
    make_concurrent_queries<<<64, 256, 0, reader>>>(keys.get(), kLookups, seed);
    check(tardis_gpu_index_lookup(&table.index, keys.get(), &counts[1], kLookups, 0, answers.get(), &tickets[1],
                                  &reports[1], kCtas, reader),
          "tardis_gpu_index_lookup");
    judge_concurrent<<<64, 256, 0, reader>>>(keys.get(), answers.get(), kLookups, seed, least.get(), tally.get());
    remember<<<64, 256, 0, reader>>>(answers.get(), kLookups, seed, least.get());
    check(cudaGetLastError(), "remember");
  }
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  ConcurrentTally found{};
  check(cudaMemcpy(&found, tally.get(), sizeof found, cudaMemcpyDeviceToHost), "cudaMemcpy");
  expect(found.torn == 0, "torn answers", found.torn, 0);
  expect(found.lost == 0, "misses of keys that were there throughout", found.lost, 0);
  expect(found.old == 0, "answers older than an earlier one", found.old, 0);
  // They may give up where a writer is held up for long; this is no wrong answer, but must be rare.
  expect(found.unknown * 1'000'000 <= rounds * kLookups, "lookups that gave up", found.unknown, 0);
  std::vector<std::uint64_t> words(std::size_t{table.index.buckets} * kLanes);
  check(cudaMemcpy(words.data(), table.index.words, words.size() * 8, cudaMemcpyDeviceToHost), "cudaMemcpy");
  for (std::size_t i = 0; i < words.size(); ++i) {
    const bool header = i % kLanes == 0;
    const bool rests = header ? (words[i] & kLocked) == 0
                              : state_of(words[i]) == EntryState::kEmpty || state_of(words[i]) == EntryState::kLive;
    expect(rests, "a word at rest after changes", i, words[i]);
  }
  expect(found.newest > 1 && found.missed > 0, "lookups that ran beside changes", found.newest, rounds);
  std::printf(
      "beside %llu changes: %llu found (newest generation %llu), %llu missed, %llu torn, %llu lost, %llu old, "
      "%llu unknown\n",
      static_cast<unsigned long long>(rounds * kChanges), found.found, found.newest, found.missed, found.torn,
      found.lost, found.old, found.unknown);
  check(cudaStreamDestroy(writer), "cudaStreamDestroy");
  check(cudaStreamDestroy(reader), "cudaStreamDestroy");
}

// One graph, replayed with other counts, keys and changes.
void replays(std::uint32_t replays) {
  constexpr std::uint32_t kRoom = 2048;
  Table table(kRoom * 4);
  table.index.patience = patience;
  Lane lane(kRoom);
  auto change_ticket = device_array<tardis_gpu_ticket>(1);
  auto change_count = mapped_array<std::uint32_t>(1);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  check(cudaStreamBeginCapture(lane.stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  check(tardis_gpu_index_apply(&table.index, lane.changes.get(), change_count.get(), kRoom, lane.statuses.get(),
                               change_ticket.get(), nullptr, 0, lane.stream),
        "tardis_gpu_index_apply");
  lane.lookup(table, 0);
  check(cudaStreamEndCapture(lane.stream, &graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  std::mt19937_64 random(3);
  std::vector<bool> there(kRoom * 4);
  for (std::uint32_t replay = 0; replay < replays; ++replay) {
    change_count[0] = random() % (kRoom + 1);
    const std::uint32_t start = random() % (3 * kRoom);
    for (std::uint32_t i = 0; i < change_count[0]; ++i) {
      const std::uint32_t number = start % (2 * kRoom) + i;
      const std::uint8_t op = random() % 2 == 0 ? TARDIS_GPU_INDEX_PUT : TARDIS_GPU_INDEX_ERASE;
      lane.changes[i] = entry_of(key_of(number), replay, 0, op);
      there[number] = op == TARDIS_GPU_INDEX_PUT;
    }
    lane.count[0] = random() % (kRoom + 1);
    std::vector<std::uint32_t> asked;
    for (std::uint32_t i = 0; i < lane.count[0]; ++i) {
      asked.push_back(random() % (kRoom * 4));
      lane.keys[i] = key_of(asked[i]);
    }
    std::memset(lane.answers.get(), 0xEE, kRoom * sizeof(tardis_gpu_index_answer));
    check(cudaGraphLaunch(exec, lane.stream), "cudaGraphLaunch");
    lane.wait_for_report();
    for (std::uint32_t i = 0; i < lane.count[0]; ++i) {
      expect(lane.answers[i].status == there[asked[i]], "a lookup of a replay", lane.answers[i].status,
             there[asked[i]]);
      if (there[asked[i]]) expect(fits(lane.answers[i], lane.keys[i], 0), "an answer of a replay");
    }
  }
  lane.count[0] = kRoom + 100;  // more than the arrays hold
  check(cudaGraphLaunch(exec, lane.stream), "cudaGraphLaunch");
  lane.wait();
  check(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  std::printf("%u replays of one graph\n", replays);
}

}  // namespace
}  // namespace tardis::gstore::testing

int main(int argc, char** argv) {
  using namespace tardis::gstore::testing;
  if (!has_gpu()) return kSkipped;
  if (argc > 3) patience = static_cast<std::uint32_t>(std::strtoul(argv[3], nullptr, 10));
  full_table();
  const std::uint64_t millions = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 100;
  const auto changes = static_cast<std::uint32_t>(argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 1'000'000);
  random_operations(changes);
  replays(changes / 1000);
  concurrent(changes / 2500);
  if (millions > 0) many_lookups(millions);
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
