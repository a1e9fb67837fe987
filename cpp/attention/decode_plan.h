// SPDX-License-Identifier: Apache-2.0
// How a decode call is divided, from what the host knows: batch, heads, SMs and a bound of the lengths. The lengths
// themselves are read by the device, so that a graph can be replayed with others.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/tile.h"
#include "tardis/attention.h"

namespace tardis::attention {

struct DecodePlan {
  std::uint32_t splits;
  std::uint64_t output_bytes, lse_bytes;  // of partial results; 0 with one split
  std::uint64_t workspace_bytes() const { return output_bytes + lse_bytes; }
};

// Most tiles that a request can have: of its window, which need not begin with a tile, or of max_tokens.
inline std::uint32_t most_tiles(const tardis_attention_decode& decode) {
  const auto tiles = [](std::uint64_t tokens) {
    return static_cast<std::uint32_t>((tokens + kTileRows - 1) / kTileRows);
  };
  const std::uint32_t all = std::max(tiles(decode.max_tokens), 1U);
  if (decode.window_left < 0) return all;
  return std::min(all, tiles(std::uint64_t{static_cast<std::uint32_t>(decode.window_left)} + decode.query_tokens) + 1);
}

// The least splits that fill the GPU nearly as well as any number does: each costs a partial result. `enough` CTAs of
// an SM read as fast as HBM gives. Where requests and heads alone are CTAs for half of the SMs, all that an SM can hold
// count: some SMs will have more than others.
inline std::uint32_t chosen_splits(std::uint32_t works, std::uint32_t tiles, std::uint32_t sms, std::uint32_t enough,
                                   std::uint32_t ctas_per_sm) {
  const std::uint32_t most = std::min<std::uint32_t>(tiles, TARDIS_ATTENTION_MOST_SPLITS);
  const std::uint32_t places = sms * (works <= sms / 2 ? enough : ctas_per_sm);
  const auto filled = [&](std::uint32_t splits) {
    const std::uint64_t ctas = std::uint64_t{works} * splits;
    const std::uint64_t waves = (ctas + places - 1) / places;
    return static_cast<double>(ctas) / static_cast<double>(waves * places);
  };
  double best = 0;
  for (std::uint32_t splits = 1; splits <= most; ++splits) best = std::max(best, filled(splits));
  for (std::uint32_t splits = 1; splits < most; ++splits) {
    if (filled(splits) >= 0.95 * best) return splits;
  }
  return most;
}

inline DecodePlan plan_of(const tardis_attention_decode& decode, std::uint32_t sms, std::uint32_t enough,
                          std::uint32_t ctas_per_sm) {
  DecodePlan plan{};
  plan.splits = decode.splits != 0
                    ? decode.splits
                    : chosen_splits(decode.batch * decode.kv_heads, most_tiles(decode), sms, enough, ctas_per_sm);
  if (plan.splits > 1) {
    const std::uint64_t rows = std::uint64_t{decode.batch} * plan.splits * decode.query_tokens * decode.query_heads;
    plan.output_bytes = rows * decode.head_dim * sizeof(float);
    plan.lse_bytes = rows * sizeof(float);
  }
  return plan;
}

}  // namespace tardis::attention
