// SPDX-License-Identifier: Apache-2.0
// RawVolume on a namespace in memory: formats, refusals, every sector of its metadata damaged, full.
// TARDIS_NVME_CAMPAIGN multiplies the fuzz (default 1).
#include "nvme_raw_volume_support.h"

namespace tardis::nvme::testing {
namespace {

Error refusal(MemoryNamespace& device, const std::optional<Uuid>& expected = kUuid) {
  const BlockFile before = device.contents;
  device.recording = true;
  device.events.clear();
  const auto volume = RawVolume::open(device, expected);
  device.recording = false;
  EXPECT_FALSE(volume) << "opened";
  EXPECT_TRUE(device.events.empty()) << "a volume that was refused was changed";
  return volume ? Error{Code::kOk, ""} : volume.error();
}
void expect_names(const std::string& text, std::initializer_list<std::string> parts) {
  for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << text;
}

bool same(const Files& a, const Files& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.first == y.first && x.second.offset == y.second.offset && x.second.bytes == y.second.bytes;
  });
}

struct Place {
  std::uint64_t offset, bytes;
};
std::vector<Place> metadata_of(const VolumeSuperblock& s) {
  const std::uint64_t tail = s.namespace_bytes / 4096 * 4096 - 4096, directory = s.entries * sizeof(VolumeEntry);
  return {{0, 512}, {tail, 512}, {s.directory_offset[0], directory}, {s.directory_offset[1], directory}};
}

TEST(NvmeRawVolume, FormatsWhatIsBlankAndOpensItAgain) {
  for (const std::uint32_t block : {512u, 4096u}) {
    MemoryNamespace device(kNamespace + (block == 512 ? 1536 : 0), block);
    poison_data(device);
    EXPECT_TRUE(RawVolume::check_blank(device));
    ASSERT_TRUE(RawVolume::format(device, kUuid));
    const auto head = read_at<VolumeSuperblock>(device.contents, 0);
    const auto tail = read_at<VolumeSuperblock>(device.contents, device.bytes() / 4096 * 4096 - 4096);
    EXPECT_EQ(std::memcmp(&head, &tail, sizeof head), 0);
    EXPECT_EQ(std::string(head.magic.data(), 8), "TARDISNV");
    EXPECT_TRUE(sealed(head));
    EXPECT_EQ(head.format_version, 1u);
    EXPECT_EQ(head.block_bytes, block);
    EXPECT_EQ(head.namespace_bytes, device.bytes());
    EXPECT_EQ(head.generation, 1u);
    EXPECT_EQ(head.data_offset % kMiB, 0u);
    EXPECT_LE(head.directory_offset[1] + head.entries * 512, device.bytes() - 4096);
    for (const std::uint64_t offset : head.directory_offset) {
      EXPECT_TRUE(reads_zero(device.contents, offset, head.entries * 512));
    }
    auto volume = open(device, std::nullopt);
    ASSERT_NE(volume, nullptr);
    EXPECT_TRUE(volume->names().empty());
    EXPECT_EQ(volume->free_bytes(), head.data_bytes);
    EXPECT_EQ(volume->mended(), 0u);
    const auto extent = volume->create("segments/000000.seg", 4 * kMiB, kMiB);
    ASSERT_TRUE(extent);
    EXPECT_EQ(extent->offset, head.data_offset);
    EXPECT_TRUE(reads_zero(device.contents, extent->offset, kMiB));
    EXPECT_FALSE(reads_zero(device.contents, extent->offset + kMiB, 4096));
    volume = open(device);
    EXPECT_TRUE(same(files_of(*volume), {{"segments/000000.seg", *extent}}));
    EXPECT_EQ(volume->free_bytes(), head.data_bytes - 4 * kMiB);
    // What is formatted is no longer blank; formatted again it is empty, and of a later generation.
    const Status again = RawVolume::check_blank(device);
    ASSERT_FALSE(again);
    expect_names(again.error().message, {"a tardis volume", "force"});
    ASSERT_TRUE(RawVolume::format(device, kOther));
    volume = open(device, kOther);
    EXPECT_TRUE(volume->names().empty());
    EXPECT_EQ(volume->superblock().generation, 2u);
  }
}

TEST(NvmeRawVolume, RefusesToFormatWhatIsNotBlank) {
  struct Foreign {
    std::uint64_t offset;
    std::string bytes;
    const char* told;
  };
  const Foreign kinds[] = {{510, "\x55\xAA", "MBR"},           {512, "EFI PART", "GPT"},
                           {1080, "\x53\xEF", "ext4"},         {0, "XFSB", "XFS"},
                           {0x10040, "_BHRfS_M", "btrfs"},     {0, "LUKS\xBA\xBE", "LUKS"},
                           {512, "LABELONE", "LVM"},           {4096, "\xFC\x4E\x2B\xA9", "RAID"},
                           {77777, "x", "byte 77777 is not"},  {kNamespace - 1, "x", "byte 16777215 is not"},
                           {kNamespace - kMiB, "x", "is not"}, {kMiB - 1, "x", "is not"}};
  for (const Foreign& kind : kinds) {
    MemoryNamespace device(kNamespace);
    device.contents.write(kind.offset, kind.bytes.data(), kind.bytes.size());
    const Status status = RawVolume::check_blank(device);
    ASSERT_FALSE(status) << kind.told;
    EXPECT_EQ(status.error().code, Code::kInvalidArgument);
    expect_names(status.error().message, {kind.told, "memory namespace", "force"});
  }
  MemoryNamespace unreadable(kNamespace);
  unreadable.before = [](const NamespaceRequest& r) { return r.offset > kMiB ? EIO : 0; };
  EXPECT_EQ(RawVolume::check_blank(unreadable).error().code, Code::kIo);
  MemoryNamespace small(2 * kMiB);
  EXPECT_EQ(RawVolume::check_blank(small).error().code, Code::kNoSpace);
  EXPECT_EQ(RawVolume::format(small, kUuid).error().code, Code::kNoSpace);
  MemoryNamespace tiny(4096);
  EXPECT_EQ(RawVolume::open(tiny, kUuid).error().code, Code::kNoSpace);
}

TEST(NvmeRawVolume, RefusesToOpenWhatIsNotItsOwn) {
  MemoryNamespace device(kNamespace);
  EXPECT_EQ(refusal(device).code, Code::kNotFound);
  const std::uint64_t tail = kNamespace - 4096;
  const auto both = [&](const VolumeSuperblock& s) {
    write_at(device.contents, 0, s), write_at(device.contents, tail, s);
  };
  ASSERT_TRUE(RawVolume::format(device, kUuid));
  const auto good = read_at<VolumeSuperblock>(device.contents, 0);

  Error error = refusal(device, kOther);
  EXPECT_EQ(error.code, Code::kInvalidArgument);
  expect_names(error.message, {"0102030405060708090a0b0c0d0e0f10", "ff000000"});

  VolumeSuperblock s = good;
  s.magic[3] = 'x';
  both(s);
  EXPECT_EQ(refusal(device).code, Code::kCorrupt);

  s = good;
  s.format_version = 2;
  both(s);  // its checksum may be elsewhere
  EXPECT_EQ(refusal(device).code, Code::kUnsupportedFormat);
  seal(s);
  write_at(device.contents, 0, good);
  write_at(device.contents, tail, s);  // one copy is enough to tell
  EXPECT_EQ(refusal(device).code, Code::kUnsupportedFormat);

  s = good;
  s.crc ^= 1;
  both(s);
  error = refusal(device);
  EXPECT_EQ(error.code, Code::kCorrupt);
  expect_names(error.message, {"both superblocks", "force"});

  s = good;
  s.namespace_bytes += 4096;  // the namespace was larger
  seal(s);
  both(s);
  error = refusal(device);
  EXPECT_EQ(error.code, Code::kInvalidArgument);
  expect_names(error.message, {std::to_string(kNamespace + 4096), std::to_string(kNamespace)});

  s = good;
  s.block_bytes = 4096;
  seal(s);
  both(s);
  error = refusal(device);
  EXPECT_EQ(error.code, Code::kInvalidArgument);
  expect_names(error.message, {"512", "4096"});

  both(good);
  device.before = [](const NamespaceRequest&) { return EIO; };
  EXPECT_EQ(refusal(device).code, Code::kIo);
  device.before = nullptr;
  EXPECT_NE(open(device), nullptr);
}

// A copy that is of an earlier format, in either place: what was written since never reached it.
TEST(NvmeRawVolume, TheNewerOfTwoSuperblocksHolds) {
  MemoryNamespace device(kNamespace);
  ASSERT_TRUE(RawVolume::format(device, kUuid));
  const auto older = read_at<VolumeSuperblock>(device.contents, 0);
  ASSERT_TRUE(RawVolume::format(device, kOther));
  for (const std::uint64_t place : {std::uint64_t{0}, kNamespace - 4096}) {
    MemoryNamespace mixed(device.contents, 512);
    write_at(mixed.contents, place, older);
    EXPECT_EQ(refusal(mixed).code, Code::kInvalidArgument);
    const auto volume = open(mixed, kOther);
    ASSERT_NE(volume, nullptr);
    EXPECT_EQ(volume->mended(), 1u);
  }
}

TEST(NvmeRawVolume, ANamespaceThatGrewStillHasIt) {
  MemoryNamespace device(kNamespace);
  auto volume = make(device);
  ASSERT_TRUE(volume->create("a", kMiB, 0));
  BlockFile larger = device.contents;
  larger.resize(kNamespace * 2);
  MemoryNamespace grown(larger, 512);
  EXPECT_EQ(files_of(*open(grown)).size(), 1u);
  EXPECT_EQ(open(grown)->mended(), 0u);
  // Any one sector of it may be lost there, too.
  for (const std::uint64_t lost : {std::uint64_t{0}, kNamespace - 4096, 2 * kNamespace - 4096}) {
    MemoryNamespace damaged(grown.contents, 512);
    poison(damaged.contents, lost, 512);
    const auto opened = open(damaged);
    ASSERT_NE(opened, nullptr) << lost;
    EXPECT_EQ(files_of(*opened).size(), 1u);
    EXPECT_EQ(open(damaged)->mended(), 0u);
  }
}

// A generation is not beyond what changes can count to, so that there is always a later one.
TEST(NvmeRawVolume, GenerationsHaveALaterOne) {
  MemoryNamespace device(kNamespace);
  auto volume = make(device);
  ASSERT_TRUE(volume->create("a", kMiB, 0));
  const VolumeSuperblock s = volume->superblock();
  auto entry = read_at<VolumeEntry>(device.contents, s.directory_offset[0]);
  entry.generation = ~std::uint64_t{0};
  seal(entry);
  write_at(device.contents, s.directory_offset[0], entry);
  volume = open(device);
  EXPECT_EQ(files_of(*volume).size(), 1u) << "the other copy has it";
  // The change reaches one copy only: it is the later one.
  device.before = [&](const NamespaceRequest& r) { return r.offset >= s.directory_offset[1] ? EIO : 0; };
  EXPECT_FALSE(volume->remove({"a"}));
  device.before = nullptr;
  EXPECT_TRUE(files_of(*open(device)).empty());

  VolumeSuperblock last = s;
  last.generation = ~std::uint64_t{0};
  seal(last);
  write_at(device.contents, 0, last);
  EXPECT_EQ(open(device)->superblock().generation, s.generation);
}

TEST(NvmeRawVolume, AnySectorOfItsMetadataMayBeLost) {
  for (const std::uint32_t block : {512u, 4096u}) {
    MemoryNamespace device(kNamespace, block);
    auto volume = make(device);
    for (int i = 0; i < 10; ++i) ASSERT_TRUE(volume->create("segments/" + std::to_string(i), kMiB, 4096));
    const BlockFile older = device.contents;
    ASSERT_TRUE(volume->remove({"segments/3", "segments/7"}));
    const Files files = files_of(*volume);
    const BlockFile whole = device.contents;
    std::mt19937_64 random(1);
    for (const Place& place : metadata_of(volume->superblock())) {
      for (std::uint64_t at = place.offset; at < place.offset + place.bytes; at += kSector) {
        for (int kind = 0; kind < 5; ++kind) {
          MemoryNamespace damaged(whole, block);
          std::array<std::uint64_t, kSector / 8> sector{}, before{};
          whole.read(at, before.data(), kSector);
          switch (kind) {
            case 0:  // zeros
              break;
            case 1:
              for (std::uint64_t& word : sector) word = random();
              break;
            case 2:  // the end of it is another's
              sector = before;
              for (std::size_t i = random() % sector.size(); i < sector.size(); ++i) sector[i] = ~sector[i];
              break;
            case 3:
              sector = before;
              sector[random() % sector.size()] ^= std::uint64_t{1} << random() % 64;
              break;
            case 4:  // its last write never reached the medium
              older.read(at, sector.data(), kSector);
              break;
          }
          damaged.contents.write(at, sector.data(), kSector);
          const auto opened = open(damaged);
          ASSERT_NE(opened, nullptr) << "sector " << at << ", damage " << kind;
          ASSERT_TRUE(same(files_of(*opened), files)) << "sector " << at << ", damage " << kind;
          EXPECT_EQ(opened->lost(), 0u);
          EXPECT_EQ(opened->mended(), sector != before ? 1u : 0u);
          // Mended: the other copy may be lost now.
          EXPECT_EQ(open(damaged)->mended(), 0u);
        }
      }
    }
  }
}

TEST(NvmeRawVolume, AFileWhoseEntryIsLostTwiceIsGoneAndNothingElse) {
  MemoryNamespace device(kNamespace, 4096);
  auto volume = make(device);
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(volume->create(std::to_string(i), kMiB, 0));
  Files files = files_of(*volume);
  const VolumeExtent gone = *volume->find("4");
  for (const std::uint64_t offset : volume->superblock().directory_offset)
    poison(device.contents, offset + 4 * 512, 512);
  volume = open(device);
  EXPECT_EQ(volume->lost(), 1u);
  files.erase("4");
  EXPECT_TRUE(same(files_of(*volume), files));
  const auto again = volume->create("again", kMiB, kMiB);
  ASSERT_TRUE(again);
  EXPECT_EQ(again->offset, gone.offset);
  volume = open(device);
  EXPECT_EQ(volume->lost(), 0u);
  files["again"] = *again;
  EXPECT_TRUE(same(files_of(*volume), files));
}

TEST(NvmeRawVolume, WhatCannotBeReadInOneCopyIsReadInTheOther) {
  MemoryNamespace device(kNamespace);
  auto volume = make(device);
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(volume->create(std::to_string(i), kMiB, 0));
  const Files files = files_of(*volume);
  const VolumeSuperblock s = volume->superblock();
  const auto unreadable = [](std::vector<std::uint64_t> offsets) {
    return [offsets = std::move(offsets)](const NamespaceRequest& r) {
      const std::uint64_t end = r.offset + total_bytes(r.memory);
      const bool hit =
          std::any_of(offsets.begin(), offsets.end(), [&](std::uint64_t at) { return at >= r.offset && at < end; });
      return hit && r.op == NamespaceRequest::Op::kRead ? EIO : 0;
    };
  };
  device.before = unreadable({0, s.directory_offset[0], s.directory_offset[1] + 4096});
  EXPECT_TRUE(same(files_of(*open(device)), files));
  // A drive that answers nothing must not be taken for an empty one.
  device.before = unreadable({s.directory_offset[0], s.directory_offset[1]});
  EXPECT_EQ(RawVolume::open(device, kUuid).error().code, Code::kIo);
  device.before = unreadable({0, kNamespace - 4096});
  EXPECT_EQ(RawVolume::open(device, kUuid).error().code, Code::kIo);
}

TEST(NvmeRawVolume, GivesTheFirstRangeThatFitsAndEveryByteItHas) {
  MemoryNamespace device(kNamespace);
  auto volume = make(device);
  const std::uint64_t all = volume->superblock().data_bytes / kMiB, start = volume->superblock().data_offset;
  for (std::uint64_t i = 0; i < all; ++i) {
    const auto extent = volume->create(std::to_string(i), kMiB - 512 * (i % 2), 512);
    ASSERT_TRUE(extent);
    EXPECT_EQ(extent->offset, start + i * kMiB);
  }
  EXPECT_EQ(volume->free_bytes(), 0u);
  const auto full = volume->create("more", 512, 0);
  ASSERT_FALSE(full);
  EXPECT_EQ(full.error().code, Code::kNoSpace);
  ASSERT_TRUE(volume->remove({"2", "5", "6", "none"}));
  EXPECT_EQ(volume->free_bytes(), 3 * kMiB);
  EXPECT_EQ(volume->create("large", 2 * kMiB, 0)->offset, start + 5 * kMiB);
  EXPECT_EQ(volume->create("larger", 2 * kMiB, 0).error().code, Code::kNoSpace);
  EXPECT_EQ(volume->create("small", kMiB, 0)->offset, start + 2 * kMiB);
  EXPECT_EQ(volume->free_bytes(), 0u);
  EXPECT_EQ(open(device)->free_bytes(), 0u);
  ASSERT_TRUE(volume->remove({"small"}));
  poison(device.contents, start + 2 * kMiB, kMiB);
  ASSERT_TRUE(volume->create("small", kMiB, ~std::uint64_t{0})) << "more zeros than it has bytes";
  EXPECT_TRUE(reads_zero(device.contents, start + 2 * kMiB, kMiB));
  EXPECT_EQ(volume->create("small", kMiB, 0).error().code, Code::kInternal);
  EXPECT_EQ(volume->create("", kMiB, 0).error().code, Code::kInvalidArgument);
  EXPECT_EQ(volume->create(std::string(445, 'n'), kMiB, 0).error().code, Code::kInvalidArgument);
  EXPECT_EQ(volume->create("none", 0, 0).error().code, Code::kInvalidArgument);
  EXPECT_EQ(volume->create("huge", ~std::uint64_t{0}, 0).error().code, Code::kNoSpace);
}

TEST(NvmeRawVolume, ADirectoryMayBeFullBeforeTheData) {
  MemoryNamespace device(256 * kMiB);
  auto volume = make(device);
  const std::uint64_t entries = volume->superblock().entries;
  for (std::uint64_t i = 0; i < entries; ++i) ASSERT_TRUE(volume->create(std::to_string(i), 512, 0));
  const auto full = volume->create("more", 512, 0);
  ASSERT_FALSE(full);
  EXPECT_EQ(full.error().code, Code::kNoSpace);
  expect_names(full.error().message, {std::to_string(entries)});
  ASSERT_TRUE(volume->remove({"17"}));
  EXPECT_TRUE(volume->create(std::string(444, 'n'), 512, 0));
  EXPECT_EQ(files_of(*open(device)).size(), entries);
}

TEST(NvmeRawVolume, WhatFailedHalfwayUsesNoRangeThatAnotherFileGets) {
  for (const bool flush : {false, true}) {
    MemoryNamespace device(kNamespace);
    auto volume = make(device);
    ASSERT_TRUE(volume->create("a", kMiB, 0));
    const Files files = files_of(*volume);
    const VolumeSuperblock s = volume->superblock();
    const auto fail = [&](bool on) {
      device.before = nullptr, device.before_flush = nullptr;
      // The second copy of the directory, so that the first has the change.
      if (on && !flush)
        device.before = [&](const NamespaceRequest& r) { return r.offset >= s.directory_offset[1] ? EIO : 0; };
      if (on && flush) device.before_flush = [] { return EIO; };
    };
    fail(true);
    EXPECT_EQ(volume->create("b", kMiB, 0).error().code, Code::kIo);
    EXPECT_FALSE(volume->find("b"));
    EXPECT_EQ(volume->remove({"a"}).error().code, Code::kIo);
    EXPECT_FALSE(volume->find("a")) << "nobody knows whether it is still there";
    EXPECT_EQ(volume->free_bytes(), s.data_bytes - 2 * kMiB);
    fail(false);
    const auto c = volume->create("c", kMiB, 0);
    ASSERT_TRUE(c);
    EXPECT_EQ(c->offset, s.data_offset + 2 * kMiB);
    // As far as the namespace says they may be there or not, but apart.
    EXPECT_NE(open(device), nullptr);
    // In doubt, what is asked for again is made anew.
    const auto b = volume->create("b", kMiB, 0);
    ASSERT_TRUE(b);
    EXPECT_TRUE(volume->remove({"a"}));
    EXPECT_EQ(volume->free_bytes(), s.data_bytes - 2 * kMiB);
    EXPECT_TRUE(same(files_of(*open(device)), {{"b", *b}, {"c", *c}}));
  }
  MemoryNamespace device(kNamespace);
  auto volume = make(device);
  device.before = [](const NamespaceRequest& r) { return r.op == NamespaceRequest::Op::kWrite ? ENOSPC : 0; };
  EXPECT_FALSE(volume->create("z", kMiB, 4096));  // the zeros
  device.before = nullptr;
  EXPECT_EQ(volume->free_bytes(), volume->superblock().data_bytes);
}

TEST(NvmeRawVolume, BelievesNoSuperblockOrEntryThatContradictsItself) {
  MemoryNamespace device(kNamespace);
  auto volume = make(device);
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(volume->create(std::to_string(i), kMiB, 0));
  const VolumeSuperblock good = volume->superblock();
  const BlockFile whole = device.contents;
  std::mt19937_64 random(7);
  const auto odd = [&](std::uint64_t usual) -> std::uint64_t {
    const std::uint64_t values[] = {usual,
                                    usual + 1,
                                    usual + 4096,
                                    usual - 4096,
                                    0,
                                    kNamespace,
                                    ~0ull,
                                    ~0ull - 4095,
                                    std::uint64_t{1} << 63,
                                    random(),
                                    random() % kNamespace / kMiB * kMiB};
    return values[random() % std::size(values)];
  };
  std::uint64_t opened = 0;
  for (std::uint64_t round = 0; round < 4000 * campaign(); ++round) {
    MemoryNamespace changed(whole, 512);
    if (random() % 2 == 0) {
      VolumeSuperblock s = good;
      std::uint64_t* const fields[] = {&s.namespace_bytes,     &s.entries,     &s.directory_offset[0],
                                       &s.directory_offset[1], &s.data_offset, &s.data_bytes};
      for (std::uint64_t* field : fields) *field = random() % 3 == 0 ? odd(*field) : *field;
      if (random() % 8 == 0) s.block_bytes = static_cast<std::uint32_t>(random());
      seal(s);
      write_at(changed.contents, 0, s);
      write_at(changed.contents, kNamespace - 4096, s);
    } else {
      for (std::uint32_t number = 0; number < 6; ++number) {
        auto entry = read_at<VolumeEntry>(whole, good.directory_offset[0] + number * 512);
        if (random() % 2 == 0) continue;
        if (number >= 4) entry = read_at<VolumeEntry>(whole, good.directory_offset[0] + (number - 4) * 512);
        entry.number = random() % 4 != 0 ? number : static_cast<std::uint32_t>(random());
        entry.offset = random() % 3 == 0 ? odd(entry.offset) : entry.offset;
        entry.bytes = random() % 3 == 0 ? odd(entry.bytes) : entry.bytes;
        if (random() % 4 == 0) entry.name_bytes = static_cast<std::uint32_t>(odd(entry.name_bytes));
        if (random() % 4 == 0) entry.state = static_cast<EntryState>(random() % 4);
        if (random() % 4 == 0) entry.name[0] = static_cast<char>('0' + random() % 10);
        entry.generation += random() % 3;
        seal(entry);
        for (const std::uint64_t offset : good.directory_offset) {
          if (random() % 4 != 0) write_at(changed.contents, offset + number * 512, entry);
        }
      }
    }
    const auto found = RawVolume::open(changed, kUuid);
    if (!found) continue;
    ++opened;
    // Ranges lie in the data and apart.
    std::map<std::uint64_t, std::uint64_t> ranges;
    for (const auto& [name, extent] : files_of(**found)) {
      EXPECT_GE(extent.offset, (*found)->superblock().data_offset);
      EXPECT_LE(extent.offset + extent.bytes, (*found)->superblock().data_offset + (*found)->superblock().data_bytes);
      EXPECT_TRUE(ranges.emplace(extent.offset, extent.offset + extent.bytes).second);
    }
    std::uint64_t end = 0;
    for (const auto& [from, to] : ranges) {
      EXPECT_GE(from, end);
      end = to;
    }
    (void)(*found)->create("new", kMiB, kMiB);
  }
  EXPECT_GT(opened, 100u);
}

}  // namespace
}  // namespace tardis::nvme::testing
