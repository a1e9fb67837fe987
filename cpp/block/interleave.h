// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "block/block_device.h"

namespace tardis {

// The files' items take turns, so that drives which hold a file each work at the same time. `file_of(item)`: its file.
template <class Item, class FileOf>
void interleave(std::vector<Item>& items, FileOf file_of) {
  std::map<FileId, std::size_t> seen;
  std::vector<std::pair<std::size_t, Item>> turns;
  turns.reserve(items.size());
  for (Item& item : items) {
    const std::size_t turn = seen[file_of(item)]++;
    turns.emplace_back(turn, std::move(item));
  }
  std::stable_sort(turns.begin(), turns.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::transform(turns.begin(), turns.end(), items.begin(), [](auto& turn) { return std::move(turn.second); });
}

}  // namespace tardis
