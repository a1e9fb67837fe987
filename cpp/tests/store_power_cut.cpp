// SPDX-License-Identifier: Apache-2.0
// The power goes at a random operation; of what was not flushed, the medium keeps a random part, sector by sector.
#include <cstdlib>

#include "store_support.h"

namespace tardis::testing {
namespace {

struct Known {
  bool attempted = false, flushed = false, cleared = false;
};

class StorePowerCut : public ::testing::TestWithParam<int> {
 protected:
  using Pages = std::map<std::pair<std::uint64_t, std::uint64_t>, Known>;  // (chain, index)

  // Works until the power goes (or for `steps`), and notes what was promised.
  static void work(Store& store, std::array<Space, 2>& spaces, std::array<Pages, 2>& known, std::mt19937_64& random,
                   int steps, const PowerDevice::Power& power, bool keep) {
    std::array<Pages, 2> unflushed;
    for (int step = 0; step < steps && !power.off; ++step) {
      const std::size_t s = random() % 2;
      Space& space = spaces[s];
      const std::uint64_t chain = random() % 8;
      const std::size_t have = space.run(chain, 0, 12), count = 1 + random() % 4;
      const auto action = random() % 20;
      if (action < 12 && have < 12) {
        for (std::size_t i = have; i < have + count; ++i) {
          known[s][{chain, i}].attempted = true;
          known[s][{chain, i}].cleared = false;
        }
        const std::size_t stored = space.put(chain, have, count);
        for (std::size_t i = have; i < have + stored; ++i) unflushed[s][{chain, i}] = {};
      } else if (action < 15) {
        space.get(chain, 0, 12);
      } else if (action < 19) {
        if (!store.flush()) continue;
        for (std::size_t k = 0; k < 2; ++k) {
          for (const auto& [page, ignored] : unflushed[k]) known[k][page].flushed = keep;
          unflushed[k].clear();
        }
      } else if (random() % 3 == 0) {
        for (auto& [page, state] : known[s]) state.flushed = false;  // gone or not, if the power goes amid the clear
        unflushed[s].clear();
        if (!store.clear(space.fingerprint())) continue;
        for (auto& [page, state] : known[s]) state = {false, false, true};
      }
    }
  }

  static void check(Store& store, std::array<Space, 2>& spaces, std::array<Pages, 2>& known) {
    for (std::size_t s = 0; s < 2; ++s) {
      for (auto& [page, state] : known[s]) {
        const bool arrived = spaces[s].fetch(page.first, page.second, 1) == 1;  // its bytes are compared there
        if (state.flushed) {
          EXPECT_TRUE(arrived) << "lost page " << page.second << " of chain " << page.first << " after it was flushed";
        }
        if (state.cleared) {
          EXPECT_FALSE(arrived) << "page " << page.second << " of chain " << page.first << " came back after a clear";
        }
      }
    }
    expect_slots_conserved(store);
    EXPECT_EQ(stats_of(store).get_pages_corrupt, 0u) << "a power cut was taken for corruption";
    EXPECT_EQ(stats_of(store).segments_unreadable, 0u);
  }

  void campaign(bool keep, int cuts, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    // Evicting: two page sizes in two segments. Keeping: equal sizes, and room for all.
    const std::array<Layout, 2> layouts = {Layout{2, {20000, 12345}}, keep ? Layout{1, {65536}} : Layout{1, {150'000}}};
    StoreOptions options = small_store(keep ? 8 : 2);
    TempFolder folder(memory_parent());
    std::array<Pages, 2> known;
    std::uint64_t done = 0;
    for (int cut = 0; cut < cuts && !HasFailure(); ++cut) {
      SCOPED_TRACE("cut " + std::to_string(cut) + " of seed " + std::to_string(seed));
      options.flush_milliseconds = random() % 3 == 0 ? 1 : 10'000;
      auto power = std::make_shared<PowerDevice::Power>(random());
      power->cut_at = 1 + random() % (random() % 4 == 0 ? 12 : 250);
      auto opened = Store::open(folder.path(), options, true, powered(power));
      if (opened) {
        std::array<Space, 2> spaces = {Space(**opened, 1, layouts[0]), Space(**opened, 2, layouts[1])};
        work(**opened, spaces, known, random, 60, *power, keep);
        (void)(*opened)->close();
      } else {
        EXPECT_TRUE(power->off) << opened.error().message;
      }
      done += power->off;
      // Now and then the power goes again while the store recovers; sometimes the store is used for a while in between.
      if (random() % 3 == 0) continue;
      auto store = open_store(folder.path(), options);
      ASSERT_NE(store, nullptr);
      std::array<Space, 2> spaces = {Space(*store, 1, layouts[0]), Space(*store, 2, layouts[1])};
      check(*store, spaces, known);
      EXPECT_TRUE(store->close());
      if (random() % 8 == 0) {
        auto verified = verify_store(folder.path(), /*repair=*/true, {});
        ASSERT_TRUE(verified);
        EXPECT_EQ(verified->report.bad_headers + verified->report.bad_payloads + verified->report.quarantined, 0u)
            << (verified->problems.empty() ? "" : verified->problems.front());
      }
    }
    EXPECT_GT(done, static_cast<std::uint64_t>(cuts) / 3) << "the power did not go often enough to prove anything";
  }
};

TEST_P(StorePowerCut, WhatWasFlushedIsThere) { campaign(/*keep=*/true, 60, static_cast<std::uint64_t>(GetParam())); }

TEST_P(StorePowerCut, NeverWrongBytesInAFullStore) {
  campaign(/*keep=*/false, 60, 100 + static_cast<std::uint64_t>(GetParam()));
}

// 480 cuts; TARDIS_POWER_CUT_SEEDS asks for more (120 each).
int seeds() {
  const char* wanted = std::getenv("TARDIS_POWER_CUT_SEEDS");
  return wanted != nullptr ? std::max(1, std::atoi(wanted)) : 4;
}

INSTANTIATE_TEST_SUITE_P(Seeds, StorePowerCut, ::testing::Range(0, seeds()));

}  // namespace
}  // namespace tardis::testing
