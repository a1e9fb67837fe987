// SPDX-License-Identifier: Apache-2.0
// What is wrong with a call, in a sentence.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>

#include "attention/tile.h"
#include "tardis/attention.h"

namespace tardis::attention {

// Where the sentence goes; a caller that wants none has no bytes.
class Complaint {
 public:
  Complaint(char* text, std::size_t bytes) : text_(text), bytes_(text == nullptr ? 0 : bytes) {
    if (bytes_ != 0) text_[0] = '\0';
  }
  // False, for `return complaint.say(...)`.
  [[gnu::format(printf, 2, 3)]] bool say(const char* format, ...) {
    if (bytes_ != 0) {
      std::va_list values;
      va_start(values, format);
      std::vsnprintf(text_, bytes_, format, values);
      va_end(values);
    }
    return false;
  }

 private:
  char* text_;
  std::size_t bytes_;
};

inline const char* type_name(std::uint32_t type) {
  constexpr const char* kNames[TARDIS_ATTENTION_TYPES] = {"bf16", "fp16", "fp8"};
  return type < TARDIS_ATTENTION_TYPES ? kNames[type] : "unknown";
}

template <class Call>
bool is_valid_kind(const Call& call, Complaint& complaint) {
  using U = unsigned;
  if (call.type >= TARDIS_ATTENTION_TYPES)
    return complaint.say("type: expected one of enum tardis_attention_type (0 to 2), found %u", U{call.type});
  if (call.head_dim != 64 && call.head_dim != 128 && call.head_dim != 256)
    return complaint.say("head_dim: expected 64, 128 or 256, found %u; use another attention backend",
                         U{call.head_dim});
  if (call.page_tokens != 16 && call.page_tokens != 32 && call.page_tokens != 64 && call.page_tokens != 128)
    return complaint.say("page_tokens: expected 16, 32, 64 or 128, found %u; start the server with such a --page-size",
                         U{call.page_tokens});
  if (call.reserved != 0) return complaint.say("reserved: expected 0, found %u", U{call.reserved});
  return true;
}

// The numbers alone: what a plan wants.
inline bool is_valid_shape(const tardis_attention_decode& d, Complaint& complaint) {
  using U = unsigned;
  if (!is_valid_kind(d, complaint)) return false;
  if (d.batch == 0 || d.batch > 65535)
    return complaint.say("batch: expected 1 to 65535 requests, found %u", U{d.batch});
  if (d.kv_heads == 0 || d.query_heads == 0 || d.query_heads % d.kv_heads != 0)
    return complaint.say("query_heads: expected a multiple of kv_heads, found %u and %u", U{d.query_heads},
                         U{d.kv_heads});
  if (d.query_tokens == 0 || std::uint64_t{d.query_tokens} * (d.query_heads / d.kv_heads) > TARDIS_ATTENTION_MOST_ROWS)
    return complaint.say(
        "query_tokens: expected at least 1, and with %u query heads a KV head at most %u, found %u; pass the others in "
        "another call",
        U{d.query_heads / d.kv_heads}, U{TARDIS_ATTENTION_MOST_ROWS} / U{d.query_heads / d.kv_heads},
        U{d.query_tokens});
  if (d.max_tokens == 0 || d.max_tokens > 1U << 30)
    return complaint.say("max_tokens: expected 1 to 2^30, found %u", U{d.max_tokens});
  if (d.splits > TARDIS_ATTENTION_MOST_SPLITS)
    return complaint.say("splits: expected at most %d, found %u; 0 has them chosen", int{TARDIS_ATTENTION_MOST_SPLITS},
                         U{d.splits});
  if (d.window_left < -1)
    return complaint.say("window_left: expected -1 (all tokens) or more, found %d", int{d.window_left});
  if (!(d.scale > 0) || !(d.key_scale > 0))
    return complaint.say("scale and key_scale: expected numbers above 0, found %g and %g", double{d.scale},
                         double{d.key_scale});
  if (!(d.soft_cap >= 0)) return complaint.say("soft_cap: expected 0 (none) or more, found %g", double{d.soft_cap});
  return true;
}

inline bool is_valid_side(const char* name, std::uint64_t address, std::uint64_t slot_bytes, std::uint64_t head_bytes,
                          std::uint64_t row, Complaint& complaint) {
  using L = unsigned long long;
  if (address == 0 || address % 16 != 0)
    return complaint.say("%s: expected an address that is a multiple of 16, found %#llx", name, L{address});
  if (slot_bytes % 16 != 0 || head_bytes % 16 != 0 || slot_bytes >= 1ULL << 40 || head_bytes >= 1ULL << 40 ||
      head_bytes < row || slot_bytes < row)
    return complaint.say(
        "%s: expected strides of slots and heads that are multiples of 16, %llu to 2^40 bytes, found "
        "%llu and %llu",
        name, L{row}, L{slot_bytes}, L{head_bytes});
  return true;
}

// Of a decode or a store.
template <class Call>
bool are_valid_pools(const Call& call, Complaint& complaint) {
  using L = unsigned long long;
  const std::uint64_t row = std::uint64_t{call.head_dim} * (call.type == TARDIS_ATTENTION_FP8_E4M3 ? 1 : 2);
  bool any = false;
  for (const tardis_attention_pool& pool : call.pools) {
    if (pool.keys == 0 && pool.values == 0) continue;
    any = true;
    if (!is_valid_side("keys", pool.keys, pool.key_slot_bytes, pool.key_head_bytes, row, complaint) ||
        !is_valid_side("values", pool.values, pool.value_slot_bytes, pool.value_head_bytes, row, complaint))
      return false;
    if (pool.slots == 0 || pool.slots % call.page_tokens != 0 || pool.slots > 1ULL << 31)
      return complaint.say("slots: expected whole pages of %u tokens, at most 2^31 slots, found %llu",
                           unsigned{call.page_tokens}, L{pool.slots});
  }
  return any || complaint.say("pools: expected one at least that has keys and values, found none");
}

inline bool is_valid_call(const tardis_attention_decode& d, Complaint& complaint) {
  using L = unsigned long long;
  if (!is_valid_shape(d, complaint)) return false;
  if (!are_valid_pools(d, complaint)) return false;
  if (d.queries == nullptr || d.output == nullptr || d.pages == nullptr || d.lengths == nullptr)
    return complaint.say("queries, output, pages, lengths: expected addresses, found a null pointer");
  const std::uint64_t row = std::uint64_t{d.query_heads} * d.head_dim * 2;
  const auto misfit = [&](const void* at, std::uint64_t bytes) {
    return reinterpret_cast<std::uintptr_t>(at) % 16 != 0 || bytes % 16 != 0 || bytes < row;
  };
  if (misfit(d.queries, d.query_row_bytes) || misfit(d.output, d.output_row_bytes))
    return complaint.say(
        "queries and output: expected addresses and rows that are multiples of 16, rows of %llu bytes "
        "at least, found rows of %llu and %llu",
        L{row}, L{d.query_row_bytes}, L{d.output_row_bytes});
  if (d.page_row * d.page_tokens < d.max_tokens)
    return complaint.say("page_row: expected entries for %u tokens, found %llu pages of %u", d.max_tokens,
                         L{d.page_row}, d.page_tokens);
  return true;
}

inline bool is_valid_call(const tardis_attention_store& s, Complaint& complaint) {
  using L = unsigned long long;
  if (!is_valid_kind(s, complaint)) return false;
  if (s.kv_heads == 0) return complaint.say("kv_heads: expected 1 or more, found 0");
  if (!(s.key_scale > 0) || !(s.value_scale > 0))
    return complaint.say("key_scale and value_scale: expected numbers above 0, found %g and %g", double{s.key_scale},
                         double{s.value_scale});
  if (!are_valid_pools(s, complaint)) return false;
  if (s.keys == nullptr || s.values == nullptr || s.slots == nullptr)
    return complaint.say("keys, values, slots: expected addresses, found a null pointer");
  const std::uint64_t row = std::uint64_t{s.kv_heads} * s.head_dim * 2;
  const auto misfit = [&](const void* at, std::uint64_t bytes) {
    return reinterpret_cast<std::uintptr_t>(at) % 16 != 0 || bytes % 16 != 0 || bytes < row;
  };
  if (misfit(s.keys, s.key_row_bytes) || misfit(s.values, s.value_row_bytes))
    return complaint.say(
        "keys and values: expected addresses and rows that are multiples of 16, rows of %llu bytes at least, found "
        "rows "
        "of %llu and %llu",
        L{row}, L{s.key_row_bytes}, L{s.value_row_bytes});
  return true;
}

}  // namespace tardis::attention
