// SPDX-License-Identifier: Apache-2.0
// Keeps the GPU's index and block table in step with a store, one namespace of it: which objects are new, and which are
// gone, whichever process stored or evicted them. Host only; the caller hands batches to the device (docs/restore.md).
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "gstore/mirror_batch.h"
#include "store/store.h"

namespace tardis::gstore {

struct MirrorOptions {
  NamespaceId space = 0;           // opened in the store
  std::uint32_t file_blocks = 0;   // of the block table: no more objects than that are mirrored
  std::uint32_t block_shift = 12;  // of the namespace that the drive, or the controller, shows
  // Arrays of file_blocks, where the device reads them (pinned and mapped, say). A file block's part is written before
  // the block is told of, and again only after its row is known to be gone.
  std::uint64_t* page_blocks = nullptr;  // first block on the namespace
  std::uint64_t* digests = nullptr;      // [layer][chunk] of each, proven against the root; null: none
};

struct MirrorCounters {
  std::uint64_t objects = 0;  // mirrored now
  std::uint64_t told = 0, gone = 0;
  std::uint64_t no_block = 0;  // not mirrored: more objects than file blocks, or rows
  std::uint64_t unproven = 0;  // not mirrored: the chunk digests did not fit the root (gone meanwhile, or damaged)
};

// Not thread-safe.
class Mirror {
 public:
  // An error: the layers of the namespace's objects do not begin at whole blocks.
  static Result<Mirror> create(Store& store, const MirrorOptions& options);

  // What changed since the last call; everything there is in the first. Takes no lock of the store. Batches are applied
  // one after the other.
  tardis::Status scan(MirrorBatch& batch);
  // That a row in memory holds an object which the store is about to get: when it has it, that row's file block is the
  // object's, and no second row is made. Forgotten where the store does not get it, after some scans.
  void expect(const tardis_gpu_index_entry& key, std::uint64_t handle);
  // statuses[i]: of batch.attach_blocks[i] (tardis_gpu_blocks_status).
  void attached(MirrorBatch& batch, const std::uint8_t* statuses);
  // handles[i]: of batch.adopts[i], all ones where the table had no room. Then batch.puts is complete.
  void adopted(MirrorBatch& batch, const std::uint64_t* handles);
  // statuses[i]: of batch.leaves[i] (tardis_gpu_blocks_status). Rows that are in use are tried again with the next
  // batch; the others' file blocks are free.
  void left(const MirrorBatch& batch, const std::uint8_t* statuses);

  const MirrorCounters& counters() const { return counters_; }
  // What the mirror says of file block `block`: a handle, all ones if there is none.
  std::uint64_t handle_of(std::uint32_t block) const { return rows_[block].handle; }

 private:
  struct Row {
    std::uint64_t handle = ~std::uint64_t{0};
    tardis_gpu_index_entry entry{};
  };
  struct Leaving {
    std::uint64_t handle;
    std::uint32_t block;
  };

  struct Expected {
    std::uint64_t handle;
    std::uint32_t scans = 0;  // it has waited for
  };
  struct Hash {
    std::size_t operator()(const Hash256& hash) const { return static_cast<std::size_t>(short_key(hash)); }
  };
  static constexpr std::uint32_t kMostScans = 1000;

  Mirror(Store& store, const MirrorOptions& options, const ObjectGeometry& geometry);
  void drop(GlobalSlot slot, MirrorBatch& batch);
  void add(std::uint32_t block, std::uint64_t handle, MirrorBatch& batch);

  Store* store_;
  MirrorOptions options_;
  ObjectGeometry geometry_;
  SeenSlots seen_;
  std::unordered_map<GlobalSlot, std::uint32_t> blocks_;  // of mirrored slots
  std::vector<Row> rows_;                                 // by file block
  std::vector<std::uint32_t> free_;
  std::unordered_map<Hash256, Expected, Hash> expected_;
  std::vector<Leaving> leaving_;  // as told in the last batch, and those to be tried again
  MirrorCounters counters_;
};

}  // namespace tardis::gstore
