// SPDX-License-Identifier: Apache-2.0
#include "gstore/mirror.h"

#include <cstring>
#include <iterator>
#include <string>
#include <utility>

#include "gstore/blocks.h"
#include "gstore/store_entry.h"

namespace tardis::gstore {

Mirror::Mirror(Store& store, const MirrorOptions& options, const ObjectGeometry& geometry)
    : store_(&store), options_(options), geometry_(geometry), rows_(options.file_blocks) {
  for (std::uint32_t block = options.file_blocks; block > 0; --block) free_.push_back(block - 1);
}

Result<Mirror> Mirror::create(Store& store, const MirrorOptions& options) {
  auto geometry = store.object_geometry(options.space);
  if (!geometry) return geometry.error();
  const std::uint64_t block_bytes = std::uint64_t{1} << options.block_shift;
  if (geometry->parts > 1 && geometry->part_stride % block_bytes != 0) {
    return Error{Code::kInvalidArgument, "mirror of a store: layers are " + std::to_string(geometry->part_stride) +
                                             " bytes apart, which is not whole blocks of " +
                                             std::to_string(block_bytes) + "; open the namespace with block_bytes 512"};
  }
  if (options.file_blocks == 0 || options.page_blocks == nullptr) {
    return Error{Code::kInvalidArgument, "mirror of a store: expected file blocks and their array, found none"};
  }
  return Mirror(store, options, *geometry);
}

void Mirror::drop(GlobalSlot slot, MirrorBatch& batch) {
  const auto known = blocks_.find(slot);
  if (known == blocks_.end()) return;
  const std::uint32_t block = known->second;
  Row& row = rows_[block];
  tardis_gpu_index_entry erase = row.entry;
  erase.op = TARDIS_GPU_INDEX_ERASE;
  batch.erases.push_back(erase);
  leaving_.push_back({row.handle, block});
  row = {};
  blocks_.erase(known);
  ++counters_.gone;
  --counters_.objects;
}

tardis::Status Mirror::scan(MirrorBatch& batch) {
  batch = {};
  std::vector<LiveObject> found;
  const tardis::Status looked = store_->changes(seen_, [&](const SlotChange& change) {
    if (change.gone) drop(change.slot, batch);
    if (change.now && change.now->entry.space == options_.space &&
        change.now->entry.payload_bytes == geometry_.payload_bytes()) {
      found.push_back(*change.now);
    }
  });
  if (!looked) return looked;
  for (const Leaving& row : leaving_) batch.leaves.push_back(row.handle);

  const std::size_t chunks = geometry_.chunks();
  std::vector<std::uint64_t> digests;
  std::vector<std::uint8_t> proven(found.size(), 1);
  if (options_.digests != nullptr) {
    std::vector<DigestSource> sources;
    for (const LiveObject& object : found) sources.push_back(object.digests);
    digests.resize(found.size() * chunks);
    const tardis::Status read = store_->read_digests(options_.space, sources, digests.data(), proven.data());
    if (!read) return read;
  }
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (proven[i] == 0) {
      ++counters_.unproven;
      continue;
    }
    if (free_.empty()) {
      ++counters_.no_block;
      continue;
    }
    const std::uint32_t block = free_.back();
    free_.pop_back();
    options_.page_blocks[block] = found[i].address >> options_.block_shift;
    if (options_.digests != nullptr) {
      std::memcpy(options_.digests + block * chunks, digests.data() + i * chunks, chunks * sizeof(std::uint64_t));
    }
    rows_[block].entry = change_of(found[i].entry, TARDIS_GPU_INDEX_PUT);
    blocks_[found[i].entry.slot] = block;
    const auto expected = expected_.find(found[i].entry.key);
    if (expected != expected_.end()) {
      batch.attach_blocks.push_back(block);
      batch.attach_handles.push_back(expected->second.handle);
      expected_.erase(expected);
    } else {
      batch.adopts.push_back(block);
    }
    ++counters_.told;
    ++counters_.objects;
  }
  for (auto item = expected_.begin(); item != expected_.end();) {
    item = ++item->second.scans > kMostScans ? expected_.erase(item) : std::next(item);
  }
  return {};
}

void Mirror::expect(const tardis_gpu_index_entry& key, std::uint64_t handle) {
  Hash256 hash;
  std::memcpy(hash.data(), key.key, sizeof hash);
  expected_[hash] = {handle};
}

void Mirror::add(std::uint32_t block, std::uint64_t handle, MirrorBatch& batch) {
  rows_[block].handle = handle;
  batch.puts.push_back(rows_[block].entry);
  batch.puts.back().location = handle;
}

void Mirror::attached(MirrorBatch& batch, const std::uint8_t* statuses) {
  for (std::size_t i = 0; i < batch.attach_blocks.size(); ++i) {
    if (statuses[i] == TARDIS_GPU_BLOCKS_OK) {
      add(batch.attach_blocks[i], batch.attach_handles[i], batch);
    } else {
      batch.adopts.push_back(batch.attach_blocks[i]);  // the row has left memory, or is of another object
    }
  }
}

void Mirror::adopted(MirrorBatch& batch, const std::uint64_t* handles) {
  for (std::size_t i = 0; i < batch.adopts.size(); ++i) {
    const std::uint32_t block = batch.adopts[i];
    if (handles[i] == ~std::uint64_t{0}) {
      blocks_.erase(rows_[block].entry.location);  // its slot, as the store tells it
      rows_[block] = {};
      free_.push_back(block);
      ++counters_.no_block;
      --counters_.objects;
      continue;
    }
    add(block, handles[i], batch);
  }
}

void Mirror::left(const MirrorBatch& batch, const std::uint8_t* statuses) {
  std::vector<Leaving> again;
  for (std::size_t i = 0; i < batch.leaves.size(); ++i) {
    const bool in_use = statuses[i] == TARDIS_GPU_BLOCKS_REFERENCED || statuses[i] == TARDIS_GPU_BLOCKS_MOVING;
    if (in_use) {
      again.push_back(leaving_[i]);
    } else {
      free_.push_back(leaving_[i].block);
    }
  }
  leaving_ = std::move(again);
}

}  // namespace tardis::gstore
