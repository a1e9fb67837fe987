// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <deque>
#include <thread>

#include "base/aligned_buffer.h"
#include "gio/load.h"
#include "store/digest.h"

namespace tardis::gio {
namespace {

// Between two looks at what the GPU tells: a layer takes milliseconds, and a core is not to be kept busy.
constexpr auto kLook = std::chrono::microseconds(50);

enum class Part : std::uint8_t { kFailed, kDamaged, kGood };

}  // namespace

void Load::look_after() {
  for (std::uint32_t layer = 0; layer < terms_.shape.layers; ++layer) {
    if (LoadBoard::read(board_.repaired(layer)) == TARDIS_LOAD_BAD) return;
    LoadBoard::Word landed = TARDIS_LOAD_PENDING;
    while ((landed = LoadBoard::read(board_.landed(layer))) == TARDIS_LOAD_PENDING) {
      if (stopped() || LoadBoard::read(board_.head().abandoned) != 0) return;
      std::this_thread::sleep_for(kLook);
    }
    if (landed != TARDIS_LOAD_GOOD && !repair(layer)) {
      all_bad(layer);
      return;
    }
  }
  all_told_ = true;
}

bool Load::repair(std::uint32_t layer) {
  failed_.clear();
  failed_pages(layer, failed_);
  if (failed_.size() > terms_.shape.most_repairs || !read_again(layer)) return false;
  const std::uint64_t room = terms_.part_room();
  for (std::size_t i = 0; i < failed_.size(); ++i) {
    board_.list()[i] = {reinterpret_cast<std::uintptr_t>(staging_ + i * room), failed_[i], 0};
  }
  board_.repairs(layer) = static_cast<LoadBoard::Word>(failed_.size());
  repaired_parts_ += static_cast<std::uint32_t>(failed_.size());
  terms_.counters.repaired_parts += failed_.size();
  LoadBoard::tell(board_.repaired(layer), TARDIS_LOAD_GOOD);
  return true;
}

void Load::failed_pages(std::uint32_t layer, std::vector<std::uint32_t>& out) const {
  const std::uint32_t commands = terms_.shape.commands_per_page, of_rings = board_.head().ring_pages;
  std::uint64_t done = 0, good = 0;
  for (std::uint32_t ring = 0; ring < terms_.shape.rings; ++ring) done += board_.reports(layer)[ring].done;
  for (std::uint32_t i = 0; i < of_rings * commands; ++i) {
    good += IoStatus{board_.statuses()[i]}.end() == IoEnd::kDone;
  }
  // Where no ring ran, or the rings count other than the statuses say, these may be of a layer before.
  const bool trusted = of_rings != 0 && done == good;
  for (std::uint32_t page = 0; page < pages(); ++page) {
    const std::uint32_t* const first = board_.statuses() + std::size_t{page} * commands;
    const bool whole = trusted && std::all_of(first, first + commands, [](std::uint32_t status) {
                         return IoStatus{status}.end() == IoEnd::kDone;
                       });
    if (!whole) out.push_back(page);
  }
}

bool Load::read_again(std::uint32_t layer) {
  const ObjectGeometry& geometry = terms_.geometry;
  const std::uint64_t room = terms_.part_room();
  const std::uint64_t bytes = round_up(geometry.part_bytes, std::max(1u, terms_.store.read_geometry().offset_align));
  std::vector<AddressRead> reads(failed_.size());
  std::vector<iovec> memory(failed_.size());
  std::vector<Part> parts(failed_.size(), Part::kFailed);
  for (std::size_t i = 0; i < failed_.size(); ++i) {
    const auto extents = lease_.extents(failed_[i], layer * geometry.part_stride, bytes);
    if (extents.size() != 1) return false;
    memory[i] = {staging_ + i * room, bytes};
    reads[i] = {extents.front().address, {&memory[i], 1}, 0};
  }
  terms_.store.read_addresses(reads, [&](AddressRead& read) {
    if (read.error != 0) return;
    const auto i = static_cast<std::size_t>(&read - reads.data());
    std::uint64_t regions[4] = {reinterpret_cast<std::uintptr_t>(memory[i].iov_base)};
    for (std::uint32_t r = 1; r < geometry.regions; ++r) regions[r] = regions[r - 1] + geometry.region_bytes[r - 1];
    std::vector<std::uint64_t> digests(geometry.chunks_per_part);
    digest_chunks(geometry, regions, 0, geometry.chunks_per_part, digests.data());
    parts[i] =
        std::equal(digests.begin(), digests.end(), board_.digests(failed_[i], layer)) ? Part::kGood : Part::kDamaged;
  });
  bool good = true;
  for (std::size_t i = 0; i < failed_.size(); ++i) {
    if (parts[i] == Part::kGood) continue;
    good = false;
    (parts[i] == Part::kDamaged ? terms_.counters.damaged_pages : terms_.counters.failed_pages) += 1;
    suspects_.push_back({failed_[i], false});
  }
  return good;
}

void Load::judge() {
  if (suspects_.empty()) return;
  const ObjectGeometry& geometry = terms_.geometry;
  AlignedBuffer object(geometry.payload_bytes());
  std::vector<std::uint64_t> pieces;
  std::uint64_t at = reinterpret_cast<std::uintptr_t>(object.data());
  for (std::uint32_t part = 0; part < geometry.parts; ++part) {
    for (std::uint32_t r = 0; r < geometry.regions; at += geometry.region_bytes[r++]) pieces.push_back(at);
  }
  for (const Suspect& suspect : suspects_) {
    std::uint8_t ok = 0;
    // What comes of it is the store's: it counts, quarantines and tells its paths.
    (void)terms_.store.get(terms_.space, &hashes_[suspect.page], pieces.data(), 1, &ok);
    // Its bytes alone would be offered again and again, and no load would be good.
    if (suspect.unproven && ok != 0) (void)terms_.store.check_digests(terms_.space, hashes_[suspect.page]);
  }
}

void Load::give_up() {
  all_bad(0);
  LoadBoard::tell(board_.head().ready, TARDIS_LOAD_GOOD);
}

void Load::let_go(bool over) {
  if (over || all_told_) lease_ = Lease();
}

tardis_load_result Load::result(bool cancelled) const {
  tardis_load_result result{};
  result.pages = pages();
  result.repaired_parts = repaired_parts_;
  bool good = !cancelled && LoadBoard::read(board_.head().ready) == TARDIS_LOAD_GOOD &&
              LoadBoard::read(board_.head().errors) == 0 && LoadBoard::read(board_.head().abandoned) == 0;
  for (std::uint32_t layer = 0; layer < terms_.shape.layers; ++layer) {
    const LoadBoard::Word landed = LoadBoard::read(board_.landed(layer));
    const bool read = landed == TARDIS_LOAD_GOOD && board_.head().ring_pages == pages();
    const bool again = landed == TARDIS_LOAD_BAD && LoadBoard::read(board_.repaired(layer)) == TARDIS_LOAD_GOOD;
    good = good && (read || again);
    if (landed == TARDIS_LOAD_PENDING) continue;
    for (std::uint32_t ring = 0; ring < terms_.shape.rings; ++ring) {
      if (ends_queue(board_.reports(layer)[ring].error)) result.renew = 1;
    }
  }
  result.good = good ? 1 : 0;
  return result;
}

}  // namespace tardis::gio
