// SPDX-License-Identifier: Apache-2.0
// sgl.h against a controller's reading of SGLs, written from the specification alone, and against hand-made vectors.
#include "nvme/sgl.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <vector>

#include "nvme_pointers.h"
#include "nvme_sgl_reader.h"
#include "nvme_sgl_vectors.h"

namespace tardis::nvme {

inline void PrintTo(SglStatus status, std::ostream* out) { *out << name_of(status); }
inline void PrintTo(const SglDescriptor& descriptor, std::ostream* out) {
  *out << std::hex << "type 0x" << int{descriptor.type} << ", 0x" << descriptor.address << "+0x" << descriptor.length
       << std::dec;
}

namespace {

using namespace testing::pointers;

static_assert(std::is_trivially_copyable_v<SglTable>);

bool same(const SglDescriptor& a, const SglDescriptor& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

const SglDescriptor kPoison = {0xabadcafeabadcafe, 0xabadcafe, {0xab, 0xad, 0xca}, 0xfe};

// Neighbours made one: how a transfer is cut into blocks is not what it moves.
void join(std::vector<Piece>& pieces) {
  std::size_t kept = 0;
  for (const Piece& piece : pieces) {
    if (kept > 0 && pieces[kept - 1].address + pieces[kept - 1].length == piece.address) {
      pieces[kept - 1].length += piece.length;
    } else {
      pieces[kept++] = piece;
    }
  }
  pieces.resize(kept);
}

SglStatus status_of(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(SglStatus::kGranule); ++i) {
    if (name == name_of(static_cast<SglStatus>(i))) return static_cast<SglStatus>(i);
  }
  ADD_FAILURE() << "no status is named '" << name << "'";
  return SglStatus::kOk;
}

// Pieces of descriptor memory with guards around each.
class GuardedDescriptors {
 public:
  static constexpr std::uint32_t kGuard = 4;
  explicit GuardedDescriptors(std::size_t count) : entries_(count, kPoison) {}

  void clear() { used_ = kGuard; }
  SglDescriptor* take(std::uint32_t count) {
    SglDescriptor* piece = entries_.data() + used_;
    used_ += count + kGuard;
    EXPECT_LE(used_, entries_.size());
    return piece;
  }
  // Is everything around the pieces taken, and in them, as it was at first?
  bool clean() const {
    return std::all_of(entries_.begin(), entries_.begin() + static_cast<std::ptrdiff_t>(used_),
                       [](const SglDescriptor& entry) { return same(entry, kPoison); });
  }

 private:
  std::vector<SglDescriptor> entries_;
  std::size_t used_ = kGuard;
};

SglRules rules_of(const Vector& vector) {
  return SglRules::of(static_cast<std::uint32_t>(vector.value("sgls")),
                      static_cast<std::uint8_t>(vector.value("msdbd")));
}

// A controller with the vector's own descriptors in its memory.
struct VectorReader : SglReader {
  std::uint16_t answer = 0;

  explicit VectorReader(const Vector& vector) {
    sgls = static_cast<std::uint32_t>(vector.value("sgls"));
    msdbd = static_cast<std::uint32_t>(vector.value("msdbd"));
    std::vector<Placed> placed = segments_of(vector);
    BusMemory<SglDescriptor> memory;
    for (Placed& each : placed) memory.add(each.bus, &each.descriptor, 1);
    answer = walk(memory, descriptor_of(vector.text("sgl1")), vector.value("transfer"));
  }
};

// A vector's descriptor memory, and what the builder makes in it.
struct VectorBuild {
  GuardedDescriptors memory{64};
  std::vector<SglMemory> given;
  BusMemory<SglDescriptor> bus;
  SglDescriptor descriptor = kPoison;
  SglStatus status;

  explicit VectorBuild(const Vector& vector) {
    for (const std::string& text : split(vector.text("memory"), ',')) {
      const std::size_t star = text.find('*');
      const auto count = static_cast<std::uint32_t>(number(text.substr(star + 1)));
      given.push_back({memory.take(count), number(text.substr(0, star)), count});
      bus.add(given.back().bus, given.back().entries, count);
    }
    const std::vector<SglRange> blocks = blocks_of(vector);
    status = build_sgl(rules_of(vector), blocks.data(), static_cast<std::uint32_t>(blocks.size()),
                       vector.value("transfer"), given.data(), static_cast<std::uint32_t>(given.size()), descriptor);
  }
};

TEST(NvmeSglVectors, Build) {
  int seen = 0;
  for (const Vector& vector : read_vectors("nvme_sgl_vectors.txt")) {
    if (vector.kind != "build") continue;
    SCOPED_TRACE(vector.name);
    ++seen;
    const VectorBuild built(vector);
    ASSERT_EQ(built.status, SglStatus::kOk);
    EXPECT_TRUE(same(built.descriptor, descriptor_of(vector.text("sgl1"))))
        << ::testing::PrintToString(built.descriptor);
    for (const Placed& placed : segments_of(vector)) {
      SglDescriptor* found = built.bus.at(placed.bus);
      ASSERT_NE(found, nullptr) << placed.bus;
      EXPECT_TRUE(same(*found, placed.descriptor)) << "at " << placed.bus << ": " << ::testing::PrintToString(*found);
      *found = kPoison;
    }
    EXPECT_TRUE(built.memory.clean()) << "more was written than the list has";

    const VectorReader reader(vector);
    EXPECT_EQ(reader.answer, kScSuccess);
    EXPECT_EQ(reader.untidy, nullptr) << reader.untidy;
    EXPECT_EQ(reader.pieces, pieces_of(vector));
  }
  EXPECT_GE(seen, 15);
}

TEST(NvmeSglVectors, Refuse) {
  int seen = 0;
  for (const Vector& vector : read_vectors("nvme_sgl_vectors.txt")) {
    if (vector.kind != "refuse") continue;
    SCOPED_TRACE(vector.name);
    ++seen;
    const VectorBuild built(vector);
    EXPECT_EQ(built.status, status_of(vector.text("status")));
    EXPECT_TRUE(same(built.descriptor, kPoison));
    EXPECT_TRUE(built.memory.clean());
  }
  EXPECT_GE(seen, 15);
}

// A table in guarded memory.
class GuardedTable {
 public:
  SglTable table;

  GuardedTable(const SglRules& rules, std::uint64_t region_bytes, std::uint64_t granule, std::uint64_t bus)
      : count_(SglTable::memory_bytes(region_bytes, granule) / 16),
        entries_(count_ + 2 * kGuard, kPoison),
        status_(SglTable::make(rules, region_bytes, granule, entries_.data() + kGuard, bus, count_ * 16, table)) {
    memory_.add(bus, entries_.data() + kGuard, count_);
  }
  SglStatus status() const { return status_; }
  const BusMemory<SglDescriptor>& memory() const { return memory_; }
  bool guards_clean() const {
    const auto poisoned = [](const SglDescriptor& entry) { return same(entry, kPoison); };
    return std::all_of(entries_.begin(), entries_.begin() + kGuard, poisoned) &&
           std::all_of(entries_.end() - kGuard, entries_.end(), poisoned);
  }

 private:
  static constexpr std::ptrdiff_t kGuard = 8;
  std::size_t count_;
  std::vector<SglDescriptor> entries_;
  BusMemory<SglDescriptor> memory_;
  SglStatus status_;
};

// What [offset, offset + length) of a region is, granule by granule, with neighbours joined.
template <class GranuleAddress>
void naive_pieces(const GranuleAddress& granule_address, std::uint64_t granule, std::uint64_t offset,
                  std::uint64_t length, std::vector<Piece>& pieces) {
  pieces.clear();
  for (const std::uint64_t end = offset + length; offset < end;) {
    const std::uint64_t next = std::min(end, (offset / granule + 1) * granule);
    pieces.push_back({granule_address(offset / granule) + offset % granule, next - offset});
    offset = next;
  }
  join(pieces);
}

TEST(NvmeSglVectors, Table) {
  int seen = 0;
  for (const Vector& vector : read_vectors("nvme_sgl_vectors.txt")) {
    if (vector.kind != "table") continue;
    SCOPED_TRACE(vector.name);
    ++seen;
    const std::string granules = vector.text("granules");
    const std::vector<std::string> listed = split(granules, ',');
    const auto granule_address = [&](std::uint64_t i) {
      return listed.size() > 1 ? number(listed.at(i)) : AddressRule(granules)(i);
    };
    const std::uint64_t granule = vector.value("granule");
    GuardedTable guarded(rules_of(vector), vector.value("bytes"), granule, vector.value("table"));
    ASSERT_EQ(guarded.status(), SglStatus::kOk);
    ASSERT_EQ(guarded.table.fill(granule_address), SglStatus::kOk);
    const std::uint64_t offset = vector.value("offset"), length = vector.value("length");
    EXPECT_EQ(guarded.table.longest(offset, length), vector.value("longest"));
    SglDescriptor descriptor = kPoison;
    const SglStatus status = guarded.table.describe(offset, length, descriptor);
    if (vector.has("status")) {
      EXPECT_EQ(status, status_of(vector.text("status")));
      EXPECT_TRUE(same(descriptor, kPoison));
      continue;
    }
    ASSERT_EQ(status, SglStatus::kOk);
    EXPECT_TRUE(same(descriptor, descriptor_of(vector.text("sgl1")))) << ::testing::PrintToString(descriptor);
    SglReader reader;
    EXPECT_EQ(reader.walk(guarded.memory(), descriptor, length), kScSuccess);
    join(reader.pieces);
    std::vector<Piece> pieces;
    naive_pieces(granule_address, granule, offset, length, pieces);
    EXPECT_EQ(reader.pieces, pieces);
  }
  EXPECT_GE(seen, 20);
}

// What the other tests measure by must itself refuse what a controller refuses.
TEST(NvmeSglVectors, Walk) {
  int seen = 0;
  for (const Vector& vector : read_vectors("nvme_sgl_vectors.txt")) {
    if (vector.kind != "walk") continue;
    SCOPED_TRACE(vector.name);
    ++seen;
    const VectorReader reader(vector);
    EXPECT_TRUE(vector.allows(reader.answer)) << "answered " << std::hex << reader.answer;
    if (reader.answer == kScSuccess) {
      EXPECT_EQ(reader.pieces, pieces_of(vector));
    }
  }
  EXPECT_GE(seen, 18);
}

TEST(NvmeSglVectors, Choose) {
  int seen = 0;
  for (const Vector& vector : read_vectors("nvme_sgl_vectors.txt")) {
    if (vector.kind != "choose") continue;
    SCOPED_TRACE(vector.name);
    ++seen;
    const DataPointer chosen = choose_data_pointer(static_cast<std::uint32_t>(vector.value("sgls")),
                                                   static_cast<std::uint8_t>(vector.value("msdbd")),
                                                   vector.value("max"), vector.value("granule"));
    EXPECT_EQ(chosen == DataPointer::kSgl ? "sgl" : "prp", vector.text("pointer"));
  }
  EXPECT_GE(seen, 12);
}

// How many pieces of descriptor memory `blocks` blocks take, one by one; 0 if all of them do not suffice.
std::size_t naive_segments(std::uint32_t blocks, const std::vector<std::uint32_t>& counts) {
  for (std::size_t used = 0; used < counts.size(); ++used) {
    if (blocks <= counts[used]) return used + 1;
    blocks -= counts[used] - 1;
  }
  return 0;
}

TEST(NvmeSgl, BuilderAgainstAControllersReading) {
  constexpr std::uint32_t kMostBlocks = 700;
  GuardedDescriptors memory(3 * kMostBlocks);
  BusMemory<SglDescriptor> bus;
  SglReader reader;
  std::vector<SglRange> ranges;
  std::vector<SglMemory> given;
  std::vector<std::uint32_t> counts;
  std::vector<Piece> expected;
  Random random(3);
  std::uint64_t chained = 0, short_of_memory = 0;
  for (std::uint64_t i = 0, cases = campaign(1'000'000); i < cases; ++i) {
    reader.sgls = random.one_in(2) ? kSglDword : kSglAnyAlignment;
    const std::uint64_t unit = reader.sgls == kSglDword ? 4 : 1;
    const auto blocks = static_cast<std::uint32_t>(random.one_in(200)  ? random.between(1, kMostBlocks)
                                                   : random.one_in(10) ? random.between(1, 64)
                                                                       : random.between(1, 6));
    reader.msdbd = random.one_in(3) && blocks <= 255 ? blocks : 0;
    ranges.clear();
    expected.clear();
    std::uint64_t transfer = 0;
    for (std::uint32_t block = 0; block < blocks; ++block) {
      const std::uint64_t length = random.between(1, 1 << 18) * unit, address = random() % (0 - length) / unit * unit;
      ranges.push_back({address, length});
      expected.push_back({address, length});
      transfer += length;
    }
    memory.clear();
    bus.clear();
    given.clear();
    counts.clear();
    const auto most = random.one_in(4) ? blocks : static_cast<std::uint32_t>(random.between(1, blocks > 64 ? 64 : 8));
    for (std::uint32_t total = 0; given.size() < 40 && total < blocks + 8;) {
      const auto count = static_cast<std::uint32_t>(random.between(1, most));
      given.push_back({memory.take(count), random() % (UINT64_MAX - 0x10000) & ~std::uint64_t{7}, count});
      bus.add(given.back().bus, given.back().entries, count);
      counts.push_back(count);
      total += count;
    }
    const std::size_t segments = naive_segments(blocks, counts);
    SglDescriptor descriptor = kPoison;
    const SglStatus status =
        build_sgl(SglRules::of(reader.sgls, static_cast<std::uint8_t>(reader.msdbd)), ranges.data(), blocks, transfer,
                  given.data(), static_cast<std::uint32_t>(given.size()), descriptor);
    if (blocks > 1 && segments == 0) {
      ASSERT_EQ(status, SglStatus::kMemoryTooSmall) << "case " << i;
      ASSERT_TRUE(same(descriptor, kPoison) && memory.clean()) << "case " << i;
      ++short_of_memory;
      continue;
    }
    ASSERT_EQ(status, SglStatus::kOk) << "case " << i;
    ASSERT_EQ(reader.walk(bus, descriptor, transfer), kScSuccess) << "case " << i;
    ASSERT_EQ(reader.untidy, nullptr) << "case " << i << ": " << reader.untidy;
    ASSERT_EQ(reader.pieces, expected) << "case " << i;
    ASSERT_EQ(reader.read.size(), blocks == 1 ? 0 : blocks + segments - 1) << "case " << i;
    for (SglDescriptor* entry : reader.read) *entry = kPoison;
    ASSERT_TRUE(memory.clean()) << "case " << i << ": more was written than the list has";
    chained += blocks > 1 && segments > 1 ? 1 : 0;
  }
  EXPECT_GT(chained, 0u);
  EXPECT_GT(short_of_memory, 0u);
}

TEST(NvmeSgl, TableAgainstAControllersReading) {
  constexpr std::uint64_t kQueries = 1000;
  SglReader reader;
  std::vector<Piece> expected, found;
  Random random(4);
  std::uint64_t inline_ones = 0, table_ones = 0, split_ones = 0;
  for (std::uint64_t done = 0, cases = campaign(1'000'000); done < cases; done += kQueries) {
    const std::uint64_t granule = std::uint64_t{kPageBytes} << random.below(6);
    reader.sgls = random.one_in(2) ? kSglDword : kSglAnyAlignment;
    reader.msdbd = random.one_in(2) ? 0 : static_cast<std::uint32_t>(random.between(1, 20));
    const std::uint64_t unit = reader.sgls == kSglDword ? 4 : 1;
    const std::uint64_t granules = random.between(1, 400);
    const std::uint64_t bytes = granules * granule - (random.one_in(2) ? 0 : random.below(granule / 4) * 4);
    // Every second granule or so follows the one before it; all of them do, or none.
    const std::uint64_t seed = random(), habit = random.below(3);
    std::vector<std::uint64_t> addresses;
    for (std::uint64_t i = 0; i < granules; ++i) {
      const bool follows = i > 0 && (habit == 0 || (habit == 1 && Random::mix(seed ^ i) % 2 == 0));
      addresses.push_back(follows ? addresses.back() + granule : (random() >> 8) / granule * granule);
    }
    const auto granule_address = [&](std::uint64_t i) { return addresses[i]; };
    GuardedTable guarded(SglRules::of(reader.sgls, static_cast<std::uint8_t>(reader.msdbd)), bytes, granule,
                         random() >> 1 & ~std::uint64_t{7});
    ASSERT_EQ(guarded.status(), SglStatus::kOk);
    ASSERT_EQ(guarded.table.fill(granule_address), SglStatus::kOk);
    ASSERT_TRUE(guarded.guards_clean());
    const SglTable& table = guarded.table;
    for (std::uint64_t query = 0; query < kQueries; ++query) {
      std::uint64_t offset = random.below(bytes / unit) * unit;
      if (random.one_in(2)) offset = offset / granule * granule;
      std::uint64_t length = std::min(random.between(1, 24 * granule / unit) * unit, bytes - offset);
      if (random.one_in(2) && length >= granule && offset + length < bytes) length = length / granule * granule;
      SglDescriptor at_once = kPoison;
      ASSERT_EQ(table.describe(offset, length, at_once) == SglStatus::kOk, table.longest(offset, length) == length)
          << length << " bytes from " << offset;
      found.clear();
      int commands = 0;
      for (std::uint64_t at = offset, left = length; left > 0; ++commands) {
        const std::uint64_t step = table.longest(at, left);
        ASSERT_TRUE(step > 0 && step <= left);
        SglDescriptor descriptor = kPoison;
        ASSERT_EQ(table.describe(at, step, descriptor), SglStatus::kOk);
        ASSERT_EQ(reader.walk(guarded.memory(), descriptor, step), kScSuccess) << step << " bytes from " << at;
        ASSERT_EQ(reader.untidy, nullptr) << reader.untidy;
        (descriptor.type == 0 ? inline_ones : table_ones) += 1;
        found.insert(found.end(), reader.pieces.begin(), reader.pieces.end());
        at += step;
        left -= step;
      }
      join(found);
      naive_pieces(granule_address, granule, offset, length, expected);
      ASSERT_EQ(found, expected) << length << " bytes from " << offset;
      // One command where one can do it, and three wherever MSDBD has no part in it.
      const bool whole = offset % granule == 0 && (length % granule == 0 || offset + length == bytes);
      const std::uint64_t blocks = (length + granule - 1) / granule;
      if (expected.size() == 1 || (whole && (reader.msdbd == 0 || blocks <= reader.msdbd))) {
        ASSERT_EQ(commands, 1) << length << " bytes from " << offset;
      }
      ASSERT_TRUE(commands <= 3 || reader.msdbd != 0) << length << " bytes from " << offset;
      split_ones += commands > 1 ? 1 : 0;
    }
  }
  EXPECT_GT(inline_ones, 0u);
  EXPECT_GT(table_ones, 0u);
  EXPECT_GT(split_ones, 0u);
}

TEST(NvmeSgl, TableMemory) {
  constexpr std::uint64_t kPool = std::uint64_t{60} << 30;
  const std::uint64_t bytes = SglTable::memory_bytes(kPool);
  std::printf("SGL table of a 60 GiB pool: %.2f MiB\n", static_cast<double>(bytes) / (1 << 20));
  EXPECT_LE(bytes, 15u << 20);

  std::vector<SglDescriptor> entries(4);
  SglTable table;
  const SglRules any = SglRules::of(kSglAnyAlignment, 0), dword = SglRules::of(kSglDword, 0);
  const auto make = [&](const SglRules& rules, std::uint64_t region, std::uint64_t granule, std::uint64_t bus,
                        std::uint64_t size) {
    return SglTable::make(rules, region, granule, entries.data(), bus, size, table);
  };
  EXPECT_EQ(make(any, 0x30001, 0x10000, 0x1008, 64), SglStatus::kOk);
  EXPECT_EQ(table.granules(), 4u);
  EXPECT_EQ(make(any, 0x40001, 0x10000, 0x1008, 64), SglStatus::kMemoryTooSmall);
  ASSERT_EQ(make(any, 0x40000, 0x10000, 0x1008, 64), SglStatus::kOk);
  ASSERT_EQ(table.fill_contiguous(0x10000000), SglStatus::kOk);
  EXPECT_EQ(table.longest(0x20000, 0x20000), 0x20000u) << "a sanitizer would see a read behind the table";
  EXPECT_EQ(make(any, 0x30000, 0x10000, 0x1004, 64), SglStatus::kAlignment);
  EXPECT_EQ(make(any, 0x20000, 0x10000, 0xfffffffffffffff0, 64), SglStatus::kOverflow);
  EXPECT_EQ(make(any, 0, 0x10000, 0x1000, 64), SglStatus::kNoBytes);
  EXPECT_EQ(make(dword, 0x30002, 0x10000, 0x1000, 64), SglStatus::kGranularity);
  for (const std::uint64_t granule :
       {std::uint64_t{0}, std::uint64_t{2048}, std::uint64_t{0x18000}, std::uint64_t{1} << 32}) {
    EXPECT_EQ(make(any, 0x10000, granule, 0x1000, 64), SglStatus::kGranule) << granule;
  }
}

TEST(NvmeSgl, TableRefusesGranules) {
  GuardedTable guarded(SglRules::of(kSglDword, 0), 0x18000, 0x10000, 0x50000000);
  EXPECT_EQ(guarded.table.set_granule(1, 0x10000000), SglStatus::kOk);
  EXPECT_EQ(guarded.table.set_granule(2, 0x10000000), SglStatus::kOutOfRange);
  EXPECT_EQ(guarded.table.set_granule(0, 0x10000002), SglStatus::kGranularity);
  EXPECT_EQ(guarded.table.set_granule(0, 0xffffffffffff0004), SglStatus::kOverflow);
  EXPECT_EQ(guarded.table.set_granule(1, 0xffffffffffff8000), SglStatus::kOk) << "the last granule is a short one";
  EXPECT_EQ(guarded.table.fill_contiguous(0x10000000), SglStatus::kOk);
  SglDescriptor descriptor = kPoison;
  EXPECT_EQ(guarded.table.describe(0, 0x18000, descriptor), SglStatus::kOk);
  EXPECT_TRUE(same(descriptor, {0x10000000, 0x18000, {}, 0})) << ::testing::PrintToString(descriptor);

  // The same table through another mapping of its memory.
  std::vector<SglDescriptor> copy = {{0x20000000, 0x10000, {}, 0}, {0x30000000, 0x8000, {}, 0}};
  EXPECT_EQ(guarded.table.seen_at(copy.data()).describe(0x10000, 512, descriptor), SglStatus::kOk);
  EXPECT_EQ(descriptor.address, 0x30000000u);
}

// Lengths are 32 bits: more is several commands, however contiguous it is.
TEST(NvmeSgl, TableBeyondFourGiB) {
  constexpr std::uint64_t kGranule = std::uint64_t{1} << 31, kRegion = 5 * kGranule;
  GuardedTable guarded(SglRules::of(kSglAnyAlignment, 0), kRegion, kGranule, 0x50000000);
  ASSERT_EQ(guarded.status(), SglStatus::kOk);
  ASSERT_EQ(guarded.table.fill_contiguous(kGranule), SglStatus::kOk);
  SglReader reader;
  SglDescriptor descriptor = kPoison;
  EXPECT_EQ(guarded.table.describe(0, kRegion, descriptor), SglStatus::kLength);
  const std::uint64_t step = guarded.table.longest(0, kRegion);
  EXPECT_GE(step, kGranule);
  ASSERT_EQ(guarded.table.describe(0, step, descriptor), SglStatus::kOk);
  EXPECT_EQ(reader.walk(guarded.memory(), descriptor, step), kScSuccess);
  EXPECT_EQ(reader.pieces, (std::vector<Piece>{{kGranule, step}}));
}

}  // namespace
}  // namespace tardis::nvme
