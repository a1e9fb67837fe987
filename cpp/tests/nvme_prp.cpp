// SPDX-License-Identifier: Apache-2.0
// prp.h against a controller's reading of PRPs, written from the specification alone, and against hand-made vectors.
#include "nvme/prp.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <type_traits>
#include <vector>

#include "nvme_pointers.h"
#include "nvme_prp_vectors.h"

namespace tardis::nvme {

inline void PrintTo(PrpStatus status, std::ostream* out) { *out << name_of(status); }

namespace {

using namespace testing::pointers;

constexpr std::uint64_t kPage = kPageBytes;
constexpr std::uint64_t kPoison = 0xabadcafeabadcafe;  // no page address: bits 11:0 are not 0

static_assert(std::is_trivially_copyable_v<PrpTable>);

// Reads a command's PRPs as a controller does (4.3.1).
struct PrpReader {
  std::vector<Piece> pieces;
  std::vector<std::uint64_t*> read;  // qwords of list memory, in the order of reading
  const char* untidy = nullptr;      // what a controller need not mind, but a driver must not do

  // What the controller answers.
  std::uint16_t walk(const BusMemory<std::uint64_t>& memory, const PrpPair& pointer, std::uint64_t length) {
    pieces.clear();
    read.clear();
    untidy = nullptr;
    if (pointer.prp1 % 4 != 0) return kScPrpOffsetInvalid;
    std::uint64_t left = length;
    take(pointer.prp1, kPage - pointer.prp1 % kPage, left);
    if (left == 0) {
      if (pointer.prp2 != 0) untidy = "PRP2 is reserved if the data is in one page";
      return kScSuccess;
    }
    if (left <= kPage) {
      if (pointer.prp2 % kPage != 0) return kScPrpOffsetInvalid;
      take(pointer.prp2, kPage, left);
      return kScSuccess;
    }
    if (pointer.prp2 % 8 != 0) return kScPrpOffsetInvalid;
    for (std::uint64_t at = pointer.prp2; left > 0; at += 8) {
      std::uint64_t* word = memory.at(at);
      if (word == nullptr) return kScDataTransferError;
      read.push_back(word);
      if (at % kPage == kPage - 8 && left > kPage) {
        if (*word % kPage != 0) return kScPrpOffsetInvalid;
        at = *word;
        word = memory.at(at);
        if (word == nullptr) return kScDataTransferError;
        read.push_back(word);
      }
      if (*word % kPage != 0) return kScPrpOffsetInvalid;
      take(*word, kPage, left);
    }
    return kScSuccess;
  }

 private:
  void take(std::uint64_t address, std::uint64_t most, std::uint64_t& left) {
    const std::uint64_t length = std::min(most, left);
    pieces.push_back({address, length});
    left -= length;
  }
};

// A status by its name in the files, so that a renamed enumerator is no silent change.
PrpStatus status_of(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(PrpStatus::kBridge); ++i) {
    if (name == name_of(static_cast<PrpStatus>(i))) return static_cast<PrpStatus>(i);
  }
  ADD_FAILURE() << "no status is named '" << name << "'";
  return PrpStatus::kOk;
}

// List memory, page by page, with a page in front of each and behind the last that nothing may write.
class GuardedLists {
 public:
  explicit GuardedLists(std::size_t pages) : words_((2 * pages + 1) * kPrpSlots, kPoison) {}

  std::uint64_t* page(std::size_t index) { return words_.data() + (2 * index + 1) * kPrpSlots; }
  // Is everything around the first `pages` pages, and in them, as it was at first?
  bool clean(std::size_t pages) const {
    const std::size_t count = (2 * pages + 1) * kPrpSlots;
    std::uint64_t differing = 0;  // without a branch, for speed
    for (std::size_t i = 0; i < count; ++i) differing |= words_[i] ^ kPoison;
    return differing == 0;
  }

 private:
  std::vector<std::uint64_t> words_;
};

// The lists of a `build` vector's builder.
struct VectorLists {
  std::vector<PrpList> lists;
  GuardedLists memory{4};
  BusMemory<std::uint64_t> bus;

  explicit VectorLists(const std::vector<std::string>& addresses) {
    EXPECT_LE(addresses.size(), 4u);
    for (const std::string& text : addresses) {
      const std::uint64_t address = number(text), slot = address % kPage / 8;
      lists.push_back({memory.page(lists.size()) + slot, address});
      bus.add(address, lists.back().words, kPrpSlots - slot);
    }
  }
  PrpStatus build(const Vector& vector, PrpPair& pointer) const {
    return build_prp(AddressRule(vector.text("pages")), vector.value("offset"), vector.value("length"), lists.data(),
                     static_cast<std::uint32_t>(lists.size()), pointer);
  }
};

// A controller with the vector's own words in its memory.
struct VectorReader : PrpReader {
  std::uint16_t answer = 0;

  explicit VectorReader(const Vector& vector) {
    std::vector<Word> words = words_of(vector);
    BusMemory<std::uint64_t> memory;
    for (Word& word : words) memory.add(word.bus, &word.value, 1);
    answer = walk(memory, {vector.value("prp1"), vector.value("prp2")}, vector.value("length"));
  }
};

TEST(NvmePrpVectors, Build) {
  int seen = 0;
  for (const Vector& vector : read_vectors("nvme_prp_vectors.txt")) {
    if (vector.kind != "build") continue;
    SCOPED_TRACE(vector.name);
    ++seen;
    VectorLists lists(split(vector.text("lists"), ','));
    PrpPair pointer = {kPoison, kPoison};
    ASSERT_EQ(lists.build(vector, pointer), PrpStatus::kOk);
    EXPECT_EQ(pointer.prp1, vector.value("prp1"));
    EXPECT_EQ(pointer.prp2, vector.value("prp2"));
    for (const Word& word : words_of(vector)) {
      std::uint64_t* found = lists.bus.at(word.bus);
      ASSERT_NE(found, nullptr) << word.bus;
      ASSERT_EQ(*found, word.value) << "at bus address " << word.bus;
      *found = kPoison;
    }
    EXPECT_TRUE(lists.memory.clean(4)) << "more was written than the list has";

    const VectorReader reader(vector);
    EXPECT_EQ(reader.answer, kScSuccess);
    EXPECT_EQ(reader.untidy, nullptr) << reader.untidy;
    std::vector<Piece> pieces;
    naive_pieces(AddressRule(vector.text("pages")), vector.value("offset"), vector.value("length"), pieces);
    EXPECT_EQ(reader.pieces, pieces);
  }
  EXPECT_GE(seen, 30);
}

TEST(NvmePrpVectors, Refuse) {
  int seen = 0;
  for (const Vector& vector : read_vectors("nvme_prp_vectors.txt")) {
    if (vector.kind != "refuse") continue;
    SCOPED_TRACE(vector.name);
    ++seen;
    const VectorLists lists(split(vector.text("lists"), ','));
    PrpPair pointer = {kPoison, kPoison};
    EXPECT_EQ(lists.build(vector, pointer), status_of(vector.text("status")));
    EXPECT_TRUE(pointer.prp1 == kPoison && pointer.prp2 == kPoison);
    if (vector.text("status") == "list-too-small") {
      EXPECT_TRUE(lists.memory.clean(4));
    }
  }
  EXPECT_GE(seen, 15);
}

// A table in memory that is guarded like lists.
class GuardedTable {
 public:
  PrpTable table;

  GuardedTable(std::uint64_t region_bytes, std::uint32_t bridge, std::uint64_t bus)
      : bytes_(PrpTable::memory_bytes(region_bytes, bridge)),
        words_(bytes_ / 8 + 2 * kPrpSlots, kPoison),
        status_(PrpTable::make(region_bytes, bridge, {words_.data() + kPrpSlots, bus}, bytes_, table)) {
    memory_.add(bus, words_.data() + kPrpSlots, bytes_ / 8);
  }
  PrpStatus status() const { return status_; }
  const BusMemory<std::uint64_t>& memory() const { return memory_; }
  std::uint64_t bytes() const { return bytes_; }
  bool guards_clean() const {
    const auto poisoned = [](std::uint64_t word) { return word == kPoison; };
    return std::all_of(words_.begin(), words_.begin() + kPrpSlots, poisoned) &&
           std::all_of(words_.end() - kPrpSlots, words_.end(), poisoned);
  }
  // The longest run of a region's pages `first`, `first` + 1 ... in one page of table memory, sought by brute force.
  template <class PageAddress>
  std::uint64_t longest_run(const PageAddress& page_address, std::uint64_t first, std::uint64_t pages) const {
    std::uint64_t best = 0;
    const std::uint64_t* words = words_.data() + kPrpSlots;
    for (std::uint64_t slot = 0; slot < bytes_ / 8; ++slot) {
      if (words[slot] != page_address(first)) continue;
      std::uint64_t length = 1;
      while ((slot + length) % kPrpSlots != 0 && first + length < pages &&
             words[slot + length] == page_address(first + length)) {
        ++length;
      }
      best = std::max(best, length);
    }
    return best;
  }

 private:
  std::uint64_t bytes_;
  std::vector<std::uint64_t> words_;
  BusMemory<std::uint64_t> memory_;
  PrpStatus status_;
};

TEST(NvmePrpVectors, Table) {
  int seen = 0;
  for (const Vector& vector : read_vectors("nvme_prp_vectors.txt")) {
    if (vector.kind != "table") continue;
    SCOPED_TRACE(vector.name);
    ++seen;
    const AddressRule page_address(vector.text("pages"));
    GuardedTable guarded(vector.value("bytes"), static_cast<std::uint32_t>(vector.value("bridge")),
                         vector.value("table"));
    ASSERT_EQ(guarded.status(), PrpStatus::kOk);
    ASSERT_EQ(guarded.table.fill(page_address), PrpStatus::kOk);
    const std::uint64_t offset = vector.value("offset"), length = vector.value("length");
    EXPECT_EQ(guarded.table.longest(offset), vector.value("longest"));
    PrpPair pointer = {kPoison, kPoison};
    const PrpStatus status = guarded.table.describe(offset, length, pointer);
    if (vector.has("status")) {
      EXPECT_EQ(status, status_of(vector.text("status")));
      EXPECT_TRUE(pointer.prp1 == kPoison && pointer.prp2 == kPoison);
      continue;
    }
    ASSERT_EQ(status, PrpStatus::kOk);
    EXPECT_EQ(pointer.prp1, vector.value("prp1"));
    EXPECT_EQ(pointer.prp2, vector.value("prp2"));
    PrpReader reader;
    EXPECT_EQ(reader.walk(guarded.memory(), pointer, length), kScSuccess);
    std::vector<Piece> pieces;
    naive_pieces(page_address, offset, length, pieces);
    EXPECT_EQ(reader.pieces, pieces);
  }
  EXPECT_GE(seen, 20);
}

// What the other tests measure by must itself refuse what a controller refuses.
TEST(NvmePrpVectors, Walk) {
  int seen = 0;
  for (const Vector& vector : read_vectors("nvme_prp_vectors.txt")) {
    if (vector.kind != "walk") continue;
    SCOPED_TRACE(vector.name);
    ++seen;
    const VectorReader reader(vector);
    EXPECT_TRUE(vector.allows(reader.answer)) << "answered " << std::hex << reader.answer;
    if (reader.answer != kScSuccess) continue;
    std::vector<Piece> pieces;
    naive_pieces(AddressRule(vector.text("pages")), vector.value("prp1") % kPage, vector.value("length"), pieces);
    EXPECT_EQ(reader.pieces, pieces);
  }
  EXPECT_GE(seen, 7);
}

// A random bus address for every page, different for different pages in all likelihood.
struct ScatteredPages {
  std::uint64_t seed;
  std::uint64_t operator()(std::uint64_t page) const { return Random::mix(seed + page) & ~(kPage - 1); }
};

// How many pages of list memory a list takes, entry by entry.
std::size_t naive_list_pages(std::uint64_t entries, std::uint64_t first_slot) {
  std::size_t pages = 1;
  for (std::uint64_t slot = first_slot; entries > 0; ++slot, --entries) {
    if (slot == kPrpSlots - 1 && entries > 1) {
      ++pages;
      slot = 0;
    }
  }
  return pages;
}

TEST(NvmePrp, ListPagesOfEveryLengthAndStart) {
  for (std::uint64_t slot = 0; slot < kPrpSlots; ++slot) {
    for (std::uint64_t entries = 1; entries < 1600; entries += slot % 17 == 0 || slot > 500 ? 1 : 37) {
      ASSERT_EQ(prp_list_pages(entries, 0x40000000 + slot * 8), naive_list_pages(entries, slot))
          << entries << " entries from slot " << slot;
    }
  }
}

TEST(NvmePrp, BuilderAgainstAControllersReading) {
  constexpr std::size_t kMostLists = 6;
  GuardedLists memory(kMostLists);
  BusMemory<std::uint64_t> bus;
  PrpReader reader;
  std::vector<Piece> expected;
  Random random(1);
  std::uint64_t chained = 0, short_of_memory = 0;
  for (std::uint64_t i = 0, cases = campaign(1'000'000); i < cases; ++i) {
    const std::uint64_t shape = random.below(100);
    const std::uint64_t offset = random.one_in(2) ? 0 : random.below(kPage / 4) * 4;
    const std::uint64_t pages = shape < 60   ? random.between(1, 24)
                                : shape < 90 ? random.between(1, 4)
                                : shape < 97 ? random.between(1, 3) * 512 + random.below(6) - 2
                                             : random.between(25, 2000);
    const std::uint64_t length = (pages - 1) * kPage + random.between(1, kPage);
    const std::uint64_t slot = random.one_in(2) ? 0 : random.one_in(3) ? random.between(508, 511) : random.below(512);
    const std::uint64_t entries = (offset + length + kPage - 1) / kPage - 1;
    std::size_t needed = entries < 2 ? 0 : naive_list_pages(entries, slot);
    const bool too_few = needed > 0 && random.one_in(16);
    const std::size_t given = too_few ? needed - 1 : std::min(kMostLists, needed + random.below(2));

    PrpList lists[kMostLists];
    bus.clear();
    for (std::size_t list = 0; list < given; ++list) {
      const std::uint64_t start = list == 0 ? slot : 0;
      lists[list] = {memory.page(list) + start, (random() & ~(kPage - 1)) + start * 8};
      bus.add(lists[list].bus, lists[list].words, kPrpSlots - start);
    }
    const ScatteredPages page_address{random()};
    PrpPair pointer = {kPoison, kPoison};
    const PrpStatus status = build_prp(page_address, offset, length, lists, static_cast<std::uint32_t>(given), pointer);
    if (too_few) {
      ASSERT_EQ(status, PrpStatus::kListTooSmall) << "case " << i;
      ASSERT_TRUE(pointer.prp1 == kPoison && memory.clean(given)) << "case " << i;
      ++short_of_memory;
      continue;
    }
    ASSERT_EQ(status, PrpStatus::kOk) << "case " << i;
    ASSERT_EQ(reader.walk(bus, pointer, length), kScSuccess) << "case " << i;
    ASSERT_EQ(reader.untidy, nullptr) << "case " << i << ": " << reader.untidy;
    expected.clear();
    naive_pieces(page_address, offset, length, expected);
    ASSERT_EQ(reader.pieces, expected) << "case " << i;
    // Packed and minimal: a qword for every entry and every page after the first, and no other one is written.
    ASSERT_EQ(reader.read.size(), needed == 0 ? 0 : entries + needed - 1) << "case " << i;
    for (std::uint64_t* word : reader.read) *word = kPoison;
    ASSERT_TRUE(memory.clean(given)) << "case " << i << ": more was written than the list has";
    chained += needed > 1 ? 1 : 0;
  }
  EXPECT_GT(chained, 0u);
  EXPECT_GT(short_of_memory, 0u);
}

TEST(NvmePrp, TableAgainstAControllersReading) {
  constexpr std::uint32_t kBridges[] = {0, 2, 8, 64, 128, 256, 512};
  constexpr std::uint64_t kQueries = 2000;
  PrpReader reader;
  std::vector<Piece> expected, found;
  Random random(2);
  std::uint64_t split_ones = 0;
  for (std::uint64_t done = 0, cases = campaign(1'000'000); done < cases; done += kQueries) {
    const std::uint32_t bridge = kBridges[done / kQueries % std::size(kBridges)];
    const std::uint64_t pages =
        random.one_in(4) ? random.between(1, 4) * 512 + random.below(4) - 1 : random.between(1, 2600);
    const std::uint64_t bytes = pages * kPage - (random.one_in(2) ? 0 : random.below(kPage / 4) * 4);
    GuardedTable guarded(bytes, bridge, random() & ~(kPage - 1));
    ASSERT_EQ(guarded.status(), PrpStatus::kOk);
    const PrpTable& table = guarded.table;
    const ScatteredPages page_address{random()};
    ASSERT_EQ(guarded.table.fill(page_address), PrpStatus::kOk);
    ASSERT_TRUE(guarded.guards_clean());
    for (std::uint64_t query = 0; query < kQueries; ++query) {
      const std::uint64_t offset = random.below((bytes + 3) / 4) * 4;
      const std::uint64_t wanted = random.one_in(20) ? bytes : random.between(1, random.one_in(4) ? 2 << 20 : 80 << 10);
      const std::uint64_t length = std::min(wanted, bytes - offset);
      found.clear();
      int commands = 0;
      for (std::uint64_t at = offset, left = length; left > 0; ++commands) {
        const std::uint64_t longest = table.longest(at), step = std::min(longest, left);
        ASSERT_GT(step, 0u);
        PrpPair pointer = {};
        ASSERT_EQ(table.describe(at, longest + 1, pointer), PrpStatus::kTooLong);
        ASSERT_EQ(table.describe(at, step, pointer), PrpStatus::kOk);
        ASSERT_EQ(reader.walk(guarded.memory(), pointer, step), kScSuccess)
            << step << " bytes from " << at << ", bridge " << bridge;
        ASSERT_EQ(reader.untidy, nullptr) << reader.untidy;
        found.insert(found.end(), reader.pieces.begin(), reader.pieces.end());
        at += step;
        left -= step;
        ASSERT_TRUE(left == 0 || at % kPage == 0) << "a split within a page";
      }
      expected.clear();
      naive_pieces(page_address, offset, length, expected);
      ASSERT_EQ(found, expected) << length << " bytes from " << offset << ", bridge " << bridge;
      ASSERT_TRUE(commands == 1 || length > table.any_offset_bytes());
      split_ones += commands > 1 ? 1 : 0;
    }
  }
  EXPECT_GT(split_ones, 0u);
}

TEST(NvmePrp, TableMovesAsMuchInACommandAsItsMemoryAllows) {
  for (const std::uint32_t bridge : {0u, 2u, 128u, 512u}) {
    for (const std::uint64_t pages : {1, 2, 512, 513, 514, 1500}) {
      const ScatteredPages page_address{bridge + pages};
      GuardedTable guarded(pages * kPage, bridge, 0x50000000);
      for (std::uint64_t page = pages; page-- > 0;) {  // in no order that would make up for a stray store
        ASSERT_EQ(guarded.table.set_page(page, page_address(page)), PrpStatus::kOk);
      }
      ASSERT_TRUE(guarded.guards_clean()) << pages << " pages, bridge " << bridge;
      for (std::uint64_t page = 0; page < pages; ++page) {
        const std::uint64_t entries = page + 1 == pages ? 0 : guarded.longest_run(page_address, page + 1, pages);
        ASSERT_EQ(guarded.table.longest(page * kPage), (1 + entries) * kPage)
            << "page " << page << " of " << pages << ", bridge " << bridge;
      }
    }
  }
}

TEST(NvmePrp, TableMemory) {
  constexpr std::uint64_t kPool = std::uint64_t{60} << 30;
  const std::uint64_t bytes = PrpTable::memory_bytes(kPool);
  const double percent = 100.0 * static_cast<double>(bytes) / static_cast<double>(kPool);
  std::printf("PRP table of a 60 GiB pool: %.1f MiB, %.4f %% of it\n", static_cast<double>(bytes) / (1 << 20), percent);
  EXPECT_LE(percent, 0.25);
  EXPECT_EQ(PrpTable::memory_bytes(kPool, 0), kPool / 512);
  EXPECT_EQ(PrpTable::memory_bytes(1), kPage);
  EXPECT_EQ(PrpTable::memory_bytes(512 * kPage), kPage);
  EXPECT_EQ(PrpTable::memory_bytes(512 * kPage + 1), 3 * kPage);

  std::vector<std::uint64_t> words(3 * kPrpSlots);
  PrpTable table;
  const auto make = [&](std::uint64_t region, std::uint32_t bridge, std::uint64_t bus, std::uint64_t size) {
    return PrpTable::make(region, bridge, {words.data(), bus}, size, table);
  };
  EXPECT_EQ(make(513 * kPage, 128, 0x1000, 3 * kPage), PrpStatus::kOk);
  EXPECT_EQ(table.any_offset_bytes(), 260u << 10);
  EXPECT_EQ(table.pages(), 513u);
  EXPECT_EQ(make(513 * kPage, 128, 0x1000, 3 * kPage - 1), PrpStatus::kListTooSmall);
  EXPECT_EQ(make(513 * kPage, 128, 0x1008, 3 * kPage), PrpStatus::kListAlignment);
  EXPECT_EQ(make(0, 128, 0x1000, 3 * kPage), PrpStatus::kNoBytes);
  for (const std::uint32_t bridge : {1u, 3u, 127u, 513u, 1024u, 1u << 31}) {
    EXPECT_EQ(make(kPage, bridge, 0x1000, 3 * kPage), PrpStatus::kBridge) << bridge;
  }
}

TEST(NvmePrp, TableRefusesPages) {
  GuardedTable guarded(3 * kPage, 128, 0x50000000);
  EXPECT_EQ(guarded.table.set_page(2, 0x10000000), PrpStatus::kOk);
  EXPECT_EQ(guarded.table.set_page(3, 0x10000000), PrpStatus::kOutOfRange);
  EXPECT_EQ(guarded.table.set_page(0, 0x10000800), PrpStatus::kPageAlignment);
  EXPECT_EQ(guarded.table.fill_contiguous(0x10000004), PrpStatus::kPageAlignment);
  EXPECT_EQ(guarded.table.fill_contiguous(0x10000000), PrpStatus::kOk);
  PrpPair pointer = {};
  EXPECT_EQ(guarded.table.describe(0x1200, 512, pointer), PrpStatus::kOk);
  EXPECT_EQ(pointer.prp1, 0x10001200u);

  // The same table through another mapping of its memory.
  std::vector<std::uint64_t> copy = {0x20000000, 0x20001000, 0x20002000};
  EXPECT_EQ(guarded.table.seen_at(copy.data()).describe(0x1200, 512, pointer), PrpStatus::kOk);
  EXPECT_EQ(pointer.prp1, 0x20001200u);
}

}  // namespace
}  // namespace tardis::nvme
