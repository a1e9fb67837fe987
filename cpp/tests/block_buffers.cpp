// SPDX-License-Identifier: Apache-2.0
// Memory registered with a device.
#include <grp.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <thread>

#include "tests/block_support.h"

#if TARDIS_HAS_IO_URING
#include "block/uring_ring.h"
#endif

namespace tardis {
namespace {

using testing::file_contents;
using testing::OffsetMemory;
using testing::random_bytes;
using testing::TempFolder;
using Engine = BlockDeviceOptions::Engine;
using Op = IoRequest::Op;

constexpr std::size_t kKiB = 1024, kMiB = 1024 * kKiB;

std::unique_ptr<BlockDevice> open(const TempFolder& folder, Engine engine, std::string* why) {
  BlockDeviceOptions options;
  options.engine = engine;
  options.queue_depth = 16;
  auto device = open_block_device(folder.path(), options, -1);
  if (!device) *why = device.error().message;
  return device ? std::move(*device) : nullptr;
}

int move(BlockDevice& device, Op op, FileId file, std::uint64_t offset, std::span<const iovec> memory) {
  IoRequest request{.op = op, .file = file, .offset = offset, .memory = memory, .error = -1};
  device.run({&request, 1}, nullptr);
  return request.error;
}

std::uint64_t pinned_kib() {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.starts_with("VmPin:")) return std::stoull(line.substr(6));
  }
  return 0;
}

// The kernel takes a closed ring apart in the background.
bool pinned_falls_to(std::uint64_t kib) {
  for (int i = 0; i < 500 && pinned_kib() > kib; ++i) ::usleep(10'000);
  return pinned_kib() <= kib;
}

// In any engine: registering is a hint, and what is right stays right.
TEST(RegisteredMemory, AnyEngineMovesTheSameBytes) {
  for (const Engine engine : {Engine::kIoUring, Engine::kSync}) {
    TempFolder folder;
    std::string why;
    auto device = open(folder, engine, &why);
    if (device == nullptr) continue;  // this machine has no io_uring
    auto file = device->open_file(folder.file("data"), true, true);
    ASSERT_TRUE(file);
    OffsetMemory memory(4 * kMiB, 0), outside(kMiB, 0);
    const auto data = random_bytes(memory.size(), 3);
    memory.fill(data);
    ASSERT_TRUE(device->register_memory(memory.data(), memory.size()));
    const auto at = [&](std::size_t offset) { return memory.data() + offset; };
    // One range; several; several of which one is empty; some of them elsewhere.
    const std::vector<std::vector<iovec>> cases = {
        {{at(0), kMiB}},
        {{at(kMiB), 512 * kKiB}, {at(2 * kMiB), 256 * kKiB}, {at(kMiB + 768 * kKiB), 256 * kKiB}},
        {{at(kMiB), 512 * kKiB}, {at(0), 0}, {at(2 * kMiB), 512 * kKiB}},
        {{at(3 * kMiB), 512 * kKiB}, {outside.data(), 512 * kKiB}},
        {{outside.data(), kMiB}},
    };
    for (std::size_t i = 0; i < cases.size(); ++i) {
      std::vector<std::uint8_t> expected;
      for (const iovec& piece : cases[i]) {
        const auto* from = static_cast<const std::uint8_t*>(piece.iov_base);
        expected.insert(expected.end(), from, from + piece.iov_len);
      }
      ASSERT_EQ(move(*device, Op::kWrite, *file, i * kMiB, cases[i]), 0) << i;
      ASSERT_TRUE(device->flush(*file));
      ASSERT_EQ(file_contents(folder.file("data"), i * kMiB, kMiB), expected) << i;
      for (const iovec& piece : cases[i]) std::memset(piece.iov_base, 0, piece.iov_len);
      ASSERT_EQ(move(*device, Op::kRead, *file, i * kMiB, cases[i]), 0) << i;
      std::vector<std::uint8_t> found;
      for (const iovec& piece : cases[i]) {
        const auto* from = static_cast<const std::uint8_t*>(piece.iov_base);
        found.insert(found.end(), from, from + piece.iov_len);
      }
      ASSERT_EQ(found, expected) << i;
    }
    const auto counters = device->counters();
    EXPECT_EQ(counters.errors, 0u);
    if (engine == Engine::kIoUring && counters.registered_bytes > 0) {
      EXPECT_EQ(counters.registered_bytes, memory.size());
      EXPECT_GE(counters.registered_requests, 2u);
      EXPECT_LE(counters.registered_requests, 4u) << "an empty range, and memory elsewhere, go the plain way";
    }
    device->unregister_memory(memory.data());
    EXPECT_EQ(device->counters().registered_bytes, 0u);
    EXPECT_EQ(device->counters().not_registered_bytes, 0u);
    device->unregister_memory(memory.data());  // a second time does nothing
  }
}

#if TARDIS_HAS_IO_URING

#define OPEN_OR_SKIP(device, folder)                          \
  std::string why_skipped;                                    \
  auto device = open(folder, Engine::kIoUring, &why_skipped); \
  if (device == nullptr) GTEST_SKIP() << why_skipped

TEST(RegisteredMemory, OverlapIsRefused) {
  TempFolder folder;
  OPEN_OR_SKIP(device, folder);
  OffsetMemory memory(4 * kMiB, 0);
  ASSERT_TRUE(device->register_memory(memory.data() + kMiB, kMiB));
  for (const auto& [offset, bytes] :
       {std::pair{kMiB, kMiB}, {kMiB, 4 * kKiB}, {2 * kMiB - 4096, kMiB}, {0ul, kMiB + 1}}) {
    const Status status = device->register_memory(memory.data() + offset, bytes);
    ASSERT_FALSE(status) << offset;
    EXPECT_EQ(status.error().code, Code::kInvalidArgument);
  }
  EXPECT_FALSE(device->register_memory(nullptr, kMiB));
  EXPECT_FALSE(device->register_memory(memory.data(), 0));
  EXPECT_TRUE(device->register_memory(memory.data(), kMiB)) << "neighbours";
  EXPECT_TRUE(device->register_memory(memory.data() + 2 * kMiB, kMiB));
}

// Idle rings let go of the pages at once, and nothing is read into what lay at the address before.
TEST(RegisteredMemory, TheAddressIsFreeAfterUnregistering) {
  TempFolder folder;
  OPEN_OR_SKIP(device, folder);
  auto file = device->open_file(folder.file("data"), true, true);
  ASSERT_TRUE(file);
  constexpr std::size_t kSize = 8 * kMiB;
  void* address = nullptr;
  ASSERT_TRUE(pinned_falls_to(0)) << "left by another test";
  for (std::uint64_t round = 0; round < 4; ++round) {
    void* memory = ::mmap(address, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    if (round > 0) {
      ASSERT_EQ(memory, address) << "the address was free";
    }
    address = memory;
    const bool registered = round != 2;  // one round uses the address unregistered
    if (registered) {
      ASSERT_TRUE(device->register_memory(memory, kSize));
    }
    if (device->counters().registered_bytes > 0) {
      EXPECT_GE(pinned_kib(), kSize / kKiB);
    }
    const auto data = random_bytes(kSize, round);
    std::memcpy(memory, data.data(), kSize);
    const iovec whole{memory, kSize};
    ASSERT_EQ(move(*device, Op::kWrite, *file, 0, {&whole, 1}), 0);
    std::memset(memory, 0, kSize);
    ASSERT_EQ(move(*device, Op::kRead, *file, 0, {&whole, 1}), 0);
    EXPECT_EQ(std::memcmp(memory, data.data(), kSize), 0) << round;
    if (registered) device->unregister_memory(memory);
    EXPECT_TRUE(pinned_falls_to(0)) << round;
    ASSERT_EQ(::munmap(memory, kSize), 0);
  }
}

TEST(RegisteredMemory, ComesAndGoesWhileOthersRun) {
  TempFolder folder;
  OPEN_OR_SKIP(device, folder);
  auto file = device->open_file(folder.file("data"), true, true);
  ASSERT_TRUE(file);
  constexpr std::size_t kSize = kMiB;
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> rounds{0}, wrong{0};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      OffsetMemory memory(kSize, 0);
      if (t == 0 && !device->register_memory(memory.data(), kSize)) ++wrong;
      const auto data = random_bytes(kSize, t);
      const iovec whole{memory.data(), kSize};
      while (!stop) {
        memory.fill(data);
        wrong += move(*device, Op::kWrite, *file, t * kSize, {&whole, 1}) != 0;
        std::memset(memory.data(), 0, kSize);
        wrong += move(*device, Op::kRead, *file, t * kSize, {&whole, 1}) != 0;
        wrong += memory.copy() != data;
        ++rounds;
      }
      if (t == 0) device->unregister_memory(memory.data());
    });
  }
  OffsetMemory other(kSize, 0);
  for (int i = 0; i < 100 || (rounds < 30 && i < 100000); ++i) {
    EXPECT_TRUE(device->register_memory(other.data(), kSize));
    device->unregister_memory(other.data());
  }
  stop = true;
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0u);
  EXPECT_EQ(device->counters().registered_bytes, 0u);
}

// In a child without privileges: root may lock as much as it likes.
TEST(RegisteredMemory, TooLittleLockedMemoryFallsBack) {
  if (::geteuid() != 0) GTEST_SKIP() << "becoming another user needs root";
  TempFolder folder;
  {
    OPEN_OR_SKIP(device, folder);
    OffsetMemory memory(kMiB, 0);
    ASSERT_TRUE(device->register_memory(memory.data(), kMiB));
    if (device->counters().registered_bytes == 0) GTEST_SKIP() << "this kernel registers no memory";
  }
  ASSERT_EQ(::chmod(folder.path().c_str(), 0777), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const rlimit limit{256 * kKiB, 256 * kKiB};
    if (::setrlimit(RLIMIT_MEMLOCK, &limit) != 0 || ::setgroups(0, nullptr) != 0 || ::setgid(65534) != 0 ||
        ::setuid(65534) != 0) {
      ::_exit(100);
    }
    std::string why;
    auto device = open(folder, Engine::kIoUring, &why);
    if (device == nullptr) ::_exit(101);
    auto file = device->open_file(folder.file("data"), true, true);
    if (!file) ::_exit(102);
    OffsetMemory large(8 * kMiB, 0), small(64 * kKiB, 0);
    large.fill(random_bytes(large.size(), 1));
    int wrong = device->register_memory(large.data(), large.size()) ? 0 : 1;
    auto counters = device->counters();
    wrong += counters.registered_bytes == 0 && counters.not_registered_bytes == large.size() ? 0 : 2;
    wrong += device->register_memory(small.data(), small.size()) ? 0 : 4;
    wrong += device->counters().registered_bytes == small.size() ? 0 : 8;
    for (OffsetMemory* memory : {&large, &small}) {
      const auto data = memory->copy();
      const iovec whole{memory->data(), memory->size()};
      wrong += move(*device, Op::kWrite, *file, 0, {&whole, 1}) == 0 ? 0 : 16;
      std::memset(memory->data(), 0, memory->size());
      wrong += move(*device, Op::kRead, *file, 0, {&whole, 1}) == 0 && memory->copy() == data ? 0 : 32;
    }
    wrong += device->counters().registered_requests == 2 ? 0 : 64;
    device.reset();
    ::_exit(wrong);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(UringBuffers, ChunksAndTheirBounds) {
  UringRing::Failure failure;
  auto ring = UringRing::create(4, -1, &failure);
  if (ring == nullptr) GTEST_SKIP() << failure.operation;
  UringBuffers buffers({.chunk_bytes = kMiB, .clone = true, .rings_without_clone = 4});
  OffsetMemory memory(3 * kMiB, 0);
  ASSERT_TRUE(buffers.add(memory.data(), 2 * kMiB + 8 * kKiB));
  if (buffers.registered_bytes() == 0) GTEST_SKIP() << "this kernel registers no memory";
  buffers.attach(*ring);
  ASSERT_NE(ring->buffers, nullptr);
  const UringBufferTable& table = *ring->buffers;
  EXPECT_EQ(table.chunks.size(), 3u);
  const auto slot = [&](std::size_t offset, std::size_t bytes) {
    const iovec range{memory.data() + offset, bytes};
    return table.slot_of({&range, 1});
  };
  EXPECT_TRUE(slot(0, kMiB));
  EXPECT_TRUE(slot(kMiB, kMiB));
  EXPECT_NE(slot(0, kMiB), slot(kMiB, kMiB));
  EXPECT_TRUE(slot(2 * kMiB + 4096, 4096));
  EXPECT_FALSE(slot(kMiB - 4096, 8192)) << "over the border of two chunks";
  EXPECT_FALSE(slot(2 * kMiB + 4096, 8192)) << "over the end";
  EXPECT_FALSE(slot(2 * kMiB + 8 * kKiB, 4096)) << "behind the end";
  EXPECT_FALSE(slot(0, 0));
  EXPECT_FALSE(table.slot_of({}));
  const iovec before{memory.data() - 4096, 4096};
  EXPECT_FALSE(table.slot_of({&before, 1}));
  buffers.remove(memory.data());
  buffers.attach(*ring);
  EXPECT_EQ(ring->buffers, nullptr);
}

// As on kernels that cannot clone: the first rings register the memory themselves, the others do without.
TEST(UringBuffers, WithoutCloning) {
  UringRing::Failure failure;
  auto first = UringRing::create(4, -1, &failure);
  auto second = UringRing::create(4, -1, &failure);
  if (first == nullptr || second == nullptr) GTEST_SKIP() << failure.operation;
  UringBuffers buffers({.chunk_bytes = kMiB, .clone = false, .rings_without_clone = 1});
  OffsetMemory memory(2 * kMiB, 0);
  ASSERT_TRUE(buffers.add(memory.data(), memory.size()));
  if (buffers.registered_bytes() == 0) GTEST_SKIP() << "this kernel registers no memory";
  for (int round = 0; round < 3; ++round) {
    buffers.attach(*first);
    buffers.attach(*second);
    ASSERT_NE(first->buffers, nullptr) << round;
    EXPECT_EQ(second->buffers, nullptr);
    // The slot really holds the memory: a read into it works, one beside it does not.
    TempFolder folder;
    std::ofstream(folder.file("data")) << std::string(4096, 'x');
    const int fd = ::open(folder.file("data").c_str(), O_RDONLY | O_CLOEXEC);
    ASSERT_GE(fd, 0);
    const iovec range{memory.data() + kMiB, 4096};
    const auto slot = first->buffers->slot_of({&range, 1});
    ASSERT_TRUE(slot);
    for (const bool inside : {true, false}) {
      io_uring_sqe* sqe = io_uring_get_sqe(first->raw());
      io_uring_prep_read_fixed(sqe, fd, memory.data() + (inside ? kMiB : 0), 4096, 0, static_cast<int>(*slot));
      ASSERT_EQ(io_uring_submit_and_wait(first->raw(), 1), 1);
      io_uring_cqe* cqe = nullptr;
      ASSERT_EQ(io_uring_wait_cqe(first->raw(), &cqe), 0);
      EXPECT_EQ(cqe->res, inside ? 4096 : -EFAULT);
      io_uring_cqe_seen(first->raw(), cqe);
    }
    ::close(fd);
    EXPECT_EQ(memory.data()[kMiB], 'x');
    buffers.remove(memory.data());
    ASSERT_TRUE(buffers.add(memory.data(), memory.size()));
  }
}

// Memory that takes a while to pin: in small pages, all of them there.
class SlowMemory {
 public:
  static constexpr std::size_t kSize = 256 * kMiB;
  SlowMemory() : memory_(::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (memory_ == MAP_FAILED) return;
    ::madvise(memory_, kSize, MADV_NOHUGEPAGE);
    std::memset(memory_, 1, kSize);
  }
  ~SlowMemory() {
    if (memory_ != MAP_FAILED) ::munmap(memory_, kSize);
  }
  SlowMemory(const SlowMemory&) = delete;
  SlowMemory& operator=(const SlowMemory&) = delete;
  void* data() const { return memory_; }

 private:
  void* memory_;
};

double seconds(const std::function<void()>& what) {
  const auto begin = std::chrono::steady_clock::now();
  what();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Whether `quick`, called a quarter of the time into `slow`, returns well before that does.
bool returns_during(const std::function<void()>& slow, double slow_seconds, const std::function<void()>& quick) {
  using Clock = std::chrono::steady_clock;
  std::atomic<bool> begun{false};
  Clock::time_point end;
  std::thread other([&] {
    begun = true;
    slow();
    end = Clock::now();
  });
  while (!begun) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::duration<double>(slow_seconds / 4));
  quick();
  const auto returned = Clock::now();
  other.join();
  return std::chrono::duration<double>(end - returned).count() > slow_seconds / 4;
}

// On a busy machine the thread that is to be quick may not run in time; the one that waits never does.
constexpr int kAttempts = 30;

TEST(UringBuffers, AttachingDoesNotWaitForMemoryBeingAdded) {
  UringRing::Failure failure;
  if (UringRing::create(4, -1, &failure) == nullptr) GTEST_SKIP() << failure.operation;
  const SlowMemory first, second;
  ASSERT_TRUE(first.data() != MAP_FAILED && second.data() != MAP_FAILED);
  bool quick = false;
  for (int attempt = 0; attempt < kAttempts && !quick; ++attempt) {
    // In one chunk: the kernel holds a ring's own lock while it pins for it.
    UringBuffers buffers;
    auto ring = UringRing::create(4, -1, &failure);
    ASSERT_NE(ring, nullptr);
    const double duration = seconds([&] { ASSERT_TRUE(buffers.add(first.data(), SlowMemory::kSize)); });
    if (buffers.registered_bytes() < SlowMemory::kSize) GTEST_SKIP() << "this kernel registers no memory";
    Status added;
    quick = returns_during([&] { added = buffers.add(second.data(), SlowMemory::kSize); }, duration,
                           [&] { buffers.attach(*ring); });
    ASSERT_TRUE(added);
    EXPECT_NE(ring->buffers, nullptr);
    EXPECT_EQ(buffers.registered_bytes(), 2 * SlowMemory::kSize);
    buffers.attach(*ring);
    ASSERT_NE(ring->buffers, nullptr);
    EXPECT_EQ(ring->buffers->chunks.size(), 2u);
    for (const SlowMemory* memory : {&first, &second}) buffers.remove(memory->data());
    buffers.attach(*ring);
    EXPECT_EQ(ring->buffers, nullptr);
    EXPECT_TRUE(pinned_falls_to(0));
  }
  EXPECT_TRUE(quick);
}

TEST(UringBuffers, OneOfTwoOverlappingRangesAddedAtOnceIsRefused) {
  OffsetMemory memory(2 * kMiB, 0);
  for (int round = 0; round < 20; ++round) {
    UringBuffers buffers({.chunk_bytes = 64 * kKiB, .clone = true, .rings_without_clone = 4});
    std::atomic<int> added{0};
    std::thread other([&] { added += static_cast<bool>(buffers.add(memory.data(), 2 * kMiB)); });
    added += static_cast<bool>(buffers.add(memory.data() + kMiB, kMiB));
    other.join();
    EXPECT_EQ(added, 1);
    buffers.remove(memory.data());
    buffers.remove(memory.data() + kMiB);
    EXPECT_EQ(buffers.registered_bytes() + buffers.refused_bytes(), 0u);
    EXPECT_TRUE(buffers.add(memory.data(), 2 * kMiB));
  }
}

// Where the kernel cannot clone, a ring that is put back pins the memory itself; the others are used meanwhile.
TEST(UringPool, ARingThatPinsMemoryItselfHoldsUpNoOther) {
  UringRing::Failure failure;
  if (UringRing::create(4, -1, &failure) == nullptr) GTEST_SKIP() << failure.operation;
  const SlowMemory memory;
  ASSERT_NE(memory.data(), MAP_FAILED);
  bool quick = false;
  for (int attempt = 0; attempt < kAttempts && !quick; ++attempt) {
    UringBuffers buffers({.chunk_bytes = std::size_t{1} << 30, .clone = false, .rings_without_clone = 1});
    UringPool pool(2, 4, -1, buffers);
    auto pinning = pool.acquire(&failure), other = pool.acquire(&failure);
    ASSERT_TRUE(pinning != nullptr && other != nullptr);
    pool.release(std::move(other));
    const double duration = seconds([&] { ASSERT_TRUE(buffers.add(memory.data(), SlowMemory::kSize)); });
    if (buffers.registered_bytes() < SlowMemory::kSize) GTEST_SKIP() << "this kernel registers no memory";
    quick =
        returns_during([&] { pool.release(std::move(pinning)); }, duration, [&] { other = pool.acquire(&failure); });
    ASSERT_NE(other, nullptr);
    pool.release(std::move(other));
    buffers.remove(memory.data());
    pool.attach_buffers();
    EXPECT_TRUE(pinned_falls_to(0)) << "by idle rings";
  }
  EXPECT_TRUE(quick);
}

#endif

}  // namespace
}  // namespace tardis
