// SPDX-License-Identifier: Apache-2.0
// Batches of objects: which requests they become, that bytes and digests are right, and what an error costs.
#include "store/transfer.h"

#include <algorithm>
#include <cerrno>
#include <mutex>

#include "store/digest.h"
#include "tests/block_support.h"

namespace tardis {
namespace {

using testing::OffsetMemory;
using testing::random_bytes;
using testing::TempFolder;
using Op = IoRequest::Op;

constexpr std::uint64_t kKiB = 1024;

// A file device that joins as told, records its requests, and whose medium is bad at one offset of the file.
class RecordingDevice final : public BlockDevice {
 public:
  RecordingDevice(std::unique_ptr<BlockDevice> inner, std::uint64_t join_bytes)
      : inner_(std::move(inner)), join_bytes_(join_bytes) {}
  Result<FileId> open_file(const std::string& path, bool create, bool writable) override {
    return inner_->open_file(path, create, writable);
  }
  void close_file(FileId file) override { inner_->close_file(file); }
  Status preallocate(FileId file, std::uint64_t bytes) override { return inner_->preallocate(file, bytes); }
  Result<std::uint64_t> file_bytes(FileId file) override { return inner_->file_bytes(file); }
  void run(std::span<IoRequest> all, const Completion& on_complete) override {
    for (IoRequest& request : all) {
      std::uint64_t bytes = 0;
      for (const iovec& piece : request.memory) bytes += piece.iov_len;
      requests.push_back(bytes);
      if (bad_at && *bad_at >= request.offset && *bad_at < request.offset + bytes) {
        request.error = EIO;
      } else {
        inner_->run({&request, 1}, {});
      }
      if (on_complete) on_complete(request);
    }
  }
  Status flush(FileId file) override { return inner_->flush(file); }
  IoGeometry geometry() const override { return inner_->geometry(); }
  std::uint64_t join_bytes() const override { return join_bytes_; }
  const PathReport& report() const override { return inner_->report(); }
  BlockDeviceCounters counters() const override { return inner_->counters(); }

  std::vector<std::uint64_t> requests;  // bytes of each
  std::optional<std::uint64_t> bad_at;

 private:
  std::unique_ptr<BlockDevice> inner_;
  const std::uint64_t join_bytes_;
};

class TransferTest : public ::testing::Test {
 protected:
  // `count` objects of one geometry in a file, `stride` bytes apart.
  struct Objects {
    ObjectGeometry geometry;
    std::uint64_t stride;
    std::size_t count;
    OffsetMemory memory;
    std::vector<std::uint64_t> pieces;
    std::vector<std::uint8_t> data;

    Objects(const ObjectGeometry& g, std::uint64_t apart, std::size_t n)
        : geometry(g), stride(apart), count(n), memory(n * g.payload_bytes(), 0), data(random_bytes(memory.size(), n)) {
      memory.fill(data);
      auto at = reinterpret_cast<std::uint64_t>(memory.data());
      for (std::size_t i = 0; i < n * g.parts; ++i) {
        for (std::uint32_t region = 0; region < g.regions; ++region) {
          pieces.push_back(at);
          at += g.region_bytes[region];
        }
      }
    }
    void add_to(Transfer& transfer, FileId file, std::size_t i) {
      transfer.add(file, 4096 + i * stride, geometry, pieces.data() + i * geometry.pieces());
    }
    std::uint64_t root(std::size_t i) const {
      std::vector<std::uint64_t> digests(geometry.chunks());
      for (std::uint32_t part = 0; part < geometry.parts; ++part) {
        digest_chunks(geometry, pieces.data() + i * geometry.pieces() + std::size_t{part} * geometry.regions, 0,
                      geometry.chunks_per_part, digests.data() + std::size_t{part} * geometry.chunks_per_part);
      }
      return digest_root(geometry, digests.data());
    }
  };

  std::unique_ptr<RecordingDevice> device(std::uint64_t join_bytes) {
    auto inner = open_block_device(folder_.path(), {}, -1);
    EXPECT_TRUE(inner);
    auto made = std::make_unique<RecordingDevice>(std::move(*inner), join_bytes);
    auto file = made->open_file(folder_.file("data"), true, true);
    EXPECT_TRUE(file);
    file_ = *file;
    return made;
  }

  // Writes them all in one transfer, then reads them back in another, in the given order; expects what was written.
  void round_trip(RecordingDevice& device, Objects& objects, const std::vector<std::size_t>& order) {
    Transfer out(device, Op::kWrite);
    for (const std::size_t i : order) objects.add_to(out, file_, i);
    out.run(true);
    std::fill_n(objects.memory.data(), objects.memory.size(), std::uint8_t{0});
    Transfer in(device, Op::kRead);
    for (const std::size_t i : order) objects.add_to(in, file_, i);
    in.run(true);
    EXPECT_EQ(objects.memory.copy(), objects.data);
    for (std::size_t k = 0; k < order.size(); ++k) {
      EXPECT_EQ(out.error(k), 0);
      EXPECT_EQ(in.error(k), 0);
      EXPECT_EQ(out.root(k), objects.root(order[k])) << k;
      EXPECT_EQ(in.root(k), objects.root(order[k])) << k;
    }
  }

  static ObjectGeometry geometry(std::uint32_t parts, std::initializer_list<std::uint64_t> regions) {
    return ObjectGeometry::of(parts, static_cast<std::uint32_t>(regions.size()), regions.begin(), 4096);
  }

  TempFolder folder_;
  FileId file_ = 0;
};

std::vector<std::size_t> in_order(std::size_t n) {
  std::vector<std::size_t> order(n);
  for (std::size_t i = 0; i < n; ++i) order[i] = i;
  return order;
}

TEST_F(TransferTest, NeighboursShareRequestsUpToTheLimit) {
  auto joining = device(1024 * kKiB);
  Objects objects(geometry(4, {16 * kKiB, 16 * kKiB}), 128 * kKiB, 20);
  round_trip(*joining, objects, in_order(20));
  std::vector<std::uint64_t> expected(5, 512 * kKiB);  // writes, of half a MiB at most; then reads
  expected.insert(expected.end(), {1024 * kKiB, 1024 * kKiB, 512 * kKiB});
  EXPECT_EQ(joining->requests, expected);
}

TEST_F(TransferTest, TheOrderOfTheCallDoesNotMatter) {
  auto joining = device(1024 * kKiB);
  Objects objects(geometry(4, {16 * kKiB, 16 * kKiB}), 128 * kKiB, 16);
  auto order = in_order(16);
  std::mt19937 random(5);
  std::shuffle(order.begin(), order.end(), random);
  round_trip(*joining, objects, order);
  EXPECT_EQ(joining->requests.size(), 4u + 2u);
}

TEST_F(TransferTest, GapsAreNotReadOrWritten) {
  auto joining = device(1024 * kKiB);
  Objects objects(geometry(2, {16 * kKiB}), 36 * kKiB, 8);  // 32 KiB each
  round_trip(*joining, objects, in_order(8));
  EXPECT_EQ(joining->requests, std::vector<std::uint64_t>(16, 32 * kKiB));
}

TEST_F(TransferTest, ADeviceThatDoesNotJoinSeesEveryObject) {
  auto plain = device(0);
  Objects objects(geometry(4, {16 * kKiB, 16 * kKiB}), 128 * kKiB, 8);
  round_trip(*plain, objects, in_order(8));
  EXPECT_EQ(plain->requests, std::vector<std::uint64_t>(16, 128 * kKiB));
}

// Parts with padding, regions that chunks straddle, objects larger than a request, and many small pieces.
TEST_F(TransferTest, ShapesOfAllKinds) {
  const ObjectGeometry shapes[] = {geometry(5, {1000, 3000}), geometry(3, {20 * kKiB, 12345}),
                                   geometry(2, {3 * 1024 * kKiB, 4096}), geometry(64, {1024, 1024, 1024, 1024}),
                                   geometry(1, {512})};
  for (const std::uint64_t join_bytes : {std::uint64_t{0}, 256 * kKiB, 1024 * kKiB}) {
    auto any = device(join_bytes);
    for (const ObjectGeometry& shape : shapes) {
      Objects objects(shape, shape.slot_class().slot_bytes, 9);
      round_trip(*any, objects, in_order(9));
    }
    for (const std::uint64_t bytes : any->requests) EXPECT_LE(bytes, 1024 * kKiB);
  }
}

// One bad sector costs the object it lies in, though seven others were asked for in the same request.
TEST_F(TransferTest, AnErrorCostsOnlyTheObjectItIsIn) {
  auto joining = device(1024 * kKiB);
  Objects objects(geometry(4, {16 * kKiB, 16 * kKiB}), 128 * kKiB, 24);
  round_trip(*joining, objects, in_order(24));
  joining->requests.clear();
  joining->bad_at = 4096 + 11 * 128 * kKiB + 70000;
  std::fill_n(objects.memory.data(), objects.memory.size(), std::uint8_t{0});
  Transfer in(*joining, Op::kRead);
  for (std::size_t i = 0; i < 24; ++i) objects.add_to(in, file_, i);
  in.run(true);
  for (std::size_t i = 0; i < 24; ++i) {
    EXPECT_EQ(in.error(i), i == 11 ? EIO : 0) << i;
    if (i != 11) {
      EXPECT_EQ(in.root(i), objects.root(i)) << i;
    }
  }
  EXPECT_EQ(joining->requests.size(), 3u + 8u);
  Transfer out(*joining, Op::kWrite);
  for (std::size_t i = 0; i < 24; ++i) objects.add_to(out, file_, i);
  out.run(false);
  for (std::size_t i = 0; i < 24; ++i) EXPECT_EQ(out.error(i), i == 11 ? EIO : 0) << i;
}

}  // namespace
}  // namespace tardis
