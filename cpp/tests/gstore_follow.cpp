// SPDX-License-Identifier: Apache-2.0
// Mirrors of a live store: told of everything, then of what changed, whichever process changed it; and the digests that
// they pass on.
#include <algorithm>
#include <cstring>
#include <map>
#include <random>

#include "gstore/blocks.h"
#include "gstore/host_index.h"
#include "gstore/mirror.h"
#include "store/digest.h"
#include "store_support.h"

namespace tardis::gstore {
namespace {

using namespace tardis::testing;

constexpr std::uint32_t kFileBlocks = 400, kBlockShift = 12;

// As a device would keep them: a row for each adopted file block, and the index.
class Device {
 public:
  explicit Device(std::uint32_t rows) : index_(buckets_for(4 * kFileBlocks)), rows_(rows) {}

  void apply(Mirror& mirror, MirrorBatch& batch) {
    for (const auto& erase : batch.erases) index_.apply(erase);
    std::vector<std::uint8_t> statuses;
    for (const std::uint64_t handle : batch.leaves) {
      const bool busy = busy_.count(handle) != 0;
      statuses.push_back(busy ? TARDIS_GPU_BLOCKS_REFERENCED : TARDIS_GPU_BLOCKS_OK);
      if (!busy) {
        EXPECT_EQ(taken_.erase(handle), 1u);
      }
    }
    mirror.left(batch, statuses.data());
    statuses.clear();
    for (std::size_t i = 0; i < batch.attach_blocks.size(); ++i) {
      const bool there = in_memory_.erase(batch.attach_handles[i]) != 0;
      if (there) taken_[batch.attach_handles[i]] = batch.attach_blocks[i];
      statuses.push_back(there ? TARDIS_GPU_BLOCKS_OK : TARDIS_GPU_BLOCKS_STALE);
    }
    mirror.attached(batch, statuses.data());
    std::vector<std::uint64_t> handles;
    for (const std::uint32_t block : batch.adopts) {
      for (const auto& [handle, taken] : taken_) EXPECT_NE(taken, block) << "a file block that is in use";
      const bool room = taken_.size() < rows_;
      handles.push_back(room ? next_ : ~std::uint64_t{0});
      if (room) taken_[next_++] = block;
    }
    mirror.adopted(batch, handles.data());
    for (const auto& put : batch.puts) index_.apply(put);
  }
  // The file block of an object, if the index knows it.
  std::optional<std::uint32_t> find(NamespaceId space, const Hash256& hash) const {
    Key key;
    std::memcpy(&key, hash.data(), sizeof key);
    const auto answer = index_.find(key, static_cast<std::uint16_t>(space));
    if (answer.status == 0) return std::nullopt;
    return taken_.at(answer.location);
  }
  std::size_t rows() const { return taken_.size(); }
  const std::map<std::uint64_t, std::uint32_t>& taken() const { return taken_; }
  std::set<std::uint64_t> busy_;       // handles
  std::set<std::uint64_t> in_memory_;  // handles of rows without a file block

 private:
  HostIndex index_;
  const std::size_t rows_;
  std::map<std::uint64_t, std::uint32_t> taken_;  // handle: file block
  std::uint64_t next_ = 1;
};

class GstoreFollow : public ::testing::Test {
 protected:
  static constexpr std::uint32_t kParts = 3;
  static Layout layout() { return {kParts, {16 * 1024, 8 * 1024}}; }

  void start(std::uint32_t file_blocks = kFileBlocks) {
    store_ = open_store(folder_.path() + "/store", small_store(8));
    ASSERT_NE(store_, nullptr);
    space_.emplace(*store_, std::uint8_t{1}, layout());
    geometry_ = *store_->object_geometry(space_->id());
    page_blocks_.resize(file_blocks);
    digests_.resize(std::size_t{file_blocks} * geometry_.chunks());
    MirrorOptions options;
    options.space = space_->id();
    options.file_blocks = file_blocks;
    options.block_shift = kBlockShift;
    options.page_blocks = page_blocks_.data();
    options.digests = digests_.data();
    auto made = Mirror::create(*store_, options);
    ASSERT_TRUE(made) << made.error().message;
    mirror_.emplace(std::move(*made));
  }
  void update(Device& device) {
    MirrorBatch batch;
    const tardis::Status scanned = mirror_->scan(batch);
    ASSERT_TRUE(scanned) << scanned.error().message;
    device.apply(*mirror_, batch);
  }
  // What the mirror says of an object leads to its bytes, and its digests are theirs.
  void expect_leads_to(const Device& device, std::uint64_t chain, std::uint64_t index) {
    const Hash256 key = page_key(chain, index);
    const auto block = device.find(space_->id(), key);
    ASSERT_TRUE(block) << chain << " " << index;
    AlignedBuffer memory(geometry_.stored_bytes());
    const iovec piece{memory.data(), memory.size()};
    AddressRead read{page_blocks_[*block] << kBlockShift, {&piece, 1}, 0};
    store_->read_addresses({&read, 1}, [](AddressRead&) {});
    ASSERT_EQ(read.error, 0);
    std::vector<std::uint64_t> expected(geometry_.chunks());
    PageMemory original(kParts, layout().regions, 1);
    original.write(0, space_->seed(key));
    for (std::uint32_t part = 0; part < kParts; ++part) {
      digest_chunks(geometry_, original.pieces() + part * 2, 0, geometry_.chunks_per_part,
                    expected.data() + part * geometry_.chunks_per_part);
      std::uint64_t at = part * geometry_.part_stride;
      for (std::size_t region = 0; region < 2; ++region) {
        const auto* const there = reinterpret_cast<const void*>(original.pieces()[part * 2 + region]);
        EXPECT_EQ(std::memcmp(memory.data() + at, there, layout().regions[region]), 0);
        at += layout().regions[region];
      }
    }
    EXPECT_EQ(std::memcmp(expected.data(), digests_.data() + *block * expected.size(), expected.size() * 8), 0);
  }

  const TempFolder folder_{memory_parent()};
  std::unique_ptr<Store> store_;
  std::optional<Space> space_;
  ObjectGeometry geometry_;
  std::vector<std::uint64_t> page_blocks_, digests_;
  std::optional<Mirror> mirror_;
};

TEST_F(GstoreFollow, FollowsPutsEvictionsAndDeletions) {
  start();
  Device device(1000);
  std::mt19937_64 random(3);
  std::uint64_t chains = 0;
  for (int round = 0; round < 25; ++round) {
    for (int step = 0; step < 3; ++step) {
      if (random() % 4 == 0) {
        const Hash256 key = page_key(random() % (chains + 1), random() % 8);
        ASSERT_TRUE(store_->remove({space_->fingerprint(), key, 64}));
      } else if (random() % 6 == 0) {
        ASSERT_TRUE(store_->prune(random() % (200 * geometry_.payload_bytes()), std::nullopt));
      } else {
        space_->put(chains++, 0, 8);  // the store is full after a while, and evicts
      }
    }
    update(device);
    std::size_t there = 0;
    for (std::uint64_t chain = 0; chain < chains; ++chain) {
      for (std::uint64_t index = 0; index < 8; ++index) {
        const bool stored = space_->has(chain, index);
        there += stored;
        ASSERT_EQ(device.find(space_->id(), page_key(chain, index)).has_value(), stored) << chain << " " << index;
      }
    }
    EXPECT_EQ(mirror_->counters().objects, there);
    EXPECT_EQ(device.rows(), there);
    const std::uint64_t chain = random() % chains;
    for (std::uint64_t index = 0; index < 8; ++index) {
      if (space_->has(chain, index)) expect_leads_to(device, chain, index);
    }
  }
  EXPECT_GT(mirror_->counters().gone, 50u);
  EXPECT_EQ(mirror_->counters().no_block, 0u);
  EXPECT_EQ(mirror_->counters().unproven, 0u);
  MirrorBatch nothing;
  ASSERT_TRUE(mirror_->scan(nothing));
  EXPECT_TRUE(nothing.empty());
}

TEST_F(GstoreFollow, OtherNamespacesAreNotMirrored) {
  start();
  Space other(*store_, 2, layout());
  other.put(1, 0, 4);
  space_->put(1, 0, 4);
  Device device(100);
  update(device);
  EXPECT_EQ(device.rows(), 4u);
  EXPECT_FALSE(device.find(other.id(), page_key(1, 0)));
}

TEST_F(GstoreFollow, WhatAnotherProcessStores) {
  int start_it[2];
  ASSERT_EQ(::pipe(start_it), 0);
  const pid_t child = ::fork();  // before this process has threads
  ASSERT_GE(child, 0);
  if (child == 0) {
    char go = 0;
    if (::read(start_it[0], &go, 1) != 1) ::_exit(3);
    auto store = open_store(folder_.path() + "/store", small_store(8), false);
    if (store == nullptr) ::_exit(1);
    Space space(*store, 1, layout());
    const bool stored = space.put(5, 0, 6) == 6 && store->flush();
    ::_exit(stored && store->close() ? 0 : 2);
  }
  start();
  Device device(100);
  update(device);
  ASSERT_EQ(::write(start_it[1], "g", 1), 1);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ::close(start_it[0]);
  ::close(start_it[1]);
  ASSERT_EQ(status, 0);
  update(device);
  EXPECT_EQ(device.rows(), 6u);
  for (std::uint64_t index = 0; index < 6; ++index) expect_leads_to(device, 5, index);
}

TEST_F(GstoreFollow, FileBlocksOfRowsInUseAreNotGivenAway) {
  start(8);
  Device device(100);
  space_->put(1, 0, 8);
  update(device);
  EXPECT_EQ(device.rows(), 8u);
  for (const auto& [handle, block] : device.taken()) device.busy_.insert(handle);
  ASSERT_TRUE(store_->clear(std::nullopt));
  space_->put(2, 0, 3);
  update(device);  // eight rows are to go, and cannot; three objects have no place
  EXPECT_EQ(device.rows(), 8u);
  EXPECT_EQ(mirror_->counters().no_block, 3u);
  EXPECT_EQ(mirror_->counters().objects, 0u);
  device.busy_.clear();
  update(device);
  EXPECT_EQ(device.rows(), 0u);
  space_->put(3, 0, 8);
  update(device);
  EXPECT_EQ(device.rows(), 8u);
}

TEST_F(GstoreFollow, PagesInMemoryGetTheirFileBlock) {
  start();
  Device device(100);
  constexpr std::uint64_t kFirst = 5000;
  for (std::uint64_t index = 0; index < 6; ++index) {
    tardis_gpu_index_entry entry{};
    std::memcpy(entry.key, page_key(1, index).data(), sizeof entry.key);
    mirror_->expect(entry, kFirst + index);
    if (index % 2 == 0) device.in_memory_.insert(kFirst + index);  // the others have left meanwhile
  }
  space_->put(1, 0, 4);
  update(device);
  EXPECT_EQ(device.rows(), 4u);
  for (std::uint64_t index = 0; index < 4; ++index) {
    expect_leads_to(device, 1, index);
    EXPECT_EQ(device.taken().count(kFirst + index), index % 2 == 0 ? 1u : 0u);
  }
  ASSERT_TRUE(store_->clear(std::nullopt));
  update(device);
  EXPECT_EQ(device.rows(), 0u);
  EXPECT_EQ(device.in_memory_.size(), 1u);  // the store never got page 4
}

TEST_F(GstoreFollow, RowsThatTheTableHasNot) {
  start();
  Device device(5);
  space_->put(1, 0, 8);
  update(device);
  EXPECT_EQ(device.rows(), 5u);
  EXPECT_EQ(mirror_->counters().objects, 5u);
  EXPECT_EQ(mirror_->counters().no_block, 3u);
  ASSERT_TRUE(store_->clear(std::nullopt));
  update(device);
  EXPECT_EQ(device.rows(), 0u);
}

TEST_F(GstoreFollow, DigestsThatDoNotFitAreNotPassedOn) {
  start();
  space_->put(1, 0, 4);
  ASSERT_TRUE(store_->flush());
  const Hash256 key = page_key(1, 2);
  auto lease = store_->acquire(space_->id(), &key, 1);
  ASSERT_TRUE(lease);
  const SegmentAddresses addresses = store_->segment_addresses();
  const std::uint64_t address = lease->digest_address(0) + 8;
  const std::string file = segment_file(folder_.path() + "/store", addresses.segment_of(address).number);
  flip_bit(file, address % addresses.stride);
  Device device(100);
  update(device);
  EXPECT_EQ(device.rows(), 3u);
  EXPECT_EQ(mirror_->counters().unproven, 1u);
  EXPECT_FALSE(device.find(space_->id(), key));
  expect_leads_to(device, 1, 3);
}

TEST_F(GstoreFollow, LayersThatDoNotBeginAtBlocks) {
  start();
  const Space odd(*store_, 3, {2, {3 * 512}});
  MirrorOptions options;
  options.space = odd.id();
  options.file_blocks = 1;
  options.page_blocks = page_blocks_.data();
  const auto geometry = store_->object_geometry(odd.id());
  ASSERT_TRUE(geometry);
  const auto made = Mirror::create(*store_, options);
  if (geometry->part_stride % 4096 == 0) {
    EXPECT_TRUE(made);  // a store of 4 KiB blocks
    return;
  }
  ASSERT_FALSE(made);
  EXPECT_NE(made.error().message.find("block_bytes 512"), std::string::npos) << made.error().message;
}

}  // namespace
}  // namespace tardis::gstore
