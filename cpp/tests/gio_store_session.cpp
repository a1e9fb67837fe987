// SPDX-License-Identifier: Apache-2.0
// Sessions over an open store through the C ABI, with a ring of the host as their owner: objects by their leases, and
// the digests that prove them.
#include "tardis/gio_store.h"

#include <cstring>
#include <numeric>

#include "base/checksum.h"
#include "tests/gio_support.h"
#include "tests/store_support.h"

namespace tardis::gio {
namespace {

using tardis::testing::page_key;
using tardis::testing::PageMemory;
using tardis::testing::TempFolder;

constexpr std::uint32_t kLayers = 3, kChunks = 3;
constexpr std::uint64_t kHalf = 20 << 10, kLayer = 2 * kHalf;  // K and V: 40 KiB, so the second digest spans both
constexpr std::size_t kPages = 20;
constexpr std::uint8_t kFingerprint[TARDIS_FINGERPRINT_BYTES] = {7};

tardis_gio_options session_options(std::uint32_t block_bytes = 4096) {
  tardis_gio_options options{};
  options.block_bytes = block_bytes;
  options.controller_threads = 1;
  options.queues = 1;
  options.entries = 16;
  options.slot_bytes = kLayer;
  return options;
}

class GioStoreSession : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    tardis_options options;
    tardis_default_options(&options);
    options.capacity_bytes = 64 << 20;
    options.segment_bytes = 8 << 20;
    options.engine = TARDIS_ENGINE_SYNC;
    options.free_space_floor = 0;
    const std::string second = folder_.file("second");
    const char* more[] = {second.c_str()};
    if (std::string(GetParam()) == "layers") {
      options.placement = TARDIS_PLACEMENT_LAYERS;
      options.more_paths = more;
      options.more_paths_count = 1;
    }
    open(folder_.file("first"), options);
  }
  void TearDown() override {
    tardis_free(error_);
    tardis_destroy(store_);
  }
  void open(const std::string& folder, const tardis_options& options) {
    ASSERT_EQ(tardis_open(folder.c_str(), &options, 1, &store_, &error_), TARDIS_OK) << error_;
    tardis_object_layout layout{};
    layout.parts = kLayers;
    layout.regions = 2;
    layout.region_bytes[0] = layout.region_bytes[1] = kHalf;
    ASSERT_EQ(tardis_namespace_open(store_, kFingerprint, "{}", &layout, &space_, &error_), TARDIS_OK) << error_;
    keys_.resize(kPages);
    for (std::size_t i = 0; i < kPages; ++i) {
      keys_[i] = page_key(5, i);
      memory_.write(i, i);
    }
    std::vector<std::uint8_t> ok(kPages);
    ASSERT_EQ(tardis_set(store_, space_, keys_.front().data(), nullptr, memory_.pieces(), kPages, ok.data(), &error_),
              TARDIS_OK)
        << error_;
  }

  // One layer of some objects into `to`, K and V of each apart. Returns how the ring ended.
  IoFlag read_layer(GrantedQueue& queue, const std::vector<std::uint64_t>& blocks, const tardis_lease_layout& layout,
                    std::uint32_t layer, const std::uint64_t* digests, std::byte* to,
                    std::vector<std::uint32_t>& statuses) {
    std::vector<IoContext> contexts(blocks.size());
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      contexts[i].op = IoOp::kRead;
      contexts[i].block = blocks[i] + layer * layout.part_stride / 4096;
      contexts[i].memory[0] = reinterpret_cast<std::uint64_t>(to + i * kHalf);
      contexts[i].memory[1] = reinterpret_cast<std::uint64_t>(to + (blocks.size() + i) * kHalf);
      contexts[i].bytes[0] = contexts[i].bytes[1] = kHalf;
      contexts[i].digests = reinterpret_cast<std::uint64_t>(digests + (i * kLayers + layer) * kChunks);
    }
    AlignedBuffer memory(RingWork::bytes(queue.commands, 32), 64);
    const RingWork work = RingWork::in(memory.data(), queue.commands, 32);
    HostMover mover(queue, work);
    const auto count = static_cast<std::uint32_t>(contexts.size());
    statuses.assign(count, 0);
    RingReport report{};
    std::uint32_t ended = 0, flag = kIoPending;
    const IoControlBlock iocb{contexts.data(), &count,         statuses.data(), &report, &ended,
                              &flag,           10'000'000'000, nullptr,         1};
    Ring<HostLanes<32>, HostMover>(HostLanes<32>(), mover, queue, work).run(iocb, 0, 1);
    return static_cast<IoFlag>(flag);
  }

  const TempFolder folder_{"/dev/shm"};
  tardis_store* store_ = nullptr;
  std::uint32_t space_ = 0;
  char* error_ = nullptr;
  std::vector<Hash256> keys_;
  PageMemory memory_{kLayers, {kHalf, kHalf}, kPages};
};
INSTANTIATE_TEST_SUITE_P(Placement, GioStoreSession, ::testing::Values("objects", "layers"));

TEST_P(GioStoreSession, ObjectsByTheirLeases) {
  const tardis_gio_options options = session_options();
  AlignedBuffer session_memory(tardis_gio_store_memory_bytes(&options));
  tardis_gio_session* session = nullptr;
  ASSERT_EQ(tardis_gio_open_store(&options, store_, session_memory.data(), &session, &error_), TARDIS_OK) << error_;
  const void *prp = nullptr, *sgl = nullptr;
  std::size_t prp_bytes = 0, sgl_bytes = 0;
  ASSERT_EQ(tardis_gio_tables(session, &prp, &prp_bytes, &sgl, &sgl_bytes, &error_), TARDIS_OK);
  AlignedBuffer state(32), uses(2 * 15);
  GrantedQueue queue;
  ASSERT_EQ(tardis_gio_queues(session, state.data(), uses.data(), const_cast<void*>(prp), const_cast<void*>(sgl),
                              &queue, &error_),
            TARDIS_OK);
  start_queue(queue);

  tardis_lease* lease = nullptr;
  std::size_t n = 0;
  ASSERT_EQ(tardis_lease_acquire(store_, space_, keys_.front().data(), kPages, &lease, &n, &error_), TARDIS_OK);
  ASSERT_EQ(n, kPages);
  tardis_lease_layout layout{};
  ASSERT_EQ(tardis_lease_layout_of(lease, &layout, &error_), TARDIS_OK);
  EXPECT_EQ(layout.part_bytes, kLayer);
  EXPECT_EQ(layout.parts, kLayers);
  EXPECT_EQ(layout.chunks_per_part, kChunks);
  std::vector<std::uint64_t> blocks(n), roots(n), generations(n), digests(n * kLayers * kChunks);
  std::vector<std::uint8_t> proven(n);
  ASSERT_EQ(tardis_lease_blocks(lease, 4096, blocks.data(), roots.data(), generations.data(), &error_), TARDIS_OK)
      << error_;
  ASSERT_EQ(tardis_lease_digests(store_, space_, lease, digests.data(), proven.data(), &error_), TARDIS_OK) << error_;
  EXPECT_EQ(std::count(proven.begin(), proven.end(), 1), static_cast<std::ptrdiff_t>(n));

  tardis_object_layout object{};
  object.parts = kLayers;
  object.regions = 2;
  object.region_bytes[0] = object.region_bytes[1] = kHalf;
  for (std::size_t i = 0; i < n; ++i) {
    std::vector<std::uint64_t> expected(kLayers * kChunks);
    std::uint64_t root = 0;
    ASSERT_EQ(tardis_digest(&object, memory_.pieces(i), expected.data(), nullptr, &root), TARDIS_OK);
    EXPECT_EQ(std::memcmp(expected.data(), digests.data() + i * expected.size(), expected.size() * 8), 0) << i;
    EXPECT_EQ(roots[i], root) << i;
    EXPECT_GT(generations[i], 0u);
  }
  AlignedBuffer landed(n * kLayer);
  std::vector<std::uint32_t> statuses;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    std::memset(landed.data(), 0xA5, landed.size());
    EXPECT_EQ(read_layer(queue, blocks, layout, layer, digests.data(), landed.data(), statuses), kIoDone);
    for (std::size_t i = 0; i < n; ++i) {
      EXPECT_EQ(IoStatus{statuses[i]}.end(), IoEnd::kDone);
      for (std::size_t half = 0; half < 2; ++half) {
        const auto* const expected = reinterpret_cast<const void*>(memory_.pieces(i)[layer * 2 + half]);
        EXPECT_EQ(std::memcmp(landed.data() + (half * n + i) * kHalf, expected, kHalf), 0) << i << " " << layer;
      }
    }
  }
  // One that is damaged, as far as its digests say.
  digests[(7 * kLayers + 1) * kChunks + 1] ^= 1;
  EXPECT_EQ(read_layer(queue, blocks, layout, 1, digests.data(), landed.data(), statuses), kIoError);
  for (std::size_t i = 0; i < n; ++i) {
    EXPECT_EQ(IoStatus{statuses[i]}.end(), i == 7 ? IoEnd::kDamaged : IoEnd::kDone) << i;
  }
  // The namespace is the store's: nothing writes to it from here.
  std::vector<std::byte> block(4096);
  EXPECT_EQ(tardis_gio_write(session, blocks[0] * 4096, block.data(), block.size(), &error_), TARDIS_PERMISSION);
  tardis_free(error_);
  error_ = nullptr;
  tardis_lease_end(lease);
  tardis_gio_close(session);
}

TEST_P(GioStoreSession, ALeaseEndsWhereSomethingIsMissing) {
  keys_[12] = page_key(99, 0);
  tardis_lease* lease = nullptr;
  std::size_t n = 7;
  ASSERT_EQ(tardis_lease_acquire(store_, space_, keys_.front().data(), kPages, &lease, &n, &error_), TARDIS_OK);
  EXPECT_EQ(n, 12u);
  tardis_lease_end(lease);
  ASSERT_EQ(tardis_lease_acquire(store_, space_, keys_[12].data(), 1, &lease, &n, &error_), TARDIS_OK);
  EXPECT_EQ(n, 0u);
  tardis_lease_layout layout{};
  EXPECT_EQ(tardis_lease_layout_of(lease, &layout, &error_), TARDIS_OK);
  tardis_lease_end(lease);
}

// Room for the digests is what the lease's objects have.
TEST_P(GioStoreSession, DigestsOfAnotherNamespaceAreRefused) {
  tardis_object_layout larger{};
  larger.parts = kLayers + 1;
  larger.regions = 2;
  larger.region_bytes[0] = larger.region_bytes[1] = kHalf;
  auto fingerprint = std::to_array(kFingerprint);
  fingerprint[0] ^= 1;
  std::uint32_t other = 0;
  ASSERT_EQ(tardis_namespace_open(store_, fingerprint.data(), "{}", &larger, &other, &error_), TARDIS_OK) << error_;
  tardis_lease* lease = nullptr;
  std::size_t n = 0;
  ASSERT_EQ(tardis_lease_acquire(store_, space_, keys_.front().data(), 2, &lease, &n, &error_), TARDIS_OK);
  ASSERT_EQ(n, 2u);
  std::vector<std::uint64_t> digests(2 * (kLayers + 1) * kChunks, 7);
  std::vector<std::uint8_t> proven(2);
  EXPECT_EQ(tardis_lease_digests(store_, other, lease, digests.data(), proven.data(), &error_),
            TARDIS_INVALID_ARGUMENT);
  tardis_free(std::exchange(error_, nullptr));
  EXPECT_EQ(std::count(digests.begin(), digests.end(), 7u), static_cast<std::ptrdiff_t>(digests.size()));
  tardis_lease_end(lease);
}

TEST_P(GioStoreSession, OptionsThatMakeNoSense) {
  tardis_gio_options options = session_options();
  AlignedBuffer memory(tardis_gio_store_memory_bytes(&options));
  tardis_gio_session* session = nullptr;
  options.bytes = 4096;
  EXPECT_EQ(tardis_gio_store_memory_bytes(&options), 0u);
  EXPECT_EQ(tardis_gio_open_store(&options, store_, memory.data(), &session, &error_), TARDIS_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error_).find("bytes 0 and file NULL"), std::string::npos) << error_;
  tardis_free(error_);
  options = session_options();
  EXPECT_EQ(tardis_gio_open_store(&options, nullptr, memory.data(), &session, &error_), TARDIS_INVALID_ARGUMENT);
  tardis_free(error_);
  error_ = nullptr;
  EXPECT_EQ(session, nullptr);
}

}  // namespace
}  // namespace tardis::gio
