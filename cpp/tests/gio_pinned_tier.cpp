// SPDX-License-Identifier: Apache-2.0
// The tier of pinned objects: against a model, and with threads that fill, read and erase at once.
#include "gio/pinned_tier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "base/aligned_buffer.h"
#include "tardis/pinned_tier.h"
#include "tests/store_pages.h"

namespace tardis::gio {
namespace {

using Name = PinnedTier::Name;
using Reserved = PinnedTier::Reserved;

Name name_of(std::uint64_t number) { return {tardis::testing::page_key(number / 3, 1), std::uint32_t(number % 3)}; }

std::unique_ptr<PinnedTier> make_tier(AlignedBuffer& memory, std::uint64_t slot_bytes, std::uint64_t bonus = 0,
                                      std::uint64_t slack = 0) {
  auto made = PinnedTier::create({memory.data(), memory.size(), slot_bytes, bonus, slack});
  EXPECT_TRUE(made) << (made ? "" : made.error().message);
  return made ? std::move(*made) : nullptr;
}

// The same, in the plainest way.
class Model {
 public:
  struct Object {
    bool published = false, erased = false;
    std::uint32_t pins = 0, reuses = 0;
    std::uint64_t score = 0;
    std::uint32_t slot = 0;  // decides between equal scores
  };
  Model(std::size_t slots, std::uint64_t bonus) : slots_(slots), bonus_(bonus) {}

  std::size_t used() const { return objects.size() + dying.size(); }
  Reserved reserve(std::uint64_t number, bool spare) {
    if (const auto known = objects.find(number); known != objects.end()) {
      return known->second.published ? Reserved::kThere : Reserved::kBusy;
    }
    if (used() == slots_) {
      auto least = objects.end();
      for (auto at = objects.begin(); at != objects.end(); ++at) {
        if (!at->second.published || at->second.pins > 0) continue;
        const auto rank = [](const Object& object) { return std::pair(object.score, object.slot); };
        if (least == objects.end() || rank(at->second) < rank(least->second)) least = at;
      }
      if (least == objects.end() || (spare && least->second.reuses > 0)) return Reserved::kFull;
      objects.erase(least);
      ++evicted;
    }
    objects[number] = {};
    return Reserved::kYes;
  }
  void publish(std::uint64_t number, bool pinned) {
    const std::uint32_t slot = objects[number].slot;
    if (objects[number].erased) {
      objects.erase(number);
      if (pinned) dying[slot] = 1;
      return;
    }
    objects[number].published = true;
    objects[number].pins = pinned ? 1 : 0;
    objects[number].score = ++clock_;
  }
  bool pin(std::uint64_t number) {
    const auto known = objects.find(number);
    if (known == objects.end() || !known->second.published) return false;
    Object& object = known->second;
    ++object.pins;
    object.reuses = std::min(3u, object.reuses + 1);
    object.score = ++clock_ + object.reuses * bonus_;
    return true;
  }
  bool erase(std::uint64_t number, std::uint32_t slot) {
    const auto known = objects.find(number);
    if (known == objects.end()) return false;
    if (!known->second.published) {
      known->second.erased = true;
      return false;
    }
    if (known->second.pins > 0) dying[slot] = known->second.pins;
    objects.erase(known);
    return true;
  }

  std::map<std::uint64_t, Object> objects;
  std::map<std::uint32_t, std::uint32_t> dying;  // slot: pins
  std::uint64_t evicted = 0;

 private:
  const std::size_t slots_;
  const std::uint64_t bonus_;
  std::uint64_t clock_ = 0;
};

TEST(GioPinnedTier, AgreesWithAModel) {
  constexpr std::uint64_t kSlotBytes = 64, kSlots = 13, kNumbers = 40;
  for (const std::uint64_t bonus : {0, 7}) {
    AlignedBuffer memory(kSlots * kSlotBytes + 48);  // the rest is no slot
    const auto tier = make_tier(memory, kSlotBytes, bonus);
    ASSERT_EQ(tier->slots(), kSlots);
    Model model(kSlots, bonus);
    std::map<std::uint64_t, std::uint32_t> filling;               // number: slot
    std::vector<std::pair<std::uint64_t, std::uint32_t>> pinned;  // number, slot
    std::mt19937_64 random(bonus + 1);
    for (int step = 0; step < 200'000; ++step) {
      const std::uint64_t number = random() % kNumbers;
      switch (random() % 6) {
        case 0: {
          std::uint32_t slot = ~0u;
          const bool spare = random() % 3 == 0;
          const Reserved expected = model.reserve(number, spare);
          ASSERT_EQ(tier->reserve(name_of(number), slot, spare), expected) << step;
          if (expected != Reserved::kYes) break;
          ASSERT_LT(slot, kSlots);
          for (const auto& [other, taken] : filling) ASSERT_NE(taken, slot) << other;
          for (const auto& [other, taken] : pinned) ASSERT_NE(taken, slot) << other;
          filling[number] = slot;
          model.objects[number].slot = slot;
          break;
        }
        case 1: {
          if (filling.empty()) break;
          auto at = std::next(filling.begin(), static_cast<std::ptrdiff_t>(random() % filling.size()));
          if (random() % 4 == 0) {
            ASSERT_TRUE(tier->abort(at->second));
            model.objects.erase(at->first);
          } else {
            std::memcpy(reinterpret_cast<void*>(tier->address(at->second)), &at->first, 8);
            const bool stays = random() % 3 == 0;
            ASSERT_TRUE(tier->publish(at->second, stays));
            model.publish(at->first, stays);
            if (stays) pinned.push_back({at->first, at->second});
          }
          filling.erase(at);
          break;
        }
        case 2:
        case 3: {
          const Name names[] = {name_of(number), name_of((number + 1) % kNumbers)};
          std::uint32_t slots[2];
          std::uint8_t found[2];
          const auto there = [&](std::uint64_t other) {
            const auto known = model.objects.find(other % kNumbers);
            return known != model.objects.end() && known->second.published;
          };
          const bool first = there(number), second = there(number + 1);
          ASSERT_EQ(tier->find(names, 2, found), first ? 1u + second : 0u);
          ASSERT_TRUE(found[0] == first && found[1] == second);
          if (random() % 2 == 0) {
            ASSERT_EQ(tier->pin_each(names, 2, slots), std::size_t{first} + second);
            for (std::uint64_t i = 0; i < 2; ++i) {
              ASSERT_EQ(slots[i] != PinnedTier::kNoSlot, model.pin((number + i) % kNumbers));
              if (slots[i] != PinnedTier::kNoSlot) pinned.push_back({(number + i) % kNumbers, slots[i]});
            }
            break;
          }
          std::size_t expected = 0;
          while (expected < 2 && model.pin((number + expected) % kNumbers)) ++expected;
          ASSERT_EQ(tier->pin(names, 2, slots), expected);
          for (std::size_t i = 0; i < expected; ++i) {
            const std::uint64_t held = (number + i) % kNumbers;
            ASSERT_EQ(std::memcmp(reinterpret_cast<const void*>(tier->address(slots[i])), &held, 8), 0);
            pinned.push_back({held, slots[i]});
          }
          break;
        }
        case 4: {
          if (pinned.empty()) break;
          std::swap(pinned[random() % pinned.size()], pinned.back());
          const auto [held, slot] = pinned.back();
          pinned.pop_back();
          ASSERT_EQ(std::memcmp(reinterpret_cast<const void*>(tier->address(slot)), &held, 8), 0)
              << "a slot that was overwritten while it was pinned";
          ASSERT_TRUE(tier->unpin(&slot, 1));
          if (const auto dying = model.dying.find(slot); dying != model.dying.end()) {
            if (--dying->second == 0) model.dying.erase(dying);
          } else {
            --model.objects[held].pins;
          }
          break;
        }
        default: {
          if (random() % 4 != 0) break;
          std::uint32_t slot = ~0u;
          for (const auto& [held, taken] : pinned) {
            if (held == number && model.dying.count(taken) == 0) slot = taken;
          }
          ASSERT_EQ(tier->erase(name_of(number)), model.erase(number, slot));
        }
      }
      if (step % 64 != 0) continue;
      const PinnedCounters counters = tier->counters();
      std::size_t published = 0;
      for (const auto& [held, object] : model.objects) published += object.published;
      ASSERT_EQ(counters.published, published);
      ASSERT_EQ(counters.reserved, filling.size());
      ASSERT_EQ(counters.evicted, model.evicted);
    }
    EXPECT_GT(tier->counters().evicted, 1000u);
    EXPECT_GT(tier->counters().refused_full, 100u);

    // Nothing is found after clear(); what is held stays until it is given back, and then every slot is free.
    const std::size_t there = tier->counters().published;
    ASSERT_EQ(tier->clear(), there);
    for (const auto& [held, slot] : pinned) {
      ASSERT_EQ(std::memcmp(reinterpret_cast<const void*>(tier->address(slot)), &held, 8), 0);
      ASSERT_TRUE(tier->unpin(&slot, 1));
    }
    for (const auto& [number, slot] : filling) ASSERT_TRUE(tier->publish(slot));
    EXPECT_EQ(tier->counters().published + tier->counters().pinned + tier->counters().reserved, 0u);
    std::uint32_t slot;
    for (std::uint64_t number = 0; number < kSlots; ++number) {
      ASSERT_EQ(tier->reserve(name_of(number), slot), Reserved::kYes);
    }
  }
}

// What a copy engine's commands count: runs of a prompt's pages whose slots follow each other.
// Prompts have 66 pages in the mean.
TEST(GioPinnedTier, SlotsOfACallFollowEachOther) {
  constexpr std::uint64_t kSlots = 1024;
  AlignedBuffer memory(kSlots * 64);
  const auto tier = make_tier(memory, 64, kSlots / 2, kSlots / 4);
  std::mt19937_64 random(11);
  std::uint64_t number = 0, pages = 0, runs = 0;
  std::vector<std::vector<Name>> prompts;
  for (int round = 0; round < 200; ++round) {
    const std::size_t n = 16 + random() % 100;
    std::vector<Name> names;
    for (std::size_t i = 0; i < n; ++i) names.push_back(name_of(number++));
    std::vector<Reserved> results(n);
    std::vector<std::uint32_t> slots(n);
    tier->reserve_each(names.data(), n, results.data(), slots.data());
    int back = 0;
    for (std::size_t i = 0; i < n; ++i) {
      ASSERT_EQ(results[i], Reserved::kYes);
      if (i != 0) back += slots[i] < slots[i - 1];
      std::memcpy(reinterpret_cast<void*>(tier->address(slots[i])), names[i].hash.data(), 8);
    }
    ASSERT_LE(back, 1);
    for (const std::uint32_t slot : slots) ASSERT_TRUE(tier->publish(slot));
    if (round >= 20) {  // it is full, and prompts make room for others
      pages += n;
      runs += 1;
      for (std::size_t i = 1; i < n; ++i) runs += slots[i] != slots[i - 1] + 1;
    }
    prompts.push_back(names);
    // Earlier ones are used again, so that worth and age differ; some go.
    const std::vector<Name>& other = prompts[prompts.size() - 1 - random() % std::min<std::size_t>(prompts.size(), 12)];
    std::vector<std::uint32_t> held(other.size());
    const std::size_t there = tier->pin(other.data(), other.size() * (1 + random() % 2) / 2, held.data());
    for (std::size_t i = 0; i < there; ++i) {
      ASSERT_EQ(std::memcmp(reinterpret_cast<const void*>(tier->address(held[i])), other[i].hash.data(), 8), 0);
    }
    ASSERT_TRUE(tier->unpin(held.data(), there));
    if (random() % 8 == 0) {
      for (const Name& name : prompts[random() % prompts.size()]) (void)tier->erase(name);
    }
  }
  EXPECT_GE(static_cast<double>(pages) / static_cast<double>(runs), 10.0) << pages << " pages in " << runs << " runs";
  tier->clear();  // in no order
  std::vector<Name> names;
  for (std::size_t i = 0; i < kSlots; ++i) names.push_back(name_of(number++));
  std::vector<Reserved> results(kSlots);
  std::vector<std::uint32_t> slots(kSlots);
  tier->reserve_each(names.data(), kSlots, results.data(), slots.data());
  for (std::uint32_t i = 0; i < kSlots; ++i) {
    ASSERT_TRUE(results[i] == Reserved::kYes && slots[i] == (slots[0] + i) % kSlots);
  }
}

// Readers never see other bytes than the name's, whatever others do meanwhile.
TEST(GioPinnedTier, ThreadsAtOnce) {
  constexpr std::uint64_t kSlotBytes = 4096, kSlots = 24, kNumbers = 60;
  AlignedBuffer memory(kSlots * kSlotBytes);
  const auto tier = make_tier(memory, kSlotBytes, 5);
  std::atomic<std::uint64_t> wrong{0}, read{0};
  const auto work = [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int step = 0; step < 20'000; ++step) {
      const std::uint64_t number = random() % kNumbers;
      const Name name = name_of(number);
      std::uint32_t slot;
      if (tier->pin(&name, 1, &slot) == 1) {
        const auto* const words = reinterpret_cast<const std::uint64_t*>(tier->address(slot));
        for (std::size_t w = 0; w < kSlotBytes / 8; w += 37) wrong += words[w] != number * 1000 + w;
        ++read;
        if (!tier->unpin(&slot, 1)) ++wrong;
        if (random() % 50 == 0) (void)tier->erase(name);
      } else if (tier->reserve(name, slot) == Reserved::kYes) {
        auto* const words = reinterpret_cast<std::uint64_t*>(tier->address(slot));
        for (std::size_t w = 0; w < kSlotBytes / 8; ++w) words[w] = number * 1000 + w;
        if (!(random() % 10 == 0 ? tier->abort(slot) : tier->publish(slot))) ++wrong;
      }
    }
  };
  std::vector<std::thread> threads;
  for (std::uint64_t seed = 1; seed <= 4; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0u);
  EXPECT_GT(read.load(), 1000u);
  const PinnedCounters counters = tier->counters();
  EXPECT_EQ(counters.reserved, 0u);
  EXPECT_EQ(counters.pinned, 0u);
  EXPECT_LE(counters.published, kSlots);
  EXPECT_EQ(counters.stored, counters.published + counters.evicted + counters.erased);
}

TEST(GioPinnedTier, WhatIsNotHeldIsNotGivenBack) {
  AlignedBuffer memory(4 * 64);
  const auto tier = make_tier(memory, 64);
  std::uint32_t slot = 0;
  EXPECT_FALSE(tier->publish(0));
  EXPECT_FALSE(tier->abort(99));
  ASSERT_EQ(tier->reserve(name_of(1), slot), Reserved::kYes);
  EXPECT_FALSE(tier->unpin(&slot, 1));
  ASSERT_TRUE(tier->publish(slot));
  EXPECT_FALSE(tier->publish(slot));
  EXPECT_FALSE(tier->abort(slot));
  const Name name = name_of(1);
  ASSERT_EQ(tier->pin(&name, 1, &slot), 1u);
  EXPECT_TRUE(tier->unpin(&slot, 1));
  EXPECT_FALSE(tier->unpin(&slot, 1));
}

TEST(GioPinnedTier, ThroughTheCAbi) {
  AlignedBuffer memory(3 * 64);
  tardis_pinned_tier* tier = nullptr;
  char* error = nullptr;
  EXPECT_EQ(tardis_pinned_open(memory.data(), 63, 64, 0, &tier, &error), TARDIS_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error).find("raise the tier's budget"), std::string::npos) << error;
  tardis_free(error);
  ASSERT_EQ(tardis_pinned_open(memory.data(), memory.size(), 64, 0, &tier, &error), TARDIS_OK);
  std::vector<Hash256> hashes;
  for (std::uint64_t i = 0; i < 4; ++i) hashes.push_back(tardis::testing::page_key(i, 0));
  std::uint8_t results[4];
  std::uint32_t slots[4];
  std::uint64_t addresses[4];
  ASSERT_EQ(tardis_pinned_reserve(tier, 1, hashes.front().data(), 4, results, slots, addresses), TARDIS_OK);
  EXPECT_EQ(results[2], TARDIS_PINNED_RESERVED);
  EXPECT_EQ(results[3], TARDIS_PINNED_FULL);
  EXPECT_EQ(addresses[1], reinterpret_cast<std::uint64_t>(memory.data()) + slots[1] * 64);
  std::size_t run = 9;
  ASSERT_EQ(tardis_pinned_pin(tier, 1, hashes.front().data(), 3, slots, addresses, &run), TARDIS_OK);
  EXPECT_EQ(run, 0u) << "served before it was published";
  ASSERT_EQ(tardis_pinned_end(tier, slots, 1, TARDIS_PINNED_PUBLISH), TARDIS_OK);
  ASSERT_EQ(tardis_pinned_end(tier, slots + 1, 1, TARDIS_PINNED_PUBLISH_PINNED), TARDIS_OK);
  ASSERT_EQ(tardis_pinned_end(tier, slots + 2, 1, TARDIS_PINNED_ABORT), TARDIS_OK);
  EXPECT_EQ(tardis_pinned_end(tier, slots + 2, 1, TARDIS_PINNED_ABORT), TARDIS_INVALID_ARGUMENT);
  ASSERT_EQ(tardis_pinned_unpin(tier, slots + 1, 1), TARDIS_OK);
  EXPECT_EQ(tardis_pinned_unpin(tier, slots + 1, 1), TARDIS_INVALID_ARGUMENT);
  std::uint8_t there[4];
  ASSERT_EQ(tardis_pinned_find(tier, 1, hashes.front().data(), 4, there, &run), TARDIS_OK);
  EXPECT_TRUE(run == 2 && there[0] == 1 && there[1] == 1 && there[2] == 0 && there[3] == 0);
  std::uint32_t each[4];
  ASSERT_EQ(tardis_pinned_pin_each(tier, 1, hashes[1].data(), 3, each, addresses, &run), TARDIS_OK);
  EXPECT_TRUE(run == 1 && each[0] == slots[1] && each[1] == TARDIS_PINNED_NO_SLOT && each[2] == TARDIS_PINNED_NO_SLOT);
  ASSERT_EQ(tardis_pinned_reserve(tier, 1, hashes[2].data(), 1, results, each + 1, addresses), TARDIS_OK);
  EXPECT_EQ(results[0], TARDIS_PINNED_RESERVED);  // the free slot
  ASSERT_EQ(tardis_pinned_end(tier, each + 1, 1, TARDIS_PINNED_PUBLISH), TARDIS_OK);
  ASSERT_EQ(tardis_pinned_unpin(tier, each, 1), TARDIS_OK);
  ASSERT_EQ(tardis_pinned_pin(tier, 1, hashes.front().data(), 3, slots, addresses, &run), TARDIS_OK);
  EXPECT_EQ(run, 3u);
  EXPECT_EQ(tardis_pinned_pin(tier, 2, hashes.front().data(), 1, each, addresses + 3, &run), TARDIS_OK);
  EXPECT_EQ(run, 0u) << "of another namespace";
  ASSERT_EQ(tardis_pinned_unpin(tier, slots, 3), TARDIS_OK);
  std::size_t erased = 0;
  ASSERT_EQ(tardis_pinned_erase(tier, 1, hashes.front().data(), 4, &erased), TARDIS_OK);
  EXPECT_EQ(erased, 3u);
  tardis_pinned_counters counters{};
  ASSERT_EQ(tardis_pinned_get_counters(tier, &counters), TARDIS_OK);
  EXPECT_EQ(counters.slots, 3u);
  EXPECT_EQ(counters.published, 0u);
  EXPECT_EQ(counters.hits, 4u);
  EXPECT_EQ(counters.refused_full, 1u);
  ASSERT_EQ(tardis_pinned_reserve(tier, 1, hashes.front().data(), 3, results, slots, addresses), TARDIS_OK);
  ASSERT_EQ(tardis_pinned_end(tier, slots, 3, TARDIS_PINNED_PUBLISH), TARDIS_OK);
  ASSERT_EQ(tardis_pinned_pin(tier, 1, hashes.front().data(), 3, slots, addresses, &run), TARDIS_OK);
  ASSERT_EQ(tardis_pinned_unpin(tier, slots, 3), TARDIS_OK);
  ASSERT_EQ(tardis_pinned_reserve_spare(tier, 1, hashes[3].data(), 1, results, slots, addresses), TARDIS_OK);
  EXPECT_EQ(results[0], TARDIS_PINNED_FULL) << "in place of one that was used";
  ASSERT_EQ(tardis_pinned_clear(tier, &erased), TARDIS_OK);
  EXPECT_EQ(erased, 3u);
  tardis_pinned_close(tier);
}

}  // namespace
}  // namespace tardis::gio
