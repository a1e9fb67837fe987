// SPDX-License-Identifier: Apache-2.0
// How calls of decode attention are divided, and what is said of those that cannot be.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

#include "attention/decode_check.h"
#include "attention/decode_plan.h"

namespace tardis::attention {
namespace {

constexpr std::uint32_t kSms = 132;

tardis_attention_decode valid_call() {
  static const std::int32_t numbers[4] = {};
  tardis_attention_decode d{};
  d.pools[0] = {1 << 20, 1 << 21, 6400, 2048, 256, 2048, 256};
  d.queries = d.pages = numbers;
  d.queries = reinterpret_cast<const void*>(std::uintptr_t{1} << 22);
  d.output = reinterpret_cast<void*>(std::uintptr_t{1} << 23);
  d.lengths = numbers;
  d.query_row_bytes = d.output_row_bytes = 8192;
  d.page_row = 100;
  d.scale = 0.1F;
  d.key_scale = d.value_scale = 1;
  d.window_left = -1;
  d.batch = d.query_tokens = 1;
  d.query_heads = 32;
  d.kv_heads = 8;
  d.head_dim = 128;
  d.page_tokens = 64;
  d.max_tokens = 6400;
  return d;
}

std::string complaint_of(const std::function<void(tardis_attention_decode&)>& change) {
  tardis_attention_decode d = valid_call();
  change(d);
  char text[512];
  Complaint complaint(text, sizeof text);
  const bool valid = is_valid_call(d, complaint);
  EXPECT_EQ(valid, text[0] == '\0');
  return text;
}

TEST(AttentionPlan, SplitsFillTheSmsAndNoMore) {
  for (const std::uint32_t works : {1U, 4U, 8U, 32U, 66U, 67U, 128U, 136U, 1024U, 65'535U}) {
    for (const std::uint32_t tiles : {1U, 2U, 16U, 128U, 2048U}) {
      for (const std::uint32_t enough : {1U, 2U}) {
        const std::uint32_t splits = chosen_splits(works, tiles, kSms, enough, 2);
        ASSERT_GE(splits, 1U);
        ASSERT_LE(splits, std::min<std::uint32_t>(tiles, TARDIS_ATTENTION_MOST_SPLITS));
        const double places = kSms * (works <= kSms / 2 ? enough : 2);
        if (works <= places && tiles >= places) {
          const double ctas = static_cast<double>(works) * splits;
          EXPECT_GE(ctas / (std::ceil(ctas / places) * places), 0.9) << works << " " << tiles;
        }
      }
    }
  }
  EXPECT_EQ(chosen_splits(8, 2048, kSms, 1, 2), 16U);
  EXPECT_EQ(chosen_splits(8, 2048, kSms, 2, 2), 32U);
  EXPECT_EQ(chosen_splits(128, 2048, kSms, 1, 2), 2U);
  EXPECT_EQ(chosen_splits(264, 2048, kSms, 1, 2), 1U);
  EXPECT_EQ(chosen_splits(8, 4, kSms, 1, 2), 4U);
}

TEST(AttentionPlan, TilesAreThoseOfTheWindow) {
  tardis_attention_decode d = valid_call();
  EXPECT_EQ(most_tiles(d), 100U);
  d.max_tokens = 1;
  EXPECT_EQ(most_tiles(d), 1U);
  d.max_tokens = 6401;
  EXPECT_EQ(most_tiles(d), 101U);
  for (const std::int32_t window : {0, 1, 63, 64, 1000}) {
    for (const std::uint32_t queries : {1U, 4U}) {
      d.window_left = window;
      d.query_tokens = queries;
      for (std::uint32_t length = 1; length <= 300; ++length) {
        const TokenRange seen = seen_by_all(length, queries, window);
        ASSERT_LE((seen.end + kTileRows - 1) / kTileRows - seen.begin / kTileRows, most_tiles(d));
      }
    }
  }
}

TEST(AttentionPlan, WorkspaceHoldsEachSplit) {
  tardis_attention_decode d = valid_call();
  d.batch = 3;
  d.query_tokens = 2;
  d.splits = 5;
  const DecodePlan plan = plan_of(d, kSms, 1, 2);
  EXPECT_EQ(plan.splits, 5U);
  EXPECT_EQ(plan.output_bytes, 3U * 5 * 2 * 32 * 128 * 4);
  EXPECT_EQ(plan.lse_bytes, 3U * 5 * 2 * 32 * 4);
  d.splits = 1;
  EXPECT_EQ(plan_of(d, kSms, 1, 2).workspace_bytes(), 0U);
}

TEST(AttentionCheck, AValidCallHasNoComplaint) {
  EXPECT_EQ(complaint_of([](auto&) {}), "");
  EXPECT_EQ(complaint_of([](auto& d) { d.pools[1] = d.pools[0], d.pools[0] = {}; }), "");
  EXPECT_EQ(complaint_of([](auto& d) { d.type = TARDIS_ATTENTION_FP8_E4M3; }), "");
}

TEST(AttentionCheck, EachComplaintNamesWhatWasFound) {
  using D = tardis_attention_decode;
  const std::pair<std::function<void(D&)>, const char*> cases[] = {
      {[](D& d) { d.type = 7; }, "type: expected one of enum tardis_attention_type (0 to 2), found 7"},
      {[](D& d) { d.head_dim = 96; }, "head_dim: expected 64, 128 or 256, found 96"},
      {[](D& d) { d.page_tokens = 1; }, "page_tokens: expected 16, 32, 64 or 128, found 1"},
      {[](D& d) { d.batch = 0; }, "batch: expected 1 to 65535 requests, found 0"},
      {[](D& d) { d.batch = 65'536; }, "batch: expected 1 to 65535 requests, found 65536"},
      {[](D& d) { d.kv_heads = 0; }, "query_heads: expected a multiple of kv_heads, found 32 and 0"},
      {[](D& d) { d.kv_heads = 7; }, "query_heads: expected a multiple of kv_heads, found 32 and 7"},
      {[](D& d) { d.query_tokens = 17; }, "with 4 query heads a KV head at most 16, found 17"},
      {[](D& d) { d.query_tokens = 0; }, "found 0"},
      {[](D& d) { d.kv_heads = 1, d.query_heads = 65; }, "with 65 query heads a KV head at most 0, found 1"},
      {[](D& d) { d.max_tokens = 0; }, "max_tokens: expected 1 to 2^30, found 0"},
      {[](D& d) { d.max_tokens = 6401; }, "page_row: expected entries for 6401 tokens, found 100 pages of 64"},
      {[](D& d) { d.splits = 257; }, "splits: expected at most 256, found 257"},
      {[](D& d) { d.window_left = -2; }, "window_left: expected -1 (all tokens) or more, found -2"},
      {[](D& d) { d.scale = 0; }, "scale and key_scale: expected numbers above 0, found 0 and 1"},
      {[](D& d) { d.key_scale = NAN; }, "scale and key_scale: expected numbers above 0"},
      {[](D& d) { d.soft_cap = -1; }, "soft_cap: expected 0 (none) or more, found -1"},
      {[](D& d) { d.reserved = 1; }, "reserved: expected 0, found 1"},
      {[](D& d) { d.pools[0] = {}; }, "pools: expected one at least that has keys and values, found none"},
      {[](D& d) { d.pools[0].values = 0; }, "values: expected an address that is a multiple of 16, found 0"},
      {[](D& d) { d.pools[0].keys += 8; }, "keys: expected an address that is a multiple of 16, found 0x100008"},
      {[](D& d) { d.pools[0].key_head_bytes = 240; }, "keys: expected strides of slots and heads"},
      {[](D& d) { d.pools[0].value_slot_bytes = 2056; }, "256 to 2^40 bytes, found 2056 and 256"},
      {[](D& d) { d.pools[0].slots = 6401; },
       "slots: expected whole pages of 64 tokens, at most 2^31 slots, found 6401"},
      {[](D& d) { d.lengths = nullptr; }, "queries, output, pages, lengths: expected addresses, found a null pointer"},
      {[](D& d) { d.output_row_bytes = 8191; }, "rows of 8192 bytes at least, found rows of 8192 and 8191"},
      {[](D& d) { d.query_row_bytes = 4096; }, "rows of 8192 bytes at least, found rows of 4096 and 8192"},
  };
  for (const auto& [change, sentence] : cases) {
    const std::string found = complaint_of(change);
    EXPECT_NE(found.find(sentence), std::string::npos) << "expected \"" << sentence << "\", found \"" << found << "\"";
  }
}

TEST(AttentionCheck, StoresThatCannotBe) {
  using S = tardis_attention_store;
  const std::pair<std::function<void(S&)>, const char*> cases[] = {
      {[](S&) {}, ""},
      {[](S& s) { s.tokens = 0; }, ""},
      {[](S& s) { s.type = 3; }, "type: expected one of enum tardis_attention_type (0 to 2), found 3"},
      {[](S& s) { s.head_dim = 80; }, "head_dim: expected 64, 128 or 256, found 80"},
      {[](S& s) { s.page_tokens = 8; }, "page_tokens: expected 16, 32, 64 or 128, found 8"},
      {[](S& s) { s.kv_heads = 0; }, "kv_heads: expected 1 or more, found 0"},
      {[](S& s) { s.value_scale = 0; }, "key_scale and value_scale: expected numbers above 0, found 1 and 0"},
      {[](S& s) { s.pools[0] = {}; }, "pools: expected one at least that has keys and values, found none"},
      {[](S& s) { s.pools[0].slots = 1; }, "slots: expected whole pages of 64 tokens, at most 2^31 slots, found 1"},
      {[](S& s) { s.slots = nullptr; }, "keys, values, slots: expected addresses, found a null pointer"},
      {[](S& s) { s.key_row_bytes = 1024; }, "rows of 2048 bytes at least, found rows of 1024 and 2048"},
      {[](S& s) { s.value_row_bytes = 2056; }, "rows of 2048 bytes at least, found rows of 2048 and 2056"},
      {[](S& s) { s.reserved = 2; }, "reserved: expected 0, found 2"},
  };
  for (const auto& [change, sentence] : cases) {
    const tardis_attention_decode d = valid_call();
    S store{};
    store.pools[0] = d.pools[0];
    store.keys = d.queries;
    store.values = d.output;
    store.slots = reinterpret_cast<const std::int64_t*>(d.queries);
    store.key_row_bytes = store.value_row_bytes = 2048;
    store.key_scale = store.value_scale = 1;
    store.tokens = 3;
    store.kv_heads = 8;
    store.head_dim = 128;
    store.page_tokens = 64;
    change(store);
    char text[512];
    Complaint complaint(text, sizeof text);
    EXPECT_EQ(is_valid_call(store, complaint), *sentence == '\0');
    EXPECT_NE(std::string(text).find(sentence), std::string::npos)
        << "expected \"" << sentence << "\", found \"" << text << "\"";
    EXPECT_EQ(text[0] == '\0', *sentence == '\0');
  }
}

TEST(AttentionCheck, ASentenceIsCutToItsRoom) {
  char text[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  Complaint(text, 4).say("%s", "longer than that");
  EXPECT_STREQ(text, "lon");
  EXPECT_EQ(text[4], 1);
  EXPECT_FALSE(Complaint(nullptr, 100).say("nowhere"));
}

}  // namespace
}  // namespace tardis::attention
