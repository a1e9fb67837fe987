// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "gio/load.h"
#include "nvme/soft/store_medium.h"

namespace tardis::gio {

Load::Load(const LoadTerms& terms, std::byte* staging) : terms_(terms), staging_(staging) {
  hashes_.reserve(terms.shape.most_pages);
  failed_.reserve(terms.shape.most_pages);
  suspects_.reserve(terms.shape.most_pages);
}

void Load::start(const Hash256* hashes, std::uint32_t n, bool use_rings, void* board) {
  hashes_.assign(hashes, hashes + n);
  use_rings_ = use_rings;
  board_ = LoadBoard(board, terms_.shape, terms_.layout);
  stopped_.store(false, std::memory_order_relaxed);
  all_told_ = false;
  failed_.clear();
  suspects_.clear();
  repaired_parts_ = 0;
}

void Load::prepare() {
  const bool good = acquire() && prove();
  const bool rings = good && place() && use_rings_;
  // Without rings every part of a layer is read by the host, which has room for so many.
  if (!good || (!rings && pages() > terms_.shape.most_repairs)) all_bad(0);
  board_.head().ring_pages = rings ? pages() : 0;
  LoadBoard::tell(board_.head().ready, TARDIS_LOAD_GOOD);
}

bool Load::acquire() {
  auto lease = terms_.store.acquire(terms_.space, hashes_.data(), hashes_.size());
  if (lease) lease_ = std::move(*lease);
  terms_.counters.missing += hashes_.size() - lease_.size();
  return lease_.size() == hashes_.size();
}

bool Load::prove() {
  std::vector<DigestSource> sources;
  sources.reserve(lease_.size());
  for (std::size_t i = 0; i < lease_.size(); ++i) {
    sources.push_back({lease_.digest_address(i), lease_.root_digest(i)});
  }
  std::vector<std::uint8_t> proven(sources.size());
  if (!terms_.store.read_digests(terms_.space, sources, board_.digests(), proven.data())) return false;
  for (std::uint32_t i = 0; i < proven.size(); ++i) {
    if (proven[i] == 0) suspects_.push_back({i, true});
  }
  terms_.counters.unproven += suspects_.size();
  return suspects_.empty();
}

bool Load::place() {
  if (!terms_.parts_are_blocks()) return false;
  for (std::size_t i = 0; i < lease_.size(); ++i) {
    const auto ranges = nvme::blocks_of(lease_, i, 0, terms_.geometry.stored_bytes(), terms_.block_bytes);
    if (ranges.size() != 1 || ranges.front().skip != 0) return false;
    board_.blocks()[i] = ranges.front().first;
  }
  return true;
}

void Load::all_bad(std::uint32_t from) {
  for (std::uint32_t layer = from; layer < terms_.shape.layers; ++layer) {
    if (LoadBoard::read(board_.repaired(layer)) != TARDIS_LOAD_PENDING) continue;  // told once
    LoadBoard::tell(board_.repaired(layer), TARDIS_LOAD_BAD);
  }
}

}  // namespace tardis::gio
