// SPDX-License-Identifier: Apache-2.0
#include "gio/load_board.h"

#include <string>

#include "store/format.h"

namespace tardis::gio {
namespace {

constexpr std::uint64_t kApart = 64;  // of arrays: what one side writes shares no cache line with the other's

}  // namespace

Result<tardis_load_board_layout> board_layout_of(const tardis_load_shape& shape) {
  constexpr std::uint32_t kMostLayers = 1u << 16, kMostChunks = 1u << 20;
  if (shape.layers == 0 || shape.layers > kMostLayers || shape.chunks == 0 || shape.chunks > kMostChunks ||
      shape.most_pages == 0 || shape.most_repairs == 0 || shape.commands_per_page == 0 ||
      std::uint64_t{shape.most_pages} * shape.commands_per_page > kMostContexts || shape.rings == 0 ||
      shape.rings > kMostQueues) {
    return Error{Code::kInvalidArgument,
                 "tardis_load_shape: expected layers, chunks, pages, repairs, 1 to 16 rings and at most " +
                     std::to_string(kMostContexts) + " commands a layer, found " + std::to_string(shape.layers) +
                     " layers of " + std::to_string(shape.chunks) + " chunks, " + std::to_string(shape.most_pages) +
                     " pages of " + std::to_string(shape.commands_per_page) + " commands, " +
                     std::to_string(shape.most_repairs) + " repairs, " + std::to_string(shape.rings) + " rings"};
  }
  tardis_load_board_layout layout{};
  std::uint64_t end = sizeof(tardis_load_board);
  const auto place = [&](std::uint64_t bytes) {
    const std::uint64_t begin = end;
    end = round_up(begin + bytes, kApart);
    return begin;
  };
  const std::uint64_t words = std::uint64_t{shape.layers} * sizeof(LoadBoard::Word);
  layout.landed = place(words);
  layout.repaired = place(words);
  layout.repairs = place(words);
  layout.done = place(words);
  layout.list = place(std::uint64_t{shape.most_repairs} * sizeof(tardis_load_repair));
  layout.blocks = place(std::uint64_t{shape.most_pages} * sizeof(std::uint64_t));
  layout.digests = place(std::uint64_t{shape.most_pages} * shape.layers * shape.chunks * sizeof(std::uint64_t));
  layout.statuses = place(kMostContexts * sizeof(std::uint32_t));
  layout.reports = place(std::uint64_t{shape.layers} * shape.rings * sizeof(RingReport));
  layout.bytes = end;
  return layout;
}

}  // namespace tardis::gio
