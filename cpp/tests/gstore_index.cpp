// SPDX-License-Identifier: Apache-2.0
// The index's code on the host: the same that a warp runs, against a map, under threads, and full.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "gpu_gstore_objects.h"
#include "gstore/host_index.h"
#include "gstore/index_batch.h"

namespace tardis::gstore::testing {
namespace {

using Words = std::array<std::uint64_t, 4>;

Words words_of(const Key& key) { return {key.word[0], key.word[1], key.word[2], key.word[3]}; }

bool same(const tardis_gpu_index_entry& a, const tardis_gpu_index_entry& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

void expect_answer(const tardis_gpu_index_answer& answer, const tardis_gpu_index_entry& entry) {
  EXPECT_EQ(answer.status, static_cast<std::uint32_t>(TARDIS_GPU_INDEX_FOUND));
  EXPECT_EQ(answer.location, entry.location);
  EXPECT_EQ(answer.generation, entry.generation);
  EXPECT_EQ(answer.root, entry.root);
  EXPECT_EQ(answer.payload_bytes, entry.payload_bytes);
}

// Headers count exactly the entries that are in their second bucket, and nothing is left claimed or locked.
void expect_at_rest(const HostIndex& index, std::size_t entries, std::uint32_t space) {
  const std::uint32_t buckets = index.view().buckets;
  std::vector<std::uint64_t> overflow(buckets);
  std::size_t live = 0;
  for (std::uint32_t b = 0; b < buckets; ++b) {
    for (int lane = 1; lane < kLanes; ++lane) {
      const EntryState state = state_of(bucket_words(index.view(), b)[lane]);
      ASSERT_TRUE(state == EntryState::kEmpty || state == EntryState::kLive);
      if (state == EntryState::kEmpty) continue;
      ++live;
      Key key;
      std::memcpy(&key, record_words(index.view(), b, lane), sizeof key);
      const Place place = place_of(key, space, buckets);
      ASSERT_TRUE(place.first == b || place.second == b);
      if (place.first != b) ++overflow[place.first];
    }
  }
  EXPECT_EQ(live, entries);
  for (std::uint32_t b = 0; b < buckets; ++b) ASSERT_EQ(bucket_words(index.view(), b)[kHeaderLane], overflow[b]);
}

TEST(GstoreIndex, PlaceIsInRangeAndInTwoBuckets) {
  for (const std::uint32_t buckets : {2u, 3u, 31u, 1000u, 0xFFFFFFFFu}) {
    for (std::uint64_t i = 0; i < 2000; ++i) {
      const Place place = place_of(key_of(i), 5, buckets);
      ASSERT_LT(place.first, buckets);
      ASSERT_LT(place.second, buckets);
      ASSERT_NE(place.first, place.second);
    }
  }
}

TEST(GstoreIndex, NearKeysShareBucketsAndTag) {
  for (std::uint64_t i = 1; i < 200; ++i) {
    const Place a = place_of(key_of(7), 1, 1000), b = place_of(near_key(7, i), 1, 1000);
    ASSERT_EQ(a.first, b.first);
    ASSERT_EQ(a.second, b.second);
    ASSERT_EQ(a.tag, b.tag);
    ASSERT_NE(words_of(key_of(7)), words_of(near_key(7, i)));
  }
}

TEST(GstoreIndex, NearKeysMayShareTheFirstHalf) {
  for (std::uint64_t i = 2; i < 200; i += 2) {
    ASSERT_EQ(key_of(7).word[0], near_key(7, i).word[0]);
    ASSERT_EQ(key_of(7).word[1], near_key(7, i).word[1]);
  }
}

// What a reader does with a record that is not as it was when its word was read.
TEST(GstoreIndex, AReaderWaitsForTheEndOfAReplacement) {
  HostIndex index(2);
  const Key key = key_of(1);
  ASSERT_EQ(index.apply(entry_of(key, 1, 0, TARDIS_GPU_INDEX_PUT)), Status::kInserted);
  const Place place = place_of(key, 0, 2);
  std::uint64_t* word = bucket_words(index.view(), place.first) + 1;
  std::uint64_t* record = record_words(index.view(), place.first, 1);
  const std::uint64_t seen = *word;
  ASSERT_TRUE(leads_to(seen, place.tag));
  const auto ask = [&] {
    tardis_gpu_index_answer answer = miss();
    return std::pair(examine(word, record, seen, place.tag, key, 0, answer), answer);
  };
  expect_answer(ask().second, entry_of(key, 1, 0, 0));
  // Half of the new record is there, and the writer does not go on.
  *word = next_word(seen, place.tag, EntryState::kChanging);
  record[kLocation] = 4711;
  EXPECT_EQ(ask().first, Found::kUnknown);
  EXPECT_EQ(ask().second.location, kNowhere);
  // It was done meanwhile.
  const auto entry = entry_of(key, 2, 0, 0);
  std::memcpy(record, &entry, sizeof entry);
  *word = next_word(*word, place.tag, EntryState::kLive);
  expect_answer(ask().second, entry);
  // The entry is another object's by now, with the same tag; then it is empty.
  const auto other = entry_of(near_key(1, 2), 3, 0, 0);
  std::memcpy(record, &other, sizeof other);
  *word = next_word(*word, place.tag, EntryState::kLive);
  EXPECT_EQ(ask().first, Found::kMiss);
  std::memcpy(record, &entry, sizeof entry);
  *word = next_word(*word, 0, EntryState::kEmpty);
  EXPECT_EQ(ask().first, Found::kMiss);
}

TEST(GstoreIndex, PatienceIsStretchedOnlyWhereItIsAskedFor) {
  tardis_gpu_index index{};
  EXPECT_EQ(patience_of(index, Deadline::kReaderPatience), Deadline::kReaderPatience);
  index.patience = 1000;
  EXPECT_EQ(patience_of(index, Deadline::kReaderPatience), 1000 * Deadline::kReaderPatience);
}

TEST(GstoreIndex, RandomChangesAgreeWithAMap) {
  constexpr std::uint16_t kSpace = 9;
  HostIndex index(buckets_for(1500));
  std::map<Words, tardis_gpu_index_entry> model;
  std::vector<Key> universe;
  for (std::uint64_t i = 0; i < 1800; ++i) {
    universe.push_back(key_of(i));
    if (i % 10 == 0) universe.push_back(near_key(i, 1 + i % 7));
  }
  std::mt19937_64 random(1);
  std::map<Status, int> seen;
  for (int step = 0; step < 60'000; ++step) {
    const Key& key = universe[random() % universe.size()];
    // Grows in one half of the time and shrinks in the other.
    const auto op =
        static_cast<std::uint8_t>(step / 10'000 % 2 == 0 || random() % 3 == 0 ? random() % 2 : 2 + random() % 2);
    tardis_gpu_index_entry change = entry_of(key, static_cast<std::uint64_t>(step) / 1000 + random() % 3, kSpace, op);
    const Status status = index.apply(change);
    ++seen[status];
    change.op = 0;
    const auto known = model.find(words_of(key));
    const bool removes = op == TARDIS_GPU_INDEX_ERASE || op == TARDIS_GPU_INDEX_FORGET;
    Status expected = removes ? Status::kAbsent : Status::kInserted;
    if (known != model.end()) {
      if (op == TARDIS_GPU_INDEX_ADD) {
        expected = Status::kExists;
      } else if (op == TARDIS_GPU_INDEX_FORGET) {
        expected = known->second.location == change.location ? Status::kErased : Status::kStale;
        if (expected == Status::kErased) model.erase(known);
      } else if (known->second.generation > change.generation) {
        expected = Status::kStale;
      } else {
        expected = op == TARDIS_GPU_INDEX_ERASE ? Status::kErased : Status::kReplaced;
        if (op == TARDIS_GPU_INDEX_ERASE) model.erase(known);
        if (op == TARDIS_GPU_INDEX_PUT) known->second = change;
      }
    } else if (!removes) {
      if (status == Status::kFull) expected = Status::kFull;
      if (status != Status::kFull) model.emplace(words_of(key), change);
    }
    ASSERT_EQ(status, expected) << "step " << step;
    const Key& other = universe[random() % universe.size()];
    const auto its = model.find(words_of(other));
    const auto answer = index.find(other, kSpace);
    if (its == model.end()) {
      ASSERT_EQ(answer.status, static_cast<std::uint32_t>(TARDIS_GPU_INDEX_MISS)) << "step " << step;
    } else {
      expect_answer(answer, its->second);
    }
    ASSERT_EQ(index.find(other, kSpace + 1).status, static_cast<std::uint32_t>(TARDIS_GPU_INDEX_MISS));
  }
  expect_at_rest(index, model.size(), kSpace);
  for (const Status status :
       {Status::kInserted, Status::kReplaced, Status::kErased, Status::kExists, Status::kStale, Status::kAbsent}) {
    EXPECT_GT(seen[status], 100) << static_cast<int>(status);
  }
}

TEST(GstoreIndex, LoadOfFourFifthsHasRoomForEveryKey) {
  constexpr std::uint64_t kEntries = 200'000;
  HostIndex index(buckets_for(kEntries));
  for (std::uint64_t i = 0; i < kEntries; ++i) {
    ASSERT_EQ(index.apply(entry_of(key_of(i), 1, 0, TARDIS_GPU_INDEX_PUT)), Status::kInserted) << i;
  }
  EXPECT_GT(static_cast<double>(kEntries) / (index.view().buckets * 31.0), 0.79);
  for (std::uint64_t i = 0; i < kEntries; ++i) expect_answer(index.find(key_of(i), 0), entry_of(key_of(i), 1, 0, 0));
  expect_at_rest(index, kEntries, 0);
}

TEST(GstoreIndex, AFullTableTellsAndLosesNothing) {
  HostIndex index(8);
  std::vector<Key> stored;
  std::uint64_t refused = 0;
  for (std::uint64_t i = 0; i < 2000; ++i) {
    const Key key = i % 2 == 0 ? key_of(i) : near_key(4, i);
    const Status status = index.apply(entry_of(key, 1, 0, TARDIS_GPU_INDEX_PUT));
    ASSERT_TRUE(status == Status::kInserted || status == Status::kFull);
    if (status == Status::kFull) {
      ++refused;
      ASSERT_EQ(index.find(key, 0).status, static_cast<std::uint32_t>(TARDIS_GPU_INDEX_MISS));
    } else {
      stored.push_back(key);
    }
  }
  EXPECT_EQ(stored.size(), 8u * kEntriesPerBucket);
  EXPECT_EQ(stored.size() + refused, 2000u);
  for (const Key& key : stored) {
    expect_answer(index.find(key, 0), entry_of(key, 1, 0, 0));
    ASSERT_EQ(index.apply(entry_of(key, 2, 0, TARDIS_GPU_INDEX_PUT)), Status::kReplaced);  // needs no room
  }
  for (const Key& key : stored) ASSERT_EQ(index.apply(entry_of(key, 2, 0, TARDIS_GPU_INDEX_ERASE)), Status::kErased);
  expect_at_rest(index, 0, 0);
}

TEST(GstoreIndex, UnknownOperationIsRefused) {
  HostIndex index(4);
  EXPECT_EQ(index.apply(entry_of(key_of(1), 1, 0, 4)), Status::kBusy);
  expect_at_rest(index, 0, 0);
}

// Of one key at a time: replaced over and over, or put and erased, by one writer each; read by all the others.
TEST(GstoreIndex, ReadersBesideWritersFindWholeEntries) {
  constexpr int kWriters = 2, kReaders = 2, kSteps = 1500;
  constexpr std::uint64_t kKeys = 24;  // few buckets, so that everybody meets
  HostIndex index(4);
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> found{0}, torn{0}, lost{0}, older{0};
  const auto key_number = [](std::uint64_t i) {
    return i % 3 == 0 ? near_key(i / 3 * 3 + 100, 2) : key_of(i / 3 * 3 + 100 + i % 2);
  };
  std::set<Words> distinct;
  for (std::uint64_t i = 0; i < kKeys; ++i) distinct.insert(words_of(key_number(i)));
  ASSERT_EQ(distinct.size(), kKeys);
  for (std::uint64_t i = 0; i < kKeys; ++i) {
    ASSERT_EQ(index.apply(entry_of(key_number(i), 1, 0, TARDIS_GPU_INDEX_PUT)), Status::kInserted);
  }
  const auto always_there = [](std::uint64_t i) { return i % 2 == 0; };
  std::vector<std::thread> threads;
  for (std::uint64_t w = 0; w < kWriters; ++w) {
    threads.emplace_back([&, w] {
      for (std::uint64_t step = 2; step < kSteps; ++step) {
        for (std::uint64_t i = w; i < kKeys; i += kWriters) {
          const auto op = static_cast<std::uint8_t>(always_there(i) || step % 2 == 0 ? TARDIS_GPU_INDEX_PUT
                                                                                     : TARDIS_GPU_INDEX_ERASE);
          index.apply(entry_of(key_number(i), step, 0, op));
        }
      }
    });
  }
  for (std::uint64_t r = 0; r < kReaders; ++r) {
    threads.emplace_back([&, r] {
      std::array<std::uint64_t, kKeys> least{};
      std::mt19937_64 random(r);
      while (!stop.load()) {
        const std::uint64_t i = random() % kKeys;
        const auto answer = index.find(key_number(i), 0);
        if (answer.status == TARDIS_GPU_INDEX_FOUND) {
          ++found;
          if (!fits(answer, key_number(i), 0)) ++torn;
          if (answer.generation < least[i]) ++older;
          least[i] = answer.generation;
        } else if (answer.status == TARDIS_GPU_INDEX_MISS && always_there(i)) {
          ++lost;
        }
      }
    });
  }
  for (int w = 0; w < kWriters; ++w) threads[static_cast<std::size_t>(w)].join();
  stop.store(true);
  for (std::size_t r = kWriters; r < threads.size(); ++r) threads[r].join();
  EXPECT_GT(found.load(), 1000u);
  EXPECT_EQ(torn.load(), 0u);
  EXPECT_EQ(lost.load(), 0u);
  EXPECT_EQ(older.load(), 0u);
  for (std::uint64_t i = 0; i < kKeys; ++i) {
    index.apply(entry_of(key_number(i), kSteps, 0, TARDIS_GPU_INDEX_ERASE));
  }
  expect_at_rest(index, 0, 0);
}

// Writers of the same keys: each change is done whole, and no key is there twice.
TEST(GstoreIndex, WritersOfOneKeyExcludeEachOther) {
  constexpr std::uint64_t kKeys = 60;
  HostIndex index(4);
  std::array<std::atomic<std::int64_t>, kKeys> balance{};  // insertions less erasures
  std::vector<std::thread> threads;
  for (std::uint64_t w = 0; w < 4; ++w) {
    threads.emplace_back([&, w] {
      std::mt19937_64 random(w);
      for (int step = 0; step < 20'000; ++step) {
        const std::uint64_t i = random() % kKeys;
        const auto op = static_cast<std::uint8_t>(random() % 3);
        const Status status = index.apply(entry_of(key_of(i), 5, 0, op));
        if (status == Status::kInserted) ++balance[i];
        if (status == Status::kErased) --balance[i];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::size_t there = 0;
  for (std::uint64_t i = 0; i < kKeys; ++i) {
    const std::int64_t count = balance[i].load();
    ASSERT_TRUE(count == 0 || count == 1) << i << ": " << count;
    there += static_cast<std::size_t>(count);
    EXPECT_EQ(index.find(key_of(i), 0).status, static_cast<std::uint32_t>(count));
  }
  expect_at_rest(index, there, 0);
}

TEST(GstoreIndexBatch, KeepsTheLastChangeOfAKey) {
  IndexBatch batch;
  batch.add(entry_of(key_of(1), 1, 0, TARDIS_GPU_INDEX_PUT));
  batch.add(entry_of(key_of(2), 2, 0, TARDIS_GPU_INDEX_PUT));
  batch.add(entry_of(key_of(1), 3, 1, TARDIS_GPU_INDEX_PUT));  // another namespace
  batch.add(entry_of(key_of(1), 4, 0, TARDIS_GPU_INDEX_ERASE));
  batch.add(entry_of(near_key(2, 1), 5, 0, TARDIS_GPU_INDEX_PUT));
  batch.add(entry_of(key_of(2), 6, 0, TARDIS_GPU_INDEX_PUT));
  const std::vector<tardis_gpu_index_entry> expected = {
      entry_of(key_of(1), 4, 0, TARDIS_GPU_INDEX_ERASE), entry_of(key_of(2), 6, 0, TARDIS_GPU_INDEX_PUT),
      entry_of(key_of(1), 3, 1, TARDIS_GPU_INDEX_PUT), entry_of(near_key(2, 1), 5, 0, TARDIS_GPU_INDEX_PUT)};
  ASSERT_EQ(batch.entries().size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(same(batch.entries()[i], expected[i])) << i;
  batch.clear();
  EXPECT_TRUE(batch.entries().empty());
  batch.add(entry_of(key_of(1), 1, 0, TARDIS_GPU_INDEX_PUT));
  EXPECT_EQ(batch.entries().size(), 1u);
}

// A mirror that is told in batches, in any order within each, ends as the history does.
TEST(GstoreIndexBatch, BatchesInAnyOrderGiveTheLastState) {
  std::mt19937_64 random(4);
  HostIndex index(buckets_for(400));
  std::map<std::uint64_t, std::uint64_t> model;  // number to generation
  IndexBatch batch;
  for (std::uint64_t step = 1; step < 20'000; ++step) {
    const std::uint64_t number = random() % 300;
    if (random() % 3 == 0) {
      if (model.count(number) == 0) continue;
      batch.add(entry_of(key_of(number), model[number], 0, TARDIS_GPU_INDEX_ERASE));  // of the generation that goes
      model.erase(number);
    } else {
      batch.add(entry_of(key_of(number), step, 0, TARDIS_GPU_INDEX_PUT));
      model[number] = step;
    }
    if (batch.entries().size() < 1 + random() % 200) continue;
    std::vector<tardis_gpu_index_entry> list = batch.entries();
    std::shuffle(list.begin(), list.end(), random);
    for (const auto& change : list) index.apply(change);
    batch.clear();
  }
  for (const auto& change : batch.entries()) index.apply(change);
  for (std::uint64_t number = 0; number < 300; ++number) {
    const auto known = model.find(number);
    const auto answer = index.find(key_of(number), 0);
    ASSERT_EQ(answer.status, known == model.end() ? 0u : 1u) << number;
    if (known != model.end()) {
      EXPECT_EQ(answer.generation, known->second);
    }
  }
}

}  // namespace
}  // namespace tardis::gstore::testing
