// SPDX-License-Identifier: Apache-2.0
// What client processes of a broker do until they are told to stop, or killed.
#pragma once

#include <array>

#include "nvme_broker_support.h"

namespace tardis::nvme::testing {

inline constexpr std::size_t kPiece = 64 << 10;
inline constexpr std::uint64_t kRangeBlocks = 2048;

struct Progress {
  std::atomic<bool> up{false}, stop{false};
  std::array<std::atomic<std::uint64_t>, 3> moved{};  // requests of each
};

// Writes and reads its range until it is told to stop; half of it through registered memory.
inline void work(const std::string& socket, std::size_t who, Progress& progress) {
  ASSERT_TRUE(eventually([&] { return progress.up.load(); }));
  auto client = join_broker(client_options(socket, "client " + std::to_string(who)));
  ASSERT_NE(client, nullptr);
  auto space =
      take_range(client, {.first_block = who * kRangeBlocks, .blocks = kRangeBlocks, .name = std::to_string(who)});
  ASSERT_NE(space, nullptr);
  constexpr std::size_t kAtOnce = 8;
  auto pages = client->allocate(kAtOnce * kPiece);
  ASSERT_TRUE(pages);
  ASSERT_TRUE(client->register_memory(pages->memory.get(), kAtOnce / 2 * kPiece));
  std::byte* const memory = pages->memory.get();
  for (std::uint64_t round = 0; !progress.stop.load(); ++round) {
    for (const Op op : {Op::kWrite, Op::kRead}) {
      std::array<iovec, kAtOnce> ranges;
      std::vector<NamespaceRequest> requests(kAtOnce);
      for (std::size_t i = 0; i < kAtOnce; ++i) {
        const std::uint64_t offset = (round * kAtOnce + i) % 128 * kPiece;
        ranges[i] = {memory + i * kPiece, kPiece};
        requests[i] = {.op = op, .offset = offset, .memory = {&ranges[i], 1}, .error = -1};
        if (op == Op::kWrite) {
          mark(memory + i * kPiece, kPiece, offset, who * 1'000'000 + round);
        } else {
          std::memset(memory + i * kPiece, 0, kPiece);
        }
      }
      space->run(requests, nullptr);
      for (std::size_t i = 0; i < kAtOnce; ++i) {
        ASSERT_EQ(requests[i].error, 0) << "client " << who << " round " << round;
        if (op == Op::kWrite) continue;
        ASSERT_TRUE(holds_mark(memory + i * kPiece, kPiece, requests[i].offset, who * 1'000'000 + round))
            << "client " << who << " round " << round;
      }
      progress.moved[who].fetch_add(kAtOnce);
    }
  }
}

inline double rate(std::atomic<std::uint64_t>& moved, int ms) {
  const std::uint64_t before = moved.load(), begin = monotonic_ns();
  ::usleep(static_cast<useconds_t>(ms) * 1000);
  return static_cast<double>(moved.load() - before) * kPiece / static_cast<double>(monotonic_ns() - begin);  // GB/s
}

}  // namespace tardis::nvme::testing
