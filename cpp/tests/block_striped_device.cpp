// SPDX-License-Identifier: Apache-2.0
// Several files as one, against one flat file.
#include "block/striped_device.h"

#include <cerrno>
#include <cstring>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

#include "block/iovec_range.h"
#include "block_support.h"

namespace tardis::testing {
namespace {

// Files in memory; the requests of a batch are done by several threads at once.
class MemoryDevice : public BlockDevice {
 public:
  std::vector<std::vector<std::uint8_t>> files;
  std::vector<int> error;        // of each file's requests
  std::vector<int> flush_error;  // and flushes
  std::multiset<FileId> flushed, closed;
  std::vector<FileId> order;  // of the last batch
  std::size_t batches = 0;
  const IoRequest* last_front = nullptr;

  FileId add(std::size_t bytes) {
    files.emplace_back(bytes);
    error.push_back(0);
    flush_error.push_back(0);
    return static_cast<FileId>(files.size() - 1);
  }
  Result<FileId> open_file(const std::string&, bool, bool) override { return add(0); }
  void close_file(FileId file) override { closed.insert(file); }
  Status preallocate(FileId file, std::uint64_t bytes) override {
    files[file].resize(std::max<std::size_t>(files[file].size(), bytes));
    return {};
  }
  Result<std::uint64_t> file_bytes(FileId file) override { return files[file].size(); }
  void run(std::span<IoRequest> requests, const Completion& on_complete) override {
    ++batches;
    last_front = requests.data();
    order.clear();
    for (const IoRequest& request : requests) order.push_back(request.file);
    std::atomic<std::size_t> next{0};
    const auto work = [&] {
      for (std::size_t i = next++; i < requests.size(); i = next++) {
        move(requests[i]);
        if (on_complete) on_complete(requests[i]);
      }
    };
    std::thread other(work);
    work();
    other.join();
  }
  Status flush(FileId file) override {
    flushed.insert(file);
    if (flush_error[file] != 0) return errno_error(flush_error[file], "flush");
    return {};
  }
  bool reads_at_once() const override { return true; }
  int read_at_once(FileId file, std::uint64_t offset, std::span<const iovec> memory) override {
    IoRequest request{IoRequest::Op::kRead, file, offset, memory, 0};
    move(request);
    return request.error;
  }
  IoGeometry geometry() const override { return {}; }
  std::uint64_t join_bytes() const override { return 12345; }
  const PathReport& report() const override { return report_; }
  BlockDeviceCounters counters() const override { return {.reads = 77}; }

 private:
  void move(IoRequest& request) {
    std::vector<std::uint8_t>& file = files[request.file];
    const std::uint64_t bytes = total_bytes(request.memory);
    request.error = error[request.file];
    if (request.error == 0 && request.offset + bytes > file.size()) request.error = ENODATA;
    if (request.error != 0) return;
    IovecCursor at;
    auto* place = reinterpret_cast<std::byte*>(file.data() + request.offset);
    if (request.op == IoRequest::Op::kRead) {
      scatter(place, request.memory, at, bytes);
    } else {
      gather(request.memory, at, place, bytes);
    }
  }
  PathReport report_;
};

struct Rig {
  static constexpr std::uint64_t kPayload = 3u << 20;
  std::atomic<std::uint64_t> word;
  MemoryDevice* memory;
  std::unique_ptr<StripedDevice> device;
  std::vector<FileId> members;
  FileId joined, plain;
  StripeMap map;

  Rig(std::uint64_t start, std::uint64_t unit, std::uint32_t files) : word(StripeMap::pack(start, unit)) {
    auto inner = std::make_unique<MemoryDevice>();
    memory = inner.get();
    device = std::make_unique<StripedDevice>(std::move(inner));
    map = StripeMap::of(word, files);
    plain = memory->add(kPayload);
    for (std::uint32_t i = 0; i < files; ++i) {
      members.push_back(memory->add(map.start_in(i) + map.share(i, kPayload)));
    }
    joined = device->join(members, word);
  }
  std::uint64_t bytes() const { return map.start + kPayload; }
};

// A request with memory of its own, in pieces of odd lengths, some of them empty.
struct Asked {
  std::vector<std::uint8_t> bytes;
  std::vector<iovec> memory;
  Asked(std::size_t length, std::mt19937_64& random) : bytes(length) {
    for (std::size_t at = 0; at < length;) {
      const std::size_t n = random() % 9 == 0 ? 0 : std::min<std::size_t>(length - at, 1 + random() % 20'000);
      memory.push_back({bytes.data() + at, n});
      at += n;
    }
    // In another order than they lie in memory.
    std::vector<iovec> shuffled = memory;
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    memory = shuffled;
  }
  std::vector<std::uint8_t> flat() const {
    std::vector<std::uint8_t> out;
    for (const iovec& one : memory) {
      const auto* from = static_cast<const std::uint8_t*>(one.iov_base);
      out.insert(out.end(), from, from + one.iov_len);
    }
    return out;
  }
  IoRequest request(IoRequest::Op op, FileId file, std::uint64_t offset) {
    IoRequest r;
    r.op = op;
    r.file = file;
    r.offset = offset;
    r.memory = memory;
    return r;
  }
};

TEST(StripedDevice, DoesWhatOneFlatFileWouldDo) {
  std::mt19937_64 random(7);
  for (const std::uint32_t files : {2u, 3u, 5u, 16u}) {
    for (const std::uint64_t unit : {4096u, 12288u, 65536u, 1u << 20}) {
      SCOPED_TRACE(std::to_string(files) + " files, unit " + std::to_string(unit));
      Rig rig(64 << 10, unit, files);
      std::vector<std::uint8_t> flat(rig.bytes());
      for (int round = 0; round < 12; ++round) {
        std::vector<std::unique_ptr<Asked>> asked;
        std::vector<IoRequest> requests;
        std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
        const bool reads = round % 2 == 1;
        std::uint64_t at = random() % 5000;
        while (at < flat.size()) {  // disjoint, as a device may do them in any order
          const std::uint64_t n =
              std::min<std::uint64_t>(flat.size() - at, 1 + random() % (random() % 2 ? 3000 : 400'000));
          asked.push_back(std::make_unique<Asked>(n, random));
          for (auto& byte : asked.back()->bytes) byte = static_cast<std::uint8_t>(random());
          requests.push_back(
              asked.back()->request(reads ? IoRequest::Op::kRead : IoRequest::Op::kWrite, rig.joined, at));
          ranges.emplace_back(at, n);
          at += n + random() % 100'000;
        }
        std::vector<std::atomic<int>> told(requests.size());
        rig.device->run(requests,
                        [&](IoRequest& request) { ++told[static_cast<std::size_t>(&request - requests.data())]; });
        for (std::size_t i = 0; i < requests.size(); ++i) {
          ASSERT_EQ(told[i], 1);
          ASSERT_EQ(requests[i].error, 0);
          const auto bytes = asked[i]->flat();
          auto* here = flat.data() + ranges[i].first;
          if (reads) {
            ASSERT_TRUE(std::equal(bytes.begin(), bytes.end(), here));
          } else {
            std::copy(bytes.begin(), bytes.end(), here);
          }
        }
      }
      // Unit by unit, each file has what is its own.
      for (std::uint64_t u = 0; (u + 1) * unit <= Rig::kPayload; ++u) {
        const std::uint32_t file = u % files;
        const auto& own = rig.memory->files[rig.members[file]];
        ASSERT_EQ(std::memcmp(own.data() + rig.map.start_in(file) + u / files * unit,
                              flat.data() + rig.map.start + u * unit, unit),
                  0)
            << u;
      }
      EXPECT_EQ(*rig.device->file_bytes(rig.joined), rig.bytes());
    }
  }
}

TEST(StripedDevice, ReadsAtOnceWhatRequestsRead) {
  std::mt19937_64 random(3);
  Rig rig(64 << 10, 12288, 3);
  EXPECT_TRUE(rig.device->reads_at_once());
  for (auto& file : rig.memory->files) {
    for (auto& byte : file) byte = static_cast<std::uint8_t>(random());
  }
  for (int round = 0; round < 200; ++round) {
    const FileId file = round % 5 == 0 ? rig.plain : rig.joined;
    const std::uint64_t end = file == rig.plain ? Rig::kPayload : rig.bytes(), n = 1 + random() % 200'000;
    const std::uint64_t offset = random() % (end - n + 1);
    Asked expected(n, random), found(n, random);
    IoRequest request = expected.request(IoRequest::Op::kRead, file, offset);
    rig.device->run({&request, 1}, nullptr);
    ASSERT_EQ(request.error, 0);
    ASSERT_EQ(rig.device->read_at_once(file, offset, found.memory), 0);
    ASSERT_EQ(found.flat(), expected.flat());
  }
  // What fails is known by file, and the others are read all the same.
  (void)rig.device->take_met(rig.joined, IoUse::kRead);
  rig.memory->error[rig.members[1]] = EREMOTEIO;
  Asked all(3 * 12288, random);
  EXPECT_EQ(rig.device->read_at_once(rig.joined, 64 << 10, all.memory), EREMOTEIO);
  const auto met = rig.device->take_met(rig.joined, IoUse::kRead);
  ASSERT_EQ(met.size(), 3u);
  EXPECT_EQ(met[0].worked, 1u);
  EXPECT_EQ(met[1].worked, 0u);
  EXPECT_EQ(met[1].error, EREMOTEIO);
  EXPECT_EQ(met[2].worked, 1u);
  EXPECT_EQ(rig.device->read_at_once(rig.joined + 1, 0, all.memory), EBADF);
}

TEST(StripedDevice, ARequestIsOnePieceForEachDriveAndTheyTakeTurns) {
  std::mt19937_64 random(1);
  Rig rig(4096, 16384, 2);
  Asked large(1 << 20, random), other(1 << 20, random);
  IoRequest requests[] = {large.request(IoRequest::Op::kWrite, rig.joined, 4096),
                          other.request(IoRequest::Op::kWrite, rig.joined, 4096 + (1 << 20))};
  rig.device->run(requests, {});
  EXPECT_EQ(rig.memory->batches, 1u);
  EXPECT_EQ(rig.memory->order, (std::vector<FileId>{1, 2, 1, 2}));
  // Four requests, of which two lie in each file as a whole.
  Rig coarse(4096, 1 << 20, 2);
  std::vector<std::unique_ptr<Asked>> asked;
  std::vector<IoRequest> four;
  for (std::uint64_t i = 0; i < 4; ++i) {
    asked.push_back(std::make_unique<Asked>(512 << 10, random));
    four.push_back(asked.back()->request(IoRequest::Op::kRead, coarse.joined, 4096 + i * (512 << 10)));
  }
  coarse.device->run(four, {});
  EXPECT_EQ(coarse.memory->order, (std::vector<FileId>{1, 2, 1, 2}));
}

TEST(StripedDevice, OrdinaryRequestsPassThroughAsTheyAre) {
  std::mt19937_64 random(2);
  Rig rig(4096, 4096, 2);
  Asked one(5000, random), two(40'000, random);
  IoRequest alone[] = {one.request(IoRequest::Op::kRead, rig.plain, 100)};
  rig.device->run(alone, {});
  EXPECT_EQ(rig.memory->last_front, alone) << "not even copied";
  IoRequest mixed[] = {one.request(IoRequest::Op::kRead, rig.plain, 100),
                       two.request(IoRequest::Op::kRead, rig.joined, 8192)};
  int told = 0;
  std::mutex mutex;
  rig.device->run(mixed, [&](IoRequest&) {
    const std::lock_guard lock(mutex);
    ++told;
  });
  EXPECT_EQ(told, 2);
  EXPECT_EQ(mixed[0].error + mixed[1].error, 0);
  EXPECT_EQ(rig.device->join_bytes(), 12345u);
  EXPECT_EQ(rig.device->counters().reads, 77u);
}

TEST(StripedDevice, AnErrorInOneFileFailsTheRequestsThatNeedItAndIsKnownByFile) {
  std::mt19937_64 random(3);
  Rig rig(4096, 65536, 3);
  rig.memory->error[rig.members[1]] = EIO;
  std::vector<std::unique_ptr<Asked>> asked;
  std::vector<IoRequest> requests;
  for (std::uint64_t unit = 0; unit < 12; ++unit) {
    asked.push_back(std::make_unique<Asked>(65536, random));
    requests.push_back(asked.back()->request(IoRequest::Op::kRead, rig.joined, 4096 + unit * 65536));
  }
  asked.push_back(std::make_unique<Asked>(300'000, random));
  requests.push_back(asked.back()->request(IoRequest::Op::kRead, rig.joined, 4096));
  rig.device->run(requests, {});
  for (std::size_t unit = 0; unit < 12; ++unit) EXPECT_EQ(requests[unit].error, unit % 3 == 1 ? EIO : 0) << unit;
  EXPECT_EQ(requests.back().error, EIO);
  const auto met = rig.device->take_met(rig.joined, IoUse::kRead);
  ASSERT_EQ(met.size(), 3u);
  EXPECT_EQ(met[0].worked, 5u);
  EXPECT_EQ(met[0].error, 0);
  EXPECT_EQ(met[1].worked, 0u);
  EXPECT_EQ(met[1].error, EIO);
  EXPECT_EQ(met[2].error, 0);
  EXPECT_EQ(rig.device->take_met(rig.joined, IoUse::kRead)[1].error, 0) << "told once";
}

TEST(StripedDevice, AShortFileEndsTheWhole) {
  std::mt19937_64 random(4);
  for (const std::uint32_t files : {2u, 3u}) {
    for (std::uint32_t cut = 0; cut < files; ++cut) {
      for (const std::uint64_t at :
           {std::uint64_t{0}, std::uint64_t{4096}, std::uint64_t{70'000}, std::uint64_t{200'000}}) {
        Rig rig(8192, 65536, files);
        rig.memory->files[rig.members[cut]].resize(rig.map.start_in(cut) + at);
        const std::uint64_t end = *rig.device->file_bytes(rig.joined);
        ASSERT_LT(end, rig.bytes());
        const auto read = [&](std::uint64_t offset, std::size_t n) {
          Asked asked(n, random);
          IoRequest request = asked.request(IoRequest::Op::kRead, rig.joined, offset);
          rig.device->run({&request, 1}, {});
          return request.error;
        };
        EXPECT_EQ(read(0, end), 0);
        EXPECT_EQ(read(end, 1), ENODATA);
        EXPECT_EQ(read(end - 1, 2), ENODATA);
      }
    }
  }
  Rig rig(8192, 65536, 2);
  rig.memory->files[rig.members[0]].resize(5000);
  EXPECT_EQ(*rig.device->file_bytes(rig.joined), 5000u);
  ASSERT_TRUE(rig.device->preallocate(rig.joined, rig.bytes()));
  EXPECT_EQ(*rig.device->file_bytes(rig.joined), rig.bytes());
}

TEST(StripedDevice, FlushesEveryFileAndTellsTheFirstFailure) {
  Rig rig(4096, 4096, 3);
  ASSERT_TRUE(rig.device->flush(rig.joined));
  EXPECT_EQ(rig.memory->flushed.size(), 3u);
  rig.memory->flush_error[rig.members[0]] = EIO;
  rig.memory->flush_error[rig.members[1]] = EROFS;
  const Status status = rig.device->flush(rig.joined);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().os_error, EIO);
  EXPECT_EQ(rig.memory->flushed.size(), 6u) << "the others too";
  const auto met = rig.device->take_met(rig.joined, IoUse::kFlush);
  EXPECT_EQ(met[0].error, EIO);
  EXPECT_EQ(met[1].error, EROFS);
  EXPECT_EQ(met[2].error, 0);
  EXPECT_GT(met[2].worked, 0u);
}

TEST(StripedDevice, ClosesEveryFileAndUsesTheIdAgain) {
  Rig rig(4096, 4096, 2);
  rig.device->close_file(rig.joined);
  EXPECT_EQ(rig.memory->closed, (std::multiset<FileId>{1, 2}));
  std::mt19937_64 random(5);
  Asked asked(100, random);
  IoRequest request = asked.request(IoRequest::Op::kRead, rig.joined, 0);
  int told = 0;
  rig.device->run({&request, 1}, [&](IoRequest&) { ++told; });
  EXPECT_EQ(request.error, EBADF);
  EXPECT_EQ(told, 1);
  EXPECT_FALSE(rig.device->flush(rig.joined));
  EXPECT_EQ(rig.device->join({rig.memory->add(0), rig.memory->add(0)}, rig.word), rig.joined);
}

}  // namespace
}  // namespace tardis::testing
