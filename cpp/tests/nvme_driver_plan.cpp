// SPDX-License-Identifier: Apache-2.0
// How requests are cut into commands: every plan is legal for its controller and names the right bytes, in order.
#include "nvme/io_plan.h"

#include <map>

#include "nvme/soft/dma_space.h"
#include "tests/nvme_driver_support.h"

namespace tardis::nvme {
namespace {

using testing::Arena;
using testing::campaign_factor;
using testing::random_pieces;
using Way = CommandPlan::Way;

// Memory in order; what lies side by side is one run.
class Runs {
 public:
  void add(std::byte* at, std::uint64_t bytes) {
    if (bytes == 0) return;
    if (!runs_.empty() && runs_.back().first + runs_.back().second == at) {
      runs_.back().second += bytes;
    } else {
      runs_.emplace_back(at, bytes);
    }
  }
  bool operator==(const Runs&) const = default;

 private:
  std::vector<std::pair<std::byte*, std::uint64_t>> runs_;
};

Runs runs_of(std::span<const iovec> memory, std::uint64_t from, std::uint64_t bytes) {
  Runs runs;
  for (const iovec& piece : memory) {
    const std::uint64_t skipped = std::min<std::uint64_t>(from, piece.iov_len);
    const std::uint64_t taken = std::min<std::uint64_t>(bytes, piece.iov_len - skipped);
    runs.add(static_cast<std::byte*>(piece.iov_base) + skipped, taken);
    from -= skipped;
    bytes -= taken;
  }
  return runs;
}

// The memory that a data pointer names, by the rules alone. Stops where they are broken.
class Reader {
 public:
  explicit Reader(DmaSpace& space) : reader_(space) {}

  Runs prp(const PrpPair& pair, std::uint64_t bytes, std::string* broken) {
    Runs found;
    const auto take = [&](std::uint64_t address, std::uint64_t most) {
      const std::uint64_t step = std::min(bytes, most);
      append(found, address, step, broken);
      bytes -= step;
    };
    if (pair.prp1 % 4 != 0) *broken = "PRP1: not a dword";
    take(pair.prp1, kPageBytes - pair.prp1 % kPageBytes);
    if (bytes == 0) return found;
    if (bytes <= kPageBytes) {
      if (pair.prp2 % kPageBytes != 0) *broken = "PRP2: not a page";
      take(pair.prp2, kPageBytes);
      return found;
    }
    std::uint64_t list = pair.prp2;
    if (list % 8 != 0) *broken = "PRP list: not a qword";
    while (bytes > 0 && broken->empty()) {
      const bool last_of_page = list % kPageBytes == kPageBytes - 8;
      std::uint64_t entry = 0;
      const std::byte* const at = translate(list, 8);
      if (at == nullptr) {
        *broken = "PRP list: not mapped";
        return found;
      }
      std::memcpy(&entry, at, 8);
      if (entry % kPageBytes != 0) *broken = "PRP entry: not a page";
      if (last_of_page && bytes > kPageBytes) {
        list = entry;
        continue;
      }
      take(entry, kPageBytes);
      list += 8;
    }
    return found;
  }

  Runs sgl(const SglDescriptor& first, bool dword, std::uint32_t most_blocks, std::uint64_t bytes,
           std::string* broken) {
    Runs found;
    std::uint64_t total = 0;
    std::uint32_t blocks = 0;
    const auto block = [&](const SglDescriptor& descriptor) {
      if (descriptor.kind() != SglType::kDataBlock || descriptor.subtype() != 0) *broken = "SGL: not a data block";
      if (dword && (descriptor.address | descriptor.length) % 4 != 0) *broken = "SGL: not of dwords";
      append(found, descriptor.address, descriptor.length, broken);
      total += descriptor.length;
      ++blocks;
    };
    if (first.kind() == SglType::kLastSegment) {
      const std::byte* const at = translate(first.address, first.length);
      if (at == nullptr || first.length % sizeof(SglDescriptor) != 0 || first.length == 0 || first.address % 8 != 0) {
        *broken = "SGL segment";
        return found;
      }
      for (std::uint32_t i = 0; i < first.length; i += sizeof(SglDescriptor)) {
        SglDescriptor descriptor;
        std::memcpy(&descriptor, at + i, sizeof descriptor);
        block(descriptor);
      }
    } else {
      block(first);
    }
    if (total != bytes) *broken = "SGL: another length than the command's";
    if (blocks > most_blocks) *broken = "SGL: too many blocks";
    return found;
  }

 private:
  std::byte* translate(std::uint64_t address, std::size_t bytes) {
    const std::lock_guard lock(reader_);
    return reader_.translate(address, bytes);
  }
  void append(Runs& found, std::uint64_t address, std::uint64_t bytes, std::string* broken) {
    std::byte* const at = translate(address, bytes);
    if (at == nullptr) {
      *broken = "data: not mapped";
      return;
    }
    found.add(at, bytes);
  }
  DmaSpace::Reader reader_;
};

TEST(NvmeDriverPlan, EveryCommandNamesItsBytesInOrder) {
  const auto requests = static_cast<int>(100'000 * campaign_factor());
  std::mt19937_64 random(7);
  DmaSpaceOptions space_options;
  space_options.addresses = DmaSpaceOptions::Addresses::kTranslated;
  DmaSpace space(space_options);
  HostMemory host(space);
  std::map<Way, std::uint64_t> ways;
  constexpr std::size_t kArena = 3 << 20;
  for (int done = 0; done < requests;) {
    // Two regions with a hole between them.
    Arena arena(kArena, 4 * (random() % 2048));
    RegisteredMemory registered(space);
    ASSERT_TRUE(registered.add(host, arena.data(), kArena / 2 - 4 * (random() % 4096)));
    ASSERT_TRUE(registered.add(host, arena.data() + kArena / 2, kArena / 2));
    auto list_memory = DmaMemory::allocate(space, kPageBytes);
    ASSERT_TRUE(list_memory);
    const PrpList list{reinterpret_cast<std::uint64_t*>(list_memory->data()), list_memory->address()};
    Reader reader(space);
    for (int round = 0; round < 200; ++round, ++done) {
      PlanLimits limits;
      limits.block_bytes = random() % 2 == 0 ? 512 : 4096;
      limits.max_bytes = (std::uint64_t{8192} << random() % 9);
      limits.boundary_bytes = random() % 3 == 0 ? limits.block_bytes * (1 + random() % 40) : 0;
      limits.sgl = static_cast<SglRule>(random() % 3);
      limits.sgl_blocks = random() % 2 == 0 ? ~0u : 1 + static_cast<std::uint32_t>(random() % 4);
      limits.bounce_bytes = 4096 * (1 + random() % 32);
      const std::size_t aligns[] = {1, 2, 4, 8, 512, 4096, 4096};
      const std::uint64_t total = limits.block_bytes * (1 + random() % ((512u << 10) / limits.block_bytes));
      const auto memory =
          random_pieces(random, arena.data(), arena.data() + kArena, total, 1 + random() % 12, aligns[random() % 7]);
      std::uint64_t offset = limits.block_bytes * (random() % 100), moved = 0;
      IovecCursor at;
      std::vector<PlanRange> ranges;
      while (moved < total) {
        const auto table = registered.table();
        const CommandPlan plan = plan_command(limits, *table, offset, memory, at, total - moved, ranges);
        ASSERT_NE(plan.way, Way::kImpossible);
        ASSERT_GT(plan.bytes, 0u);
        ASSERT_EQ(plan.bytes % limits.block_bytes, 0u);
        ASSERT_LE(plan.bytes, std::min(limits.max_bytes, total - moved));
        if (limits.boundary_bytes != 0) {
          ASSERT_EQ(offset / limits.boundary_bytes, (offset + plan.bytes - 1) / limits.boundary_bytes);
        }
        ++ways[plan.way];
        std::string broken;
        Runs named;
        if (plan.way == Way::kBounce) {
          ASSERT_LE(plan.bytes, limits.bounce_bytes);
        } else if (plan.way == Way::kPrp) {
          PrpPair pair{};
          ASSERT_EQ(point_by_prp(ranges, list, pair), PrpStatus::kOk);
          named = reader.prp(pair, plan.bytes, &broken);
        } else {
          ASSERT_NE(limits.sgl, SglRule::kNone);
          SglDescriptor descriptor{};
          ASSERT_EQ(point_by_sgl(limits, ranges, list, descriptor), SglStatus::kOk);
          named = reader.sgl(descriptor, limits.sgl == SglRule::kDword, limits.sgl_blocks, plan.bytes, &broken);
        }
        ASSERT_EQ(broken, "");
        if (plan.way != Way::kBounce) {
          ASSERT_TRUE(named == runs_of(memory, moved, plan.bytes)) << "request " << done;
        }
        advance(memory, at, plan.bytes);
        moved += plan.bytes;
        offset += plan.bytes;
      }
    }
    EXPECT_TRUE(registered.revoke());
  }
  for (const Way way : {Way::kPrp, Way::kSgl, Way::kBounce}) EXPECT_GT(ways[way], static_cast<std::uint64_t>(requests));
}

struct Planned {
  Way way;
  std::uint64_t bytes;
  bool operator==(const Planned&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Planned& plan) {
  return out << "way " << int(plan.way) << ", " << plan.bytes << " bytes";
}

class NvmeDriverPlanOf : public ::testing::Test {
 protected:
  NvmeDriverPlanOf() : host(space), registered(space), memory(16 << 20), plain(1 << 20) {
    EXPECT_TRUE(registered.add(host, memory.data(), memory.size()));
    limits.block_bytes = 4096;
    limits.max_bytes = 8 << 20;
    limits.bounce_bytes = 128 << 10;
    limits.sgl_blocks = 16;
  }
  Planned plan(std::vector<iovec> pieces, std::uint64_t offset = 0) {
    std::vector<PlanRange> ranges;
    const CommandPlan made = plan_command(limits, *registered.table(), offset, pieces, {}, total_bytes(pieces), ranges);
    return {made.way, made.bytes};
  }
  iovec at(std::size_t offset, std::size_t bytes) { return {memory.data() + offset, bytes}; }
  iovec other(std::size_t offset, std::size_t bytes) { return {plain.data() + offset, bytes}; }

  DmaSpace space;
  HostMemory host;
  RegisteredMemory registered;
  AlignedBuffer memory, plain;
  PlanLimits limits;
};

TEST_F(NvmeDriverPlanOf, OneRange) {
  EXPECT_EQ(plan({at(0, 4096)}), (Planned{Way::kPrp, 4096}));
  EXPECT_EQ(plan({at(4, 1 << 20)}), (Planned{Way::kPrp, 1 << 20}));
  EXPECT_EQ(plan({at(2, 1 << 20)}), (Planned{Way::kBounce, 128 << 10}));
  EXPECT_EQ(plan({at(0, 2 << 20)}), (Planned{Way::kPrp, 2 << 20}));
  EXPECT_EQ(plan({at(0, 3 << 20)}), (Planned{Way::kPrp, 513 * 4096})) << "as far as a list of one page reaches";
  limits.sgl = SglRule::kAnyAlignment;
  EXPECT_EQ(plan({at(0, 8192)}), (Planned{Way::kPrp, 8192}));
  EXPECT_EQ(plan({at(0, 12288)}), (Planned{Way::kSgl, 12288}));
  EXPECT_EQ(plan({at(2, 8 << 20)}), (Planned{Way::kSgl, 8 << 20}));
  limits.sgl = SglRule::kDword;
  EXPECT_EQ(plan({at(2, 1 << 20)}), (Planned{Way::kBounce, 128 << 10}));
}

TEST_F(NvmeDriverPlanOf, SeveralRanges) {
  const std::vector<iovec> pages = {at(8192, 8192), at(1 << 20, 65536), at(0, 4096)};
  const std::vector<iovec> odd = {at(8192, 65536 + 100), at(1 << 20, 65536 - 100)};
  EXPECT_EQ(plan(pages), (Planned{Way::kPrp, 77824})) << "each page is used to its end";
  EXPECT_EQ(plan(odd), (Planned{Way::kPrp, 65536})) << "the rest of the first range is no page";
  limits.sgl = SglRule::kDword;
  EXPECT_EQ(plan(odd), (Planned{Way::kSgl, 131072}));
  limits.sgl_blocks = 1;
  EXPECT_EQ(plan(odd), (Planned{Way::kSgl, 65536}));
}

TEST_F(NvmeDriverPlanOf, RegisteredAndOtherMemory) {
  EXPECT_EQ(plan({other(0, 65536), at(0, 65536)}), (Planned{Way::kBounce, 65536}));
  EXPECT_EQ(plan({at(0, 65536), other(0, 65536)}), (Planned{Way::kPrp, 65536}));
  EXPECT_EQ(plan({other(0, 2048), at(0, 63488)}), (Planned{Way::kBounce, 65536}));
}

TEST_F(NvmeDriverPlanOf, LittlePiecesAreCopiedTogether) {
  limits.block_bytes = 512;
  EXPECT_EQ(plan({at(0, 512), other(0, 512), at(8192, 512), other(4096, 512)}), (Planned{Way::kBounce, 2048}));
  EXPECT_EQ(plan({at(0, 512)}), (Planned{Way::kPrp, 512}));
}

TEST_F(NvmeDriverPlanOf, BoundariesAreKept) {
  limits.boundary_bytes = 65536;
  EXPECT_EQ(plan({at(0, 1 << 20)}, 61440), (Planned{Way::kPrp, 4096}));
  EXPECT_EQ(plan({at(0, 1 << 20)}, 65536), (Planned{Way::kPrp, 65536}));
  EXPECT_EQ(plan({other(0, 1 << 20)}, 57344), (Planned{Way::kBounce, 8192}));
}

}  // namespace
}  // namespace tardis::nvme
