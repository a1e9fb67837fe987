// SPDX-License-Identifier: Apache-2.0
// Changes of the store's index on their way to the GPU's. A batch is applied in no order, so only the last change of a
// key is kept.
#pragma once

#include <cstddef>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "gstore/index_layout.h"

namespace tardis::gstore {

class IndexBatch {
 public:
  void add(const tardis_gpu_index_entry& change) {
    Name name{{}, change.space};
    std::memcpy(name.key, change.key, sizeof name.key);
    const auto [known, is_new] = places_.try_emplace(name, entries_.size());
    if (is_new) {
      entries_.push_back(change);
    } else {
      entries_[known->second] = change;
    }
  }
  void clear() {
    entries_.clear();
    places_.clear();
  }
  const std::vector<tardis_gpu_index_entry>& entries() const { return entries_; }

 private:
  struct Name {
    std::uint64_t key[4];
    std::uint64_t space;
    bool operator==(const Name& other) const { return std::memcmp(this, &other, sizeof other) == 0; }
  };
  struct Hash {
    std::size_t operator()(const Name& name) const { return static_cast<std::size_t>(mix(name.key[0] + name.space)); }
  };

  std::vector<tardis_gpu_index_entry> entries_;
  std::unordered_map<Name, std::size_t, Hash> places_;
};

}  // namespace tardis::gstore
