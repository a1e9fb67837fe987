// SPDX-License-Identifier: Apache-2.0
// The PRP and SGL vectors as transfers of a real controller, which finds their memory at their own bus addresses.
#include <algorithm>
#include <cstring>
#include <optional>

#include "guest_support.h"
#include "nvme/prp.h"
#include "nvme/vfio/vfio_mapper.h"
#include "raw_queue.h"
#include "tests/nvme_prp_vectors.h"
#include "tests/nvme_sgl_vectors.h"

namespace tardis::nvme::testing {
namespace {

using namespace pointers;
using Op = NamespaceRequest::Op;

std::vector<std::byte> pattern(std::uint64_t seed, std::size_t bytes) {
  std::vector<std::byte> data(bytes);
  Random random(seed);
  for (std::size_t at = 0; at < bytes; at += 8) {
    const std::uint64_t word = random();
    std::memcpy(data.data() + at, &word, std::min<std::size_t>(8, bytes - at));
  }
  return data;
}

// One namespace, by the driver and by hand.
class Disk {
 public:
  Disk(const std::shared_ptr<VfioController>& controller, std::uint32_t id)
      : mapper_(dynamic_cast<VfioMapper&>(controller->mapper())),
        space_(*controller->open_namespace(id)),
        id_(id),
        most_(controller->driver()->controller().max_transfer_bytes),
        queue_(*controller->driver(), 16) {}

  std::uint32_t block_bytes() const { return space_->block_bytes(); }
  bool takes(std::uint64_t bytes) const { return bytes > 0 && bytes % block_bytes() == 0 && bytes <= most_; }
  IommuDomain& domain() { return mapper_.domain(); }
  bool ready() const { return queue_.ready(); }

  int by_driver(Op op, std::vector<std::byte>& data) {
    const iovec range{data.data(), data.size()};
    NamespaceRequest request{.op = op, .offset = kAt, .memory = {&range, 1}, .error = -1};
    space_->run({&request, 1}, nullptr);
    return request.error;
  }
  template <class SetPointer>
  std::uint16_t by_hand(Op op, std::uint64_t bytes, SetPointer set_pointer) {
    SubmissionEntry entry =
        guest_io(op == Op::kRead ? IoOpcode::kRead : IoOpcode::kWrite, id_, kAt / block_bytes(), bytes / block_bytes());
    set_pointer(entry);
    return queue_.run(entry);
  }

  // Both directions of a transfer whose pointer a vector gives. Returns what the controller answered to the write.
  template <class SetPointer>
  std::uint16_t transfer(BusPages& pages, const std::vector<Piece>& pieces, std::uint64_t bytes,
                         SetPointer set_pointer) {
    std::vector<std::byte> sent = pattern(++seed_, bytes), found(bytes);
    pages.fill(pieces, sent.data());
    const bool twice = pages.bytes_of(pieces) != sent;  // blocks that overlap: what a read leaves there is not said
    sent = pages.bytes_of(pieces);
    const std::uint16_t answer = by_hand(Op::kWrite, bytes, set_pointer);
    if (answer != kScSuccess) {
      EXPECT_EQ(by_hand(Op::kRead, bytes, set_pointer), answer) << "another answer to a read";
      return answer;
    }
    EXPECT_EQ(by_driver(Op::kRead, found), 0);
    EXPECT_TRUE(found == sent) << "a write moved other bytes";
    if (twice) return answer;

    sent = pattern(++seed_, bytes);
    EXPECT_EQ(by_driver(Op::kWrite, sent), 0);
    pages.poison(pieces);
    const std::size_t around = pages.poisoned_bytes() - bytes;
    EXPECT_EQ(by_hand(Op::kRead, bytes, set_pointer), kScSuccess);
    EXPECT_TRUE(pages.bytes_of(pieces) == sent) << "a read moved other bytes";
    pages.poison(pieces);
    EXPECT_EQ(pages.poisoned_bytes() - bytes, around) << "a read moved bytes to other places";
    return answer;
  }

 private:
  static constexpr std::uint64_t kAt = 1u << 20;  // of the namespace
  VfioMapper& mapper_;
  std::shared_ptr<NvmeNamespace> space_;
  const std::uint32_t id_;
  const std::uint64_t most_;
  RawQueue queue_;
  std::uint64_t seed_ = 0;
};

constexpr std::size_t kQemuPieces = 1024;  // pages of one command (IOV_MAX), however long it may be

// Where QEMU's model, which this suite runs on, answers otherwise than the specification wants. None of it is anything
// that the driver makes.
std::optional<std::uint16_t> qemu_deviates(const std::string& name) {
  if (name == "chain-of-single-slots") return kScInvalidSglSegment;  // a segment of nothing but a pointer
  if (name == "bit-bucket" || name == "reserved-type") return kScInvalidSglSegment;
  if (name == "offset-subtype") return kScSuccess;  // it looks at the type alone
  return std::nullopt;
}

class GuestVectors : public Guest {
 protected:
  void SetUp() override {
    Guest::SetUp();
    if (IsSkipped()) return;
    if (guest_way() == VfioWay::kWithoutIommu) GTEST_SKIP() << "without an IOMMU nobody chooses addresses";
    VfioOptions options = guest_options();
    options.driver.external_queues = 1;
    controller = open(options);
    ASSERT_NE(controller, nullptr);
  }
  template <class Body>
  void on_every_namespace(Body body) {
    for (const NamespaceInfo& info : controller->driver()->namespaces()) {
      SCOPED_TRACE("blocks of " + std::to_string(info.block_bytes));
      Disk disk(controller, info.id);
      ASSERT_TRUE(disk.ready());
      body(disk);
    }
  }
  std::shared_ptr<VfioController> controller;
};

TEST_F(GuestVectors, Prp) {
  const bool qemu = controller->driver()->controller().model.starts_with("QEMU");
  on_every_namespace([qemu](Disk& disk) {
    int moved = 0, refused = 0;
    for (const Vector& vector : read_vectors("nvme_prp_vectors.txt")) {
      if (vector.kind != "build" && vector.kind != "walk") continue;
      if (!disk.takes(vector.value("length"))) continue;
      SCOPED_TRACE(vector.name);
      BusPages pages(disk.domain());
      for (const Word& word : words_of(vector)) pages.store(word.bus, word.value);
      const PrpPair pointer{vector.value("prp1"), vector.value("prp2")};
      std::vector<Piece> pieces;
      naive_pieces(AddressRule(vector.text("pages")), pointer.prp1 % kPageBytes, vector.value("length"), pieces);
      const auto set = [&](SubmissionEntry& entry) { entry.prp = pointer; };
      if (qemu && pieces.size() > kQemuPieces) {
        EXPECT_EQ(disk.by_hand(Op::kWrite, vector.value("length"), set), kScInternal) << "QEMU deviates no more";
        continue;
      }
      const std::uint16_t answer = disk.transfer(pages, pieces, vector.value("length"), set);
      if (vector.kind == "build") {
        EXPECT_EQ(answer, kScSuccess);
      } else {
        EXPECT_TRUE(vector.allows(answer)) << "answered " << std::hex << answer;
      }
      ++(answer == kScSuccess ? moved : refused);
    }
    std::printf("%u-byte blocks: %d PRP vectors moved, %d refused\n", disk.block_bytes(), moved, refused);
    EXPECT_GE(moved, 10);
    EXPECT_GE(refused, 3);
  });
}

TEST_F(GuestVectors, PrpTable) {
  on_every_namespace([](Disk& disk) {
    int moved = 0;
    for (const Vector& vector : read_vectors("nvme_prp_vectors.txt")) {
      if (vector.kind != "table" || vector.has("status") || !disk.takes(vector.value("length"))) continue;
      SCOPED_TRACE(vector.name);
      const auto bridge = static_cast<std::uint32_t>(vector.value("bridge"));
      const std::uint64_t bytes = PrpTable::memory_bytes(vector.value("bytes"), bridge), bus = vector.value("table");
      std::vector<std::uint64_t> words(bytes / 8);
      PrpTable table;
      const AddressRule page_address(vector.text("pages"));
      ASSERT_EQ(PrpTable::make(vector.value("bytes"), bridge, {words.data(), bus}, bytes, table), PrpStatus::kOk);
      ASSERT_EQ(table.fill(page_address), PrpStatus::kOk);
      BusPages pages(disk.domain());
      for (std::uint64_t i = 0; i < words.size(); ++i) pages.store(bus + i * 8, words[i]);
      std::vector<Piece> pieces;
      naive_pieces(page_address, vector.value("offset"), vector.value("length"), pieces);
      PrpPair pointer{};
      ASSERT_EQ(table.describe(vector.value("offset"), vector.value("length"), pointer), PrpStatus::kOk);
      EXPECT_EQ(
          disk.transfer(pages, pieces, vector.value("length"), [&](SubmissionEntry& entry) { entry.prp = pointer; }),
          kScSuccess);
      ++moved;
    }
    std::printf("%u-byte blocks: %d transfers by PRP tables\n", disk.block_bytes(), moved);
    EXPECT_GE(moved, 4);
  });
}

TEST_F(GuestVectors, Sgl) {
  if (controller->driver()->controller().sgl != SglRule::kAnyAlignment) GTEST_SKIP() << "the controller has no SGLs";
  const bool qemu = controller->driver()->controller().model.starts_with("QEMU");
  on_every_namespace([qemu](Disk& disk) {
    int moved = 0, refused = 0;
    for (const Vector& vector : read_vectors("nvme_sgl_vectors.txt")) {
      if (vector.kind != "build" && vector.kind != "walk") continue;
      if (vector.value("sgls") != 1 || vector.has("host-only") || !disk.takes(vector.value("transfer"))) continue;
      SCOPED_TRACE(vector.name);
      BusPages pages(disk.domain());
      for (const Placed& placed : segments_of(vector)) pages.store(placed.bus, placed.descriptor);
      const SglDescriptor pointer = descriptor_of(vector.text("sgl1"));
      const auto set = [&](SubmissionEntry& entry) {
        entry.set_data_pointer(DataPointer::kSgl);
        entry.sgl = pointer;
      };
      const std::uint64_t bytes = vector.value("transfer");
      if (const auto other = qemu ? qemu_deviates(vector.name) : std::nullopt) {
        for (const Placed& placed : segments_of(vector)) pages.at(placed.descriptor.address);
        EXPECT_EQ(disk.by_hand(Op::kWrite, bytes, set), *other) << "QEMU deviates no more";
        continue;
      }
      // What is refused may have fewer blocks than bytes, and nothing to compare.
      const bool succeeds = vector.kind == "build" || vector.allows(kScSuccess);
      const std::uint16_t answer =
          succeeds ? disk.transfer(pages, pieces_of(vector), bytes, set) : disk.by_hand(Op::kWrite, bytes, set);
      if (vector.kind == "build") {
        EXPECT_EQ(answer, kScSuccess);
      } else {
        EXPECT_TRUE(vector.allows(answer)) << "answered " << std::hex << answer;
      }
      ++(answer == kScSuccess ? moved : refused);
    }
    std::printf("%u-byte blocks: %d SGL vectors moved, %d refused\n", disk.block_bytes(), moved, refused);
    EXPECT_GE(moved, disk.block_bytes() == 512 ? 12 : 3);
    if (disk.block_bytes() == 512) {
      EXPECT_GE(refused, 6);
    }
  });
}

}  // namespace
}  // namespace tardis::nvme::testing
