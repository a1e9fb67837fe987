// SPDX-License-Identifier: Apache-2.0
// The data files of an open store, read by a client that has a lease and speaks NVMe: through a driver and a software
// controller, while others store and evict.
#include <atomic>
#include <thread>

#include "nvme/soft/store_medium.h"
#include "nvme_soft_client.h"
#include "nvme_support_soft_stack.h"
#include "store_broken_folder.h"
#include "store_support.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;
using Op = NamespaceRequest::Op;

struct Setup {
  const char* name;
  std::size_t paths;
  Placement placement;
  std::uint32_t block_bytes;
  SglSupport sgl;
  bool disk = false;  // direct I/O, where there is a disk
};
void PrintTo(const Setup& setup, std::ostream* out) { *out << setup.name; }

// A store, and its namespace behind a controller.
class StoreNamespace {
 public:
  explicit StoreNamespace(const Setup& setup, std::uint64_t segments = 6,
                          const DeviceFactory& device = open_block_device)
      : setup_(setup), parent_(setup.disk ? std::string() : memory_parent()) {
    StoreOptions options =
        small_store(segments, setup.disk ? BlockDeviceOptions::Engine::kAuto : BlockDeviceOptions::Engine::kSync);
    options.live_folder = memory_parent();
    options.placement = setup.placement;
    options.more_paths.emplace();
    for (std::size_t path = 1; path < setup.paths; ++path) options.more_paths->push_back(folder(path));
    store = open_store(folder(0), options, true, device);
    if (store == nullptr) return;
    auto made = StoreMedium::create(*store);
    EXPECT_TRUE(made) << (made ? "" : made.error().message);
    if (!made) return;
    medium = std::move(*made);
    SoftStackOptions stack_options = small_stack(setup.block_bytes);
    stack_options.soft.sgl = setup.sgl;
    stack_options.soft.mdts = 5;
    stack_options.driver.queues = 4;
    stack_options.soft.queue_pairs = 4;
    stack = SoftStack::make(medium, stack_options);
  }

  std::string folder(std::size_t path) const {
    return parent_.path() + "/" + std::string(1, static_cast<char>('a' + path));
  }
  std::uint32_t block_bytes() const { return setup_.block_bytes; }
  int read(std::uint64_t offset, void* to, std::size_t bytes) {
    const iovec range{to, bytes};
    NamespaceRequest request{.op = Op::kRead, .offset = offset, .memory = {&range, 1}, .error = -1};
    stack->disk->run({&request, 1}, nullptr);
    return request.error;
  }
  // An object, layer by layer, all layers in one batch.
  bool holds(const Lease& lease, std::size_t object, std::uint64_t seed, std::byte* memory) {
    const ObjectGeometry& g = lease.geometry();
    std::vector<iovec> places;
    std::vector<NamespaceRequest> requests;
    std::vector<std::byte*> layers;
    places.reserve(g.parts);
    for (std::uint32_t part = 0; part < g.parts; ++part) {
      for (const BlockRange& range : blocks_of(lease, object, part * g.part_stride, g.part_bytes, block_bytes())) {
        const std::size_t bytes = range.blocks * block_bytes();
        EXPECT_EQ(range.bytes, g.part_bytes) << "today an object lies in a row";
        EXPECT_LE(range.skip + range.bytes, bytes);
        places.push_back({memory, bytes});
        layers.push_back(memory + range.skip);
        requests.push_back({Op::kRead, range.first * block_bytes(), {&places.back(), 1}, -1});
        memory += round_up(bytes, 4096);
      }
    }
    stack->disk->run(requests, nullptr);
    std::vector<std::uint8_t> expected(g.part_bytes);
    for (std::uint32_t part = 0; part < g.parts; ++part) {
      EXPECT_EQ(requests[part].error, 0) << "layer " << part;
      fill_page(expected.data(), g.part_bytes, seed, part * g.part_bytes);
      if (std::memcmp(layers[part], expected.data(), g.part_bytes) != 0) return false;
    }
    return true;
  }
  Lease lease(const Space& space, std::uint64_t chain, std::uint64_t first, std::size_t count) {
    const auto keys = Space::keys(chain, first, count);
    auto taken = store->acquire(space.id(), keys.data(), count);
    if (!taken) ADD_FAILURE() << taken.error().message;
    return taken ? std::move(*taken) : Lease();
  }

 private:
  const Setup setup_;
  TempFolder parent_;

 public:
  std::unique_ptr<Store> store;
  std::shared_ptr<StoreMedium> medium;
  std::shared_ptr<SoftStack> stack;
};

class NvmeStoreMedium : public ::testing::TestWithParam<Setup> {};

TEST_P(NvmeStoreMedium, LeasedObjectsReadAsTheyWereStoredWhileOthersEvict) {
  StoreNamespace all(GetParam());
  ASSERT_NE(all.stack, nullptr);
  Space space(*all.store, 1, {8, {8192, 5000}}), other(*all.store, 2, {3, {40'000}});
  constexpr std::size_t kPages = 6;
  AlignedBuffer registered(512 << 10), plain(512 << 10);
  ASSERT_TRUE(all.stack->disk->register_memory(registered.data(), registered.size()));
  std::atomic<bool> over{false};
  std::atomic<std::uint64_t> stored{0};
  std::vector<std::thread> writers;
  for (std::uint64_t writer = 0; writer < 2; ++writer) {
    writers.emplace_back([&, writer] {
      Space& own = writer == 0 ? space : other;
      for (std::uint64_t chain = 1000 * (writer + 1); !over; ++chain) {
        stored += own.put(chain, 0, kPages);
        if (chain % 7 == 0) (void)all.store->remove({own.fingerprint(), page_key(chain, 0), 64});
      }
    });
  }
  std::uint64_t compared = 0, gone = 0;
  for (std::uint64_t round = 0; round < 60 || stored < 400; ++round) {
    Space& own = round % 3 == 0 ? other : space;
    const std::uint64_t chain = round % 50;
    own.put(chain, 0, kPages);
    const Lease lease = all.lease(own, chain, 0, kPages);
    std::byte* const memory = round % 2 == 0 ? registered.data() : plain.data();
    for (std::size_t i = 0; i < lease.size(); ++i) {
      ASSERT_TRUE(all.holds(lease, i, own.seed(page_key(chain, i)), memory)) << "page " << i << " of round " << round;
      ++compared;
      gone += !own.has(chain, i);  // and could be read all the same
    }
  }
  over = true;
  for (std::thread& writer : writers) writer.join();
  EXPECT_GT(compared, 200u);
  EXPECT_GT(stats_of(*all.store).evicted_pages, 100u);
  RecordProperty("gone_while_leased", std::to_string(gone));
  expect_slots_conserved(*all.store);
  EXPECT_GE(all.medium->granularity(), all.store->read_geometry().offset_align);
  all.stack->disk->unregister_memory(registered.data());
  all.stack.reset();
  EXPECT_TRUE(all.store->close());
}

constexpr Setup kOnePath{"OnePath", 1, Placement::kObjects, 4096, kSglAnyAlignment};
INSTANTIATE_TEST_SUITE_P(Stores, NvmeStoreMedium,
                         ::testing::Values(kOnePath, Setup{"OnePathPrp512", 1, Placement::kObjects, 512, kSglNone},
                                           Setup{"TwoPaths", 2, Placement::kObjects, 4096, kSglNone},
                                           Setup{"Striped", 2, Placement::kLayers, 4096, kSglAnyAlignment},
                                           Setup{"ThreeStripes512", 3, Placement::kLayers, 512, kSglDword},
                                           Setup{"OnDisk", 1, Placement::kObjects, 4096, kSglNone, true},
                                           Setup{"OnDiskStriped", 2, Placement::kLayers, 4096, kSglAnyAlignment, true}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(NvmeStoreMedium, FilesInMemoryAreCopiedByWhoServesTheQueues) {
  const StoreNamespace memory(kOnePath), striped({"", 3, Placement::kLayers, 4096, kSglNone});
  ASSERT_NE(striped.stack, nullptr);
  EXPECT_TRUE(memory.medium->immediate());
  EXPECT_TRUE(striped.medium->immediate());
  const StoreNamespace disk({"", 1, Placement::kObjects, 4096, kSglNone, true});
  ASSERT_NE(disk.stack, nullptr);
  EXPECT_EQ(disk.medium->immediate(), disk.store->reads_at_once());
  EXPECT_FALSE(disk.store->read_geometry().direct && disk.medium->immediate());
}

TEST(NvmeStoreMedium, SegmentsThatComeLaterCanBeReadAtTheirPlace) {
  StoreNamespace all(kOnePath);
  ASSERT_NE(all.stack, nullptr);
  AlignedBuffer memory(64 << 10);
  // What the documentation says of the numbers.
  const std::uint64_t stride = kTestSegment;
  EXPECT_EQ(all.store->segment_addresses().of({0, 3}, 4096), 3 * stride + 4096);
  EXPECT_EQ(all.store->segment_addresses().of({2, 1}, 0), ((2u << 20) + 1) * stride);
  EXPECT_EQ(all.stack->disk->bytes(), (std::uint64_t{16} << 20) * stride);
  EXPECT_EQ(all.read(0, memory.data(), 4096), EIO) << "a segment that is not there reads as something";

  Space space(*all.store, 1, {});
  ASSERT_EQ(space.put(1, 0, 100), 100u);
  ASSERT_GE(stats_of(*all.store).segments, 2u);
  for (std::uint64_t number = 0; number < 2; ++number) {
    ASSERT_EQ(all.read(number * stride, memory.data(), 4096), 0);
    SegmentSuperblock superblock;
    std::memcpy(&superblock, memory.data(), sizeof superblock);
    EXPECT_TRUE(sealed(superblock));
    EXPECT_EQ(superblock.segment, number);
    const auto file = file_contents(segment_file(all.folder(0), static_cast<std::uint32_t>(number)), stride / 2, 4096);
    ASSERT_EQ(all.read(number * stride + stride / 2, memory.data(), 4096), 0);
    EXPECT_EQ(std::memcmp(memory.data(), file.data(), file.size()), 0);
  }
  // From one segment into the next, and from the last one into nothing.
  EXPECT_EQ(all.read(stride - 4096, memory.data(), 8192), 0);
  const std::uint64_t end = stats_of(*all.store).segments * stride;
  EXPECT_EQ(all.read(end - 4096, memory.data(), 4096), 0);
  EXPECT_EQ(all.read(end - 4096, memory.data(), 8192), EIO);
  EXPECT_EQ(all.read(end, memory.data(), 4096), EIO);
  EXPECT_EQ(all.read(all.stack->disk->bytes() - 4096, memory.data(), 4096), EIO);
  EXPECT_EQ(all.read(all.stack->disk->bytes(), memory.data(), 4096), EINVAL);
}

TEST(NvmeStoreMedium, StatusesSayWhatIsWrong) {
  StoreNamespace all(kOnePath);
  ASSERT_NE(all.medium, nullptr);
  Space space(*all.store, 1, {});
  ASSERT_EQ(space.put(1, 0, 4), 4u);
  SoftControllerOptions options;
  options.namespaces.push_back({all.medium, 12, 0, 0});
  HandClient client(std::move(options));
  ASSERT_TRUE(client.enable());
  const auto queue = client.queue(1, 8);
  SharedMemory data(client.space(), 8192);
  const std::uint64_t blocks = all.medium->bytes() / 4096;
  const auto status = [&](IoOpcode opcode, std::uint64_t block, std::uint32_t count = 1) {
    return queue->status(io_command(opcode, 1, block, count, data.address(), count > 1 ? data.address(4096) : 0));
  };
  EXPECT_EQ(status(IoOpcode::kRead, 0), kScSuccess);
  EXPECT_EQ(status(IoOpcode::kRead, kTestSegment / 4096), kScUnwrittenBlock);
  EXPECT_EQ(status(IoOpcode::kRead, blocks - 1), kScUnwrittenBlock);
  EXPECT_EQ(status(IoOpcode::kFlush, 0), kScSuccess);
  EXPECT_EQ(client.complaints(), "");
  EXPECT_EQ(status(IoOpcode::kRead, blocks), kScLbaOutOfRange);
  EXPECT_EQ(status(IoOpcode::kRead, blocks - 1, 2), kScLbaOutOfRange);
  EXPECT_EQ(status(IoOpcode::kRead, ~std::uint64_t{0}), kScLbaOutOfRange);
  EXPECT_EQ(client.kinds(), "LBA range, LBA range, LBA range");
  for (const IoOpcode opcode : {IoOpcode::kWrite, IoOpcode::kWriteZeroes}) {
    EXPECT_EQ(status(opcode, 0), kScWriteProtected);
    EXPECT_EQ(status(opcode, kTestSegment / 4096), kScWriteProtected);
  }
  client.controller().take_violations();
  // Identify Namespace.
  SubmissionEntry identify = admin_command(AdminOpcode::kIdentify, 0, 0, data.address());
  identify.namespace_id = 1;
  ASSERT_EQ(client.admin().status(identify), kScSuccess);
  const auto& page = data.at<IdentifyNamespace>(0);
  EXPECT_EQ(page.size_blocks, blocks);
  EXPECT_EQ(page.capacity_blocks, stats_of(*all.store).capacity_bytes / 4096);
  EXPECT_EQ(page.nsfeat & kNsfeatThin, kNsfeatThin);
  EXPECT_EQ(page.attributes & kNsattrWriteProtected, kNsattrWriteProtected);
  // What goes while the controller works: the end of a file, then the store.
  const std::string file = segment_file(all.folder(0), 0);
  std::filesystem::resize_file(file, kTestSegment / 2);
  EXPECT_EQ(status(IoOpcode::kRead, kTestSegment / 2 / 4096 - 1), kScSuccess);
  EXPECT_EQ(status(IoOpcode::kRead, kTestSegment / 2 / 4096), kScUnrecoveredRead);
  (void)all.store->close();
  EXPECT_EQ(status(IoOpcode::kRead, 0), kScInternal);
  EXPECT_EQ(client.complaints(), "");
}

// Into memory that the client registered, with nothing copied on the way.
TEST(NvmeStoreMedium, ReadsAreDirectWhereTheStoreIs) {
  StoreNamespace all({"", 1, Placement::kObjects, 4096, kSglNone, true});
  ASSERT_NE(all.stack, nullptr);
  if (!all.store->read_geometry().direct) GTEST_SKIP() << "no direct I/O here";
  Space space(*all.store, 1, {4, {65'536}});
  ASSERT_EQ(space.put(1, 0, 4), 4u);
  AlignedBuffer memory(256 << 10);
  ASSERT_TRUE(all.stack->disk->register_memory(memory.data(), memory.size()));
  const Lease lease = all.lease(space, 1, 0, 4);
  const tardis_stats before = stats_of(*all.store);
  const std::uint64_t copied = all.stack->driver->counters().bounced_commands;
  for (std::size_t i = 0; i < 4; ++i) EXPECT_TRUE(all.holds(lease, i, space.seed(page_key(1, i)), memory.data()));
  const tardis_stats after = stats_of(*all.store);
  EXPECT_EQ(after.bounced_requests, before.bounced_requests);
  EXPECT_EQ(after.io_read_bytes - before.io_read_bytes, 4u * 4 * 65'536);
  EXPECT_EQ(all.stack->driver->counters().bounced_commands, copied);
  all.stack->disk->unregister_memory(memory.data());
}

TEST(NvmeStoreMedium, ADriverDoesNotWriteThere) {
  StoreNamespace all(kOnePath);
  ASSERT_NE(all.stack, nullptr);
  AlignedBuffer memory(4096);
  const iovec range{memory.data(), 4096};
  NamespaceRequest request{.op = Op::kWrite, .offset = 0, .memory = {&range, 1}, .error = -1};
  all.stack->disk->run({&request, 1}, nullptr);
  EXPECT_EQ(request.error, EROFS);
}

TEST(NvmeStoreMedium, APathThatIsTakenOutIsAnErrorUnderALease) {
  auto broken = std::make_shared<BrokenFolder>();
  StoreNamespace all({"", 2, Placement::kObjects, 4096, kSglNone}, 8, breakable(broken));
  ASSERT_NE(all.stack, nullptr);
  broken->prefix = all.folder(1) + "/";
  Space space(*all.store, 1, {});
  // Its files were opened before anything was to fail there.
  ASSERT_EQ(space.put(1, 0, 64), 64u);
  AlignedBuffer memory(256 << 10);
  std::size_t failed = 0, worked = 0;
  {
    std::vector<Lease> leases;
    for (std::uint64_t i = 0; i < 64; ++i) leases.push_back(all.lease(space, 1, i, 1));
    const auto read_all = [&] {
      failed = worked = 0;
      for (const Lease& lease : leases) {
        for (const BlockRange& range : blocks_of(lease, 0, 0, lease.geometry().stored_bytes(), 4096)) {
          const int error = all.read(range.first * 4096, memory.data(), range.blocks * 4096);
          EXPECT_TRUE(error == 0 || error == EREMOTEIO || error == EIO) << error;
          ++(error == 0 ? worked : failed);
        }
      }
    };
    read_all();
    EXPECT_EQ(worked, 64u);
    broken->all(ENODEV);
    read_all();
    EXPECT_GT(failed, 0u);
    EXPECT_GT(worked, 0u);
    EXPECT_EQ(stats_of(*all.store).paths_out, 1u);
    // Also if the drive answers again: the store has given up what is there.
    broken->all(0);
    const std::size_t before = failed;
    read_all();
    EXPECT_EQ(failed, before);
  }
}

// Everything that could be evicted is, and deleted too: the bytes under the lease stay until it goes.
TEST(StoreLease, KeepsTheBytesOfWhatIsGone) {
  StoreNamespace all({"", 1, Placement::kObjects, 4096, kSglAnyAlignment}, 1);
  ASSERT_NE(all.stack, nullptr);
  Space space(*all.store, 1, {4, {16'384}});
  ASSERT_EQ(space.put(1, 0, 5), 5u);
  AlignedBuffer memory(256 << 10);
  std::uint64_t address = 0;
  {
    const Lease lease = all.lease(space, 1, 0, 9);
    ASSERT_EQ(lease.size(), 5u) << "the leading run";
    EXPECT_EQ(lease.geometry().parts, 4u);
    const auto found = lease.extents(2, 0, lease.geometry().stored_bytes());
    ASSERT_EQ(found.size(), 1u);
    address = found.front().address;
    EXPECT_TRUE(lease.extents(5, 0, 1).empty());
    EXPECT_TRUE(lease.extents(0, 4 * 16'384, 1).empty());
    EXPECT_TRUE(lease.extents(0, 1, ~std::uint64_t{0}).empty());
    ASSERT_TRUE(all.store->clear(std::nullopt));
    EXPECT_FALSE(space.has(1, 0));
    for (std::uint64_t chain = 2; chain < 40; ++chain) space.put(chain, 0, 20);
    EXPECT_GT(stats_of(*all.store).evicted_pages, 200u);
    for (std::size_t i = 0; i < 5; ++i)
      EXPECT_TRUE(all.holds(lease, i, space.seed(page_key(1, i)), memory.data())) << i;
  }
  // Then they are others'.
  for (std::uint64_t chain = 40; chain < 60; ++chain) space.put(chain, 0, 20);
  ASSERT_EQ(all.read(address, memory.data(), 65'536), 0);
  std::vector<std::uint8_t> before(65'536);
  fill_page(before.data(), before.size(), space.seed(page_key(1, 2)));
  EXPECT_NE(std::memcmp(memory.data(), before.data(), before.size()), 0);
  expect_slots_conserved(*all.store);
}

TEST(StoreLease, ClosingWaitsForItAndRefusesOthers) {
  StoreNamespace all(kOnePath);
  ASSERT_NE(all.stack, nullptr);
  Space space(*all.store, 1, {});
  ASSERT_EQ(space.put(1, 0, 3), 3u);
  std::optional<Lease> lease = all.lease(space, 1, 0, 3);
  Lease other = std::move(*lease);
  lease.emplace(std::move(other));
  std::atomic<bool> closed{false};
  std::thread closing([&] {
    EXPECT_TRUE(all.store->close());
    closed = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_FALSE(closed);
  EXPECT_EQ(lease->size(), 3u);
  lease.reset();
  closing.join();
  const auto key = page_key(1, 0);
  const auto refused = all.store->acquire(space.id(), &key, 1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kClosed);
}

TEST(StoreLease, ThereAreSoManyAtATime) {
  StoreNamespace all(kOnePath);
  ASSERT_NE(all.stack, nullptr);
  Space space(*all.store, 1, {});
  ASSERT_EQ(space.put(1, 0, 4), 4u);
  std::vector<Lease> leases;
  for (std::uint32_t i = 0; i < kLeasesPerProcess / 4; ++i) {
    leases.push_back(all.lease(space, 1, 0, 4));
    ASSERT_EQ(leases.back().size(), 4u);
  }
  const auto keys = Space::keys(1, 0, 4);
  const auto refused = all.store->acquire(space.id(), keys.data(), 4);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kBusy);
  EXPECT_EQ(space.fetch(1, 0, 4), 4u) << "reading needs none";
  leases.pop_back();
  EXPECT_EQ(all.lease(space, 1, 0, 4).size(), 4u);
  const auto missing = page_key(9, 9);
  const auto none = all.store->acquire(space.id(), &missing, 1);
  ASSERT_TRUE(none);
  EXPECT_EQ(none->size(), 0u);
}

}  // namespace
}  // namespace tardis::nvme::testing
