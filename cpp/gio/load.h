// SPDX-License-Identifier: Apache-2.0
// One load as a thread of the loader works it off: leases and digests first, then layers that a ring could not read.
// load_prepare.cpp, load_repair.cpp.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gio/load_board.h"
#include "store/store.h"

namespace tardis::gio {

// Since the loader was opened; as tardis_loader_counters.
struct LoadCounters {
  std::atomic<std::uint64_t> loads{0}, pages{0}, missing{0}, unproven{0}, repaired_parts{0}, failed_pages{0},
      damaged_pages{0}, abandoned{0};
};

// What is the same for every load of a loader.
struct LoadTerms {
  Store& store;
  NamespaceId space;
  tardis_load_shape shape;
  tardis_load_board_layout layout;
  ObjectGeometry geometry;
  std::uint32_t block_bytes;  // of the session that reads
  LoadCounters& counters;

  std::uint64_t part_room() const { return round_up(geometry.part_bytes, 4096); }  // in staging
  // Whether a ring's commands can name the parts of an object that begins at a whole block.
  bool parts_are_blocks() const {
    return geometry.part_bytes % block_bytes == 0 && (geometry.parts == 1 || geometry.part_stride % block_bytes == 0);
  }
};

class Load {
 public:
  Load(const LoadTerms& terms, std::byte* staging);

  // By who begins it. No I/O, and no memory is allocated.
  void start(const Hash256* hashes, std::uint32_t n, bool use_rings, void* board);

  // By its thread. prepare() fills the board and says ready; look_after() returns when no layer can need it any more:
  // all were told, the load is bad, or its user has gone.
  void prepare();
  void look_after();
  // Has the store judge the objects whose bytes were wrong: it quarantines those that are.
  void judge();
  // Answers whatever is not answered, with bad news.
  void give_up();
  // Ends the lease if no ring can be reading, or (`over`) will be.
  void let_go(bool over);

  // Its user waits for nothing any more.
  void stop() { stopped_.store(true, std::memory_order_relaxed); }
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }

  const LoadBoard& board() const { return board_; }
  std::uint32_t pages() const { return static_cast<std::uint32_t>(hashes_.size()); }
  bool use_rings() const { return use_rings_; }
  // After its thread has let go, or of a load whose user is not waited for.
  tardis_load_result result(bool cancelled) const;

 private:
  // An object that could not be read or proven.
  struct Suspect {
    std::uint32_t page;
    bool unproven;  // its digests are what is wrong
  };

  // load_prepare.cpp
  bool acquire();
  bool prove();
  bool place();  // false: rings cannot read these objects
  void all_bad(std::uint32_t from);
  // load_repair.cpp
  bool repair(std::uint32_t layer);
  void failed_pages(std::uint32_t layer, std::vector<std::uint32_t>& pages) const;
  bool read_again(std::uint32_t layer);

  const LoadTerms& terms_;
  std::byte* const staging_;
  std::vector<Hash256> hashes_;
  bool use_rings_ = false;
  LoadBoard board_;
  std::atomic<bool> stopped_{false};

  Lease lease_;
  bool all_told_ = false;              // every layer: no ring reads any more
  std::vector<std::uint32_t> failed_;  // pages of the layer that is read again
  std::vector<Suspect> suspects_;
  std::uint32_t repaired_parts_ = 0;
};

}  // namespace tardis::gio
