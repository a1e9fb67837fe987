// SPDX-License-Identifier: Apache-2.0
// NvmeDevice over a namespace in memory.
#include <array>
#include <atomic>
#include <set>
#include <thread>

#include "block/io_arbiter.h"
#include "nvme_store_support.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;

class NvmeDeviceTest : public ::testing::Test {
 protected:
  std::unique_ptr<BlockDevice> open(NvmeDeviceOptions options = {}) {
    auto device = NvmeDevice::open(memory, home.path(), options);
    if (device) return std::move(*device);
    ADD_FAILURE() << device.error().message;
    return nullptr;
  }
  Error refusal(const std::string& folder, std::shared_ptr<RawNamespace> on, NvmeDeviceOptions options = {}) {
    const auto device = NvmeDevice::open(std::move(on), folder, options);
    EXPECT_FALSE(device);
    return device ? Error{Code::kOk, ""} : device.error();
  }
  std::string file(const std::string& name) const { return home.path() + "/" + name; }
  static int transfer(BlockDevice& device, FileId file, IoRequest::Op op, std::uint64_t offset, std::string& data) {
    const iovec piece{data.data(), data.size()};
    IoRequest request{op, file, offset, {&piece, 1}, -1};
    device.run({&request, 1}, {});
    return request.error;
  }

  TempFolder home{memory_parent()};
  std::shared_ptr<MemoryNamespace> memory = std::make_shared<MemoryNamespace>(64 * kMiB);
};

TEST_F(NvmeDeviceTest, FilesKeepTheirBytesAndNames) {
  auto device = open();
  const FileId a = *device->open_file(file("a"), true, true), b = *device->open_file(file("b"), true, true);
  EXPECT_EQ(*device->file_bytes(a), 0u);
  ASSERT_TRUE(device->preallocate(a, 3 * kMiB));
  ASSERT_TRUE(device->reserve(b, kMiB + 512, 512));
  EXPECT_EQ(*device->file_bytes(a), 3 * kMiB);
  EXPECT_EQ(*device->file_bytes(b), kMiB + 512);
  EXPECT_EQ(std::filesystem::file_size(file("a")), 0u);
  std::string data(4096, 'x'), found(4096, 0);
  EXPECT_EQ(transfer(*device, b, IoRequest::Op::kWrite, kMiB - 3584, data), 0);
  EXPECT_EQ(transfer(*device, b, IoRequest::Op::kRead, kMiB - 3584, found), 0);
  EXPECT_EQ(found, data);
  // Nothing beyond its end, which is another file's.
  EXPECT_EQ(transfer(*device, b, IoRequest::Op::kRead, kMiB - 3072, found), ENODATA);
  EXPECT_EQ(transfer(*device, b, IoRequest::Op::kWrite, kMiB - 3072, data), EFBIG);
  EXPECT_EQ(transfer(*device, b, IoRequest::Op::kWrite, ~std::uint64_t{0} - 511, data), EFBIG);
  EXPECT_EQ(transfer(*device, b, IoRequest::Op::kWrite, 100, data), EINVAL);
  EXPECT_EQ(transfer(*device, 77, IoRequest::Op::kRead, 0, found), EBADF);
  std::string none;
  EXPECT_EQ(transfer(*device, b, IoRequest::Op::kWrite, 0, none), 0);
  EXPECT_TRUE(device->preallocate(a, 3 * kMiB));  // as it is
  EXPECT_EQ(device->preallocate(a, 4 * kMiB).error().code, Code::kInvalidArgument);
  EXPECT_EQ(device->open_file(file("c"), false, true).error().os_error, ENOENT);
  EXPECT_EQ(device->open_file("/elsewhere/c", true, true).error().code, Code::kInvalidArgument);
  // One name for each file, and none above the home.
  for (const char* name : {"x/../../c", "..", "x/..", "./b", "x/.", "x//b", "/b", "b/", ""}) {
    EXPECT_EQ(device->open_file(file(name), true, true).error().code, Code::kInvalidArgument) << name;
  }
  const FileId same = *device->open_file(file("b"), false, true);
  EXPECT_EQ(*device->file_bytes(same), kMiB + 512);
  device.reset();
  device = open();
  const FileId again = *device->open_file(file("b"), false, false);
  found.assign(4096, 0);
  EXPECT_EQ(transfer(*device, again, IoRequest::Op::kRead, kMiB - 3584, found), 0);
  EXPECT_EQ(found, data);
  // Only read where it was opened so, as a descriptor.
  EXPECT_EQ(transfer(*device, again, IoRequest::Op::kWrite, 0, data), EBADF);
  EXPECT_EQ(transfer(*device, *device->open_file(file("b"), false, true), IoRequest::Op::kWrite, 0, data), 0);
  EXPECT_EQ(device->flush(again + 10).error().code, Code::kInternal) << "not open";
  std::ofstream(file("real")) << "bytes";
  EXPECT_EQ(device->open_file(file("real"), false, true).error().code, Code::kInvalidArgument);
}

TEST_F(NvmeDeviceTest, OneBatchIsOneBatchAndFlushesOfManyFilesAreOne) {
  auto device = open();
  std::vector<FileId> files;
  for (int i = 0; i < 4; ++i) {
    files.push_back(*device->open_file(file(std::to_string(i)), true, true));
    ASSERT_TRUE(device->reserve(files.back(), kMiB, 0));
  }
  std::string data(64 * 1024, 'd');
  const iovec piece{data.data(), data.size()};
  for (const auto op : {IoRequest::Op::kWrite, IoRequest::Op::kRead}) {
    std::vector<IoRequest> requests;
    for (std::size_t i = 0; i < 64; ++i) requests.push_back({op, files[i % 4], i / 4 * data.size(), {&piece, 1}, -1});
    requests.push_back({op, 99, 0, {&piece, 1}, -1});
    const std::uint64_t batches = memory->batches;
    std::set<const IoRequest*> completed;
    device->run(requests, [&](IoRequest& request) { EXPECT_TRUE(completed.insert(&request).second); });
    EXPECT_EQ(memory->batches, batches + 1);
    EXPECT_EQ(completed.size(), 65u);
    EXPECT_EQ(std::count_if(requests.begin(), requests.end(), [](const IoRequest& r) { return r.error == 0; }), 64);
  }
  const std::uint64_t flushes = memory->flushes;
  EXPECT_EQ(device->flush_files(files).size(), 4u);
  EXPECT_TRUE(device->flush(files[0]));
  EXPECT_EQ(memory->flushes, flushes + 2);
  memory->before_flush = [] { return EIO; };
  for (const Status& status : device->flush_files(files)) EXPECT_EQ(status.error().os_error, EIO);
  const BlockDeviceCounters c = device->counters();
  EXPECT_EQ(c.reads, 65u);
  EXPECT_EQ(c.writes, 65u);
  EXPECT_EQ(c.read_bytes, 64 * data.size());
  EXPECT_EQ(c.written_bytes, 64 * data.size());
  EXPECT_EQ(c.errors, 2u);
  EXPECT_EQ(c.peak_in_flight, 64u);
  EXPECT_GE(c.read_batches, 1u);
  EXPECT_EQ(device->report().engine, "nvme");
  EXPECT_NE(device->report().reason.find("memory namespace"), std::string::npos);
  EXPECT_EQ(device->report().logical_block, 512u);
}

// While a batch of reads runs, writes go to the drive few at a time; and a flush waits for reads that one has delayed.
TEST_F(NvmeDeviceTest, WritesHoldBackWhileReadsRun) {
  auto device = open();
  const FileId a = *device->open_file(file("a"), true, true);
  ASSERT_TRUE(device->reserve(a, 16 * kMiB, 0));
  class Slow final : public RawNamespace {
   public:
    explicit Slow(std::shared_ptr<MemoryNamespace> inner) : inner_(std::move(inner)) {}
    std::string name() const override { return "slow"; }
    std::uint64_t bytes() const override { return inner_->bytes(); }
    std::uint32_t block_bytes() const override { return 512; }
    std::uint32_t atomic_bytes() const override { return 512; }
    void run(std::span<NamespaceRequest> requests, const Completion& on_complete) override {
      if (requests.front().op == NamespaceRequest::Op::kWrite) {
        largest_write = std::max<std::size_t>(largest_write, requests.size());
        if (--writes_to_wait_for == 0) writes_to_wait_for.notify_all();
      } else if (hold_reads) {
        reading = true;
        reading.notify_all();
        for (int left = writes_to_wait_for; left > 0; left = writes_to_wait_for) writes_to_wait_for.wait(left);
      }
      inner_->run(requests, on_complete);
    }
    Status flush() override { return inner_->flush(); }
    Status register_memory(void*, std::size_t) override { return {}; }
    void unregister_memory(void*) override {}
    std::atomic<bool> hold_reads = false, reading = false;
    std::atomic<int> writes_to_wait_for = -1'000'000;
    std::atomic<std::size_t> largest_write = 0;

   private:
    std::shared_ptr<MemoryNamespace> inner_;
  };
  device.reset();
  auto slow = std::make_shared<Slow>(memory);
  auto opened = NvmeDevice::open(slow, home.path(), {});
  ASSERT_TRUE(opened);
  device = std::move(*opened);
  const FileId again = *device->open_file(file("a"), false, true);
  std::string data(4096, 'd'), found(4096, 0);
  const iovec piece{data.data(), data.size()};
  std::vector<IoRequest> writes;
  for (std::size_t i = 0; i < 64; ++i) writes.push_back({IoRequest::Op::kWrite, again, i * 4096, {&piece, 1}, -1});
  slow->largest_write = 0;
  device->run(writes, {});
  EXPECT_EQ(slow->largest_write, 64u);
  slow->largest_write = 0;
  slow->writes_to_wait_for = 16;
  slow->hold_reads = true;
  std::thread reader([&] { EXPECT_EQ(transfer(*device, again, IoRequest::Op::kRead, 8 * kMiB, found), 0); });
  slow->reading.wait(false);
  device->run(writes, {});
  reader.join();
  EXPECT_LE(slow->largest_write, IoArbiter::kWritesBesideReads);
  EXPECT_EQ(device->counters().writes_yielded, 1u);
  for (const IoRequest& request : writes) EXPECT_EQ(request.error, 0);
}

TEST_F(NvmeDeviceTest, AFileThatLostItsNameIsGone) {
  auto device = open();
  const std::uint64_t total = device->room()->total;
  const auto make = [&](const std::string& name, std::uint64_t bytes) {
    const FileId id = *device->open_file(file(name), true, true);
    EXPECT_TRUE(device->preallocate(id, bytes));
    return id;
  };
  const FileId a = make("a", 30 * kMiB), b = make("b", 20 * kMiB);
  std::string data(4096, 'a'), found(4096, 0);
  EXPECT_EQ(transfer(*device, a, IoRequest::Op::kWrite, 0, data), 0);
  EXPECT_EQ(device->room()->free, total - 50 * kMiB);
  // Its range is used again when there is no other, but not while it is open.
  std::filesystem::remove(file("a"));
  const FileId c = *device->open_file(file("c"), true, true);
  EXPECT_EQ(device->preallocate(c, 30 * kMiB).error().code, Code::kNoSpace);
  EXPECT_EQ(transfer(*device, a, IoRequest::Op::kRead, 0, found), 0);
  EXPECT_EQ(found, data);
  EXPECT_EQ(device->open_file(file("a"), true, true).error().code, Code::kBusy);
  device->close_file(a);
  EXPECT_TRUE(device->preallocate(c, 30 * kMiB));
  EXPECT_EQ(transfer(*device, c, IoRequest::Op::kRead, 0, found), 0);
  EXPECT_EQ(found, std::string(4096, '\0'));
  // The name alone is an empty file.
  const FileId again = *device->open_file(file("a"), true, true);
  EXPECT_EQ(*device->file_bytes(again), 0u);
  // Removed and made again, with no need for its range meanwhile.
  device->close_file(b);
  std::filesystem::remove(file("b"));
  EXPECT_EQ(*device->file_bytes(*device->open_file(file("b"), true, true)), 0u);
  EXPECT_EQ(device->room()->free, total - 30 * kMiB);
  device.reset();
  std::filesystem::remove(file("c"));
  device = open();
  EXPECT_EQ(device->room()->free, total);
}

TEST_F(NvmeDeviceTest, AFolderThatIsAwayMayComeBack) {
  auto device = open();
  std::filesystem::create_directory(file("more"));
  ASSERT_TRUE(device->preallocate(*device->open_file(file("more/a"), true, true), kMiB));
  device.reset();
  std::filesystem::rename(file("more"), file("away"));
  device = open();
  device.reset();
  std::filesystem::rename(file("away"), file("more"));
  device = open();
  EXPECT_EQ(*device->file_bytes(*device->open_file(file("more/a"), false, true)), kMiB);
}

TEST_F(NvmeDeviceTest, PreallocatedBytesReadAsZerosOverWhatWasThere) {
  auto device = open();
  std::string stale(kMiB, 's'), found(kMiB, 'x');
  FileId id = *device->open_file(file("a"), true, true);
  ASSERT_TRUE(device->preallocate(id, 8 * kMiB));
  for (std::uint64_t at = 0; at < 8 * kMiB; at += kMiB) {
    EXPECT_EQ(transfer(*device, id, IoRequest::Op::kWrite, at, stale), 0);
  }
  device->close_file(id);
  std::filesystem::remove(file("a"));
  id = *device->open_file(file("a"), true, true);
  ASSERT_TRUE(device->preallocate(id, 4 * kMiB));
  for (std::uint64_t at = 0; at < 4 * kMiB; at += kMiB) {
    EXPECT_EQ(transfer(*device, id, IoRequest::Op::kRead, at, found), 0);
    EXPECT_EQ(found, std::string(kMiB, '\0'));
  }
  const FileId other = *device->open_file(file("b"), true, true);
  ASSERT_TRUE(device->reserve(other, 4 * kMiB, 2 * kMiB));
  EXPECT_EQ(transfer(*device, other, IoRequest::Op::kRead, kMiB, found), 0);
  EXPECT_EQ(found, std::string(kMiB, '\0'));
  EXPECT_EQ(transfer(*device, other, IoRequest::Op::kRead, 2 * kMiB, found), 0);
  EXPECT_EQ(found, stale) << "more was written than was asked for";
}

TEST_F(NvmeDeviceTest, RefusesWhatIsNotItsOwn) {
  {
    auto device = open();
    const Error busy = refusal(home.path(), memory);
    EXPECT_EQ(busy.code, Code::kBusy);
    EXPECT_NE(busy.message.find("another store of this process"), std::string::npos);
  }
  // Another folder's.
  TempFolder other{memory_parent()};
  const Error foreign = refusal(other.path(), memory);
  EXPECT_EQ(foreign.code, Code::kInvalidArgument);
  EXPECT_NE(foreign.message.find("a tardis volume"), std::string::npos) << foreign.message;
  // Another namespace, blank or with another volume, once there is a store.
  std::ofstream(file("tardis.store")) << "store";
  auto blank = std::make_shared<MemoryNamespace>(64 * kMiB);
  EXPECT_EQ(refusal(home.path(), blank).code, Code::kNotFound);
  ASSERT_TRUE(NvmeDevice::open(blank, other.path(), {}));
  EXPECT_EQ(refusal(home.path(), blank).code, Code::kInvalidArgument);
  // With force, and only then.
  { ASSERT_TRUE(NvmeDevice::open(blank, home.path(), {.force = true})); }
  EXPECT_EQ(refusal(home.path(), memory).code, Code::kInvalidArgument);
  EXPECT_NE(open({.force = true}), nullptr);
  // Force does not empty what is this folder's.
  {
    auto device = open();
    ASSERT_TRUE(device->preallocate(*device->open_file(file("kept"), true, true), kMiB));
  }
  auto device = open({.force = true});
  EXPECT_EQ(*device->file_bytes(*device->open_file(file("kept"), false, true)), kMiB);
  device.reset();
  // The file that says which volume it is.
  const std::string binding = file("NVME");
  const auto before = file_contents(binding, 0, 512);
  flip_bit(binding, 20);
  EXPECT_EQ(refusal(home.path(), memory).code, Code::kCorrupt);
  flip_bit(binding, 20);
  flip_bit(binding, 8, 3);
  EXPECT_EQ(refusal(home.path(), memory).code, Code::kUnsupportedFormat);
  flip_bit(binding, 8, 3);
  EXPECT_EQ(file_contents(binding, 0, 512), before);
  EXPECT_NE(open(), nullptr);
  // An error of the drive is not taken for a foreign volume, whatever the options.
  memory->before = [](const NamespaceRequest&) { return EIO; };
  EXPECT_EQ(refusal(home.path(), memory, {.force = true}).code, Code::kIo);
  memory->before = nullptr;
  EXPECT_NE(open(), nullptr);
}

// The power goes at any moment while a home gets its volume: the next start makes it.
TEST_F(NvmeDeviceTest, AVolumeThatWasBegunIsMadeByTheNextStart) {
  for (int writes = 0;; ++writes) {
    TempFolder folder{memory_parent()};
    auto device = std::make_shared<MemoryNamespace>(64 * kMiB);
    int left = writes;
    device->before = [&](const NamespaceRequest& r) {
      return r.op == NamespaceRequest::Op::kWrite && left-- <= 0 ? EIO : 0;
    };
    const bool whole = static_cast<bool>(NvmeDevice::open(device, folder.path(), {}));
    device->before = nullptr;
    const auto again = NvmeDevice::open(device, folder.path(), {});
    EXPECT_TRUE(again) << again.error().message;
    if (whole) break;
    ASSERT_LT(writes, 100);
  }
}

TEST_F(NvmeDeviceTest, TellsWhatMemoryTheNamespaceRegistered) {
  auto device = open();
  std::array<std::byte, 1000> bytes{};
  std::byte *const a = bytes.data(), *const b = a + 200;
  const auto code = [&](std::byte* base, std::size_t length) {
    const Status status = device->register_memory(base, length);
    return status ? Code::kOk : status.error().code;
  };
  EXPECT_EQ(code(a, 100), Code::kOk);
  memory->registering = Error{Code::kNoSpace, "no more"};
  EXPECT_EQ(code(b, 50), Code::kOk);
  EXPECT_EQ(device->counters().registered_bytes, 100u);
  EXPECT_EQ(device->counters().not_registered_bytes, 50u);
  // What was refused is known all the same.
  EXPECT_EQ(code(b, 50), Code::kInvalidArgument);
  EXPECT_EQ(code(b - 10, 11), Code::kInvalidArgument);
  EXPECT_EQ(code(b + 49, 1), Code::kInvalidArgument);
  EXPECT_EQ(code(a + 10, 0), Code::kInvalidArgument);
  EXPECT_EQ(code(b - 10, 10), Code::kOk);
  EXPECT_EQ(device->counters().not_registered_bytes, 60u);
  memory->registering = Error{Code::kInvalidArgument, "overlaps"};
  EXPECT_EQ(code(b + 100, 50), Code::kInvalidArgument);
  device->unregister_memory(a);
  device->unregister_memory(b);
  device->unregister_memory(b - 10);
  device->unregister_memory(b + 100);
  EXPECT_EQ(memory->unregistered, 1u);
  EXPECT_EQ(device->counters().registered_bytes + device->counters().not_registered_bytes, 0u);
}

TEST_F(NvmeDeviceTest, FilesComeAndGoWhileOthersAreUsed) {
  auto device = open();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 40; ++round) {
        const std::string path = file(std::to_string(t) + "-" + std::to_string(round % 3));
        const auto id = device->open_file(path, true, true);
        ASSERT_TRUE(id) << id.error().message;
        ASSERT_TRUE(device->reserve(*id, 14 * kMiB, 4096));  // all that four can have at once
        std::string data(8192, static_cast<char>('a' + t)), found(8192, 0);
        EXPECT_EQ(transfer(*device, *id, IoRequest::Op::kRead, 0, found), 0);
        EXPECT_EQ(found.substr(0, 4096), std::string(4096, '\0'));
        EXPECT_EQ(transfer(*device, *id, IoRequest::Op::kWrite, 0, data), 0);
        EXPECT_TRUE(device->flush(*id));
        EXPECT_EQ(transfer(*device, *id, IoRequest::Op::kRead, 0, found), 0);
        EXPECT_EQ(found, data);
        device->close_file(*id);
        std::filesystem::remove(path);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(NvmeDeviceTest, ASecondProcessIsTold) {
  auto device = open();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto second = NvmeDevice::open(std::make_shared<MemoryNamespace>(64 * kMiB), home.path(), {});
    const std::string owner = "pid " + std::to_string(::getppid());
    const bool told = !second && second.error().message.find(owner) != std::string::npos;
    ::_exit(told && second.error().code == Code::kBusy ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace tardis::nvme::testing
